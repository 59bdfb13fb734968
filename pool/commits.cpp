// What makes blocks findable, what pins them, and what orders them: touch, commit, revalue,
// uncommit, find.
#include <fmt/format.h>

#include <utility>

#include "kvleaf/leaf/errors.h"
#include "kvleaf/pool/block_pool.h"
#include "kvleaf/pool/transitions.h"

namespace kvleaf {

// ---- references --------------------------------------------------------------------------------

inline void BlockPool::set_value(LeafState& leaf, Place place, Value value) noexcept {
  Block& block = block_at(place);
  const Value old = std::exchange(block.value, value);
  if (value < old) {
    doubt_worth(place.huge, old);
    raise_worth(place.huge, value);
    if (block.cached()) {
      file_block(place, value);
      file_huge(*leaf.page_class, place.huge);
    }
  } else {
    raise_worth(place.huge, value);
  }
}

void BlockPool::touch(LeafId leaf, BlockId block, std::optional<Value> value) {
  touch_many(leaf, {&block, 1}, value);
}

void BlockPool::touch_many(LeafId leaf, std::span<const BlockId> blocks,
                           std::optional<Value> value) {
  require(Work::ready, "touch");
  LeafState& state = state_of(leaf);
  const auto leaf_number = static_cast<std::uint16_t>(leaf.value());
  const std::uint32_t ratio = state.divider.ratio();
  // Huge blocks are told once per run of blocks in them that became live, the leaf once.
  std::uint32_t huge = 0;
  std::uint32_t in_huge = 0;
  std::uint64_t now_live = 0;
  const auto end_run = [&] {
    if (in_huge == 0) return;
    now_live += in_huge;
    cached_to_live(*state.page_class, huge, std::exchange(in_huge, 0));
  };
  // The blocks of a long prefix may lie anywhere: their records are asked for ahead of time.
  constexpr std::size_t ahead = 24;
  const auto fetch = [&](std::size_t at) {
    if (at >= blocks.size() || blocks[at].value() - 1 >= state.blocks) return;
    const Place place = place_of(state, blocks[at]);
    __builtin_prefetch(&block_at(place), 1);
    __builtin_prefetch(&huge_[place.huge], 1);
  };
  const bool many = blocks.size() > ahead;
  for (std::size_t at = 0; many && at < ahead; ++at) fetch(at);
  bool valued = value.has_value();
  std::size_t done = 0;
  while (done < blocks.size()) {
    const std::uint32_t first = blocks[done].value();
    if (first - 1 >= state.blocks) break;
    const Place place = place_of(state, blocks[done]);
    if (place.huge != huge) end_run();
    huge = place.huge;
    // As many as lie one behind the other in it.
    const Block* const begin = &block_at(place);
    const std::size_t most = std::min<std::size_t>(blocks.size() - done, ratio - place.index);
    std::uint16_t flags = 0;
    Block* record = &block_at(place);
    for (std::size_t n = 0; n < most && blocks[done + n].value() == first + n; ++n, ++record) {
      const std::uint32_t references = record->references;
      if (record->leaf != leaf_number || record->clean() || references == ~std::uint32_t{0}) break;
      flags |= record->flags;
      in_huge += references == 0 ? 1 : 0;
      record->references = references + 1;
    }
    if (record == begin) break;
    valued = valued || (flags & Block::timed) != 0;
    const std::size_t next = done + static_cast<std::size_t>(record - begin);
    if (many) fetch(next + ahead - 1);
    done = next;
  }
  end_run();
  state.live.add(now_live);
  state.cached.add(-now_live);
  if (done != blocks.size()) {
    const BlockId refused = blocks[done];
    while (done-- > 0) {
      const Place place = place_of(state, blocks[done]);
      if (--block_at(place).references == 0) release(state, place);
    }
    refuse_block("touch", leaf, refused);
  }
  if (!valued) return;
  std::uint32_t raised = FullestFirst::none;  // the huge block whose worth was seen to last
  for (const BlockId block : blocks) {
    const Place place = place_of(state, block);
    Block& record = block_at(place);
    if (!record.is(Block::committed)) continue;
    if (!value) {
      if (record.is(Block::timed)) set_value(state, place, ++clock_);
      continue;
    }
    record.flags &= static_cast<std::uint16_t>(~Block::timed);
    if (*value < record.value) {
      set_value(state, place, *value);
      continue;
    }
    record.value = *value;
    if (place.huge != raised) raise_worth(place.huge, *value);
    raised = place.huge;
  }
}

std::uint32_t BlockPool::references(LeafId leaf, BlockId block) const {
  const LeafState& state = state_of(leaf);
  if (block.value() - 1 >= state.blocks) refuse_block("references", leaf, block);
  const Place place = place_of(state, block);
  const Block& record = blocks_of(place.huge)[place.index];
  return record.leaf == leaf.value() ? record.references : 0;
}

// ---- commits -----------------------------------------------------------------------------------

void BlockPool::commit(LeafId leaf, BlockId block, PageKey key, std::optional<Value> value) {
  if (value) {
    commit_many(leaf, {&block, 1}, {&key, 1}, {&*value, 1});
  } else {
    commit_many(leaf, {&block, 1}, {&key, 1});
  }
}

void BlockPool::commit_many(LeafId leaf, std::span<const BlockId> blocks,
                            std::span<const PageKey> keys, std::span<const Value> values) {
  require(Work::ready, "commit");
  LeafState& state = state_of(leaf);
  if (keys.size() != blocks.size() || (!values.empty() && values.size() != blocks.size())) {
    throw InvalidArgument(fmt::format("commit: {} blocks, {} keys, {} values", blocks.size(),
                                      keys.size(), values.size()));
  }
  const Value clock = clock_;
  std::size_t done = 0;
  try {
    for (; done < blocks.size(); ++done) {
      const Place place = owned_place("commit", state, leaf, blocks[done]);
      Block& record = block_at(place);
      if (!record.live() || record.is(Block::committed)) {
        refuse_block("commit", leaf, blocks[done]);
      }
      if (indexed_) {
        require_new_key("commit", leaf, blocks[done], keys[done]);
      }
      key_at(place) = keys[done];
      record.value = values.empty() ? ++clock_ : values[done];
      record.flags |= Block::committed;
      if (values.empty()) record.flags |= Block::timed;
      raise_worth(place.huge, record.value);
      if (indexed_) index_.insert(blocks_.data(), keys_.data(), record_at(place));
    }
  } catch (...) {
    while (done-- > 0) drop_commit(state, place_of(state, blocks[done]));
    clock_ = clock;
    throw;
  }
}

void BlockPool::require_new_key(const char* call, LeafId leaf, BlockId block, PageKey key) const {
  const auto leaf_number = static_cast<std::uint16_t>(leaf.value());
  const auto found = index_.find(blocks_.data(), keys_.data(), leaf_number, key);
  if (!found) return;
  const std::uint32_t huge = max_divider_.quotient(*found);
  const BlockId other = id_at(leaves_[leaf.value()], {huge, *found - huge * max_ratio_});
  throw InvalidArgument(
      fmt::format("{}: block {} of leaf {} ({}) under key {:016x}{:016x}, which "
                  "block {} has already",
                  call, block.value(), leaf.value(), geometry_.leaf(leaf).name, key.high, key.low,
                  other.value()));
}

void BlockPool::revalue(LeafId leaf, BlockId block, Value value) {
  revalue_many(leaf, {&block, 1}, {&value, 1});
}

void BlockPool::revalue_many(LeafId leaf, std::span<const BlockId> blocks,
                             std::span<const Value> values) {
  require(Work::telling, "revalue");
  LeafState& state = state_of(leaf);
  if (values.size() != blocks.size()) {
    throw InvalidArgument(
        fmt::format("revalue: {} blocks, {} values", blocks.size(), values.size()));
  }
  for (const BlockId block : blocks) {
    if (!look(leaf, block).committed) refuse_block("revalue", leaf, block);
  }
  for (std::size_t index = 0; index < blocks.size(); ++index) {
    const Place place = place_of(state, blocks[index]);
    block_at(place).flags &= static_cast<std::uint16_t>(~Block::timed);
    set_value(state, place, values[index]);
  }
}

Value BlockPool::value(LeafId leaf, BlockId block) const {
  const Place place = committed_place("value", state_of(leaf), leaf, block);
  return blocks_of(place.huge)[place.index].value;
}

void BlockPool::rekey(LeafId leaf, BlockId block, PageKey key) {
  require(Work::telling, "rekey");
  const Place place = committed_place("rekey", state_of(leaf), leaf, block);
  PageKey& old = key_at(place);
  if (old == key) return;
  if (indexed_) {
    require_new_key("rekey", leaf, block, key);
    index_.erase(blocks_.data(), keys_.data(), record_at(place));
  }
  old = key;
  if (indexed_) index_.insert(blocks_.data(), keys_.data(), record_at(place));
}

void BlockPool::uncommit(LeafId leaf, BlockId block) {
  require(Work::telling, "uncommit");
  LeafState& state = state_of(leaf);
  drop_commit(state, committed_place("uncommit", state, leaf, block));
}

bool BlockPool::committed(LeafId leaf, BlockId block) const { return key(leaf, block).has_value(); }

std::optional<PageKey> BlockPool::key(LeafId leaf, BlockId block) const {
  const LeafState& state = state_of(leaf);
  if (block.value() - 1 >= state.blocks) refuse_block("key", leaf, block);
  const Place place = place_of(state, block);
  const Block& record = blocks_of(place.huge)[place.index];
  if (record.leaf != leaf.value() || !record.is(Block::committed)) return std::nullopt;
  return key_at(place);
}

std::optional<BlockId> BlockPool::find(LeafId leaf, PageKey key) const {
  const LeafState& state = state_of(leaf);
  if (!indexed_) throw InvalidArgument("find: this pool was made with KeyIndex::none");
  const auto found =
      index_.find(blocks_.data(), keys_.data(), static_cast<std::uint16_t>(leaf.value()), key);
  if (!found) return std::nullopt;
  const std::uint32_t huge = max_divider_.quotient(*found);
  return id_at(state, {huge, *found - huge * max_ratio_});
}

}  // namespace kvleaf
