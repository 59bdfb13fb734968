// Runs the device's kernels on copies of what the tests give: lists go to the device, launches go
// to a stream of their own, results come back. Only included where the library was built with CUDA.
#pragma once

#include <cuda_runtime_api.h>

#include <memory>
#include <span>
#include <stdexcept>
#include <vector>

#include "kernels/machine.h"
#include "kvleaf/kernels/cuda.h"

namespace kvleaf::kernels::test {

class DeviceMachine {
 public:
  static bool present() { return cuda::available(); }

  /// A copy of `bytes` in device memory.
  class Buffer {
   public:
    explicit Buffer(std::span<const std::byte> bytes) : bytes_(bytes.size()) {
      // Never empty, so that every list has an address.
      require(cudaMalloc(&data_, bytes.size() + 16));
      require(cudaMemcpy(data_, bytes.data(), bytes.size(), cudaMemcpyHostToDevice));
    }
    ~Buffer() { cudaFree(data_); }
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;
    std::byte* data() { return static_cast<std::byte*>(data_); }
    Bytes download() const {
      Bytes bytes(bytes_);
      require(cudaMemcpy(bytes.data(), data_, bytes_, cudaMemcpyDeviceToHost));
      return bytes;
    }

   private:
    void* data_ = nullptr;
    std::size_t bytes_;
  };

  static std::vector<IndexResult> index(std::span<const IndexCase> cases) {
    return index_on_device(cases);
  }

  static void copy_pages(std::span<const Pages> leaves, std::span<BlockCopy> copies) {
    check_copies(leaves, copies);
    const List<BlockCopy> list(copies);
    run([&](cuda::Stream stream) { cuda::copy_pages(leaves, list.span(), stream); });
  }
  static void zero_pages(std::span<const Pages> leaves, std::span<const BlockClear> clears) {
    check_clears(leaves, clears);
    const List<BlockClear> list(clears);
    run([&](cuda::Stream stream) { cuda::zero_pages(leaves, list.span(), stream); });
  }
  static void append_rows(const std::byte* rows, std::uint64_t stride,
                          std::span<const std::int64_t> slots, const RowPages& pages) {
    const List<std::int64_t> list(slots);
    run([&](cuda::Stream stream) { cuda::append_rows(rows, stride, list.span(), pages, stream); });
  }
  static void gather_rows(const RowPages& pages, std::span<const std::int64_t> slots,
                          std::byte* rows, std::uint64_t stride) {
    const List<std::int64_t> list(slots);
    run([&](cuda::Stream stream) { cuda::gather_rows(pages, list.span(), rows, stride, stream); });
  }
  static void append_kv(const NewEntries& entries, std::span<const std::int64_t> slots,
                        const KVPages& pages, std::uint32_t layer, const ScalePages* scales) {
    with_lists(slots, scales, [&](auto list, const ScalePages* with, cuda::Stream stream) {
      cuda::append_kv(entries, list, pages, layer, with, stream);
    });
  }
  static void gather_kv(const KVPages& pages, std::uint32_t layer,
                        std::span<const std::int64_t> slots, const GatheredEntries& into,
                        const ScalePages* scales) {
    with_lists(slots, scales, [&](auto list, const ScalePages* with, cuda::Stream stream) {
      cuda::gather_kv(pages, layer, list, into, with, stream);
    });
  }
  static void scatter_table(const TableView& table, std::span<const std::int32_t> rows,
                            std::span<const std::int32_t> columns,
                            std::span<const std::int32_t> values) {
    const List<std::int32_t> list_rows(rows), list_columns(columns), list_values(values);
    run([&](cuda::Stream stream) {
      cuda::scatter_table(table, list_rows.span(), list_columns.span(), list_values.span(), stream);
    });
  }

  static void paged_attention(const PagedAttention& on_host, const AttentionMemory& memory) {
    Buffer pages(memory.pages), scale_pages(memory.scale_pages), queries(memory.queries),
        output(memory.output);
    const List<std::int32_t> table(memory.table), scale_table(memory.scale_table),
        first_slot(memory.first_slot), begins(on_host.cu_seqlens_q), lengths(on_host.seq_lens);
    PagedAttention attention = on_host;
    ScaleTables scales;
    attention.queries = queries.data();
    attention.output = output.data();
    attention.cu_seqlens_q = begins.span();
    attention.seq_lens = lengths.span();
    attention.table.blocks = table.span().data();
    if (attention.table.first_slot != nullptr)
      attention.table.first_slot = first_slot.span().data();
    attention.pages.base = pages.data();
    if (on_host.scales != nullptr) {
      scales = *on_host.scales;
      scales.pages.base = scale_pages.data();
      scales.table.blocks = scale_table.span().data();
      if (scales.table.first_slot != nullptr) scales.table.first_slot = first_slot.span().data();
      attention.scales = &scales;
    }
    run([&](cuda::Stream stream) {
      cuda::paged_attention(attention, on_host.cu_seqlens_q.back(), stream);
    });
    const Bytes result = output.download();
    std::memcpy(memory.output.data(), result.data(), result.size());
  }
  static void step(GatedDeltaRule rule, const StateMemory& memory) {
    with_states(rule.batch, rule.output, memory,
                {&rule.queries, &rule.keys, &rule.values, &rule.log_decay, &rule.beta},
                [&](cuda::Stream stream) { cuda::gated_delta_rule(rule, stream); });
  }
  static void step(Mamba2 rule, const StateMemory& memory) {
    with_states(rule.batch, rule.output, memory,
                {&rule.x, &rule.dt, &rule.a, &rule.b, &rule.c, &rule.d},
                [&](cuda::Stream stream) { cuda::mamba2(rule, stream); });
  }

 private:
  static void require(cudaError_t error) {
    if (error != cudaSuccess) throw std::runtime_error(cudaGetErrorString(error));
  }

  /// A list in device memory.
  template <class T>
  class List {
   public:
    explicit List(std::span<const T> list) : buffer_(std::as_bytes(list)), count_(list.size()) {}
    std::span<const T> span() const { return {reinterpret_cast<const T*>(buffer_.data()), count_}; }

   private:
    mutable Buffer buffer_;
    std::size_t count_;
  };

  /// Captures the launch in a graph, which an allocation or a wait inside it would spoil, and runs
  /// it.
  template <class Launch>
  static void run(Launch launch) {
    cudaStream_t stream = nullptr;
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t ready = nullptr;
    require(cudaStreamCreate(&stream));
    require(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    launch(stream);
    require(cudaStreamEndCapture(stream, &graph));
    require(cudaGraphInstantiate(&ready, graph, 0));
    require(cudaGraphLaunch(ready, stream));
    require(cudaStreamSynchronize(stream));
    require(cudaGraphExecDestroy(ready));
    require(cudaGraphDestroy(graph));
    require(cudaStreamDestroy(stream));
  }

  /// Takes a step's states, lists and inputs (in the order of memory.inputs) to the device, and
  /// what it wrote back.
  template <class Launch>
  static void with_states(StateBatch& batch, float*& output, const StateMemory& memory,
                          std::vector<const float**> inputs, Launch launch) {
    Buffer states(memory.states), out(std::as_bytes(memory.output));
    const List<std::int32_t> reads(batch.read_rows), writes(batch.write_rows),
        begins(batch.cu_seqlens_q);
    batch.states.base = states.data();
    batch.read_rows = reads.span();
    batch.write_rows = writes.span();
    batch.cu_seqlens_q = begins.span();
    output = reinterpret_cast<float*>(out.data());
    std::vector<std::unique_ptr<Buffer>> held;
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      const auto [from, count] = memory.inputs.at(i);
      if (from == nullptr) continue;
      held.push_back(std::make_unique<Buffer>(std::as_bytes(std::span(from, count))));
      *inputs[i] = reinterpret_cast<const float*>(held.back()->data());
    }
    run(launch);
    const Bytes after = states.download();
    const Bytes result = out.download();
    std::memcpy(memory.states.data(), after.data(), after.size());
    std::memcpy(memory.output.data(), result.data(), result.size());
  }

  template <class Use>
  static void with_lists(std::span<const std::int64_t> slots, const ScalePages* scales, Use use) {
    const List<std::int64_t> list(slots);
    const List<std::int64_t> scale_list(scales == nullptr ? slots : scales->slots);
    ScalePages with = scales == nullptr ? ScalePages{} : *scales;
    with.slots = scale_list.span();
    run([&](cuda::Stream stream) {
      use(list.span(), scales == nullptr ? nullptr : &with, stream);
    });
  }
};

}  // namespace kvleaf::kernels::test
