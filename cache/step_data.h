// StepIndices::Data: what the tensors of one step look at. Internal to KVCache, which fills it.
#pragma once

#include <cstdint>
#include <list>
#include <memory>
#include <vector>

#include "kvleaf/cache/cache_layout.h"
#include "kvleaf/cache/step_indices.h"
#include "kvleaf/group/step_planner.h"

namespace kvleaf {

struct StepIndices::Data : TensorOwner {
  explicit Data(std::shared_ptr<const CacheLayout> of) : layout(std::move(of)) {
    const std::size_t rows = layout->config.max_seqs;
    for (auto* lengths : {&slots, &past, &seq_lens}) lengths->reserve(rows);
    cu_q.reserve(rows + 1);
    encoder_lens.assign(rows, 0);
  }

  std::shared_ptr<const CacheLayout> layout;
  StepPlan plan;  // paged
  // Per row.
  std::vector<std::int32_t> slots;
  std::vector<std::int32_t> past;
  std::vector<std::int32_t> seq_lens;
  std::vector<std::int32_t>
      encoder_lens;  // as long as a batch can be; zeros but for cross attention
  std::vector<std::int32_t> cu_q;

  // Made when asked for.
  struct Mapping {
    std::uint32_t entries = 0;
    std::uint32_t tokens_per_entry = 0;
    std::vector<std::int64_t> slots;
  };
  struct Rows {
    std::uint32_t leaf = 0;
    std::vector<std::int32_t> indptr, indices, last;
  };
  std::vector<std::int32_t> cu_k;
  std::vector<std::int64_t> positions;
  std::list<Mapping> mappings;  // slotted
  std::list<Rows> csr;

  void forget_what_was_made() noexcept {
    cu_k.clear();
    positions.clear();
    mappings.clear();
    csr.clear();
  }
};

}  // namespace kvleaf
