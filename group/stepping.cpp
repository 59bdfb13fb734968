// Stepping: drawing for the rows of a batch, and letting go of what they slid past.
#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <span>

#include "kvleaf/group/manager_impl.h"

namespace kvleaf {

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

}  // namespace kvleaf
