#include "kvleaf/cache/step_indices.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "kvleaf/cache/index_tensors.h"
#include "kvleaf/cache/step_data.h"

namespace kvleaf {
namespace {

constexpr std::string_view table_key = "block_table";

}  // namespace

std::uint32_t StepIndices::batch() const noexcept {
  return static_cast<std::uint32_t>(data_->slots.size());
}
std::uint32_t StepIndices::num_tokens() const noexcept {
  return static_cast<std::uint32_t>(data_->cu_q.back());
}
std::uint32_t StepIndices::max_seqlen_q() const noexcept {
  std::int32_t most = 0;
  for (std::size_t row = 0; row < data_->slots.size(); ++row)
    most = std::max(most, data_->seq_lens[row] - data_->past[row]);
  return static_cast<std::uint32_t>(most);
}
std::uint32_t StepIndices::max_seqlen_k() const noexcept {
  return static_cast<std::uint32_t>(std::ranges::max(data_->seq_lens));
}
Tensor StepIndices::slot_ids() const { return view(data_, data_->slots.data(), {batch()}); }
Tensor StepIndices::cu_seqlens_q() const {
  return view(data_, data_->cu_q.data(), {std::int64_t{batch()} + 1});
}
Tensor StepIndices::past_lens() const { return view(data_, data_->past.data(), {batch()}); }
Tensor StepIndices::seq_lens() const { return view(data_, data_->seq_lens.data(), {batch()}); }
Tensor StepIndices::encoder_lens() const {
  return view(data_, data_->encoder_lens.data(), {batch()});
}

Tensor StepIndices::cu_seqlens_k() const {
  Data& data = *data_;
  if (data.cu_k.empty()) {
    std::int64_t sum = 0;
    data.cu_k.push_back(0);
    for (const std::int32_t length : data.seq_lens) {
      sum += length;
      if (sum > std::numeric_limits<std::int32_t>::max()) {
        data.cu_k.clear();
        throw PlanShapeError(
            "the sequences of this step hold more than 2^31 - 1 tokens together, and cu_seqlens_k "
            "is int32; use seq_lens");
      }
      data.cu_k.push_back(static_cast<std::int32_t>(sum));
    }
  }
  return view(data_, data.cu_k.data(), {std::int64_t{batch()} + 1});
}

Tensor StepIndices::positions() const {
  Data& data = *data_;
  if (data.positions.empty()) {
    data.positions.reserve(num_tokens());
    for (std::size_t row = 0; row < data.slots.size(); ++row)
      for (std::int32_t t = data.past[row]; t < data.seq_lens[row]; ++t)
        data.positions.push_back(t);
  }
  return view(data_, std::span<const std::int64_t>(data.positions));
}

Tensor StepIndices::slot_mapping(std::optional<std::uint32_t> layer, KVPart part) const {
  Data& data = *data_;
  const EntryPlace* place = data.layout->find(layer, part);
  if (place == nullptr || place->encoder) return {};
  if (data.layout->paged()) return view(data_, data.plan.slot_mapping(LeafId{place->leaf}));
  for (const Data::Mapping& made : data.mappings)
    if (made.entries == place->entries && made.tokens_per_entry == place->tokens_per_entry)
      return view(data_, std::span<const std::int64_t>(made.slots));
  Data::Mapping& mapping = data.mappings.emplace_back();
  mapping.entries = place->entries;
  mapping.tokens_per_entry = place->tokens_per_entry;
  mapping.slots.reserve(num_tokens());
  for (std::size_t row = 0; row < data.slots.size(); ++row) {
    const std::int64_t first = std::int64_t{data.slots[row]} * place->entries;
    for (std::int32_t t = data.past[row]; t < data.seq_lens[row]; ++t)
      mapping.slots.push_back(first + t / static_cast<std::int32_t>(place->tokens_per_entry));
  }
  return view(data_, std::span<const std::int64_t>(mapping.slots));
}

Tensor StepIndices::block_table(std::optional<std::uint32_t> layer, KVPart part) const {
  const EntryPlace* place = data_->layout->find(layer, part);
  if (place == nullptr || !data_->layout->paged()) return {};
  const StagedArray& table = data_->plan.array(LeafId{place->leaf}, table_key);
  return Tensor(table.data, std::span(table.shape.data(), table.shape.size()),
                std::span(table.strides.data(), table.strides.size()), table.dtype, {}, data_);
}

StepIndices::Csr StepIndices::csr(std::optional<std::uint32_t> layer, KVPart part) const {
  Data& data = *data_;
  const EntryPlace* place = data.layout->find(layer, part);
  if (place == nullptr || !data.layout->paged()) return {};
  auto rows = std::ranges::find(data.csr, place->leaf, &Data::Rows::leaf);
  if (rows == data.csr.end()) {
    Data::Rows made;
    made.leaf = place->leaf;
    made.indptr.push_back(0);
    const StagedArray& table = data.plan.array(LeafId{place->leaf}, table_key);
    for (std::size_t row = 0; row < data.slots.size(); ++row) {
      const auto* blocks = table.row<std::int32_t>(static_cast<std::int64_t>(row));
      const auto tokens =
          static_cast<std::uint32_t>((place->encoder ? data.encoder_lens : data.seq_lens)[row]);
      const std::uint32_t count = pages_for(tokens, place->tokens_per_entry);
      const std::uint32_t pages = pages_for(count, place->entries);
      made.indices.insert(made.indices.end(), blocks, blocks + pages);
      made.indptr.push_back(static_cast<std::int32_t>(made.indices.size()));
      made.last.push_back(
          pages == 0 ? 0 : static_cast<std::int32_t>(count - (pages - 1) * place->entries));
    }
    rows = data.csr.insert(data.csr.end(), std::move(made));
  }
  return {view(data_, rows->indptr.data(), {std::int64_t{batch()} + 1}),
          view(data_, rows->indices.data(), {static_cast<std::int64_t>(rows->indices.size())}),
          view(data_, rows->last.data(), {batch()})};
}

}  // namespace kvleaf
