// Finding: what of a prompt is there already, why no more, and taking hold of it.
#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <limits>

#include "kvleaf/group/manager_impl.h"

namespace kvleaf {

bool BlockManager::Impl::input_begins(const Request& r, std::uint32_t token) {
  return std::find(r.begins.begin(), r.begins.end(), token) != r.begins.end();
}

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

// ---- claiming ----------------------------------------------------------------------------------

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
      std::erase(row.slots, null_block);
      pool_->free_many(info.id, row.slots);
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

void BlockManager::Impl::enter_tree(Request& r, const Found& found, std::uint32_t hit,
                                    std::span<const Token> tokens, const AdmitOptions& options) {
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

}  // namespace kvleaf
