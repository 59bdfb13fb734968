// Admission: what of a prompt is there already, and would the rest fit.
#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <limits>

#include "kvleaf/group/manager_impl.h"

namespace kvleaf {
namespace {

/// Extra keys of the pages in which media items and the encoder's input begin.
PageExtras page_extras(const AdmitOptions& options, std::uint32_t page_tokens) {
  PageExtras extras;
  const auto add = [&](std::uint32_t at, std::string_view kind, std::string_view digest,
                       std::uint64_t length) {
    const std::uint32_t page = at / page_tokens;
    auto place = std::lower_bound(extras.begin(), extras.end(), page,
                                  [](const PageExtra& e, std::uint32_t p) { return e.page < p; });
    if (place == extras.end() || place->page != page) place = extras.insert(place, {page, {}});
    append_unambiguously(place->key, kind);
    append_unambiguously(place->key, digest);
    append_unambiguously(place->key, fmt::format("{}+{}", at % page_tokens, length));
  };
  if (options.encoder)
    add(options.encoder->at, "encoder", options.encoder->digest, options.encoder->tokens);
  for (const MediaItem& item : options.media) add(item.offset, "media", item.digest, item.length);
  return extras;
}

}  // namespace

bool BlockManager::Impl::input_begins(const Request& r, std::uint32_t token) {
  return std::find(r.begins.begin(), r.begins.end(), token) != r.begins.end();
}

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

void BlockManager::Impl::check_admission(std::span<const Token> tokens,
                                         const AdmitOptions& options) const {
  if (tokens.empty()) throw RequestError("a request needs at least one token; none was given");
  if (tokens.size() > options_.max_len) {
    throw RequestError(
        fmt::format("a prompt of {} tokens passes max_len {}", tokens.size(), options_.max_len));
  }
  if (options.guarantee &&
      (*options.guarantee > options_.max_len || *options.guarantee < tokens.size())) {
    throw RequestError(
        fmt::format("a guarantee of {} tokens; it must lie between the prompt's {} and max_len {}",
                    *options.guarantee, tokens.size(), options_.max_len));
  }
  std::uint64_t end = 0;
  for (const MediaItem& item : options.media) {
    const std::uint64_t item_end = std::uint64_t{item.offset} + item.length;
    if (item.length == 0 || item.offset < end || item_end > tokens.size()) {
      throw RequestError(
          fmt::format("media item at [{}, {}): items must be ascending, not overlapping, not empty "
                      "and inside the prompt's {} "
                      "tokens",
                      item.offset, item_end, tokens.size()));
    }
    end = item_end;
  }
  if (options.encoder) {
    if (encoders_.empty()) {
      throw RequestError("an encoder input was given, but no leaf is written by an encoder");
    }
    if (options.encoder->tokens == 0 || options.encoder->at >= tokens.size()) {
      throw RequestError(
          fmt::format("an encoder of {} tokens at position {}: it needs at least one token, and a "
                      "position inside the prompt's {}",
                      options.encoder->tokens, options.encoder->at, tokens.size()));
    }
  }
}

// ---- finding
// ---------------------------------------------------------------------------------------

void BlockManager::Impl::find(std::span<const Token> tokens, const AdmitOptions& options,
                              const Request& r, Found& found) {
  found.path.clear();
  found.residency.clear();
  found.residency_leaf.clear();
  found.limit = found.hit = found.extra = found.junction = 0;
  found.root.reset();
  if (!caching_) return;
  found.root = tree_->find_root(options.salt, options.adapter);
  if (!found.root) return;

  const std::uint32_t P = options_.page_tokens;
  const auto most = static_cast<std::uint32_t>(std::min<std::uint64_t>(
      tokens.size(), options.addressable.value_or(std::numeric_limits<std::uint32_t>::max())));
  tree_->match(*found.root, tokens, r.extras, most / P, found.path);

  for (const LeafInfo& info : info_) {
    if (!info.tree) continue;
    LeafResidency residency;
    residency.pattern = &info.pattern;
    residency.tokens_per_page = info.tokens_per_page;
    residency.group = info.group;
    residency.slots = found.path.pages / info.pages;
    for (const TreePath::Part& part : found.path.parts) {
      const std::uint32_t mask = tree_->mask(part.segment, *info.tree);
      if (info.pages == 1 && !info.ahead) {
        const std::uint32_t all = part.pages >= 32 ? ~0u : (1u << part.pages) - 1;
        std::uint32_t lacking = ~mask & all;
        while (lacking != 0) {  // run by run
          const auto begin = static_cast<std::uint32_t>(std::countr_zero(lacking));
          const auto length = static_cast<std::uint32_t>(std::countr_one(lacking >> begin));
          residency.lacks(part.first + begin, length);
          if (begin + length >= 32) break;
          lacking &= ~0u << (begin + length);
        }
        continue;
      }
      // A longer page is filed where it ends.
      std::uint32_t slot = part.first / info.pages;
      for (std::uint32_t page = (slot + 1) * info.pages - 1; page < part.first + part.pages;
           page += info.pages, ++slot) {
        bool held = (mask >> (page - part.first) & 1) != 0;
        if (held && info.ahead) {  // filed with the token that followed: it must follow here too
          const std::size_t next = (std::size_t{slot} + 1) * info.tokens_per_page;
          held = next < tokens.size() && !input_begins(r, static_cast<std::uint32_t>(next)) &&
                 tree_->ahead_token(part.segment, page) == tokens[next];
        }
        if (!held) residency.lacks(slot);
      }
    }
    found.residency.push_back(std::move(residency));
    found.residency_leaf.push_back(info.id.value());
  }
  const auto last =
      static_cast<std::uint32_t>(tokens.size() - 1);  // its logits are wanted: computed again
  found.limit = boundary_outside(std::min({last, most, found.path.pages * P}), unit_, r.uncut);
  found.hit = joint_hit(found.residency, found.limit, unit_, r.uncut);
  if (found.path.left_path) found.junction = boundary_outside(found.path.pages * P, unit_, r.uncut);

  // The common part of the page behind the hit, where every leaf stores it token by token.
  if (options.partial && states_.empty() && found.path.pages * P == found.hit) {
    TreeCursor cursor{*found.root, 0};
    if (!found.path.parts.empty()) cursor = {found.path.parts.back().segment, found.path.pages};
    const std::uint32_t room = std::min(last, most) - found.hit;
    const auto common = tree_->common_tokens(cursor, tokens.subspan(found.hit, std::min(room, P)));
    bool all = common.tokens > 0;
    for (const LeafInfo& info : info_) {
      all = all && (info.writing != Writing::append ||
                    (info.tree && info.pages == 1 && !info.ahead &&
                     tree_->resident(common.behind.segment, common.behind.pages - 1, *info.tree)));
    }
    const std::uint32_t end = found.hit + common.tokens;
    for (const Uncut& item : r.uncut) all = all && (end <= item.begin || end >= item.end);
    for (const PageExtra& e : r.extras) all = all && e.page != found.hit / P;
    if (all) {
      found.extra = common.tokens;
      found.extra_behind = common.behind;
    }
  }
}

std::string BlockManager::Impl::reason_of(const Found& found, std::span<const Token> tokens,
                                          const AdmitOptions& options) const {
  const std::uint32_t P = options_.page_tokens;
  if (!options_.enable_prefix_caching) return "prefix caching is off";
  if (!caching_) return "no leaf is cached by content";
  if (tokens.size() <= unit_)
    return fmt::format("shorter than a page: {} tokens of {}, and the last is computed",
                       tokens.size(), unit_);
  if (!found.root) {
    if (tree_->segments() == 0) return "nothing is cached";
    if (options.salt.empty() && options.adapter.empty())
      return "nothing is cached without salt and adapter";
    return options.adapter.empty()
               ? "nothing is cached under this salt"
               : fmt::format("nothing is cached under this salt and adapter '{}'", options.adapter);
  }
  const std::uint32_t hit = found.hit;
  if (found.path.pages * P < unit_) {
    const auto common = tree_->common_tokens({*found.root, 0}, tokens);
    if (found.path.pages > 0 || common.tokens > 0) {
      return fmt::format("shorter than a page: {} common tokens of {}",
                         std::max(common.tokens, found.path.pages * P), unit_);
    }
    return "no cached prompt begins like this";
  }
  if (hit >= found.limit) {
    if (found.limit + unit_ > tokens.size() - 1 && found.path.pages * P >= found.limit + unit_) {
      return "the last token must be computed";
    }
    return hit == 0 ? "no common boundary" : "";
  }
  // Which leaf stands in the way of the next deeper boundary that its group alone would allow?
  for (std::size_t i = 0; i < found.residency.size(); ++i) {
    const LeafResidency& leaf = found.residency[i];
    if (leaf.deepest(found.limit, unit_) >= found.limit) continue;
    const LeafInfo& info = info_[found.residency_leaf[i]];
    if (info.writing == Writing::in_place) {
      return fmt::format("leaf '{}' has no checkpoint at {} tokens", info.leaf->leaf_id(),
                         found.limit);
    }
    for (const MissingRun& run : leaf.missing) {
      const SlotReach reach = info.pattern.slots(found.limit, info.tokens_per_page);
      if (run.begin < reach.head_end || (run.begin < reach.end && run.end > reach.tail_begin)) {
        return fmt::format(
            "leaf '{}' lost the page of tokens {} to {}", info.leaf->leaf_id(),
            std::max(run.begin, run.begin < reach.head_end ? 0u : reach.tail_begin) *
                info.tokens_per_page,
            (std::max(run.begin, run.begin < reach.head_end ? 0u : reach.tail_begin) + 1) *
                info.tokens_per_page);
      }
    }
  }
  return "no boundary suits all leaves";
}

// ---- claiming
// --------------------------------------------------------------------------------------

void BlockManager::Impl::claim(Request& r, const Found& found, std::uint32_t hit, bool with_extra) {
  const std::uint32_t page = options_.page_tokens;
  const std::uint32_t tokens = hit + (with_extra ? found.extra : 0);
  for (const LeafInfo& info : info_) {
    if (info.writing == Writing::append) {
      Row& row = r.rows[info.id.value()];
      const std::uint32_t slots = hit / info.tokens_per_page;
      row.slots.clear();
      r.note_change(row, 0);
      row.first = 0;
      const SlotReach reach = info.pattern.slots(tokens, info.tokens_per_page);
      const std::uint32_t held = ceil_div(tokens, info.tokens_per_page);
      row.slots.reserve(held);
      for (const TreePath::Part& part : found.path.parts) {
        if (!info.tree || part.first * page >= hit) break;
        const BlockId* blocks = tree_->blocks(part.segment, *info.tree);
        if (info.pages == 1) {
          const std::uint32_t end = std::min(part.first + part.pages, slots);
          const std::uint32_t head = std::clamp(reach.head_end, part.first, end);
          const std::uint32_t tail = std::clamp(reach.tail_begin, head, end);
          row.slots.insert(row.slots.end(), blocks, blocks + (head - part.first));
          row.slots.resize(tail, null_block);
          row.slots.insert(row.slots.end(), blocks + (tail - part.first),
                           blocks + (end - part.first));
          continue;
        }
        std::uint32_t slot = part.first / info.pages;
        for (std::uint32_t p = (slot + 1) * info.pages - 1;
             p < part.first + part.pages && slot < slots; p += info.pages, ++slot) {
          row.slots.push_back(reach.contains(slot) ? blocks[p - part.first] : null_block);
        }
      }
      row.slots.resize(held, null_block);
      if (!info.tree || tokens == 0) continue;
      row.first = std::min(reach.tail_begin, slots);
      if (with_extra)
        row.slots.back() =
            tree_->block(found.extra_behind.segment, found.extra_behind.pages - 1, *info.tree);
      const std::uint32_t head = std::min(reach.head_end, row.first);
      pool_->touch_many(info.id, std::span(row.slots).first(head));
      pool_->touch_many(info.id, std::span(row.slots).subspan(row.first));
    } else if (info.writing == Writing::in_place && info.tree && hit > 0) {
      const std::uint32_t at = hit / page - 1;
      const auto part =
          std::find_if(found.path.parts.begin(), found.path.parts.end(),
                       [&](const TreePath::Part& p) { return at < p.first + p.pages; });
      const BlockId checkpoint = tree_->block(part->segment, at, *info.tree);
      pool_->touch(info.id, checkpoint);
      r.states[info.kind_index].read = checkpoint;
      r.states[info.kind_index].fresh = false;
    }
  }
  r.hit = r.computed = r.planned = tokens;
}

void BlockManager::Impl::unclaim(Request& r) {
  for (const LeafInfo& info : info_) {
    if (info.writing == Writing::append) {
      Row& row = r.rows[info.id.value()];
      for (const BlockId block : row.slots) {
        if (block != null_block) pool_->free(info.id, block);
      }
      row.slots.clear();
      row.first = 0;
    } else if (info.writing == Writing::in_place) {
      State& state = r.states[info.kind_index];
      if (state.read) pool_->free(info.id, *state.read);
      state.read.reset();
      state.fresh = true;
    }
  }
  r.hit = r.computed = r.planned = 0;
}

// ---- fitting
// ---------------------------------------------------------------------------------------

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

// ---- encoders
// --------------------------------------------------------------------------------------

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

// ---- the answer
// ------------------------------------------------------------------------------------

void BlockManager::Impl::plan_kept(Request& r, std::uint32_t junction) const {
  r.kept.clear();
  if (!caching_) return;
  const auto keep = [&](std::uint64_t n) {
    const std::uint32_t boundary = boundary_outside(
        static_cast<std::uint32_t>(std::min<std::uint64_t>(n, r.prompt - 1)), unit_, r.uncut);
    if (boundary > 0 && boundary <= r.addressable) r.kept.push_back(boundary);
  };
  keep(r.prompt - 1);
  if (junction > 0) keep(junction);
  if (options_.retention.kind == Retention::Kind::spaced) {
    const std::uint64_t last = (r.prompt - 1) / unit_;
    for (std::uint64_t pages = 1; pages <= last; pages *= 2) {
      keep(pages * unit_);           // from the start
      keep((last - pages) * unit_);  // from the end
    }
  }
  std::sort(r.kept.begin(), r.kept.end());
  r.kept.erase(std::unique(r.kept.begin(), r.kept.end()), r.kept.end());
}

std::optional<std::uint32_t> BlockManager::Impl::next_stop(const Request& r) const {
  if (states_.empty() || !caching_ || !r.publish) return {};
  if (in_chunk_) return {};  // wherever a chunk ends, its boundaries are emitted
  // The next boundary behind what is planned that is worth a checkpoint, if it lies before the
  // known end.
  std::uint32_t stop = std::numeric_limits<std::uint32_t>::max();
  const auto offer = [&](std::uint64_t n) {
    if (n > r.planned && n < stop) stop = static_cast<std::uint32_t>(n);
  };
  for (const std::uint32_t n : r.kept) offer(n);
  const std::uint32_t known = std::min(r.known(), r.addressable);
  const auto next = [&](std::uint64_t step) {  // multiples of step, up to what is known
    std::uint64_t n = (r.planned / step + 1) * step;
    while (n <= known && boundary_outside(static_cast<std::uint32_t>(n), unit_, r.uncut) != n)
      n += step;
    if (n <= known) offer(n);
  };
  if (options_.retention.kind == Retention::Kind::dense) next(unit_);
  if (options_.retention.kind == Retention::Kind::every)
    next(std::uint64_t{ceil_div(options_.retention.tokens, unit_)} * unit_);
  offer(boundary_outside(known, unit_, r.uncut));
  if (stop > r.known()) return {};
  return stop;
}

Admission BlockManager::Impl::answer(RequestId id, std::span<const Token> tokens,
                                     const AdmitOptions& options, bool keep) {
  check_admission(tokens, options);
  if (keep && requests_.contains(id)) {
    throw RequestError(fmt::format(
        "request {} is live already; release it first, or choose another id", id.value()));
  }
  std::unique_ptr<Request> owned = make_request(id);
  Request& r = *owned;
  try {
    r.prompt = static_cast<std::uint32_t>(tokens.size());
    r.addressable = options.addressable.value_or(std::numeric_limits<std::uint32_t>::max());
    r.priority = std::clamp(options.priority, -128, 127);
    r.guarantee = options.guarantee;
    r.extras = page_extras(options, options_.page_tokens);
    if (options.encoder) r.begins.push_back(options.encoder->at);
    for (const MediaItem& item : options.media) {
      r.begins.push_back(item.offset);
      if (item.whole) r.uncut.push_back({item.offset, item.offset + item.length});
    }
    Found& found = found_;
    find(tokens, options, r, found);

    // Claim the deepest hit with which the rest fits. Shallower ones are tried one by one at first,
    // then in growing steps: what a hit pins rarely stands in the way, and then by a few pages.
    std::uint32_t hit = found.hit;
    bool extra = found.extra > 0;
    std::string why;
    std::uint32_t tries = 0;
    bool steal = false;
    bool encoder_cached = false;
    EncoderNode* encoder = nullptr;
    if (options.encoder) {
      encoder = find_encoder(options);
      if (encoder != nullptr) {
        encoder_cached = encoder->filled;
        for (std::size_t i = 0; i < encoders_.size(); ++i) {
          pool_->touch_many(LeafId{encoders_[i]}, encoder->blocks[i]);
        }
      }
    }
    const auto let_encoder_go = [&] {
      if (encoder == nullptr) return;
      for (std::size_t i = 0; i < encoders_.size(); ++i) {
        pool_->free_many(LeafId{encoders_[i]}, encoder->blocks[i]);
      }
    };
    // An encoder that is not there is drawn now, beside the rest.
    const std::uint32_t encoder_tokens =
        options.encoder && encoder == nullptr ? options.encoder->tokens : 0;
    while (true) {
      claim(r, found, hit, extra);
      form_promises();  // what is pinned now may have been somebody's alone
      steal = false;
      std::string reason;
      if (would_fit(r, false, encoder_tokens, &reason)) break;
      if (why.empty()) why = reason;
      // An unshared checkpoint may become the live state, where there is no block for one beside
      // it.
      if (may_take_checkpoints(r)) {
        steal = true;
        if (would_fit(r, true, encoder_tokens, nullptr)) break;
      }
      unclaim(r);
      if (extra) {
        extra = false;
        continue;
      }
      if (hit == 0) {
        let_encoder_go();
        throw PoolExhausted(
            fmt::format("request {} of {} tokens {}", id.value(), tokens.size(), why));
      }
      const std::uint32_t step = ++tries <= 32 ? 1 : 1u << std::min(tries - 32, 20u);
      hit = joint_hit(found.residency, hit > step * unit_ ? hit - step * unit_ : 0, unit_, r.uncut);
    }

    Admission admission;
    admission.hit_tokens = r.hit;
    admission.encoder_cached = encoder_cached;
    for (std::uint32_t g = 0; g < groups_.size(); ++g) {
      const bool in_play = std::any_of(found.residency.begin(), found.residency.end(),
                                       [&](const LeafResidency& leaf) { return leaf.group == g; });
      if (!in_play) continue;
      const std::uint32_t without = joint_hit(found.residency, found.limit, unit_, r.uncut, g);
      if (without > found.hit) admission.lost.push_back({groups_[g].name, without - found.hit});
    }
    admission.reason = hit < found.hit
                           ? fmt::format("a hit of {} tokens would not fit: {}", found.hit, why)
                       : !admission.lost.empty() || r.hit == 0 ? reason_of(found, tokens, options)
                                                               : "";
    plan_kept(r, found.junction);
    r.tokens.assign(tokens.begin(), tokens.end());
    admission.next_stop = next_stop(r);

    if (!keep) {
      unclaim(r);
      let_encoder_go();
      retire(std::move(owned));
      return admission;
    }

    // What is taken and evicted now must not take the path away: its end holds all of it.
    std::optional<SegmentId> path_end;
    if (!found.path.parts.empty()) path_end = found.path.parts.back().segment;
    if (path_end) tree_->pin(*path_end);
    if (steal) take_checkpoints(r);
    if (r.guarantee) {  // from now on nobody may take what it was promised
      guaranteed_.push_back(&r);
      form_promises();
    }
    if (options.encoder && encoder == nullptr) encoder = make_encoder(options);
    if (encoder != nullptr) {
      ++encoder->users;
      r.encoder = encoder;
      for (std::size_t i = 0; i < encoders_.size(); ++i) {
        r.rows[encoders_[i]].slots = encoder->blocks[i];
        r.note_change(r.rows[encoders_[i]], 0);
      }
    }
    if (caching_) {
      const SegmentId root = tree_->root(options.salt, options.adapter);
      TreeCursor cursor{root, 0};
      if (hit > 0) {
        const std::uint32_t pages = hit / options_.page_tokens;
        const auto part =
            std::find_if(found.path.parts.begin(), found.path.parts.end(),
                         [&](const TreePath::Part& p) { return pages <= p.first + p.pages; });
        cursor = {part->segment, pages};
      }
      tree_->pin(cursor.segment);
      r.cursor = cursor;
      r.committed = r.ahead_committed = cursor.pages;
      r.matched = found.path.pages;
      if (options_.eviction == EvictionOrder::value) {
        r.matched = tree_->recall(root, tokens, r.extras, found.path,
                                  std::min(r.prompt, r.addressable) / options_.page_tokens);
        for (auto part = found.path.parts.rbegin(); part != found.path.parts.rend(); ++part)
          tree_->prove(part->segment, part->pages);
      }
      refresh(r, found, hit);
    }
    if (path_end) tree_->unpin(*path_end);
    if (r.planned < r.prompt) prompts_.push_back(&r);
    requests_.emplace(id, std::move(owned));

    const auto preempted = preempted_.find(id);
    if (preempted != preempted_.end()) {
      ++counters_.resumed;
      preempted_.erase(preempted);
    } else {
      ++counters_.admitted;
      counters_.prompt_tokens += r.prompt;
      counters_.hit_tokens += r.hit;
      for (const GroupLoss& loss : admission.lost) {
        std::find_if(groups_.begin(), groups_.end(), [&](const GroupInfo& g) {
          return g.name == loss.group;
        })->lost_tokens += loss.tokens;
      }
    }
    ++clock_;
    return admission;
  } catch (const PoolExhausted&) {
    if (keep) ++counters_.refused;
    retire(std::move(owned));
    throw;
  } catch (...) {
    if (owned != nullptr) {
      std::erase(guaranteed_, owned.get());
      retire(std::move(owned));
    }
    throw;
  }
}

Admission BlockManager::Impl::admit(RequestId id, std::span<const Token> tokens,
                                    const AdmitOptions& options) {
  return answer(id, tokens, options, true);
}

Admission BlockManager::Impl::probe(std::span<const Token> tokens, const AdmitOptions& options) {
  return answer(RequestId{std::numeric_limits<std::uint64_t>::max()}, tokens, options, false);
}

}  // namespace kvleaf
