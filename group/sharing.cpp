// How requests begin, share, go back and end.
#include <fmt/format.h>

#include <algorithm>

#include "kvleaf/group/manager_impl.h"

namespace kvleaf {

// ---- life
// ------------------------------------------------------------------------------------------

std::unique_ptr<Request> BlockManager::Impl::make_request(RequestId id) {
  std::unique_ptr<Request> request;
  if (spare_.empty()) {
    request = std::make_unique<Request>();
    request->rows.resize(leaves_.size());
    request->states.resize(states_.size());
    request->scratch.resize(scratch_.size());
    if (in_chunk_)
      request->unfiled.reserve((options_.max_step_tokens / unit_ + std::size_t{2}) * steps_.size());
    // Rows must not grow inside a step. What is reserved and never used is never touched.
    for (const std::uint32_t leaf : text_) {
      const LeafInfo& info = info_[leaf];
      const std::uint32_t slots = ceil_div(options_.max_len, info.tokens_per_page);
      request->rows[leaf].slots.reserve(slots);
      if (info.needs_all) continue;
      const ReserveOptions most{false, options_.max_step_tokens};
      request->rows[leaf].leaving.reserve(
          info.leaf->blocks_to_reserve(slots, info.tokens_per_page, most));
      given_up_.reserve(request->rows[leaf].leaving.capacity());
      pages_.reserve(request->rows[leaf].leaving.capacity());
    }
  } else {
    request = std::move(spare_.back());
    spare_.pop_back();
  }
  request->id = id;
  request->serial = ++serials_;
  return request;
}

void BlockManager::Impl::retire(std::unique_ptr<Request> request) {
  // Arrays keep their capacity: the next request will not have to ask for it again.
  Request& r = *request;
  Request clean;
  clean.rows = std::move(r.rows);
  clean.states = std::move(r.states);
  clean.scratch = std::move(r.scratch);
  clean.unfiled = std::move(r.unfiled);
  clean.unfiled.clear();
  clean.tokens = std::move(r.tokens);
  clean.kept = std::move(r.kept);
  clean.tokens.clear();
  clean.kept.clear();
  for (Row& row : clean.rows) {
    row.slots.clear();
    row.leaving.clear();
    row.first = row.leaving_first = 0;
    row.hint.reset();
    row.changed.fill(0);
  }
  for (State& state : clean.states) {
    state.ring.clear();
    state.read.reset();
    state.source.reset();
    state.fresh = true;
    state.valid_from = 0;
  }
  for (auto& block : clean.scratch) block.reset();
  r = std::move(clean);
  spare_.push_back(std::move(request));
}

void BlockManager::Impl::leave(Request& r) {
  std::erase(prompts_, &r);
  std::erase(guaranteed_, &r);
  for (std::uint64_t step = first_step_; step < next_step_; ++step) {
    for (StepRecord::Entry& entry : record_of(step)->entries) {
      if (entry.request == &r) entry.request = nullptr;
    }
    for (StepRecord::Source& source : record_of(step)->sources) {
      if (source.request == &r) source.request = nullptr;
    }
  }
  const auto it = requests_.find(r.id);
  std::unique_ptr<Request> owned = std::move(it->second);
  requests_.erase(it);
  retire(std::move(owned));
  if (!guaranteed_.empty()) form_promises();
}

void BlockManager::Impl::give_back(Request& r, LeafId leaf, BlockId block) {
  give_back(r, leaf, {&block, 1});
}

void BlockManager::Impl::give_back(Request& r, LeafId leaf, std::span<const BlockId> blocks) {
  if (r.in_flight > 0) {
    if (StepRecord* record = record_of(std::min(r.last_step, next_step_ - 1)); record != nullptr) {
      for (const BlockId block : blocks) record->returning.emplace_back(leaf, block);
      return;
    }
  }
  pool_->free_many(leaf, blocks);
}

bool BlockManager::Impl::anything_pends() const {
  bool any = !pending_copies_.empty() || !pending_fills_.empty();
  for (std::uint64_t step = first_step_; step < next_step_ && !any; ++step)
    any = !steps_[step % steps_.size()].held_copies.empty();
  return any;
}

bool BlockManager::Impl::awaits_copy(LeafId leaf, BlockId block) const {
  const auto to_block = [&](const PendingCopy& copy) {
    return copy.leaf == leaf && copy.dst == block;
  };
  bool any = std::any_of(pending_copies_.begin(), pending_copies_.end(), to_block);
  for (std::uint64_t step = first_step_; step < next_step_ && !any; ++step) {
    const auto& copies = steps_[step % steps_.size()].held_copies;
    any = std::any_of(copies.begin(), copies.end(), to_block);
  }
  return any;
}

void BlockManager::Impl::drop_pending(LeafId leaf, BlockId block) {
  for (std::uint64_t step = first_step_; step < next_step_; ++step) {
    for (PendingCopy& copy : record_of(step)->held_copies) {
      if (copy.leaf == leaf && copy.dst == block) copy.dst_gone = true;
    }
  }
  const auto copy =
      std::find_if(pending_copies_.begin(), pending_copies_.end(),
                   [&](const PendingCopy& c) { return c.leaf == leaf && c.dst == block; });
  if (copy != pending_copies_.end()) {
    pass_over(*copy);
    pool_->free(copy->leaf, copy->src);
    pending_copies_.erase(copy);
    last_writer_->forget(leaf, block);
  }
  const auto fill = std::find(pending_fills_.begin(), pending_fills_.end(), ZeroFill{leaf, block});
  if (fill != pending_fills_.end()) {
    pending_fills_.erase(fill);
    last_writer_->forget(leaf, block);
  }
}

void BlockManager::Impl::give_back_all(Request& r) {
  ++clock_;
  if (caching_ && r.publish && options_.eviction == EvictionOrder::value)
    r.matched = tree_->refresh_proven(r.cursor);
  const bool pends = anything_pends();
  for (const std::uint32_t leaf : text_) {
    const LeafInfo& info = info_[leaf];
    const Row& row = r.rows[leaf];
    const auto give = [&](std::uint32_t first, std::span<const BlockId> blocks) {
      const std::span<const BlockId> given = value_given_up(r, info, first, blocks, Proof::of_path);
      if (pends) {
        for (const BlockId block : given) drop_pending(info.id, block);
      }
      give_back(r, info.id, given);
    };
    const std::span<const BlockId> slots(row.slots);
    const std::size_t first = std::min<std::size_t>(row.first, slots.size());
    give(static_cast<std::uint32_t>(row.leaving_first), row.leaving);
    give(0, slots.first(
                std::min<std::size_t>(ceil_div(info.pattern.head(), info.tokens_per_page), first)));
    give(row.first, slots.subspan(first));
  }
  for (const std::uint32_t leaf : states_) {
    State& state = r.states[info_[leaf].kind_index];
    for (const BlockId block : state.ring) {
      if (block == null_block) continue;
      drop_pending(LeafId{leaf}, block);
      give_back(r, LeafId{leaf}, block);
    }
    if (state.read) give_back(r, LeafId{leaf}, *state.read);
    for (const PendingCheckpoint& pending : r.unfiled) {
      const BlockId block = pending.blocks[info_[leaf].kind_index];
      if (block != null_block) give_back(r, LeafId{leaf}, block);
    }
  }
  for (const std::uint32_t leaf : scratch_) {
    if (const auto block = r.scratch[info_[leaf].kind_index]) {
      drop_pending(LeafId{leaf}, *block);
      give_back(r, LeafId{leaf}, *block);
    }
  }
  if (r.encoder != nullptr) {
    EncoderNode& node = *r.encoder;
    for (std::size_t i = 0; i < encoders_.size(); ++i) {
      for (std::uint32_t slot = 0; slot < node.blocks[i].size(); ++slot) {
        const BlockId block = node.blocks[i][slot];
        if (pool_->committed(LeafId{encoders_[i]}, block)) {
          pool_->revalue(LeafId{encoders_[i]}, block,
                         page_value(r).at(slot, true, info_[encoders_[i]].completes));
        }
        give_back(r, LeafId{encoders_[i]}, block);
      }
    }
    if (--node.users == 0 && (!node.filled || !node.findable || !options_.enable_prefix_caching)) {
      // Nobody can find it, or it was never written: its name must not outlive its blocks.
      encoder_ids_.erase(node.id);
      const auto it = encoder_index_.find(node.name);
      if (it != encoder_index_.end() && it->second.get() == &node) {
        encoder_index_.erase(it);
      } else {
        std::erase_if(encoder_orphans_, [&](const auto& orphan) { return orphan.get() == &node; });
      }
    }
    r.encoder = nullptr;
  }
}

void BlockManager::Impl::forget_own(Request& r, std::uint32_t from_tokens) {
  // Pages behind `from_tokens` that nobody else holds.
  const std::uint32_t from = ceil_div(from_tokens, options_.page_tokens);
  SegmentId segment = r.cursor.segment;
  tree_->pin(segment);  // forgetting its last page would take it along
  for (std::uint32_t page = r.committed; page-- > from;) {
    while (tree_->first_page(segment) > page) {
      const SegmentId above = *tree_->parent(segment);
      tree_->pin(above);
      tree_->unpin(segment);
      segment = above;
    }
    for (const LeafInfo& info : info_) {
      if (!info.tree || !tree_->resident(segment, page, *info.tree)) continue;
      const BlockId block = tree_->block(segment, page, *info.tree);
      std::uint32_t own = 0;
      if (info.writing == Writing::append) {
        own = r.rows[info.id.value()].held(page / info.pages) == block ? 1 : 0;
      } else {
        const State& state = r.states[info.kind_index];
        for (const BlockId live : state.ring) own += live == block ? 1 : 0;
        own += state.read == block ? 1 : 0;
      }
      for (std::uint64_t step = first_step_; step < next_step_; ++step) {
        for (const StepRecord::Source& source : record_of(step)->sources) {
          own += source.request == &r && source.leaf == info.id && source.block == block ? 1 : 0;
        }
      }
      if (pool_->references(info.id, block) <= own) forget(info.id.value(), segment, page);
    }
  }
  tree_->unpin(segment);
}

void BlockManager::Impl::release(RequestId id, Prefix prefix,
                                 std::optional<std::uint32_t> addressable) {
  Request& r = get(id);
  if (caching_ && r.publish) {
    const std::uint32_t settled = std::min({r.computed, r.known(), r.addressable});
    const std::uint32_t last = boundary_outside(settled, unit_, r.uncut);
    if (last > 0 && !std::binary_search(r.kept.begin(), r.kept.end(), last)) {
      r.kept.insert(std::lower_bound(r.kept.begin(), r.kept.end(), last), last);
    }
    if (prefix == Prefix::keep && r.in_flight == 0) file_live_state(r);
    if (prefix == Prefix::drop) forget_own(r, r.hit / options_.page_tokens * options_.page_tokens);
    if (addressable && *addressable < settled)
      forget_own(r, *addressable / options_.page_tokens * options_.page_tokens);
  }
  give_back_all(r);
  if (caching_ && r.publish) tree_->unpin(r.cursor.segment);
  leave(r);
}

void BlockManager::Impl::preempt(RequestId id) {
  const std::uint32_t computed = get(id).computed;
  release(id, Prefix::keep, {});
  preempted_[id] = computed;
  ++counters_.preemptions;
}

// ---- fork, rewind
// ----------------------------------------------------------------------------------

void BlockManager::Impl::fork(RequestId parent, RequestId child) {
  Request& p = get(parent);
  if (requests_.contains(child))
    throw RequestError(fmt::format("request {} is live already", child.value()));
  if (p.in_flight > 0) {
    throw RequestError(fmt::format("request {} has {} steps in flight; settle them before forking",
                                   parent.value(), p.in_flight));
  }
  // The child's own: a partly filled page of each leaf, live states, scratch.
  demand_.clear();
  std::size_t total = 0;
  const auto want = [&](std::uint32_t leaf, std::uint64_t blocks, Fate fate) {
    if (blocks == 0) return;
    demand_.push_back({LeafId{leaf}, blocks, fate, {}});
    total += blocks;
  };
  const auto partly = [&](const LeafInfo& info) {
    const Row& row = p.rows[info.id.value()];
    return p.planned % info.tokens_per_page != 0 && !row.slots.empty() &&
           row.slots.back() != null_block;
  };
  const auto owns_state = [&](const State& state) { return !state.ring.empty() && !state.read; };
  for (const std::uint32_t leaf : text_) want(leaf, partly(info_[leaf]) ? 1 : 0, Fate::cache);
  for (const std::uint32_t leaf : states_) {
    const State& state = p.states[info_[leaf].kind_index];
    want(leaf, owns_state(state) ? state.ring.size() : 0, Fate::request);
  }
  for (const std::uint32_t leaf : scratch_)
    want(leaf, p.scratch[info_[leaf].kind_index] ? 1 : 0, Fate::request);
  drawn_.assign(total, null_block);
  if (!guaranteed_.empty()) {
    form_promises();
    for (const LeafInfo& info : info_)
      pool_->set_promised(info.id, pool_->promised(info.id) + lent_by_fork(p, info));
  }
  if (total > 0 ? !pool_->allocate_all(demand_, drawn_) : p.guarantee && !pool_->judge({}).fits) {
    form_promises();
    throw PoolExhausted(
        fmt::format("forking request {} at {} tokens needs {} blocks of its own; they do not fit",
                    parent.value(), p.planned, total));
  }

  // Scratch is not copied: whoever wrote it last must not show through.
  for (std::size_t i = 0, at = 0; i < demand_.size(); ++i) {
    for (std::uint64_t k = 0; k < demand_[i].blocks; ++k, ++at) {
      const bool cleared = last_writer_->draw(demand_[i].leaf, drawn_[at]);
      if (cleared && info_[demand_[i].leaf.value()].writing == Writing::exclusive) {
        pending_fills_.push_back({demand_[i].leaf, drawn_[at]});
      }
    }
  }

  std::unique_ptr<Request> owned = make_request(child);
  Request& c = *owned;
  c.tokens.assign(p.tokens.begin(), p.tokens.end());
  c.prompt = p.prompt;
  c.hit = p.hit;
  c.computed = p.computed;
  c.planned = p.planned;
  c.addressable = p.addressable;
  c.priority = p.priority;
  c.publish = p.publish;
  c.committed = p.committed;
  c.ahead_committed = p.ahead_committed;
  c.matched = p.matched;
  c.extras = p.extras;
  c.begins = p.begins;
  c.uncut = p.uncut;
  c.kept = p.kept;
  c.cursor = p.cursor;
  if (caching_ && c.publish) tree_->pin(c.cursor.segment);

  p.forget_bounds();  // its partly filled pages are read by copies now
  std::size_t next = 0;
  const auto copy_from = [&](LeafId leaf, BlockId src, BlockId dst) {
    // A block that is itself still to be copied: copy the original.
    for (const PendingCopy& copy : pending_copies_) {
      if (copy.leaf == leaf && copy.dst == src) {
        src = copy.src;
        break;
      }
    }
    pool_->touch(leaf, src);
    const bool text = info_[leaf.value()].writing == Writing::append;
    pending_copies_.push_back({leaf, src, dst, text ? p.planned : 0});
  };
  for (const std::uint32_t leaf : text_) {
    const LeafInfo& info = info_[leaf];
    const Row& from = p.rows[leaf];
    Row& to = c.rows[leaf];
    to.slots.assign(from.slots.begin(), from.slots.end());
    to.first = from.first;
    c.note_change(to, 0);
    const bool own_last = partly(info);
    if (own_last) to.slots.back() = drawn_[next++];
    for (std::size_t slot = 0; slot < to.slots.size() - (own_last ? 1 : 0); ++slot) {
      if (to.slots[slot] != null_block) pool_->touch(info.id, to.slots[slot]);
    }
    if (own_last) copy_from(info.id, from.slots.back(), to.slots.back());
  }
  for (const std::uint32_t leaf : states_) {
    const State& from = p.states[info_[leaf].kind_index];
    State& to = c.states[info_[leaf].kind_index];
    to.fresh = from.fresh;
    to.valid_from = from.valid_from;
    to.read = from.read;
    if (to.read) pool_->touch(LeafId{leaf}, *to.read);
    if (!owns_state(from)) continue;
    to.ring.assign(drawn_.begin() + static_cast<std::ptrdiff_t>(next),
                   drawn_.begin() + static_cast<std::ptrdiff_t>(next + from.ring.size()));
    next += from.ring.size();
    if (from.fresh) continue;  // cleared in both
    for (std::uint32_t n = from.valid_from; n <= p.planned; ++n) {
      const std::size_t i = n % from.ring.size();
      copy_from(LeafId{leaf}, from.ring[i], to.ring[i]);
    }
  }
  for (const std::uint32_t leaf : scratch_) {
    if (p.scratch[info_[leaf].kind_index]) c.scratch[info_[leaf].kind_index] = drawn_[next++];
  }
  if (p.encoder != nullptr) {
    c.encoder = p.encoder;
    ++c.encoder->users;
    for (std::size_t i = 0; i < encoders_.size(); ++i) {
      c.rows[encoders_[i]].slots = c.encoder->blocks[i];
      c.note_change(c.rows[encoders_[i]], 0);
      pool_->touch_many(LeafId{encoders_[i]}, c.encoder->blocks[i]);
    }
  }
  if (c.planned < c.prompt) prompts_.push_back(&c);
  requests_.emplace(child, std::move(owned));
  if (!guaranteed_.empty()) form_promises();
}

void BlockManager::Impl::rewind(RequestId id, std::uint32_t tokens) {
  Request& r = get(id);
  if (r.in_flight > 0) {
    throw RequestError(
        fmt::format("request {} has {} steps in flight; settle them, rejected drafts by `kept`",
                    id.value(), r.in_flight));
  }
  if (tokens > std::max(r.known(), r.computed)) {
    throw RequestError(fmt::format("request {} has {} tokens; it cannot be rewound to {}",
                                   id.value(), std::max(r.known(), r.computed), tokens));
  }
  if (tokens == 0)
    throw RequestError(
        fmt::format("request {} cannot be rewound to 0 tokens; release it", id.value()));
  if (tokens < r.computed) {
    if (!can_go_back(r, tokens)) {
      throw RequestError(
          fmt::format("request {} cannot be rewound to {} tokens: what computing token {} needs is "
                      "no longer held; the nearest shorter length that works is {}",
                      id.value(), tokens, tokens, deepest_return(r, tokens)));
    }
    if (!promises_allow_going_back(r, tokens)) {
      throw PoolExhausted(
          fmt::format("rewinding request {} to {} tokens would take blocks that guaranteed "
                      "requests were promised",
                      id.value(), tokens));
    }
    back_to(r, tokens);
    if (r.guarantee) forget_partly(r);
  } else if (tokens > r.computed && tokens > r.known()) {
    throw RequestError(fmt::format("request {} knows {} tokens; it cannot be rewound to {}",
                                   id.value(), r.known(), tokens));
  }
  cut_tokens(r, tokens);
  std::erase_if(prompts_, [](const Request* q) { return q->planned >= q->prompt; });
  if (!guaranteed_.empty()) form_promises();
}

void BlockManager::Impl::forget_partly(Request& r) {
  for (const std::uint32_t leaf : text_) {
    const LeafInfo& info = info_[leaf];
    const Row& row = r.rows[leaf];
    if (r.planned % info.tokens_per_page == 0 || row.slots.empty()) continue;
    const BlockId block = row.slots.back();
    if (pool_->references(info.id, block) != 1) continue;
    if (const auto key = pool_->key(info.id, block)) {
      forget(leaf, SegmentId{static_cast<std::uint32_t>(key->high)},
             static_cast<std::uint32_t>(key->low));
    }
  }
}

void BlockManager::Impl::cut_tokens(Request& r, std::uint32_t tokens) {
  if (r.known() > tokens) r.tokens.resize(tokens);
  r.prompt = std::min(r.prompt, tokens);
  r.hit = std::min(r.hit, tokens);
  std::erase_if(r.kept, [&](std::uint32_t boundary) { return boundary > tokens; });
}

// ---- reset
// -----------------------------------------------------------------------------------------

void BlockManager::Impl::reset_cache() {
  for (const auto& [id, r] : requests_) {
    r->publish = false;
    for (const PendingCheckpoint& pending : r->unfiled) {
      for (const std::uint32_t leaf : states_) {
        const BlockId block = pending.blocks[info_[leaf].kind_index];
        if (block != null_block) give_back(*r, LeafId{leaf}, block);
      }
    }
    r->unfiled.clear();
  }
  if (caching_) {
    tree_->each_segment([&](SegmentId segment) {
      const std::uint32_t first = tree_->first_page(segment);
      for (const LeafInfo& info : info_) {
        if (!info.tree) continue;
        for (std::uint32_t bits = tree_->mask(segment, *info.tree); bits != 0; bits &= bits - 1) {
          const std::uint32_t page = first + static_cast<std::uint32_t>(std::countr_zero(bits));
          pool_->uncommit(info.id, tree_->block(segment, page, *info.tree));
        }
      }
    });
    tree_->clear();
  }
  std::vector<EncoderNode*> nodes;
  for (const auto& [name, node] : encoder_index_) nodes.push_back(node.get());
  for (EncoderNode* node : nodes) encoder_lost(*node);
  if (options_.events) events_.push_back({Event::Kind::cleared, "", "", {}, {}, 0});
}

}  // namespace kvleaf
