// Going back: a step whose device work failed is undone, and a request stands at a shorter length.
#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <span>

#include "kvleaf/group/manager_impl.h"

namespace kvleaf {

std::vector<std::pair<RequestId, std::uint32_t>> BlockManager::Impl::abandon(StepId step,
                                                                             DeviceWork work) {
  if (record_of(step.value()) == nullptr) {
    throw StepError(
        fmt::format("step {} is not in flight; {}", step.value(),
                    first_step_ == next_step_
                        ? "no step is"
                        : fmt::format("steps {} to {} are", first_step_, next_step_ - 1)));
  }
  // Requests that go back, and how far they had been planned.
  std::vector<std::pair<Request*, std::uint32_t>> touched;
  const auto touch = [&](Request& r) {
    const auto it =
        std::find_if(touched.begin(), touched.end(), [&](const auto& t) { return t.first == &r; });
    return it != touched.end() ? it->second : touched.emplace_back(&r, r.planned).second;
  };
  std::vector<std::pair<LeafId, BlockId>> spoilt;  // states that a failed step has overwritten
  std::vector<ZeroFill> fills;
  while (next_step_ > step.value()) {
    StepRecord& record = steps_[(next_step_ - 1) % steps_.size()];
    for (auto entry = record.entries.rbegin(); entry != record.entries.rend(); ++entry) {
      if (entry->request == nullptr) continue;
      Request& r = *entry->request;
      const std::uint32_t top = touch(r);
      const std::uint32_t n = entry->begin;
      const std::uint32_t before = r.planned;
      --r.in_flight;
      r.last_step = step.value() - 1;
      // Checkpoints that this step was to make: nobody else has used their blocks.
      drop_unfiled(
          r,
          [&](const PendingCheckpoint& pending) { return pending.step == record.step.id.value(); },
          [&](LeafId leaf, BlockId block) { pool_->free(leaf, block); });
      unslide(r, n);
      cut_rows(r, n);
      for (const std::uint32_t leaf : states_) {
        const LeafInfo& info = info_[leaf];
        State& state = r.states[info.kind_index];
        if (state.read && before != n) {  // a checkpoint of the length it had gone back to
          pool_->free(info.id, *state.read);
          state.read.reset();
          state.valid_from = n + 1;
        }
        if (std::any_of(record.sources.begin(), record.sources.end(),
                        [&](const StepRecord::Source& source) {
                          return source.request == &r && source.leaf == info.id;
                        })) {
          continue;  // taken back below
        }
        if (entry->cleared_state) {
          state.fresh = true;
          state.valid_from = n;
        } else if (work == DeviceWork::never_ran) {
          state.valid_from = n;
        } else {
          // What the ring held before stands where the steps did not go once around it: valid_from
          // says so.
          const auto size = static_cast<std::uint32_t>(state.ring.size());
          for (std::uint32_t m = n + 1; m <= top && m <= n + size; ++m) {
            spoilt.emplace_back(info.id, state.at(m));
          }
        }
      }
      take_back_sources(record, r, n);
    }
    for (const StepRecord::Source& source : record.sources)
      record.returning.emplace_back(source.leaf, source.block);
    record.sources.clear();  // of released requests
    // Copies and clears must be listed again, the oldest first, where their targets are still held.
    pending_copies_.insert(pending_copies_.begin(), record.held_copies.begin(),
                           record.held_copies.end());
    record.held_copies.clear();
    fills.insert(fills.end(), record.step.zero_fills.begin(), record.step.zero_fills.end());
    // Of requests released meanwhile: these may be states that the step has overwritten.
    for (const auto& returned : record.returning) {
      if (info_[returned.first.value()].writing == Writing::in_place) spoilt.push_back(returned);
    }
    --next_step_;
    for (const auto& [leaf, block] : record.returning) {  // the step before may use them too
      if (next_step_ > first_step_) {
        record_of(next_step_ - 1)->returning.emplace_back(leaf, block);
      } else {
        pool_->free(leaf, block);
      }
    }
    record.returning.clear();
  }
  for (std::uint64_t earlier = first_step_; earlier < next_step_; ++earlier) {
    for (PendingCopy& copy : record_of(earlier)->held_copies) {
      copy.spoilt = copy.spoilt || std::find(spoilt.begin(), spoilt.end(),
                                             std::pair(copy.leaf, copy.src)) != spoilt.end();
    }
  }
  for (std::size_t i = 0; i < pending_copies_.size();) {
    const PendingCopy copy = pending_copies_[i];
    const bool bad = copy.spoilt || std::find(spoilt.begin(), spoilt.end(),
                                              std::pair(copy.leaf, copy.src)) != spoilt.end();
    const bool wanted = !copy.dst_gone && held(copy.leaf, copy.dst);
    if (!bad && wanted) {
      ++i;
      continue;
    }
    if (!bad) pass_over(copy);
    pool_->free(copy.leaf, copy.src);
    last_writer_->forget(copy.leaf, copy.dst);
    pending_copies_.erase(pending_copies_.begin() + static_cast<std::ptrdiff_t>(i));
    if (!bad) continue;
    // Its source is worth nothing any more, so its owner goes back too.
    spoilt.emplace_back(copy.leaf, copy.dst);
    for (const auto& [id, owner] : requests_) {
      if (info_[copy.leaf.value()].writing != Writing::in_place) continue;
      State& state = owner->states[info_[copy.leaf.value()].kind_index];
      for (std::uint32_t m = state.valid_from; m <= owner->planned && !state.ring.empty(); ++m) {
        if (state.at(m) != copy.dst) continue;
        touch(*owner);
        state.valid_from = m + 1;
      }
    }
  }
  for (const ZeroFill& fill : fills) {
    const Writing writing = info_[fill.leaf.value()].writing;
    if (writing == Writing::in_place) continue;  // cleared whenever they start anew
    if (!held(fill.leaf, fill.block)) {
      last_writer_->forget(fill.leaf, fill.block);
    } else if (std::find(pending_fills_.begin(), pending_fills_.end(), fill) ==
               pending_fills_.end()) {
      pending_fills_.push_back(fill);
    }
  }
  std::vector<std::pair<RequestId, std::uint32_t>> lengths;
  for (const auto& [r, top] : touched) {
    const bool lost = std::any_of(r->states.begin(), r->states.end(), [r = r](const State& state) {
      return !state.read && !state.fresh && state.valid_from > r->planned;
    });
    if (lost) {
      // What it pins there may not be what others were promised; at 0 it pins nothing.
      const std::uint32_t length = deepest_return(*r, r->planned);
      back_to(*r, promises_allow_going_back(*r, length) ? length : 0);
      for (std::uint64_t earlier = first_step_; earlier < next_step_; ++earlier) {
        // Steps in flight count up to there, and what they read is not gone back to.
        for (StepRecord::Source& source : record_of(earlier)->sources) {
          if (source.request == r) source.request = nullptr;
        }
        for (StepRecord::Entry& entry : record_of(earlier)->entries) {
          if (entry.request != r) continue;
          const std::uint32_t end = std::min(entry.begin + entry.count, r->planned);
          entry.begin = std::min(entry.begin, end);
          entry.count = entry.stands = end - entry.begin;
        }
      }
    }
    r->computed = std::min(r->computed, r->planned);
    r->long_step = r->since_long = 0;
    for (std::uint64_t earlier = first_step_; earlier < next_step_; ++earlier) {
      for (const StepRecord::Entry& entry : record_of(earlier)->entries) {
        if (entry.request != r) continue;
        ++r->since_long;
        if (entry.count <= options_.page_tokens) continue;
        r->long_step = earlier;
        r->since_long = 0;
      }
    }
    if (r->planned < r->prompt && std::find(prompts_.begin(), prompts_.end(), r) == prompts_.end())
      prompts_.push_back(r);
    lengths.emplace_back(r->id, r->planned);
  }
  std::sort(lengths.begin(), lengths.end());
  if (!guaranteed_.empty()) {
    form_promises();
    // A request that went back behind pages that it shares needs more than it was promised; nobody
    // else's promise may suffer for it.
    for (const auto& [r, top] : touched) {
      if (!r->guarantee || pool_->judge({}).fits) continue;
      r->guarantee.reset();
      std::erase(guaranteed_, r);
      form_promises();
    }
  }
  return lengths;
}

bool BlockManager::Impl::held(LeafId leaf, BlockId block) const {
  const LeafInfo& info = info_[leaf.value()];
  for (const auto& [id, r] : requests_) {
    switch (info.writing) {
      case Writing::append:
      case Writing::write_once: {
        const auto& slots = r->rows[leaf.value()].slots;
        if (std::find(slots.begin(), slots.end(), block) != slots.end()) return true;
        break;
      }
      case Writing::in_place: {
        const auto& ring = r->states[info.kind_index].ring;
        if (std::find(ring.begin(), ring.end(), block) != ring.end()) return true;
        break;
      }
      case Writing::exclusive:
        if (r->scratch[info.kind_index] == block) return true;
        break;
    }
  }
  return false;
}

void BlockManager::Impl::pass_over(const PendingCopy& copy) {
  for (PendingCopy& other : pending_copies_) {
    if (other.leaf != copy.leaf || other.src != copy.dst) continue;
    pool_->touch(copy.leaf, copy.src);
    pool_->free(copy.leaf, copy.dst);
    other.src = copy.src;
    other.spoilt = copy.spoilt;
  }
}

void BlockManager::Impl::unslide(Request& r, std::uint32_t tokens) {
  for (const std::uint32_t leaf : text_) {
    const LeafInfo& info = info_[leaf];
    Row& row = r.rows[leaf];
    const std::uint32_t begin = info.pattern.slots(tokens, info.tokens_per_page).tail_begin;
    while (!row.leaving.empty() && row.leaving_first + row.leaving.size() > begin) {
      const auto slot = static_cast<std::uint32_t>(row.leaving_first + row.leaving.size() - 1);
      row.slots[slot] = row.leaving.back();
      row.leaving.pop_back();
      r.note_change(row, slot);
      row.first = std::min(row.first, slot);
    }
  }
  r.forget_bounds();
}

std::optional<BlockId> BlockManager::Impl::checkpoint_at(const Request& r, const LeafInfo& leaf,
                                                         std::uint32_t tokens) const {
  if (!caching_ || !r.publish || !leaf.tree || tokens == 0 || tokens % unit_ != 0) return {};
  if (tokens > std::uint64_t{r.committed} * options_.page_tokens) return {};
  const std::uint32_t page = tokens / options_.page_tokens - 1;
  const SegmentId segment = tree_->segment_of(r.cursor, page);
  if (!tree_->resident(segment, page, *leaf.tree)) return {};
  return tree_->block(segment, page, *leaf.tree);
}

bool BlockManager::Impl::holds_state(const Request& r, const LeafInfo& leaf,
                                     std::uint32_t tokens) const {
  const State& state = r.states[leaf.kind_index];
  if (state.read) return tokens == r.planned;
  return tokens > 0 && !state.ring.empty() && tokens >= state.valid_from && tokens <= r.planned;
}

bool BlockManager::Impl::can_go_back(const Request& r, std::uint32_t tokens) const {
  if (tokens == 0) return true;
  for (const std::uint32_t leaf : text_) {
    const LeafInfo& info = info_[leaf];
    const Row& row = r.rows[leaf];
    const SlotReach reach = info.pattern.slots(tokens, info.tokens_per_page);
    for (std::uint32_t slot = reach.tail_begin; slot < reach.end && slot < row.first; ++slot) {
      if (slot >= reach.head_end && row.held(slot) == null_block) return false;
    }
    if (reach.end > row.slots.size()) return false;
  }
  for (const std::uint32_t leaf : states_) {
    const LeafInfo& info = info_[leaf];
    if (!holds_state(r, info, tokens) && !checkpoint_at(r, info, tokens)) return false;
  }
  return true;
}

std::uint32_t BlockManager::Impl::deepest_return(const Request& r, std::uint32_t at_most) const {
  if (can_go_back(r, at_most)) return at_most;
  // Lengths that a ring still holds, then boundaries: nowhere else is there a state. Without states
  // a row that has slid too far for one length has for all shorter ones, but for 0.
  for (std::uint32_t n = at_most; n > 0 && at_most - n <= 64; --n) {
    if (can_go_back(r, n)) return n;
  }
  for (std::uint32_t n = at_most / unit_ * unit_; n > 0; n -= unit_) {
    if (can_go_back(r, n)) return n;
  }
  return 0;
}

void BlockManager::Impl::back_to(Request& r, std::uint32_t tokens) {
  for (const std::uint32_t leaf : states_) {
    const LeafInfo& info = info_[leaf];
    State& state = r.states[info.kind_index];
    state.source.reset();
    if (state.read && tokens != r.planned) {
      pool_->free(info.id, *state.read);
      state.read.reset();
    }
    const bool in_ring =
        !state.ring.empty() && tokens >= state.valid_from && tokens <= r.planned && tokens > 0;
    if (tokens == 0) {
      state.fresh = true;
    } else if (!in_ring && !state.read) {
      const BlockId checkpoint = *checkpoint_at(r, info, tokens);
      pool_->touch(info.id, checkpoint);
      state.read = checkpoint;
    }
    // A live state that is filed as a checkpoint must not be overwritten: the request moves off it.
    if (!in_ring && !state.ring.empty()) {
      for (BlockId& block : state.ring) {
        drop_pending(info.id, block);
        if (block != null_block && pool_->committed(info.id, block)) {
          give_back(r, info.id, block);
          block = null_block;
        }
      }
      state.valid_from = tokens;
    }
  }
  unslide(r, tokens);
  cut_rows(r, tokens);
  drop_unfiled(
      r, [&](const PendingCheckpoint& pending) { return pending.tokens > tokens; },
      [&](LeafId leaf, BlockId block) { give_back(r, leaf, block); });
  if (tokens == 0) {
    for (const std::uint32_t leaf : text_) r.rows[leaf].first = 0;
  }
  r.forget_bounds();
  r.computed = std::min(r.computed, tokens);
  const std::uint32_t pages = tokens / options_.page_tokens;
  if (caching_ && r.publish && r.committed > pages) {
    SegmentId segment = r.cursor.segment;
    while (!tree_->is_root(segment) && tree_->first_page(segment) >= pages)
      segment = *tree_->parent(segment);
    move_cursor(r, {segment, pages});
    r.committed = pages;
    r.ahead_committed = std::min(r.ahead_committed, pages);
  }
  std::erase_if(r.kept,
                [&](std::uint32_t boundary) { return boundary > tokens && boundary > r.prompt; });
  if (r.rolling > tokens) r.rolling = 0;
}

}  // namespace kvleaf
