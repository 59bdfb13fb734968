// Runs the device's kernels on copies of what the tests give: lists go to the device, launches go
// to a stream of their own, results come back. Only included where the library was built with CUDA.
#pragma once

#include <cuda_runtime_api.h>

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
