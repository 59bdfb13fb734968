// Fitting: whether what requests still have to draw fits beside what was admitted and promised
// before.
#include <fmt/format.h>

#include <algorithm>

#include "kvleaf/group/manager_impl.h"

namespace kvleaf {

std::uint64_t BlockManager::Impl::outstanding(const Request& r, const LeafInfo& leaf,
                                              std::uint32_t length,
                                              std::uint32_t step_tokens) const {
  const ReserveOptions options{false, std::max(step_tokens, 1u)};
  switch (leaf.writing) {
    case Writing::append: {
      const std::uint32_t most = leaf.leaf->blocks_to_reserve(
          ceil_div(length, leaf.tokens_per_page), leaf.tokens_per_page, options);
      const Row& row = r.rows[leaf.id.value()];
      std::uint32_t held =
          static_cast<std::uint32_t>(row.slots.size()) -
          std::min<std::uint32_t>(row.first, static_cast<std::uint32_t>(row.slots.size()));
      held += std::min(ceil_div(leaf.pattern.head(), leaf.tokens_per_page), row.first);
      // The page behind a partial hit is copied before it is written.
      if (r.planned % leaf.tokens_per_page != 0 && !row.slots.empty()) {
        const BlockId last = row.slots.back();
        if (last == null_block || pool_->committed(leaf.id, last) ||
            shared(leaf.id, last, r.planned))
          --held;
      }
      return most > held ? most - held : 0;
    }
    case Writing::in_place:
      return r.states[leaf.kind_index].lacks(leaf.leaf->rollback()) +
             (shared_state(r, leaf) ? 1 : 0);
    case Writing::exclusive: return r.scratch[leaf.kind_index] ? 0 : 1;
    case Writing::write_once: return 0;  // drawn at admission
  }
  return 0;
}

std::uint64_t BlockManager::Impl::promise(const Request& r, const LeafInfo& leaf) const {
  // A step of more than page_tokens holds more than steps of the promised size do. Until it has
  // settled, this many may follow it.
  const bool long_in_flight = r.in_flight > 0 && r.long_step >= first_step_;
  const std::uint32_t further = options_.max_steps_in_flight - 1;
  const std::uint32_t to_come = long_in_flight ? further - std::min(further, r.since_long) : 0;
  return promise_of(r, leaf, r.planned, r.rows[leaf.id.value()].slots.size(), 0, to_come);
}

std::uint64_t BlockManager::Impl::promise_after(const Request& r, const LeafInfo& leaf,
                                                std::uint32_t end, std::uint64_t drawing) const {
  const bool is_long = end - r.planned > options_.page_tokens;
  const bool long_in_flight = is_long || (r.in_flight > 0 && r.long_step >= first_step_);
  const std::uint32_t further = options_.max_steps_in_flight - 1;
  const std::uint32_t to_come =
      !long_in_flight ? 0 : further - std::min(further, is_long ? 0 : r.since_long + 1);
  return promise_of(r, leaf, end, ceil_div(end, leaf.tokens_per_page), drawing, to_come);
}

bool BlockManager::Impl::owned(const Request& r, const LeafInfo& leaf, std::uint32_t slot,
                               BlockId block) const {
  // What it holds alone comes back to it as it moves on; what it shares does only while in its
  // reach.
  const bool alone = !shared(leaf.id, block, r.planned);
  const bool partly =
      slot == r.planned / leaf.tokens_per_page && r.planned % leaf.tokens_per_page != 0;
  if (partly) return alone && !pool_->committed(leaf.id, block);  // else it is copied
  if (alone) return true;
  const SlotReach last = leaf.pattern.slots(*r.guarantee, leaf.tokens_per_page);
  return last.contains(slot) && (leaf.needs_all || slot < last.head_end);
}

template <class Visit>
void BlockManager::Impl::each_held(const Request& r, const LeafInfo& leaf, Visit&& visit) const {
  const Row& row = r.rows[leaf.id.value()];
  const auto tell = [&](std::uint32_t slot, BlockId block) {
    if (block != null_block) visit(slot, block);
  };
  const std::uint32_t head = ceil_div(leaf.pattern.head(), leaf.tokens_per_page);
  for (std::uint32_t slot = 0; slot < std::min(head, row.first); ++slot)
    tell(slot, row.slots[slot]);
  for (std::uint32_t slot = row.first; slot < row.slots.size(); ++slot) tell(slot, row.slots[slot]);
  for (std::size_t i = 0; i < row.leaving.size(); ++i)
    tell(static_cast<std::uint32_t>(row.leaving_first + i), row.leaving[i]);
}

std::uint64_t BlockManager::Impl::promise_of(const Request& r, const LeafInfo& leaf,
                                             std::uint32_t planned, std::uint64_t slots,
                                             std::uint64_t drawing,
                                             std::uint32_t steps_to_come) const {
  const std::uint32_t length = *r.guarantee;
  const std::uint32_t step = options_.page_tokens * options_.max_steps_in_flight;
  if (leaf.writing != Writing::append) {
    const std::uint64_t wanted = outstanding(r, leaf, length, step);
    return wanted - std::min(wanted, drawing);
  }
  const std::uint64_t most = leaf.leaf->blocks_to_reserve(ceil_div(length, leaf.tokens_per_page),
                                                          leaf.tokens_per_page, {false, step});
  std::uint64_t its_own = drawing;
  bool copies_last = false;
  each_held(r, leaf, [&](std::uint32_t slot, BlockId block) {
    if (owned(r, leaf, slot, block)) {
      ++its_own;
    } else if (slot == r.planned / leaf.tokens_per_page && r.planned % leaf.tokens_per_page != 0) {
      copies_last = true;
    }
  });
  const std::uint64_t later = most > its_own ? most - its_own : 0;
  const std::uint64_t farthest = std::min<std::uint64_t>(
      planned + std::uint64_t{steps_to_come} * options_.page_tokens, length);
  const std::uint64_t ends = (farthest + leaf.tokens_per_page - 1) / leaf.tokens_per_page;
  const std::uint64_t before_it_settles =
      (ends > slots ? ends - slots : 0) +
      (steps_to_come > 0 && drawing == 0 && copies_last ? 1 : 0);
  return std::max(later, before_it_settles);
}

bool BlockManager::Impl::promises_allow_going_back(const Request& r, std::uint32_t tokens) {
  if (guaranteed_.empty()) return true;
  std::fill(wanted_.begin(), wanted_.end(), 0);
  if (r.guarantee) {
    for (const std::uint32_t index : text_) {
      const LeafInfo& leaf = info_[index];
      each_held(r, leaf, [&](std::uint32_t slot, BlockId block) {
        const bool gone = slot >= tokens / leaf.tokens_per_page;
        if (gone && owned(r, leaf, slot, block) && pool_->references(leaf.id, block) > 1) {
          ++wanted_[index];
        }
      });
    }
  }
  std::vector<std::pair<LeafId, BlockId>> pinned;
  for (const std::uint32_t index : states_) {
    const LeafInfo& leaf = info_[index];
    if (holds_state(r, leaf, tokens)) continue;
    if (const auto checkpoint = checkpoint_at(r, leaf, tokens)) {
      pool_->touch(leaf.id, *checkpoint);
      pinned.emplace_back(leaf.id, *checkpoint);
    }
  }
  form_promises();
  const bool fits = pool_->judge(wanted_).fits;
  for (const auto& [leaf, block] : pinned) pool_->free(leaf, block);
  return fits;
}

std::uint64_t BlockManager::Impl::lent_by_fork(const Request& r, const LeafInfo& leaf) const {
  if (!r.guarantee || leaf.writing != Writing::append) return 0;
  const SlotReach last = leaf.pattern.slots(*r.guarantee, leaf.tokens_per_page);
  std::uint64_t lent = 0;
  each_held(r, leaf, [&](std::uint32_t slot, BlockId block) {
    const bool partly =
        slot == r.planned / leaf.tokens_per_page && r.planned % leaf.tokens_per_page != 0;
    const bool stays = last.contains(slot) && (leaf.needs_all || slot < last.head_end);
    lent += !partly && !stays && !shared(leaf.id, block, r.planned) ? 1 : 0;
  });
  return lent;
}

void BlockManager::Impl::form_promises(const Request* without) {
  for (const LeafInfo& info : info_) {
    std::uint64_t sum = 0;
    for (const Request* r : guaranteed_) {
      if (r != without) sum += promise(*r, info);
    }
    pool_->set_promised(info.id, sum);
  }
}

bool BlockManager::Impl::would_fit(const Request& r, bool take_checkpoint,
                                   std::uint32_t encoder_tokens, std::string* why) {
  std::fill(wanted_.begin(), wanted_.end(), 0);
  for (const std::uint32_t leaf : encoders_) {
    wanted_[leaf] = ceil_div(encoder_tokens, info_[leaf].tokens_per_page);
  }
  const auto add = [&](const Request& q) {
    for (const LeafInfo& info : info_) {
      std::uint64_t want =
          outstanding(q, info, q.prompt, std::min(options_.max_step_tokens, q.prompt - q.planned));
      if (&q == &r && take_checkpoint && info.writing == Writing::in_place &&
          q.states[info.kind_index].read)
        --want;
      if (q.guarantee) {
        const std::uint64_t promised = promise(q, info);
        // The promises of admitted requests are counted by the pool; the newcomer's are not yet.
        want = &q == &r ? std::max(want, promised) : want - std::min(want, promised);
      }
      wanted_[info.id.value()] += want;
    }
  };
  for (const Request* q : prompts_) {
    if (q != &r) add(*q);
  }
  add(r);
  const BlockPool::Verdict verdict = pool_->judge(wanted_);
  if (!verdict.fits && why != nullptr) {
    std::string wants;
    for (const LeafInfo& info : info_) {
      if (wanted_[info.id.value()] > 0) {
        wants += fmt::format("{}{} of '{}'", wants.empty() ? "" : ", ", wanted_[info.id.value()],
                             info.leaf->leaf_id());
      }
    }
    *why = verdict.over_ceiling
               ? fmt::format("wants {}: leaf '{}' would pass its ceiling", wants,
                             info_[verdict.over_ceiling->value()].leaf->leaf_id())
               : fmt::format(
                     "wants {}, admitted prompts included: {} huge blocks, {} are empty or idle",
                     wants, verdict.huge_needed, verdict.huge_left);
  }
  return verdict.fits;
}

std::uint32_t BlockManager::Impl::longest_request() const {
  const Geometry& geometry = pool_->geometry();
  const auto fits = [&](std::uint32_t tokens) {
    std::vector<std::uint64_t> per_class(geometry.page_classes(), 0);
    for (const LeafInfo& info : info_) {
      const LeafGeometry& g = geometry.leaf(info.id);
      const std::uint32_t slots = ceil_div(tokens, info.tokens_per_page);
      const std::uint64_t blocks =
          info.writing == Writing::write_once
              ? 0
              : info.leaf->blocks_to_reserve(slots, info.tokens_per_page,
                                             {false, std::min(options_.max_step_tokens, tokens)});
      if (g.ceiling && blocks > *g.ceiling) return false;
      per_class[g.page_class.value()] += std::max(blocks, g.floor);
    }
    std::uint64_t huge = 0;
    for (std::uint32_t c = 0; c < per_class.size(); ++c) {
      const std::uint64_t ratio = geometry.class_ratio(PageClassId{c});
      huge += (per_class[c] + ratio - 1) / ratio;
    }
    return huge <= geometry.huge_blocks();
  };
  std::uint32_t good = 0;
  std::uint32_t bad = options_.max_len + 1;
  while (bad - good > 1) {
    const std::uint32_t middle = good + (bad - good) / 2;
    (fits(middle) ? good : bad) = middle;
  }
  return good;
}

BlockManager::Impl::Claimed BlockManager::Impl::claim_deepest(Request& r, const Found& found,
                                                              const AdmitOptions& options) {
  Claimed claimed;
  if (options.encoder) claimed.encoder = find_encoder(options);
  pin_encoder(claimed.encoder);
  claimed.encoder_cached = claimed.encoder != nullptr && claimed.encoder->filled;
  // An encoder that is not there is drawn now, beside the rest.
  const std::uint32_t encoder_tokens =
      options.encoder && claimed.encoder == nullptr ? options.encoder->tokens : 0;

  // Shallower hits are tried one by one at first, then in growing steps: what a hit pins rarely
  // stands in the way, and then by a few pages.
  claimed.hit = found.hit;
  bool extra = found.extra > 0;
  std::uint32_t tries = 0;
  while (true) {
    claim(r, found, claimed.hit, extra);
    form_promises();  // what is pinned now may have been somebody's alone
    std::string reason;
    if (would_fit(r, false, encoder_tokens, &reason)) return claimed;
    if (claimed.why.empty()) claimed.why = reason;
    // An unshared checkpoint may become the live state, where there is no block for one beside it.
    if (may_take_checkpoints(r) && would_fit(r, true, encoder_tokens, nullptr)) {
      claimed.steals = true;
      return claimed;
    }
    unclaim(r);
    if (extra) {
      extra = false;
      continue;
    }
    if (claimed.hit == 0) {
      unpin_encoder(claimed.encoder);
      throw PoolExhausted(
          fmt::format("request {} of {} tokens {}", r.id.value(), r.prompt, claimed.why));
    }
    const std::uint32_t step = ++tries <= 32 ? 1 : 1u << std::min(tries - 32, 20u);
    claimed.hit =
        joint_hit(found.residency, claimed.hit > step * unit_ ? claimed.hit - step * unit_ : 0,
                  unit_, r.uncut);
  }
}

bool BlockManager::Impl::may_take_checkpoints(const Request& r) const {
  bool any = false;
  for (const std::uint32_t leaf : states_) {
    const State& state = r.states[info_[leaf].kind_index];
    if (!state.read) continue;
    if (pool_->references(LeafId{leaf}, *state.read) != 1) return false;
    any = true;
  }
  return any;
}

void BlockManager::Impl::take_checkpoints(Request& r) {
  for (const std::uint32_t leaf : states_) {
    State& state = r.states[info_[leaf].kind_index];
    if (!state.read) continue;
    if (const auto key = pool_->key(LeafId{leaf}, *state.read)) {
      forget(leaf, SegmentId{static_cast<std::uint32_t>(key->high)},
             static_cast<std::uint32_t>(key->low));
    }
    if (state.ring.empty()) state.ring.assign(info_[leaf].leaf->rollback() + 1, null_block);
    BlockId& live = state.at(r.planned);
    if (live != null_block) give_back(r, LeafId{leaf}, live);
    live = *state.read;
    state.read.reset();
    state.valid_from = r.planned;
  }
}

}  // namespace kvleaf
