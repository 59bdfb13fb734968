// Steps: drawing for a batch, settling in order, and going back when the device failed.
#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <span>

#include "kvleaf/group/manager_impl.h"

namespace kvleaf {

// ---- begin
// -----------------------------------------------------------------------------------------

void BlockManager::Impl::check_batch(std::span<const StepRequest> batch) {
  const std::uint64_t mark = ++batch_marks_;
  batch_.resize(batch.size(), nullptr);
  Request** const found = batch_.data();
  for (std::size_t i = 0; i < batch.size(); ++i) {
    const StepRequest row = batch[i];
    if (found[i] == nullptr || found[i]->id != row.request || found[i]->serial == 0)
      found[i] = find(row.request);
    if (found[i] == nullptr) {
      throw RequestError(fmt::format("row {}: request {} is not live; {} requests are", i,
                                     row.request.value(), requests_.size()));
    }
    Request& r = *found[i];
    const std::uint64_t end = std::uint64_t{r.planned} + row.new_tokens;
    const bool plain = r.batch_mark != mark && row.new_tokens != 0 &&
                       row.new_tokens <= options_.max_step_tokens && end <= options_.max_len &&
                       r.uncut.empty() && (r.encoder == nullptr || r.encoder->filled);
    if (!plain) check_row(r, row, i, r.batch_mark == mark);
    r.batch_mark = mark;
  }
}

void BlockManager::Impl::reserve_steps(std::size_t rows) {
  const std::size_t blocks = rows * leaves_.size();
  for (StepRecord& record : steps_) {
    record.step.served.reserve(rows);
    record.step.copies.reserve(blocks);
    record.step.zero_fills.reserve(blocks);
    record.entries.reserve(rows);
    record.returning.reserve(blocks);
    record.sources.reserve(rows * states_.size());
    record.held_copies.reserve(blocks);
  }
  batch_.reserve(rows);
  kept_.reserve(rows);
  demand_.reserve(blocks);
  drawn_.reserve(blocks);
}

void BlockManager::Impl::check_row(const Request& r, StepRequest row, std::size_t index,
                                   bool twice) const {
  const std::uint64_t end = std::uint64_t{r.planned} + row.new_tokens;
  const auto refuse = [&](std::string_view what) {
    throw RequestError(fmt::format("row {}: request {} at {} tokens plans {} more: {}", index,
                                   r.id.value(), r.planned, row.new_tokens, what));
  };
  if (twice) refuse("it is in the batch twice");
  if (row.new_tokens == 0) refuse("at least 1 is needed");
  if (end > options_.max_len) refuse(fmt::format("that passes max_len {}", options_.max_len));
  if (row.new_tokens > options_.max_step_tokens) {
    refuse(fmt::format("at most max_step_tokens {} in one step", options_.max_step_tokens));
  }
  for (const Uncut& item : r.uncut) {
    if (end > item.begin && end < item.end) {
      refuse(fmt::format("the step would end inside the whole media item [{}, {})", item.begin,
                         item.end));
    }
  }
  if (r.encoder != nullptr && !r.encoder->filled && end > r.prompt) {
    refuse("its encoder leaves are not filled; call encoder_filled once they are written");
  }
}

const Step& BlockManager::Impl::begin_step(std::span<const StepRequest> batch) {
  if (next_step_ - first_step_ >= steps_.size()) {
    throw StepError(fmt::format(
        "{} steps are in flight, as many as max_steps_in_flight allows; settle step {} first",
        steps_.size(), first_step_));
  }
  check_batch(batch);

  StepRecord& record = steps_[next_step_ % steps_.size()];
  record.step.id = StepId{next_step_};
  record.step.served.clear();
  record.step.refused.clear();
  record.step.copies.clear();
  record.entries.clear();
  ++next_step_;

  record.step.zero_fills.assign(pending_fills_.begin(), pending_fills_.end());
  pending_fills_.clear();
  for (const PendingCopy& copy : pending_copies_) {
    add_copy(record, copy.leaf, copy.src, copy.dst);
    record.held_copies.push_back(copy);
  }
  pending_copies_.clear();

  if (!guaranteed_.empty()) form_promises();
  // A row that goes on in its pages and has no states needs nothing: that is most of decoding.
  const bool text_only = states_.empty();
  bool together = text_only && guaranteed_.empty();  // whether rows may draw pages together
  for (std::size_t i = 0; i < batch.size();) {
    Request& r = *batch_[i];
    const std::uint32_t n = r.planned;
    if (text_only && n + batch[i].new_tokens <= r.open_until && !r.guarantee) {
      if (n >= r.slide_at) slide(r, n);
      plan_row(r, batch[i].new_tokens, record);
      ++i;
      continue;
    }
    if (together && n <= r.open_until) {
      const std::size_t served = serve_growing(batch, i, record);
      i += served;
      together = served != 0;
      if (together) continue;
    }
    std::string why;
    if (!serve(r, batch[i].new_tokens, record, why)) {
      record.step.refused.push_back({r.id, std::move(why)});
      ++counters_.step_refusals;
    }
    ++i;
  }
  // Checkpoints are best effort, so they come after every row has what it needs.
  if (!states_.empty()) {
    for (StepRecord::Entry& entry : record.entries) due_checkpoint(*entry.request, record, entry);
    if (in_chunk_) {
      for (const StepRecord::Entry& entry : record.entries)
        due_in_chunk(*entry.request, record, entry);
    }
  }
  if (!prompts_.empty())
    std::erase_if(prompts_, [](const Request* r) { return r->planned >= r->prompt; });
  return record.step;
}

void BlockManager::Impl::add_copy(StepRecord& record, LeafId leaf, BlockId src, BlockId dst) {
  // Copies run in any order and read what was there before the step: a source that this very step
  // fills is replaced by what fills it.
  for (const BlockCopy& copy : record.step.copies) {
    if (copy.leaf == leaf && copy.dst == src) {
      src = copy.src;
      break;
    }
  }
  for (const ZeroFill& fill : record.step.zero_fills) {
    if (fill.leaf == leaf && fill.block == src) {
      record.step.zero_fills.push_back({leaf, dst});
      return;
    }
  }
  for (BlockCopy& copy : record.step.copies) {
    if (copy.leaf == leaf && copy.dst == dst) {  // an older state that nobody will read there
      copy.src = src;
      return;
    }
  }
  record.step.copies.push_back({leaf, src, dst});
}

void BlockManager::Impl::add_source(StepRecord& record, Request& r, const LeafInfo& leaf,
                                    BlockId block, bool was_live) {
  State& state = r.states[leaf.kind_index];
  state.source = block;
  state.source_step = record.step.id.value();
  record.sources.push_back({&r, leaf.id, block, was_live});
}

void BlockManager::Impl::take_back_sources(StepRecord& record, Request& r, std::uint32_t begin) {
  // The step did not take place: what it read is still held, and nobody wrote to it.
  for (StepRecord::Source& source : record.sources) {
    if (source.request != &r) continue;
    State& state = r.states[info_[source.leaf.value()].kind_index];
    state.source.reset();
    if (source.was_live) {
      BlockId& live = state.at(begin);
      pool_->free(source.leaf, live);
      live = source.block;
      state.valid_from = begin;
    } else {
      if (state.read) pool_->free(source.leaf, *state.read);
      state.read = source.block;
    }
  }
  std::erase_if(record.sources,
                [&](const StepRecord::Source& source) { return source.request == &r; });
}

bool BlockManager::Impl::shared(LeafId leaf, BlockId block, std::uint32_t from) const {
  std::uint32_t references = pool_->references(leaf, block);
  if (references <= 1) return false;
  // A copy that is listed, or will be in the next step, holds its source, but reads it before any
  // forward that is begun from now on can write to it. What it reads must stay, though: it is
  // listed again where its step fails.
  const auto discount = [&](std::span<const PendingCopy> copies) {
    for (const PendingCopy& copy : copies)
      references -= copy.leaf == leaf && copy.src == block && copy.tokens <= from ? 1 : 0;
  };
  discount(pending_copies_);
  for (std::uint64_t step = first_step_; step < next_step_; ++step)
    discount(steps_[step % steps_.size()].held_copies);
  return references > 1;
}

bool BlockManager::Impl::shared_state(const Request& r, const LeafInfo& leaf) const {
  const State& state = r.states[leaf.kind_index];
  if (state.ring.empty() || leaf.leaf->rollback() > 0 || state.read) return false;
  const BlockId live = state.ring[r.planned % state.ring.size()];
  return live != null_block && shared(leaf.id, live, r.planned);
}

std::size_t BlockManager::Impl::serve_growing(std::span<const StepRequest> batch, std::size_t first,
                                              StepRecord& record) {
  // What fits together fits one by one, and in the same places.
  demand_.clear();
  std::size_t total = 0;
  std::size_t last = first;
  for (; last < batch.size(); ++last) {
    const Request& r = *batch_[last];
    const std::uint32_t end = r.planned + batch[last].new_tokens;
    if (r.planned > r.open_until) break;  // it may have to copy
    if (end <= r.open_until) continue;
    for (const std::uint32_t leaf : text_) {
      const LeafInfo& info = info_[leaf];
      const Row& row = r.rows[leaf];
      const std::uint32_t blocks = missing_slots(row, info.tokens_per_page, end);
      if (blocks == 0) continue;
      demand_.push_back({info.id, blocks, caching_ ? Fate::cache : Fate::request, row.hint});
      total += blocks;
    }
  }
  drawn_.assign(total, null_block);
  if (!pool_->allocate_all(demand_, drawn_)) return 0;
  const BlockId* next = drawn_.data();
  for (std::size_t i = first; i < last; ++i) {
    Request& r = *batch_[i];
    const std::uint32_t n = r.planned;
    const std::uint32_t end = n + batch[i].new_tokens;
    if (end > r.open_until) {
      std::uint64_t open_until = std::numeric_limits<std::uint32_t>::max();
      for (const std::uint32_t leaf : text_) {
        next = extend(r, info_[leaf], end, next, record);
        open_until = std::min(
            open_until, r.rows[leaf].slots.size() * std::uint64_t{info_[leaf].tokens_per_page});
      }
      r.open_until = static_cast<std::uint32_t>(open_until);
    }
    if (n >= r.slide_at) slide(r, n);
    plan_row(r, batch[i].new_tokens, record);
  }
  return last - first;
}

std::uint32_t BlockManager::Impl::missing_slots(const Row& row, std::uint32_t tokens_per_page,
                                                std::uint32_t tokens) noexcept {
  const std::uint64_t end = row.slots.size() * std::uint64_t{tokens_per_page};
  if (tokens <= end) return 0;
  if (tokens - end <= tokens_per_page) return 1;  // as in most of decoding: no division
  return ceil_div(static_cast<std::uint32_t>(tokens - end), tokens_per_page);
}

const BlockId* BlockManager::Impl::extend(Request& r, const LeafInfo& info, std::uint32_t tokens,
                                          const BlockId* drawn, StepRecord& record) {
  Row& row = r.rows[info.id.value()];
  std::uint32_t blocks = missing_slots(row, info.tokens_per_page, tokens);
  if (blocks == 0) return drawn;
  r.note_change(row, static_cast<std::uint32_t>(row.slots.size()));
  for (; blocks > 0; --blocks, ++drawn) {
    row.slots.push_back(*drawn);
    if (last_writer_->draw(info.id, *drawn)) record.step.zero_fills.push_back({info.id, *drawn});
  }
  row.hint = last_writer_->huge_block_of(info.id, drawn[-1]);
  return drawn;
}

// Inline: most of decoding does nothing else for a row.
inline StepRecord::Entry& BlockManager::Impl::plan_row(Request& r, std::uint32_t new_tokens,
                                                       StepRecord& record) {
  const std::uint64_t step = record.step.id.value();
  record.step.served.push_back(r.id);
  record.entries.push_back({&r, r.id, r.planned, new_tokens, r.known(), new_tokens, false});
  r.planned += new_tokens;
  ++r.in_flight;
  if (new_tokens > options_.page_tokens) {
    r.long_step = step;
    r.since_long = 0;
  } else {
    ++r.since_long;
  }
  r.last_step = step;
  return record.entries.back();
}

bool BlockManager::Impl::serve(Request& r, std::uint32_t new_tokens, StepRecord& record,
                               std::string& why) {
  const std::uint32_t n = r.planned;
  const std::uint32_t end = n + new_tokens;

  // What the tokens cannot do without.
  demand_.clear();
  std::size_t total = 0;
  const auto want = [&](const LeafInfo& info, std::uint64_t blocks, Fate fate,
                        std::optional<HugeBlockId> hint) {
    if (blocks == 0) return;
    demand_.push_back({info.id, blocks, caching_ ? fate : Fate::request, hint});
    total += blocks;
  };
  const auto must_copy = [&](const LeafInfo& info,
                             const Row& row) {  // the page that token n goes into
    if (n <= r.open_until || n % info.tokens_per_page == 0) return false;
    const BlockId block = row.slots[n / info.tokens_per_page];
    return block == null_block || pool_->committed(info.id, block) || shared(info.id, block, n);
  };
  const bool goes_on = end <= r.open_until;  // in the pages it has, and they are its own
  if (!goes_on) {
    for (const std::uint32_t leaf : text_) {
      const LeafInfo& info = info_[leaf];
      const Row& row = r.rows[leaf];
      const std::uint32_t more = missing_slots(row, info.tokens_per_page, end);
      want(info, more + (must_copy(info, row) ? 1 : 0), Fate::cache, row.hint);
    }
  }
  const std::size_t state_demand = demand_.size();
  for (const std::uint32_t leaf : states_) {
    const LeafInfo& info = info_[leaf];
    State& state = r.states[info.kind_index];
    want(info, state.lacks(info.leaf->rollback()) + (shared_state(r, info) ? 1 : 0), Fate::request,
         {});
  }
  for (const std::uint32_t leaf : scratch_)
    want(info_[leaf], r.scratch[info_[leaf].kind_index] ? 0 : 1, Fate::request, {});

  if (total > 0) {
    drawn_.assign(total, null_block);
    if (r.guarantee) {  // its own promise is what it draws on
      for (const LeafInfo& info : info_) {
        std::uint64_t drawing = 0;
        for (const BlockPool::Demand& d : demand_) drawing += d.leaf == info.id ? d.blocks : 0;
        const std::uint64_t others = pool_->promised(info.id) - promise(r, info);
        pool_->set_promised(info.id, others + promise_after(r, info, end, drawing));
      }
    }
    bool got = pool_->allocate_all(demand_, drawn_);
    if (!got && may_take_checkpoints(r)) {
      std::size_t fewer = total;
      for (std::size_t i = state_demand; i < demand_.size(); ++i) {
        const LeafInfo& info = info_[demand_[i].leaf.value()];
        if (info.writing == Writing::in_place && r.states[info.kind_index].read &&
            demand_[i].blocks > 0) {
          --demand_[i].blocks;
          --fewer;
        }
      }
      if (fewer == 0 || pool_->allocate_all(demand_, std::span(drawn_).first(fewer))) {
        take_checkpoints(r);
        got = true;
      }
    }
    if (!got) {
      for (const BlockPool::Demand& d : demand_) {
        why += fmt::format("{}{} of '{}'", why.empty() ? "wants " : ", ", d.blocks,
                           info_[d.leaf.value()].leaf->leaf_id());
      }
      std::fill(wanted_.begin(), wanted_.end(), 0);
      for (const BlockPool::Demand& d : demand_) wanted_[d.leaf.value()] += d.blocks;
      const BlockPool::Verdict verdict = pool_->judge(wanted_);
      why =
          fmt::format("request {} at {} tokens, {} more: {}: {} huge blocks, {} are empty or idle",
                      r.id.value(), n, new_tokens, why, verdict.huge_needed, verdict.huge_left);
      if (!guaranteed_.empty()) form_promises();
      return false;
    }
  }

  // It fits: from here on nothing fails.
  std::size_t next = 0;
  const auto take =
      [&](const LeafInfo& info) {  // states are cleared or copied to, whoever wrote them
        last_writer_->draw(info.id, drawn_[next]);
        return drawn_[next++];
      };
  bool cleared_state = false;
  std::uint64_t open_until = std::numeric_limits<std::uint32_t>::max();
  for (const std::uint32_t leaf : goes_on ? std::span<const std::uint32_t>() : text_) {
    const LeafInfo& info = info_[leaf];
    Row& row = r.rows[leaf];
    if (must_copy(info, row)) {
      const std::uint32_t slot = n / info.tokens_per_page;
      const BlockId old = row.slots[slot];
      const BlockId fresh = drawn_[next++];
      const bool foreign = last_writer_->draw(info.id, fresh);
      row.slots[slot] = fresh;
      r.note_change(row, slot);
      if (old != null_block) {
        add_copy(record, info.id, old, fresh);
        record.held_copies.push_back({info.id, old, fresh, n});
      } else if (foreign) {
        record.step.zero_fills.push_back({info.id, fresh});
      }
    }
    const BlockId* const drawn = drawn_.data() + next;
    next += static_cast<std::size_t>(extend(r, info, end, drawn, record) - drawn);
    open_until = std::min(open_until, row.slots.size() * std::uint64_t{info.tokens_per_page});
  }
  if (!goes_on) r.open_until = static_cast<std::uint32_t>(open_until);
  if (n >= r.slide_at) slide(r, n);
  for (const std::uint32_t leaf : states_) {
    const LeafInfo& info = info_[leaf];
    State& state = r.states[info.kind_index];
    const std::uint32_t blocks = info.leaf->rollback() + 1;
    if (state.ring.empty()) state.ring.assign(blocks, null_block);
    bool was_live = false;
    if (state.lacks(info.leaf->rollback()) > 0) {
      for (BlockId& block : state.ring) {
        if (block == null_block) block = take(info);
      }
    } else if (shared_state(r, info)) {
      // It was filed as a checkpoint when it settled, and somebody resumed from it since: it stays
      // as it is, even where the cache was reset meanwhile.
      const BlockId old = state.at(n);
      state.at(n) = take(info);
      if (state.fresh) {
        give_back(r, info.id, old);
      } else {
        state.read = old;
        was_live = true;
      }
    }
    const bool read_elsewhere = state.read.has_value();
    if (read_elsewhere) {
      add_source(record, r, info, *state.read, was_live);
      state.read.reset();
      if (info.leaf->state_kernel() == StateKernel::in_place)
        add_copy(record, info.id, *state.source, state.at(end));
    } else if (state.fresh) {
      record.step.zero_fills.push_back({info.id, state.at(n)});
      if (state.at(end) != state.at(n) && info.leaf->state_kernel() == StateKernel::in_place) {
        record.step.zero_fills.push_back({info.id, state.at(end)});
      }
      cleared_state = true;
    } else if (info.leaf->state_kernel() == StateKernel::in_place && state.at(end) != state.at(n)) {
      add_copy(record, info.id, state.at(n), state.at(end));
    }
    state.fresh = false;
    // The state after n tokens is in the ring only if it was read there.
    if (read_elsewhere) state.valid_from = n + 1;
    state.valid_from = std::max(state.valid_from, end - std::min(end, info.leaf->rollback()));
  }
  for (const std::uint32_t leaf : scratch_) {
    auto& block = r.scratch[info_[leaf].kind_index];
    if (block) continue;
    block = drawn_[next++];
    if (last_writer_->draw(LeafId{leaf}, *block))
      record.step.zero_fills.push_back({LeafId{leaf}, *block});
  }
  plan_row(r, new_tokens, record).cleared_state = cleared_state;
  if (!guaranteed_.empty()) form_promises();
  return true;
}

void BlockManager::Impl::slide(Request& r, std::uint32_t tokens) {
  for (const std::uint32_t leaf : text_) {
    const LeafInfo& info = info_[leaf];
    if (info.needs_all) continue;
    Row& row = r.rows[leaf];
    const SlotReach reach = info.pattern.slots(tokens, info.tokens_per_page);
    const std::uint32_t head = ceil_div(info.pattern.head(), info.tokens_per_page);
    const std::uint32_t begin = std::max(row.first, std::min(head, reach.tail_begin));
    if (reach.tail_begin > begin) {
      if (row.leaving.empty()) row.leaving_first = begin;
      r.may_leave = true;
      for (std::uint32_t slot = begin; slot < reach.tail_begin; ++slot) {
        row.leaving.push_back(row.slots[slot]);
        row.slots[slot] = null_block;
      }
      r.note_change(row, begin);
    }
    row.first = std::max(row.first, reach.tail_begin);
  }
  r.slide_at = next_slide(r);
}

std::uint32_t BlockManager::Impl::next_slide(const Request& r) const {
  std::uint32_t least = std::numeric_limits<std::uint32_t>::max();
  for (const std::uint32_t leaf : text_) {
    const LeafInfo& info = info_[leaf];
    if (info.needs_all) continue;
    const std::uint64_t token = (std::uint64_t{r.rows[leaf].first} + 1) * info.tokens_per_page;
    if (token > options_.max_len) continue;
    least = std::min(least, info.pattern.tail_reaches(static_cast<std::uint32_t>(token)));
  }
  return least;
}

void BlockManager::Impl::free_leaving(Request& r) {
  r.may_leave = false;
  for (const std::uint32_t leaf : text_) {
    const LeafInfo& info = info_[leaf];
    Row& row = r.rows[leaf];
    if (row.leaving.empty()) continue;
    const std::uint32_t passed = info.pattern.slots(r.computed, info.tokens_per_page).tail_begin;
    const std::size_t count = std::min<std::size_t>(
        row.leaving.size(), passed > row.leaving_first ? passed - row.leaving_first : 0);
    pool_->free_many(info.id, value_given_up(r, info, static_cast<std::uint32_t>(row.leaving_first),
                                             std::span(row.leaving).first(count), Proof::of_page));
    row.leaving.erase(row.leaving.begin(),
                      row.leaving.begin() + static_cast<std::ptrdiff_t>(count));
    row.leaving_first += static_cast<std::uint32_t>(count);
    r.may_leave = r.may_leave || !row.leaving.empty();
  }
}

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

// ---- settle
// ----------------------------------------------------------------------------------------

void BlockManager::Impl::settle(StepId step, std::span<const Kept> kept) {
  if (step.value() != first_step_ || record_of(step.value()) == nullptr) {
    throw StepError(fmt::format("step {} cannot settle: {}", step.value(),
                                first_step_ == next_step_
                                    ? "no step is in flight"
                                    : fmt::format("step {} is the oldest in flight", first_step_)));
  }
  StepRecord& record = *record_of(step.value());
  kept_.clear();
  auto entry = record.entries.begin();
  for (const Kept& keep : kept) {
    // Who gives them in the order of rows is not searched for.
    const auto is_of = [&](const StepRecord::Entry& e) { return e.id == keep.request; };
    const auto behind = std::find_if(entry, record.entries.end(), is_of);
    entry = behind != record.entries.end() ? behind
                                           : std::find_if(record.entries.begin(), entry, is_of);
    if (behind == record.entries.end() && (entry == record.entries.end() || !is_of(*entry))) {
      throw RequestError(
          fmt::format("request {} is not in step {}", keep.request.value(), step.value()));
    }
    kept_.push_back(&*entry);
    if (keep.tokens > entry->count) {
      throw RequestError(fmt::format("request {} planned {} tokens in step {}; {} cannot stand",
                                     keep.request.value(), entry->count, step.value(),
                                     keep.tokens));
    }
    if (entry->request == nullptr || keep.tokens == entry->count) continue;
    const Request& r = *entry->request;
    if (r.in_flight > 1) {
      throw RequestError(
          fmt::format("request {} is in a later step too, planned behind tokens that were "
                      "rejected; abandon that step first",
                      keep.request.value()));
    }
    const std::uint32_t length = entry->begin + keep.tokens;
    for (const std::uint32_t leaf : states_) {
      if (length < r.states[info_[leaf].kind_index].valid_from) {
        throw RequestError(fmt::format(
            "request {}: leaf '{}' keeps states back to {} tokens; {} cannot be gone back to "
            "(rollback {})",
            keep.request.value(), info_[leaf].leaf->leaf_id(),
            r.states[info_[leaf].kind_index].valid_from, length, info_[leaf].leaf->rollback()));
      }
    }
  }

  for (std::size_t i = 0; i < kept.size(); ++i) kept_[i]->stands = kept[i].tokens;
  ++clock_;
  ++first_step_;
  for (const auto& [leaf, block] : record.returning) pool_->free(leaf, block);
  record.returning.clear();
  for (const StepRecord::Source& source : record.sources) {
    pool_->free(source.leaf, source.block);
    if (source.request == nullptr) continue;
    State& state = source.request->states[info_[source.leaf.value()].kind_index];
    if (state.source_step == step.value()) state.source.reset();
  }
  record.sources.clear();
  for (const PendingCopy& copy : record.held_copies) pool_->free(copy.leaf, copy.src);
  record.held_copies.clear();

  for (StepRecord::Entry& entry : record.entries) {
    if (entry.request == nullptr) continue;
    Request& r = *entry.request;
    --r.in_flight;
    const std::uint32_t length = entry.begin + entry.stands;
    if (entry.stands < entry.count) {
      unslide(r, length);
      cut_rows(r, length);
      drop_unfiled(
          r, [&](const PendingCheckpoint& pending) { return pending.tokens > length; },
          [&](LeafId leaf, BlockId block) { give_back(r, leaf, block); });
      // Ids that were known when the step was begun and lie behind what stands were drafts.
      if (entry.known > length) cut_tokens(r, length);
    }
    r.computed = length;
    commit(r);
    if (r.in_flight == 0) {
      file_live_state(r);
      if (length >= r.slide_at) slide(r, length);
    }
    if (r.may_leave) free_leaving(r);
  }
  if (!guaranteed_.empty()) form_promises();
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

void BlockManager::Impl::cut_rows(Request& r, std::uint32_t tokens) {
  for (const std::uint32_t leaf : text_) {
    const LeafInfo& info = info_[leaf];
    Row& row = r.rows[leaf];
    const std::uint32_t slots = ceil_div(tokens, info.tokens_per_page);
    if (row.slots.size() <= slots) continue;
    r.note_change(row, slots);
    while (row.slots.size() > slots) {
      const BlockId block = row.slots.back();
      row.slots.pop_back();
      if (block == null_block) continue;
      drop_pending(info.id, block);
      give_back(r, info.id, block);
    }
    row.first = std::min(row.first, slots);
  }
  r.planned = tokens;
  r.forget_bounds();
}

template <class Which, class GiveBack>
void BlockManager::Impl::drop_unfiled(Request& r, Which&& which, GiveBack&& give) {
  for (const PendingCheckpoint& pending : r.unfiled) {
    if (!which(pending)) continue;
    for (const std::uint32_t leaf : states_) {
      const BlockId block = pending.blocks[info_[leaf].kind_index];
      if (block != null_block) give(LeafId{leaf}, block);
    }
  }
  std::erase_if(r.unfiled, which);
}

// ---- abandon
// ---------------------------------------------------------------------------------------

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
