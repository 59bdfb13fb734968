// The machines that the kernel tests run on: one body, the host's code or the device's. Where no
// device is found, its tests say "skipped: no device".
#pragma once

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <span>
#include <vector>

#include "kernels/index_case.h"
#include "kvleaf/kernels/append.h"
#include "kvleaf/kernels/attention.h"
#include "kvleaf/kernels/attention_lanes.h"
#include "kvleaf/kernels/copy.h"
#include "kvleaf/kernels/gather.h"
#include "kvleaf/kernels/state.h"
#include "kvleaf/kernels/state_lanes.h"
#include "kvleaf/kernels/table.h"

namespace kvleaf::kernels::test {

using Bytes = std::vector<std::byte>;

/// What the pointers of a PagedAttention point to, on the host: a machine with a memory of its own
/// takes it there.
struct AttentionMemory {
  std::span<const std::byte> pages, scale_pages, queries;
  std::span<std::byte> output;
  std::span<const std::int32_t> table, scale_table, first_slot;
};

/// What the pointers of a state step point to: states and output are written.
struct StateMemory {
  std::span<std::byte> states;
  std::span<float> output;
  std::vector<std::pair<const float*, std::size_t>> inputs;
};

/// Runs the host's kernels. What a machine must offer.
struct HostMachine {
  static bool present() { return true; }

  /// A copy of `bytes` in the machine's memory.
  class Buffer {
   public:
    explicit Buffer(std::span<const std::byte> bytes) : bytes_(bytes.begin(), bytes.end()) {}
    std::byte* data() { return bytes_.data(); }
    Bytes download() const { return bytes_; }

   private:
    Bytes bytes_;
  };

  static std::vector<IndexResult> index(std::span<const IndexCase> cases) {
    std::vector<IndexResult> results;
    for (const IndexCase& one : cases) results.push_back(index_of(one));
    return results;
  }
  static void copy_pages(std::span<const Pages> leaves, std::span<BlockCopy> copies) {
    kernels::copy_pages(leaves, copies);
  }
  static void zero_pages(std::span<const Pages> leaves, std::span<const BlockClear> clears) {
    kernels::zero_pages(leaves, clears);
  }
  static void append_rows(const std::byte* rows, std::uint64_t stride,
                          std::span<const std::int64_t> slots, const RowPages& pages) {
    kernels::append_rows(rows, stride, slots, pages);
  }
  static void gather_rows(const RowPages& pages, std::span<const std::int64_t> slots,
                          std::byte* rows, std::uint64_t stride) {
    kernels::gather_rows(pages, slots, rows, stride);
  }
  static void append_kv(const NewEntries& entries, std::span<const std::int64_t> slots,
                        const KVPages& pages, std::uint32_t layer, const ScalePages* scales) {
    kernels::append_kv(entries, slots, pages, layer, scales);
  }
  static void gather_kv(const KVPages& pages, std::uint32_t layer,
                        std::span<const std::int64_t> slots, const GatheredEntries& into,
                        const ScalePages* scales) {
    kernels::gather_kv(pages, layer, slots, into, scales);
  }
  static void scatter_table(const TableView& table, std::span<const std::int32_t> rows,
                            std::span<const std::int32_t> columns,
                            std::span<const std::int32_t> values) {
    kernels::scatter_table(table, rows, columns, values);
  }
  static void paged_attention(const PagedAttention& attention, const AttentionMemory&) {
    kernels::paged_attention(attention);
  }
  static void step(const GatedDeltaRule& rule, const StateMemory&) { gated_delta_rule(rule); }
  static void step(const Mamba2& rule, const StateMemory&) { mamba2(rule); }
};

/// What each warp of a device runs, run by the host with one lane.
struct OneLaneMachine {
  static bool present() { return true; }

  static void paged_attention(const PagedAttention& attention, const AttentionMemory&) {
    const AttentionWork work = work_of(attention, attention.cu_seqlens_q.back());
    for (std::int64_t token = 0; token < work.tokens; ++token) {
      for (std::uint32_t head = 0; head < work.query_heads; ++head)
        attend<max_head_dim>(work, token, head, OneLane{});
    }
  }
  static void step(const GatedDeltaRule& rule, const StateMemory&) {
    const StateBatch& batch = rule.batch;
    for (std::size_t row = 0; row < batch.read_rows.size(); ++row) {
      for (std::uint32_t head = 0; head < rule.value_heads; ++head) {
        for (std::uint32_t column = 0; column < rule.value_dim; ++column) {
          delta_column<max_state_dim>(rule, batch.read_rows.data(), batch.write_rows.data(),
                                      batch.cu_seqlens_q.data(), static_cast<std::int64_t>(row),
                                      head, column, OneLane{});
        }
      }
    }
  }
  static void step(const Mamba2& rule, const StateMemory&) {
    const StateBatch& batch = rule.batch;
    for (std::size_t row = 0; row < batch.read_rows.size(); ++row) {
      for (std::uint32_t head = 0; head < rule.heads; ++head) {
        for (std::uint32_t p = 0; p < rule.head_dim; ++p) {
          mamba2_element<max_state_dim>(rule, batch.read_rows.data(), batch.write_rows.data(),
                                        batch.cu_seqlens_q.data(), static_cast<std::int64_t>(row),
                                        head, p, OneLane{});
        }
      }
    }
  }
};

/// Says so, and is true, where the machine is not there.
template <class Machine>
bool skipped() {
  if (Machine::present()) return false;
  MESSAGE("skipped: no device");
  return true;
}

using Random = std::mt19937_64;

inline std::uint64_t draw(Random& random, std::uint64_t least, std::uint64_t most) {
  return std::uniform_int_distribution<std::uint64_t>(least, most)(random);
}

inline Bytes random_bytes(Random& random, std::size_t count) {
  Bytes bytes(count);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
  return bytes;
}

template <class T>
std::span<const std::byte> as_bytes(const std::vector<T>& values) {
  return std::as_bytes(std::span(values));
}

}  // namespace kvleaf::kernels::test

#if defined(KVLEAF_HAVE_CUDA)
#include "kernels/device_machine.h"
#define KVLEAF_MACHINES kvleaf::kernels::test::HostMachine, kvleaf::kernels::test::DeviceMachine
#define KVLEAF_LANE_MACHINES KVLEAF_MACHINES, kvleaf::kernels::test::OneLaneMachine
#else
#define KVLEAF_MACHINES kvleaf::kernels::test::HostMachine
#define KVLEAF_LANE_MACHINES KVLEAF_MACHINES, kvleaf::kernels::test::OneLaneMachine
#endif
