// Filling cross attention: an encoder's keys and values, packed into a slot's pages or entries.
#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "kvleaf/cache/kv_cache_impl.h"

namespace kvleaf {
namespace {

/// Entries [first, first + count) of a [tokens, heads, dim] tensor, packed at `target`.
void pack(const Tensor& from, std::int64_t first, std::int64_t count, std::byte* target) {
  const std::int64_t heads = from.shape()[1];
  const std::int64_t dim = from.shape()[2];
  const std::int64_t element = size_of(from.dtype());
  const auto strides = from.strides();
  const std::byte* source = from.data();
  const bool head_packed = dim <= 1 || strides[2] == 1;
  const bool row_packed = head_packed && (heads <= 1 || strides[1] == dim);
  if (row_packed && (count <= 1 || strides[0] == heads * dim)) {
    std::memcpy(target, source + first * strides[0] * element,
                static_cast<std::size_t>(count * heads * dim * element));
    return;
  }
  for (std::int64_t t = first; t < first + count; ++t) {
    for (std::int64_t h = 0; h < heads; ++h) {
      const std::byte* row = source + (t * strides[0] + h * strides[1]) * element;
      if (head_packed) {
        std::memcpy(target, row, static_cast<std::size_t>(dim * element));
        target += dim * element;
        continue;
      }
      for (std::int64_t d = 0; d < dim; ++d, target += element)
        std::memcpy(target, row + d * strides[2] * element, static_cast<std::size_t>(element));
    }
  }
}

}  // namespace

void KVCache::Impl::fill(std::int32_t layer, std::int32_t batch_idx, const Tensor& k,
                         const Tensor& v) {
  const EntryPlace* place = layout_->find(layer, KVPart::cross);
  const auto cross =
      std::ranges::find(cross_layers_, static_cast<std::uint32_t>(std::max(layer, 0)));
  if (place == nullptr || cross == cross_layers_.end())
    throw InvalidArgument(fmt::format("layer {} has no cross attention of its own: it is '{}'",
                                      layer,
                                      to_string(layout_->specs[static_cast<std::size_t>(layer)])));
  const std::size_t s = running(batch_idx);
  Sequence& sequence = sequences_[s];
  const DType dtype = layout_->config.dtype;
  const auto check = [&](const Tensor& given, const char* name) {
    if (!given.defined() || given.rank() != 3 || given.shape()[1] != place->kv_heads ||
        given.shape()[2] != place->key_dim || given.dtype() != dtype ||
        given.device().kind != Device::Kind::cpu)
      throw PlanShapeError(fmt::format("layer {}: {} is {}; expected {} [t_enc, {}, {}] on cpu",
                                       layer, name, given.to_string(), kvleaf::name_of(dtype),
                                       place->kv_heads, place->key_dim));
  };
  check(k, "k");
  check(v, "v");
  const std::int64_t tokens = k.shape()[0];
  if (v.shape()[0] != tokens)
    throw PlanShapeError(
        fmt::format("layer {}: k has {} encoder tokens and v {}", layer, tokens, v.shape()[0]));
  const std::uint32_t most =
      layout_->paged() ? sequence.encoder_reserved : layout_->config.max_encoder_len;
  if (tokens < 1 || tokens > most)
    throw RequestError(fmt::format(
        "slot {}: {} encoder tokens; expected 1 to {}, what was reserved", s, tokens, most));
  (void)k.data();  // a stale one is refused before anything is written
  (void)v.data();
  const auto index = static_cast<std::size_t>(cross - cross_layers_.begin());
  bool others = false;
  for (std::size_t i = 0; i < sequence.filled.size(); ++i)
    others = others || (i != index && sequence.filled[i]);
  if (others && memory_->encoder_lens[s] != tokens)
    throw RequestError(
        fmt::format("slot {}: layer {} is filled with {} encoder tokens, and other layers with {}",
                    s, layer, tokens, memory_->encoder_lens[s]));
  const auto head_bytes = std::uint64_t{layout_->element_bytes} * place->kv_heads * place->key_dim;
  if (!layout_->paged()) {
    const std::uint64_t at = s * place->entries * head_bytes;
    pack(k, 0, tokens, memory_->at(place->key_offset) + at);
    pack(v, 0, tokens, memory_->at(place->value_offset) + at);
  } else if (!sequence.encoder_cached) {  // else its pages are there, and others read them
    const LeafId leaf{place->leaf};
    const std::span<const BlockId> blocks = manager_->blocks(slots_[s].request, leaf);
    for (std::int64_t first = 0, b = 0; first < tokens; first += place->entries, ++b) {
      std::byte* target = memory_->page(leaf, blocks[static_cast<std::size_t>(b)]);
      const std::int64_t count = std::min<std::int64_t>(place->entries, tokens - first);
      pack(k, first, count, target + place->key_offset);
      pack(v, first, count, target + place->value_offset);
    }
  }
  sequence.filled[index] = true;
  memory_->encoder_lens[s] = static_cast<std::int32_t>(tokens);
  if (layout_->paged() && sequence.all_filled()) {
    manager_->encoder_filled(slots_[s].request);
    slots_[s].most = most_tokens(sequence);
    if (sequence.shared_encoder)
      encoders_->remember(sequence.digest, static_cast<std::uint32_t>(tokens));
  }
}

}  // namespace kvleaf
