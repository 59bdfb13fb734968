// Checkpoints: copies of recurrent states at boundaries, from the step that takes one to the tree.
#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <span>

#include "kvleaf/group/manager_impl.h"

namespace kvleaf {

void BlockManager::Impl::due_checkpoint(Request& r, StepRecord& record, StepRecord::Entry& entry) {
  // The state after `begin` tokens is about to be overwritten. Where a kept boundary lies there,
  // keep a copy (in_place), or leave the block and write to another one (in_out).
  if (!caching_ || !r.publish) return;
  const std::uint32_t n = entry.begin;
  const std::uint32_t end = n + entry.count;
  const bool due = n > 0 && kept_boundary(r, n);
  demand_.clear();
  bool filed = false;
  for (const std::uint32_t leaf : states_) {
    const LeafInfo& info = info_[leaf];
    const State& state = r.states[info.kind_index];
    if (!info.tree) continue;
    if (state.source && state.source_step == record.step.id.value()) return;  // resumed just there
    const bool apart =
        info.leaf->state_kernel() == StateKernel::in_out && info.leaf->rollback() == 0;
    const bool ends_kept = apart && kept_boundary(r, end);
    filed =
        filed || pool_->committed(info.id, r.states[info.kind_index].ring[n % state.ring.size()]);
    if (due || ends_kept)
      demand_.push_back({info.id, 1, apart && !ends_kept ? Fate::request : Fate::cache, {}});
  }
  const auto forget_filed = [&] {
    for (const std::uint32_t leaf : states_) {
      const LeafInfo& info = info_[leaf];
      if (!info.tree) continue;
      const auto key = pool_->key(info.id, r.states[info.kind_index].at(n));
      if (key)
        forget(leaf, SegmentId{static_cast<std::uint32_t>(key->high)},
               static_cast<std::uint32_t>(key->low));
    }
  };
  if (filed && !due) forget_filed();  // no longer the last boundary, and about to be overwritten
  if (demand_.empty()) return;
  if (due && !filed &&
      n <= r.committed * options_.page_tokens) {  // it is in the tree already: a twin
    const std::uint32_t page = n / options_.page_tokens - 1;
    const SegmentId segment = tree_->segment_of(r.cursor, page);
    for (const std::uint32_t leaf : states_) {
      if (info_[leaf].tree && tree_->resident(segment, page, *info_[leaf].tree)) return;
    }
  }
  drawn_.assign(demand_.size(), null_block);
  const bool got = pool_->allocate_all(demand_, drawn_);
  if (!got) {
    if (due) ++counters_.checkpoints_skipped;
    if (filed && due) forget_filed();  // it must give way: the step overwrites it
    return;
  }
  PendingCheckpoint pending{n, record.step.id.value(), {}};
  pending.blocks.assign(states_.size(), null_block);
  bool pend = false;
  std::size_t next = 0;
  for (const std::uint32_t leaf : states_) {
    const LeafInfo& info = info_[leaf];
    State& state = r.states[info.kind_index];
    if (!info.tree || next == demand_.size() || demand_[next].leaf != info.id) continue;
    const BlockId block = drawn_[next++];
    last_writer_->draw(info.id, block);
    const bool apart =
        info.leaf->state_kernel() == StateKernel::in_out && info.leaf->rollback() == 0;
    BlockId& live = state.at(n);
    if (apart) {
      const BlockId old = live;
      live = block;
      if (entry.cleared_state) {  // nothing to read yet: the cleared block goes back, the new one
                                  // is cleared
        for (ZeroFill& fill : record.step.zero_fills) {
          if (fill.leaf == info.id && fill.block == old) fill.block = block;
        }
        pool_->free(info.id, old);
        continue;
      }
      add_source(record, r, info, old, true);
      if (due && !pool_->committed(info.id, old)) {
        pool_->touch(info.id, old);
        pending.blocks[info.kind_index] = old;
        pend = true;
      }
    } else if (due) {
      add_copy(record, info.id, live, block);
      if (const auto key =
              pool_->key(info.id, live)) {  // the copy is filed when the step has settled
        forget(leaf, SegmentId{static_cast<std::uint32_t>(key->high)},
               static_cast<std::uint32_t>(key->low));
      }
      pending.blocks[info.kind_index] = block;
      pend = true;
    }
  }
  if (!pend) return;
  // Where ids lag behind, checkpoints wait for them: for as many steps as may be in flight, no
  // more.
  const auto ahead =
      std::count_if(r.unfiled.begin(), r.unfiled.end(),
                    [&](const PendingCheckpoint& p) { return p.tokens > r.known(); });
  if (static_cast<std::size_t>(ahead) >= steps_.size()) {
    const auto oldest =
        std::find_if(r.unfiled.begin(), r.unfiled.end(),
                     [&](const PendingCheckpoint& p) { return p.tokens > r.known(); });
    drop_unfiled(
        r, [tokens = oldest->tokens](const PendingCheckpoint& p) { return p.tokens == tokens; },
        [&](LeafId leaf, BlockId block) { give_back(r, leaf, block); });
  }
  r.unfiled.push_back(std::move(pending));
}

void BlockManager::Impl::due_in_chunk(Request& r, const StepRecord& record,
                                      const StepRecord::Entry& entry) {
  if (!r.publish) return;
  // Where ids lag behind nobody could file it; the step's end is the live state's affair.
  const std::uint32_t end = std::min(entry.begin + entry.count, r.known() + 1);
  for (std::uint64_t n = (std::uint64_t{entry.begin} / unit_ + 1) * unit_; n < end; n += unit_) {
    const auto boundary = static_cast<std::uint32_t>(n);
    if (!kept_boundary(r, boundary)) continue;
    demand_.clear();
    for (const std::uint32_t leaf : states_) {
      if (info_[leaf].tree) demand_.push_back({info_[leaf].id, 1, Fate::cache, {}});
    }
    drawn_.assign(demand_.size(), null_block);
    if (!pool_->allocate_all(demand_, drawn_)) {
      ++counters_.checkpoints_skipped;
      return;
    }
    PendingCheckpoint pending{boundary, record.step.id.value(), {}};
    pending.blocks.assign(states_.size(), null_block);
    for (std::size_t i = 0; i < demand_.size(); ++i) {
      const LeafInfo& info = info_[demand_[i].leaf.value()];
      last_writer_->draw(info.id, drawn_[i]);  // written whole by the kernel
      pending.blocks[info.kind_index] = drawn_[i];
    }
    r.unfiled.push_back(std::move(pending));
  }
}

void BlockManager::Impl::file_live_state(Request& r) {
  // A commit takes no memory: the live state itself is the checkpoint until the next step moves on.
  if (states_.empty() || !caching_ || !r.publish) return;
  const std::uint32_t n = r.computed;
  if (n != r.planned || n > r.known() || !kept_boundary(r, n)) return;
  file_scratch_.assign(states_.size(), null_block);
  for (const std::uint32_t leaf : states_) {
    const LeafInfo& info = info_[leaf];
    State& state = r.states[info.kind_index];
    if (!info.tree) continue;
    if (state.ring.empty() || state.read || info.leaf->rollback() > 0) return;
    if (awaits_copy(info.id, state.at(n))) return;  // a fork's, and perhaps never written
    file_scratch_[info.kind_index] = state.at(n);
  }
  file_checkpoint(r, n, file_scratch_);
}

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
