// Recounting everything from scratch.
#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <map>

#include "kvleaf/group/manager_impl.h"

namespace kvleaf {

void BlockManager::Impl::audit() const {
  pool_->audit();
  tree_->audit();
  const auto broken = [](const std::string& equation) {
    throw InvariantError("block manager: " + equation);
  };

  // References: each block's count in the pool is the number of places here that hold it.
  std::vector<std::map<std::uint32_t, std::uint32_t>> held(leaves_.size());
  const auto hold = [&](LeafId leaf, BlockId block) {
    if (block != null_block) ++held[leaf.value()][block.value()];
  };
  std::size_t in_flight = 0;
  for (const auto& [id, r] : requests_) {
    if (r->id != id) broken(fmt::format("request {} is filed under {}", r->id.value(), id.value()));
    if (r->computed > r->planned)
      broken(fmt::format("request {}: computed {} <= planned {}", id.value(), r->computed,
                         r->planned));
    in_flight += r->in_flight;
    for (const std::uint32_t leaf : text_) {
      const LeafInfo& info = info_[leaf];
      const Row& row = r->rows[leaf];
      for (const BlockId block : row.slots) hold(info.id, block);
      for (const BlockId block : row.leaving) hold(info.id, block);
      const std::uint32_t slots = ceil_div(r->planned, info.tokens_per_page);
      if (row.slots.size() != slots) {
        broken(fmt::format("request {}, leaf '{}': row has {} slots == ⌈{} planned / {}⌉",
                           id.value(), info.leaf->leaf_id(), row.slots.size(), r->planned,
                           info.tokens_per_page));
      }
      const std::uint32_t head = ceil_div(info.pattern.head(), info.tokens_per_page);
      for (std::uint32_t slot = std::min(head, row.first); slot < row.first; ++slot) {
        if (row.slots[slot] != null_block)
          broken(fmt::format("request {}, leaf '{}': slot {} before the tail {} is null",
                             id.value(), info.leaf->leaf_id(), slot, row.first));
      }
    }
    for (const std::uint32_t leaf : encoders_) {
      for (const BlockId block : r->rows[leaf].slots) hold(LeafId{leaf}, block);
    }
    audit_bounds(*r);
    for (const std::uint32_t leaf : states_) {
      const State& state = r->states[info_[leaf].kind_index];
      for (const BlockId block : state.ring) hold(LeafId{leaf}, block);
      if (state.read) hold(LeafId{leaf}, *state.read);
      for (const PendingCheckpoint& pending : r->unfiled)
        hold(LeafId{leaf}, pending.blocks[info_[leaf].kind_index]);
    }
    for (const std::uint32_t leaf : scratch_) {
      if (const auto block = r->scratch[info_[leaf].kind_index]) hold(LeafId{leaf}, *block);
    }
    if (caching_ && r->publish && r->cursor.pages != r->committed) {
      broken(fmt::format("request {}: cursor at {} pages == committed {}", id.value(),
                         r->cursor.pages, r->committed));
    }
  }
  std::size_t entries = 0;
  for (std::uint64_t step = first_step_; step < next_step_; ++step) {
    const StepRecord& record = steps_[step % steps_.size()];
    for (const auto& [leaf, block] : record.returning) hold(leaf, block);
    for (const PendingCopy& copy : record.held_copies) hold(copy.leaf, copy.src);
    for (const StepRecord::Source& source : record.sources) hold(source.leaf, source.block);
    for (const StepRecord::Entry& entry : record.entries)
      entries += entry.request != nullptr ? 1 : 0;
  }
  if (entries != in_flight)
    broken(
        fmt::format("rows of live requests in steps in flight {} == steps counted by requests {}",
                    entries, in_flight));
  for (const PendingCopy& copy : pending_copies_) hold(copy.leaf, copy.src);

  // Findable: what the tree files is committed under its place, and nothing else is.
  std::vector<std::uint64_t> filed(leaves_.size(), 0);
  tree_->each_segment([&](SegmentId segment) {
    const std::uint32_t first = tree_->first_page(segment);
    for (const LeafInfo& info : info_) {
      if (!info.tree) continue;
      for (std::uint32_t bits = tree_->mask(segment, *info.tree); bits != 0; bits &= bits - 1) {
        const std::uint32_t page = first + static_cast<std::uint32_t>(std::countr_zero(bits));
        const BlockId block = tree_->block(segment, page, *info.tree);
        const auto key = pool_->key(info.id, block);
        if (!key || key->high != segment.value() || key->low != page) {
          broken(
              fmt::format("leaf '{}': block {} of segment {} page {} is committed under that key",
                          info.leaf->leaf_id(), block.value(), segment.value(), page));
        }
        if ((page + 1) % info.pages != 0) {
          broken(fmt::format("leaf '{}': a block is filed at page {}, where no page of {} ends",
                             info.leaf->leaf_id(), page, info.pages));
        }
        if (!info.completes && PageValue::proven(pool_->value(info.id, block)) &&
            !tree_->proven(segment, page)) {
          broken(
              fmt::format("leaf '{}': block {} of segment {} page {}, which is not proven, is not "
                          "valued as proven",
                          info.leaf->leaf_id(), block.value(), segment.value(), page));
        }
        ++filed[info.id.value()];
      }
    }
  });
  for (const LeafInfo& info : info_) {
    std::uint64_t live = 0;
    std::uint64_t committed_live = 0;
    for (const auto& [block, count] : held[info.id.value()]) {
      const std::uint32_t references = pool_->references(info.id, BlockId{block});
      if (references != count) {
        broken(fmt::format("leaf '{}': block {} has {} references == {} holders",
                           info.leaf->leaf_id(), block, references, count));
      }
      ++live;
      committed_live += pool_->committed(info.id, BlockId{block}) ? 1 : 0;
    }
    if (pool_->live(info.id) != live)
      broken(fmt::format("leaf '{}': live blocks {} == held {}", info.leaf->leaf_id(),
                         pool_->live(info.id), live));
    if (info.tree && filed[info.id.value()] != committed_live + pool_->cached(info.id)) {
      broken(fmt::format("leaf '{}': pages filed {} == committed blocks {}", info.leaf->leaf_id(),
                         filed[info.id.value()], committed_live + pool_->cached(info.id)));
    }
  }
  std::size_t users = 0;
  for (const auto& [name, node] : encoder_index_) users += node->users;
  for (const auto& node : encoder_orphans_) users += node->users;
  std::size_t with_encoder = 0;
  for (const auto& [id, r] : requests_) with_encoder += r->encoder != nullptr ? 1 : 0;
  if (users != with_encoder)
    broken(fmt::format("users of encoder inputs {} == requests with one {}", users, with_encoder));
}

void BlockManager::Impl::audit_bounds(const Request& r) const {
  const auto broken = [&](const LeafInfo& info, const std::string& what) {
    throw InvariantError(fmt::format("block manager: request {} at {} tokens, leaf '{}': {}",
                                     r.id.value(), r.planned, info.leaf->leaf_id(), what));
  };
  for (const std::uint32_t leaf : text_) {
    const LeafInfo& info = info_[leaf];
    const Row& row = r.rows[leaf];
    if (r.planned < r.open_until) {
      const std::uint64_t end = row.slots.size() * std::uint64_t{info.tokens_per_page};
      if (end < r.open_until)
        broken(info, fmt::format("pages up to {} >= open until {}", end, r.open_until));
      if (r.planned % info.tokens_per_page != 0) {
        const BlockId block = row.slots[r.planned / info.tokens_per_page];
        if (block == null_block || pool_->committed(info.id, block) ||
            shared(info.id, block, r.planned))
          broken(info,
                 fmt::format("open until {}, and page {} is its own", r.open_until, block.value()));
      }
    }
    if (r.slide_at > 0 && !info.needs_all) {
      const std::uint32_t before = std::min(r.slide_at - 1, options_.max_len);
      const std::uint32_t tail = info.pattern.slots(before, info.tokens_per_page).tail_begin;
      if (tail > row.first)
        broken(info, fmt::format("tail at slot {} at {} tokens <= {}, nothing slides before {}",
                                 tail, before, row.first, r.slide_at));
    }
    if (!row.leaving.empty() && !r.may_leave)
      broken(info, "blocks leave, and it says that none do");
  }
}

ManagerStats BlockManager::Impl::stats() const {
  ManagerStats s = counters_;
  s.pool = pool_->stats();
  for (const GroupInfo& group : groups_) s.groups.push_back({group.name, group.lost_tokens});
  s.requests = requests_.size();
  s.segments = tree_->segments();
  s.steps_in_flight = next_step_ - first_step_;
  for (const LeafInfo& info : info_) {
    if (info.tree) s.committed_pages += pool_->cached(info.id);
  }
  std::uint64_t rows = 0;
  for (const auto& [id, r] : requests_) {
    rows += sizeof(Request) + r->tokens.capacity() * sizeof(Token);
    for (const Row& row : r->rows)
      rows += (row.slots.capacity() + row.leaving.capacity()) * sizeof(BlockId);
    for (const Row& row : r->rows) s.quarantined += row.leaving.size();
  }
  for (std::uint64_t step = first_step_; step < next_step_; ++step) {
    s.quarantined += steps_[step % steps_.size()].returning.size();
  }
  s.metadata_bytes =
      pool_->metadata_bytes() + tree_->metadata_bytes() + last_writer_->bytes() + rows;
  return s;
}

}  // namespace kvleaf
