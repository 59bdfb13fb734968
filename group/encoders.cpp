// Encoder inputs: keyed by digest and length, whole or absent, shared by all requests that name
// them.
#include <fmt/format.h>

#include "kvleaf/group/manager_impl.h"

namespace kvleaf {

std::string BlockManager::Impl::encoder_name(const AdmitOptions& options) {
  std::string name;
  append_unambiguously(name, options.salt);
  append_unambiguously(name, options.adapter);
  append_unambiguously(name, options.encoder->digest);
  append_unambiguously(name, std::to_string(options.encoder->tokens));
  return name;
}

EncoderNode* BlockManager::Impl::find_encoder(const AdmitOptions& options) const {
  const auto it = encoder_index_.find(encoder_name(options));
  return it == encoder_index_.end() ? nullptr : it->second.get();
}

EncoderNode* BlockManager::Impl::make_encoder(const AdmitOptions& options) {
  demand_.clear();
  std::size_t total = 0;
  for (const std::uint32_t leaf : encoders_) {
    const std::uint32_t blocks = ceil_div(options.encoder->tokens, info_[leaf].tokens_per_page);
    demand_.push_back({LeafId{leaf}, blocks, Fate::cache, {}});
    total += blocks;
  }
  drawn_.assign(total, null_block);
  if (!pool_->allocate_all(demand_, drawn_)) {
    throw InvariantError("the pool refused an encoder that the joint rule had accepted");
  }
  // Written whole before they are read, and perhaps before the next step: never cleared.
  for (std::size_t i = 0, at = 0; i < demand_.size(); ++i) {
    for (std::uint64_t k = 0; k < demand_[i].blocks; ++k, ++at)
      last_writer_->draw(demand_[i].leaf, drawn_[at]);
  }
  auto node = std::make_unique<EncoderNode>();
  node->id = ++encoder_serials_;
  node->name = encoder_name(options);
  node->tokens = options.encoder->tokens;
  auto next = drawn_.begin();
  for (const BlockPool::Demand& demand : demand_) {
    const auto count = static_cast<std::ptrdiff_t>(demand.blocks);
    node->blocks.emplace_back(next, next + count);
    next += count;
  }
  EncoderNode* made = node.get();
  encoder_ids_.emplace(made->id, made);
  encoder_index_[made->name] = std::move(node);
  return made;
}

void BlockManager::Impl::pin_encoder(const EncoderNode* encoder) {
  if (encoder == nullptr) return;
  for (std::size_t i = 0; i < encoders_.size(); ++i)
    pool_->touch_many(LeafId{encoders_[i]}, encoder->blocks[i]);
}

void BlockManager::Impl::unpin_encoder(const EncoderNode* encoder) {
  if (encoder == nullptr) return;
  for (std::size_t i = 0; i < encoders_.size(); ++i)
    pool_->free_many(LeafId{encoders_[i]}, encoder->blocks[i]);
}

void BlockManager::Impl::use_encoder(Request& r, EncoderNode& encoder) {
  ++encoder.users;
  r.encoder = &encoder;
  for (std::size_t i = 0; i < encoders_.size(); ++i) {
    Row& row = r.rows[encoders_[i]];
    row.slots = encoder.blocks[i];
    r.note_change(row, 0);
  }
}

void BlockManager::Impl::encoder_filled(Request& r) {
  if (r.encoder == nullptr) {
    throw RequestError(
        fmt::format("request {} was admitted without an encoder input", r.id.value()));
  }
  EncoderNode& node = *r.encoder;
  if (node.filled) return;
  node.filled = true;
  if (!node.findable || !options_.enable_prefix_caching) return;
  for (std::size_t i = 0; i < encoders_.size(); ++i) {
    if (!info_[encoders_[i]].leaf->cacheable()) continue;
    for (std::uint32_t slot = 0; slot < node.blocks[i].size(); ++slot) {
      pool_->commit(LeafId{encoders_[i]}, node.blocks[i][slot], {encoder_key | node.id, slot},
                    page_value(r).at(slot, true, info_[encoders_[i]].completes));
    }
  }
}

void BlockManager::Impl::encoder_lost(EncoderNode& node) {
  // Whole or absent: the rest is of no use. Blocks in use stay live, but nobody new will find them.
  for (std::size_t i = 0; i < encoders_.size(); ++i) {
    for (const BlockId block : node.blocks[i]) {
      if (pool_->committed(LeafId{encoders_[i]}, block)) {
        const auto key = pool_->key(LeafId{encoders_[i]}, block);
        if (key && key->high == (encoder_key | node.id))
          pool_->uncommit(LeafId{encoders_[i]}, block);
      }
    }
  }
  encoder_ids_.erase(node.id);
  const auto it = encoder_index_.find(node.name);
  node.findable = false;
  if (it != encoder_index_.end() && it->second.get() == &node) {
    if (node.users > 0) encoder_orphans_.push_back(std::move(it->second));
    encoder_index_.erase(it);
  }
}

}  // namespace kvleaf
