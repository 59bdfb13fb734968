// Committing: pages of settled steps, and checkpoints of states, become findable.
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

// ---- checkpoints
// -----------------------------------------------------------------------------------

bool BlockManager::Impl::file_checkpoint(Request& r, std::uint32_t tokens,
                                         std::span<const BlockId> blocks) {
  const std::uint32_t page = tokens / options_.page_tokens - 1;
  const SegmentId segment = tree_->segment_of(r.cursor, page);
  for (const std::uint32_t leaf : states_) {
    const LeafInfo& info = info_[leaf];
    if (!info.tree) continue;
    if (tree_->resident(segment, page, *info.tree)) return false;  // all of them, or none
    if (pool_->committed(info.id, blocks[info.kind_index])) return false;
  }
  bool filed = false;
  for (const std::uint32_t leaf : states_) {
    const LeafInfo& info = info_[leaf];
    if (!info.tree) continue;
    const BlockId block = blocks[info.kind_index];
    tree_->set_block(segment, page, *info.tree, block);
    pool_->commit(info.id, block, {segment.value(), page},
                  page_value(r).at(page / info.pages, true, proven_in_tree(info, segment, page)));
    record(Event::Kind::stored, leaf, segment, page);
    filed = true;
  }
  if (!filed) return false;
  ++counters_.checkpoints;
  // A checkpoint that only the end of the sequence kept gives way to the next one, unless somebody
  // else has asked for it since, or uses it.
  const bool only_end = !std::binary_search(r.kept.begin(), r.kept.end(), tokens) &&
                        (options_.retention.kind == Retention::Kind::tail ||
                         options_.retention.kind == Retention::Kind::spaced);
  if (r.rolling > 0 && r.rolling < tokens) {
    const std::uint32_t old = r.rolling / options_.page_tokens - 1;
    const SegmentId old_segment = tree_->segment_of(r.cursor, old);
    bool unused = true;
    for (const std::uint32_t leaf : states_) {
      const LeafInfo& info = info_[leaf];
      if (!info.tree || !tree_->resident(old_segment, old, *info.tree)) continue;
      const BlockId block = tree_->block(old_segment, old, *info.tree);
      unused = unused && pool_->references(info.id, block) == 0 &&
               !PageValue::proven(pool_->value(info.id, block));
    }
    for (const std::uint32_t leaf : states_) {
      const LeafInfo& info = info_[leaf];
      if (unused && info.tree && tree_->resident(old_segment, old, *info.tree))
        forget(leaf, old_segment, old);
    }
    r.rolling = 0;
  }
  if (only_end) r.rolling = tokens;
  return true;
}

void BlockManager::Impl::file_checkpoints(Request& r) {
  for (std::size_t i = 0; i < r.unfiled.size();) {
    PendingCheckpoint& pending = r.unfiled[i];
    const bool settled = pending.step < first_step_;
    if (!settled || pending.tokens > r.committed * options_.page_tokens) {
      ++i;
      continue;
    }
    file_checkpoint(r, pending.tokens,
                    std::span<const BlockId>(pending.blocks.data(), pending.blocks.size()));
    for (const std::uint32_t leaf : states_) {
      const BlockId block = pending.blocks[info_[leaf].kind_index];
      if (block != null_block) pool_->free(LeafId{leaf}, block);
    }
    r.unfiled.erase(r.unfiled.begin() + static_cast<std::ptrdiff_t>(i));
  }
}

}  // namespace kvleaf
