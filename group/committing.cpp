// Committing: pages of settled steps become findable.
#include <fmt/format.h>

#include <algorithm>

#include "kvleaf/group/manager_impl.h"

namespace kvleaf {

void BlockManager::Impl::move_cursor(Request& r, TreeCursor cursor) {
  tree_->pin(cursor.segment);
  const SegmentId old = r.cursor.segment;
  r.cursor = cursor;
  tree_->unpin(old);
}

void BlockManager::Impl::record(Event::Kind kind, std::uint32_t leaf, SegmentId segment,
                                std::uint32_t page) {
  if (!options_.events) return;
  const LeafInfo& info = info_[leaf];
  events_.push_back({kind, groups_[info.group].name, info.leaf->leaf_id(),
                     tree_->page_key(segment, page), tree_->parent_key(segment, page),
                     (page + 1) * options_.page_tokens});
}

void BlockManager::Impl::commit(Request& r) {
  if (!caching_ || !r.publish) return;
  const std::uint32_t P = options_.page_tokens;
  const std::uint32_t limit = std::min({r.computed, r.known(), r.addressable});
  // Most steps complete no page. What the next token completes is looked for below.
  if (limit < (r.committed + std::uint64_t{1}) * P && !any_ahead_ && r.unfiled.empty()) return;
  while (r.committed < limit / P) {
    TreeCursor cursor = r.cursor;
    const PrefixTree::Run run =
        tree_->insert(cursor,
                      std::span(r.tokens).subspan(std::size_t{r.committed} * P,
                                                  std::size_t{limit / P - r.committed} * P),
                      r.extras);
    move_cursor(r, cursor);
    r.committed = cursor.pages;
    if (run.first < r.matched && options_.eviction == EvictionOrder::value) {
      tree_->prove(run.segment,
                   std::min(run.first + run.pages, r.matched) - tree_->first_page(run.segment));
    }
    for (const std::uint32_t leaf : text_) {
      if (info_[leaf].tree && !info_[leaf].ahead) commit_run(r, info_[leaf], run);
    }
  }
  // Leaves that are fed the next token follow one token behind.
  while (any_ahead_ && r.ahead_committed < r.committed &&
         std::uint64_t{r.ahead_committed + 1} * P < std::min(r.known(), r.addressable)) {
    const SegmentId segment = tree_->segment_of(r.cursor, r.ahead_committed);
    const PrefixTree::Run run{segment, r.ahead_committed, 1};
    const bool alone = !input_begins(r, (r.ahead_committed + 1) * P);
    for (const std::uint32_t leaf : text_) {
      if (alone && info_[leaf].tree && info_[leaf].ahead) commit_run(r, info_[leaf], run);
    }
    ++r.ahead_committed;
  }
  file_checkpoints(r);
}

void BlockManager::Impl::commit_run(Request& r, const LeafInfo& info, const PrefixTree::Run& run) {
  Row& row = r.rows[info.id.value()];
  const std::uint32_t leaf = *info.tree;
  const PageValue values = page_value(r);
  pages_.clear();
  std::uint32_t slot = run.first / info.pages;
  KeptRun kept;
  const std::uint32_t resident = tree_->mask(run.segment, leaf);
  const std::uint32_t first_page = tree_->first_page(run.segment);
  for (std::uint32_t page = (slot + 1) * info.pages - 1; page < run.first + run.pages;
       page += info.pages, ++slot) {
    const BlockId own = row.held(slot);
    if (own == null_block) continue;
    if (slot >= kept.until) kept = kept_run(r, info, slot);
    bool keep = kept.kept;
    bool proven = proven_in_tree(info, run.segment, page);
    if ((resident >> (page - first_page) & 1) != 0) {
      const BlockId theirs = tree_->block(run.segment, page, leaf);
      if (theirs == own || pool_->look(info.id, own).committed) continue;
      const bool equal_next =
          !info.ahead || tree_->ahead_token(run.segment, page) ==
                             r.tokens[std::size_t{slot + 1} * info.tokens_per_page];
      if (pool_->references(info.id, theirs) > 0) {
        // A twin: go on with the block that is findable, return our own. Not where a promise counts
        // on blocks that their owners hold alone, and ours would not come back at once.
        const bool back_at_once = r.in_flight == 0 && pool_->references(info.id, own) == 1;
        if (!guaranteed_.empty() && !info.needs_all && (r.guarantee || !back_at_once)) continue;
        if (slot < row.first || slot >= row.slots.size() || !equal_next) continue;
        pool_->touch(info.id, theirs);
        row.slots[slot] = theirs;
        r.note_change(row, slot);
        give_back(r, info.id, own);
        ++counters_.twins;
        continue;
      }
      // Unreferenced: ours takes its place, and takes over what the page is worth.
      const Value before = pool_->value(info.id, theirs);
      keep = keep || PageValue::kept(before);
      proven = proven || PageValue::proven(before);
      pool_->uncommit(info.id, theirs);
      ++counters_.twins;
    } else {
      if (pool_->look(info.id, own).committed) continue;
      record(Event::Kind::stored, info.id.value(), run.segment, page);
    }
    tree_->set_block(run.segment, page, leaf, own);
    if (info.ahead)
      tree_->set_ahead_token(run.segment, page,
                             r.tokens[std::size_t{slot + 1} * info.tokens_per_page]);
    pages_.push(own, values.at(slot, keep, proven));
    pages_.keys.push_back({run.segment.value(), page});
  }
  pool_->commit_many(info.id, pages_.blocks, pages_.keys, pages_.values);
  tree_->set_mark(run.segment, leaf, false);
}

}  // namespace kvleaf
