#include "world.h"

#include <numeric>

namespace kvleaf::testing {
namespace {

constexpr std::uint32_t most_people = 6;
constexpr Token placeholder = 9;  // of media

}  // namespace

Geometry World::geometry(const Mix& mix, Random& random) {
  std::vector<PageSpec> specs;
  ByHand by_hand;
  std::uint64_t huge = 8;
  for (const Leaf& leaf : mix.leaves) {
    PageSpec spec = PageSpec::of(*leaf);
    spec.stride_alignment = 8;
    specs.push_back(spec);
    by_hand.ratios.push_back(random.between(1, mix.largest_ratio));
    huge = std::lcm(huge, by_hand.ratios.back() * 8);
  }
  for (bool grown = true; grown;) {
    grown = false;
    for (std::size_t i = 0; i < specs.size(); ++i) {
      if (by_hand.huge_bytes / by_hand.ratios[i] < specs[i].bytes_per_page) {
        by_hand.huge_bytes += huge;
        grown = true;
      }
    }
  }
  by_hand.huge_blocks = random.between(mix.least_huge, mix.most_huge);
  return Geometry::by_hand(specs, by_hand);
}

World::World(const Mix& mix, std::uint64_t seed, std::vector<std::string>* log)
    : mix_(mix), random_(seed), log_(log) {
  ManagerOptions options;
  options.page_tokens = mix.page;
  options.max_len = mix.max_len;
  options.max_step_tokens = mix.max_step;
  options.max_steps_in_flight = random_.between(1, 3);
  options.retention = mix.retention;
  options.enable_prefix_caching = mix.caching;
  options.eviction = random_.one_in(4) ? EvictionOrder::lru : EvictionOrder::value;
  options.events = random_.one_in(3);
  options.geometry = geometry(mix, random_);
  manager_ = std::make_unique<BlockManager>(mix.leaves, options);
  planner_ = std::make_unique<StepPlanner>(*manager_, PlannerOptions{.max_batch = most_people + 2,
                                                                     .max_step_tokens = 256,
                                                                     .max_encoder_tokens = 32});
  device_ = std::make_unique<Device>(manager_->geometry());
  for (const Leaf& leaf : mix.leaves) {
    any_ahead_ = any_ahead_ || leaf->group_id().pattern.ahead() > 0;
    any_encoder_ = any_encoder_ || leaf->group_id().writing == Writing::write_once;
    any_state_ = any_state_ || leaf->group_id().writing == Writing::in_place;
  }
  std::string ratios;
  for (const LeafGeometry& g : manager_->geometry().leaves()) ratios += fmt::format(" {}", g.ratio);
  say("{} huge blocks, ratios{}, {} steps in flight, {}{}", manager_->geometry().huge_blocks(),
      ratios, options.max_steps_in_flight, options.eviction == EvictionOrder::lru ? "lru" : "value",
      options.events ? ", events" : "");
}

void World::run(std::uint32_t operations) {
  for (std::uint32_t i = 0; i < operations; ++i) {
    operate();
    manager_->audit();
    check_lengths();
    check_promises();
  }
}

void World::end() {
  say("end");
  while (!people_.empty()) {
    manager_->release(people_.begin()->second.id, random_.one_in(2) ? Prefix::keep : Prefix::drop);
    people_.erase(people_.begin());
    manager_->audit();
  }
  while (!flights_.empty()) settle();
  if (!manager_->stats()
           .steps_in_flight) {  // pending copies of ended forks leave with the next step
    const Step& step = manager_->begin_step({});
    manager_->settle(step.id);
  }
  manager_->reset_cache();
  manager_->audit();
  for (std::uint32_t leaf = 0; leaf < mix_.leaves.size(); ++leaf) {
    require(manager_->pool().live(LeafId{leaf}) == 0 && manager_->pool().cached(LeafId{leaf}) == 0,
            "leaf {}: {} live and {} cached blocks are left", leaf,
            manager_->pool().live(LeafId{leaf}), manager_->pool().cached(LeafId{leaf}));
  }
  const PoolStats stats = manager_->pool().stats();
  require(stats.empty == stats.huge_blocks, "{} of {} huge blocks are empty", stats.empty,
          stats.huge_blocks);
  device_->require_null_region();
}

void World::operate() {
  const std::uint32_t roll = random_.below(100);
  if (roll < 16) return admit({});
  if (roll < 48) return step();
  if (roll < 68) return settle();
  if (roll < 72) return abandon();
  if (roll < 80) return append();
  if (roll < 83) return fork();
  if (roll < 86) return rewind();
  if (roll < 91) return release();
  if (roll < 94) return preempt();
  if (roll < 96) return fill_encoder();
  if (roll < 98) return misuse();
  if (roll == 98 && random_.one_in(4)) {
    say("reset_cache");
    manager_->reset_cache();
    for (auto& [id, p] : people_) p.published = false;
    return;
  }
  if (!manager_->take_events().empty()) say("take_events");
}

// ---- the model
// -------------------------------------------------------------------------------------

World::Person* World::anyone() {
  if (people_.empty()) return nullptr;
  auto it = people_.begin();
  std::advance(it, random_.below(people_.size()));
  return &it->second;
}

std::uint64_t World::depends_on(const Person& p, std::uint32_t position) const {
  std::uint64_t hash = 0;
  for (const MediaItem& item : p.options.media) {
    if (item.offset == position) hash = mix(mix(hash + 1, item.digest), item.length);
  }
  if (p.options.encoder && p.options.encoder->at == position) {
    hash = mix(mix(hash + 2, p.options.encoder->digest), p.options.encoder->tokens);
  }
  return hash;
}

void World::hash_on(Person& p) {
  if (p.hashes.empty()) p.hashes.push_back(mix(mix(5, p.options.salt), p.options.adapter));
  while (p.hashes.size() <= p.truth.size()) {
    const auto i = static_cast<std::uint32_t>(p.hashes.size() - 1);
    p.hashes.push_back(
        mix(mix(p.hashes.back(), static_cast<std::uint64_t>(p.truth[i])), depends_on(p, i)));
  }
}

void World::know_truth(Person& p, std::uint32_t length) {
  while (p.truth.size() < length) p.truth.push_back(static_cast<Token>(random_.below(3)));
  hash_on(p);
}

void World::cut_truth(Person& p, std::uint32_t length) {
  // An entry of a leaf that is fed the next token was computed from it: the model says it again.
  const std::uint32_t left = length + (any_ahead_ ? 1 : 0);
  if (p.truth.size() > left) p.truth.resize(left);
  if (p.hashes.size() > left + 1) p.hashes.resize(left + std::size_t{1});
  p.known = std::min(p.known, length);
  p.prompt = std::min(p.prompt, length);
}

std::uint64_t World::text_word(const Person& p, LeafId leaf, std::uint32_t token) const {
  const std::uint64_t word = mix(p.hashes[token + std::size_t{1}], 100 + leaf.value());
  if (leaf_of(leaf).group_id().pattern.ahead() == 0) return word;
  return mix(mix(word, static_cast<std::uint64_t>(p.truth[token + std::size_t{1}])),
             depends_on(p, token + 1));
}

std::uint64_t World::state_word(const Person& p, LeafId leaf, std::uint32_t tokens) const {
  return tokens == 0 ? 0 : mix(p.hashes[tokens], 1000 + leaf.value());
}

std::uint64_t World::encoder_word(const Person& p, LeafId leaf, std::uint32_t token) const {
  return mix(mix(mix(mix(6, p.options.encoder->digest), p.options.salt + "/" + p.options.adapter),
                 leaf.value()),
             token);
}

bool World::cuts_item(const Person& p, std::uint32_t end) const {
  for (const MediaItem& item : p.options.media) {
    if (item.whole && end > item.offset && end < item.offset + item.length) return true;
  }
  return false;
}

void World::check_lengths() {
  for (const auto& [id, p] : people_) {
    require(manager_->planned(p.id) == p.planned, "request {}: planned {}, must be {}", id,
            manager_->planned(p.id), p.planned);
    require(manager_->length(p.id) == p.known, "request {}: knows {}, must know {}", id,
            manager_->length(p.id), p.known);
    if (const auto stop = manager_->next_stop(p.id)) {
      require(*stop > p.planned && *stop <= p.known && *stop % mix_.page == 0,
              "request {} at {} of {}: next_stop {}", id, p.planned, p.known, *stop);
    }
  }
}

void World::check_promises() {
  auto& impl = BlockManagerTestAccess::impl(*manager_);
  if (impl.guaranteed_.empty()) return;
  impl.form_promises();
  const BlockPool::Verdict verdict = manager_->pool().judge({});
  if (verdict.fits && log_ == nullptr) return;
  std::string promises;
  for (const Request* r : impl.guaranteed_) {
    promises += fmt::format(" {} ({}):", r->id.value(), *r->guarantee);
    for (const LeafInfo& leaf : impl.info_) promises += fmt::format(" {}", impl.promise(*r, leaf));
  }
  require(verdict.fits, "promises{} need {} huge blocks, {} are left", promises,
          verdict.huge_needed, verdict.huge_left);
  say("    promises{}, {} of {}", promises, verdict.huge_needed, verdict.huge_left);
}

// ---- admission
// -------------------------------------------------------------------------------------

void World::admit(std::optional<RequestId> again) {
  if (people_.size() >= most_people) return;
  Person p;
  if (!again && !preempted_.empty() && random_.one_in(3))
    again = RequestId{preempted_.begin()->first};
  if (again) {
    p = preempted_.at(again->value());
    p.filled = false;
    p.options.guarantee.reset();
  } else {
    p.id = RequestId{next_id_++};
    const std::uint32_t longest = std::min(mix_.max_len, 48u);
    const Past* base = past_.empty() ? nullptr : &past_[random_.below(past_.size())];
    if (base != nullptr && random_.one_in(4)) {
      p.truth = base->tokens;
      p.options = base->options;
    } else {
      const std::uint32_t length = random_.between(1, longest);
      if (base != nullptr && !random_.one_in(5)) {
        const std::uint32_t common = random_.below(base->tokens.size() + 1);
        p.truth.assign(base->tokens.begin(), base->tokens.begin() + common);
        p.options.salt = base->options.salt;
        p.options.adapter = base->options.adapter;
        p.options.media = base->options.media;
        p.options.encoder = base->options.encoder;
        std::erase_if(p.options.media,
                      [&](const MediaItem& item) { return item.offset + item.length > common; });
      } else {
        p.options.salt = random_.one_in(6) ? "s" : "";
        p.options.adapter = random_.one_in(6) ? "a@1" : "";
      }
      if (p.truth.size() < length) {
        while (p.truth.size() < length) p.truth.push_back(static_cast<Token>(random_.below(2)));
      } else {
        p.truth.resize(std::max<std::size_t>(1, std::min<std::size_t>(p.truth.size(), longest)));
        std::erase_if(p.options.media, [&](const MediaItem& item) {
          return item.offset + item.length > p.truth.size();
        });
      }
      const std::uint32_t last =
          p.options.media.empty() ? 0
                                  : p.options.media.back().offset + p.options.media.back().length;
      if (random_.one_in(4) && last + 1 < p.truth.size()) {
        MediaItem item;
        item.offset = random_.between(last, p.truth.size() - 1);
        item.length = random_.between(1, std::min<std::uint64_t>(p.truth.size() - item.offset, 9));
        item.digest = random_.one_in(2) ? "11" : "22";
        item.whole = random_.one_in(2) && item.length <= mix_.max_step;
        for (std::uint32_t i = 0; i < item.length; ++i) p.truth[item.offset + i] = placeholder;
        p.options.media.push_back(item);
      }
    }
    if (any_encoder_ &&
        (!p.options.encoder || random_.one_in(4) || p.options.encoder->at >= p.truth.size())) {
      p.options.encoder = EncoderInput{random_.one_in(2) ? "x" : "y", random_.between(1, 9),
                                       random_.one_in(2) ? 0 : random_.below(p.truth.size())};
    }
    p.options.priority = static_cast<std::int32_t>(random_.below(3)) - 1;
    p.options.partial = random_.one_in(3);
    p.options.addressable.reset();
    p.options.guarantee.reset();
    if (random_.one_in(8)) p.options.addressable = random_.below(p.truth.size() + 4);
    if (random_.one_in(6)) p.options.guarantee = random_.between(p.truth.size(), mix_.max_len);
  }
  p.prompt = p.known = static_cast<std::uint32_t>(p.truth.size());
  p.planned = 0;
  p.serial = ++serials_;
  p.scratch_written = false;
  p.published = true;
  hash_on(p);

  std::optional<Admission> probed;
  std::string denied;
  if (random_.one_in(2)) {
    try {
      probed = manager_->probe(p.truth, p.options);
    } catch (const PoolExhausted& e) {
      denied = e.what();
    }
    manager_->audit();
  }
  std::string tokens;
  if (log_ != nullptr) {
    for (const Token token : p.truth) tokens += std::to_string(token);
    for (const MediaItem& item : p.options.media) {
      tokens += fmt::format(" media[{},{}){}{}", item.offset, item.offset + item.length,
                            item.digest, item.whole ? "!" : "");
    }
    if (p.options.encoder)
      tokens += fmt::format(" encoder {}:{}@{}", p.options.encoder->digest,
                            p.options.encoder->tokens, p.options.encoder->at);
    if (p.options.guarantee) tokens += fmt::format(" guarantee {}", *p.options.guarantee);
    if (p.options.addressable) tokens += fmt::format(" addressable {}", *p.options.addressable);
    if (p.options.partial) tokens += " partial";
  }
  say("admit {} {} tokens {} salt '{}' adapter '{}'", p.id.value(), p.prompt, tokens,
      p.options.salt, p.options.adapter);
  try {
    const Admission admission = manager_->admit(p.id, p.truth, p.options);
    say("  hit {}: {}{}", admission.hit_tokens, admission.reason,
        admission.encoder_cached ? ", encoder cached" : "");
    require(denied.empty(), "admitted, but the probe said: {}", denied);
    if (probed) {
      require(probed->hit_tokens == admission.hit_tokens && probed->lost == admission.lost &&
                  probed->next_stop == admission.next_stop &&
                  probed->encoder_cached == admission.encoder_cached &&
                  probed->reason == admission.reason,
              "the probe said hit {} '{}', admission hit {} '{}'", probed->hit_tokens,
              probed->reason, admission.hit_tokens, admission.reason);
    }
    require(admission.hit_tokens < p.prompt, "a hit of {} of {} tokens", admission.hit_tokens,
            p.prompt);
    require(!cuts_item(p, admission.hit_tokens), "a hit of {} ends inside a media item",
            admission.hit_tokens);
    p.planned = admission.hit_tokens;
    p.filled = admission.encoder_cached;
    hit_tokens += admission.hit_tokens;
    preempted_.erase(p.id.value());
    if (past_.size() < 12) {
      past_.push_back({p.truth, p.options});
    } else {
      past_[random_.below(past_.size())] = {p.truth, p.options};
    }
    people_[p.id.value()] = std::move(p);
  } catch (const PoolExhausted& e) {
    say("  refused: {}", e.what());
    ++refused;
    require(!probed, "refused, but the probe gave {}", probed ? probed->hit_tokens : 0);
  }
}

// ---- steps
// -----------------------------------------------------------------------------------------

void World::step() {
  if (flights_.size() >= manager_->options().max_steps_in_flight) {
    if (random_.one_in(4)) settle();
    return;
  }
  std::vector<StepRequest> batch;
  std::string rows;
  std::uint32_t tokens = 0;
  const bool one = random_.one_in(3);
  for (auto& [id, p] : people_) {
    if (one ? !random_.one_in(people_.size()) : random_.one_in(4)) continue;
    std::uint32_t end;
    if (p.planned < p.known && !random_.one_in(6)) {
      end = p.known;
      const auto stop = manager_->next_stop(p.id);
      if (stop && !random_.one_in(4)) end = *stop;
      if (random_.one_in(3)) end = p.planned + random_.between(1, end - p.planned);
    } else {
      end = p.planned + (random_.one_in(2) ? 1 : random_.between(1, 5));  // ids may be unknown yet
    }
    end = std::min({end, mix_.max_len, p.planned + mix_.max_step});
    while (cuts_item(p, end)) ++end;
    if (end <= p.planned || end > mix_.max_len || end - p.planned > mix_.max_step) continue;
    if (p.options.encoder && !p.filled && end > p.prompt) continue;
    if (tokens + end - p.planned > 200) continue;
    tokens += end - p.planned;
    batch.push_back({p.id, end - p.planned});
    rows += fmt::format(" {}:{}+{}", id, p.planned, end - p.planned);
  }
  if (batch.empty() && !random_.one_in(10)) return;
  for (std::size_t i = batch.size(); i > 1; --i) std::swap(batch[i - 1], batch[random_.below(i)]);
  say("plan{}", rows);
  std::optional<std::uint32_t> pad;
  if (random_.one_in(3)) pad = static_cast<std::uint32_t>(batch.size()) + random_.below(3);

  const StepPlan& plan = planner_->plan(batch, pad);
  Flight& flight = flights_.emplace_back();
  flight.id = plan.step();
  require(plan.rows().size() + plan.refused().size() == batch.size(), "rows are lost");
  for (const Refusal& refusal : plan.refused()) {
    say("  refused: {}", refusal.why);
    const Person& p = people_.at(refusal.request.value());
    const auto row = std::find_if(batch.begin(), batch.end(),
                                  [&](const StepRequest& r) { return r.request == p.id; });
    require(!p.options.guarantee || p.planned + row->new_tokens > *p.options.guarantee ||
                row->new_tokens > mix_.page,
            "request {} is guaranteed {} tokens, but refused {} at {}: {}", p.id.value(),
            p.options.guarantee.value_or(0), row->new_tokens, p.planned, refusal.why);
  }
  for (std::size_t i = 0; i < plan.rows().size(); ++i) {
    Person& p = people_.at(plan.rows()[i].value());
    const auto row = std::find_if(batch.begin(), batch.end(),
                                  [&](const StepRequest& r) { return r.request == p.id; });
    flight.rows.push_back({p.serial, p.id, p.planned, row->new_tokens, p.known});
    know_truth(p, p.planned + row->new_tokens + 1);
  }
  if (log_ != nullptr) {
    for (const BlockCopy& c : plan.copies())
      say("  copy leaf {} {} -> {}", c.leaf.value(), c.src.value(), c.dst.value());
    for (const ZeroFill& f : plan.zero_fills())
      say("  clear leaf {} {}", f.leaf.value(), f.block.value());
  }
  device_->run(plan.copies(), plan.zero_fills(), flight.undo);
  forward(plan, flight);
  for (const Flight::Row& row : flight.rows) {
    Person& p = people_.at(row.id.value());
    p.planned = row.begin + row.count;
    ++p.in_flight;
  }
}

void World::forward(const StepPlan& plan, Flight& flight) {
  require(plan.cu_seqlens_q().size() == plan.batch() + 1u && plan.seq_lens().size() == plan.batch(),
          "lengths of the batch");
  for (std::uint32_t leaf = 0; leaf < mix_.leaves.size(); ++leaf) {
    const LeafId id{leaf};
    for (std::size_t i = 0; i < plan.batch(); ++i) {
      const auto first = static_cast<std::size_t>(plan.cu_seqlens_q()[i]);
      if (i >= flight.rows.size()) {
        require(plan.seq_lens()[i] == 1, "a dummy row has length {}", plan.seq_lens()[i]);
        if (!plan.slot_mapping(id).empty())
          require(plan.slot_mapping(id)[first] == -1, "a dummy row writes");
        continue;
      }
      const Flight::Row& row = flight.rows[i];
      require(static_cast<std::uint32_t>(plan.cu_seqlens_q()[i + 1]) - first == row.count &&
                  static_cast<std::uint32_t>(plan.seq_lens()[i]) == row.begin + row.count,
              "row {}: lengths", i);
      Person& p = people_.at(row.id.value());
      switch (leaf_of(id).group_id().writing) {
        case Writing::append: forward_text(plan, flight, id, i, p); break;
        case Writing::in_place: forward_state(plan, flight, id, i, p); break;
        case Writing::write_once: {
          if (!p.filled || !p.options.encoder) break;
          const auto* table =
              plan.array(id, "block_table").row<std::int32_t>(static_cast<std::int64_t>(i));
          const std::uint32_t P = manager_->tokens_per_page(id);
          for (std::uint32_t t = 0; t < p.options.encoder->tokens; ++t) {
            const BlockId block{static_cast<std::uint32_t>(table[t / P])};
            require(block != null_block, "request {}: encoder token {} is in the null block",
                    p.id.value(), t);
            const Device::Index at = device_->at(id, block, t % P);
            require(device_->read(at) == encoder_word(p, id, t),
                    "request {}, leaf {}: encoder token {} in block {} is wrong", p.id.value(),
                    leaf, t, block.value());
            flight.reads.emplace_back(at, device_->read(at));
          }
          break;
        }
        case Writing::exclusive: {
          const BlockId block{static_cast<std::uint32_t>(
              *plan.array(id, "block_table").row<std::int32_t>(static_cast<std::int64_t>(i)))};
          require(block != null_block, "request {}: scratch is null", p.id.value());
          const Device::Index at = device_->at(id, block, 0);
          require(device_->native(at, id), "request {}: scratch {} holds bytes of another leaf",
                  p.id.value(), block.value());
          require(!p.scratch_written || device_->read(at) == mix(p.serial, 9),
                  "request {}: scratch was overwritten", p.id.value());
          device_->write(at, mix(p.serial, 9), static_cast<std::uint8_t>(leaf), &flight.undo);
          p.scratch_written = true;
          break;
        }
      }
    }
  }
}

void World::forward_text(const StepPlan& plan, Flight& flight, LeafId leaf, std::size_t i,
                         Person& p) {
  const Flight::Row& row = flight.rows[i];
  const std::uint32_t P = manager_->tokens_per_page(leaf);
  const std::uint32_t n = row.begin;
  const std::uint32_t end = n + row.count;
  const StagedArray& array = plan.array(leaf, "block_table");
  const auto* table = array.row<std::int32_t>(static_cast<std::int64_t>(i));
  const AccessPattern& pattern = leaf_of(leaf).group_id().pattern;
  const std::uint32_t head = std::min(pattern.head(), n);
  const auto check = [&](std::uint32_t t) {
    const BlockId block{static_cast<std::uint32_t>(table[t / P])};
    require(block != null_block,
            "request {} at {}, leaf {}: token {} is in reach but in the null block", p.id.value(),
            n, leaf.value(), t);
    const Device::Index at = device_->at(leaf, block, t % P);
    require(device_->read(at) == text_word(p, leaf, t),
            "request {} at {}, leaf {}: token {} in block {} is wrong", p.id.value(), n,
            leaf.value(), t, block.value());
    flight.reads.emplace_back(at, device_->read(at));
    ++checked_words;
  };
  const std::uint32_t tail = pattern.tail_begin(n);
  for (std::uint32_t t = 0; t < std::min(head, tail); ++t) check(t);
  for (std::uint32_t t = tail; t < n; ++t) check(t);
  for (std::uint32_t slot = (end + P - 1) / P; slot < array.shape[1]; ++slot) {
    require(table[slot] == 0, "request {}, leaf {}: table entry {} behind its end is {}",
            p.id.value(), leaf.value(), slot, table[slot]);
  }
  const auto mapping = plan.slot_mapping(leaf);
  const auto first = static_cast<std::size_t>(plan.cu_seqlens_q()[i]);
  for (std::uint32_t t = n; t < end; ++t) {
    const std::int64_t slot = mapping[first + t - n];
    require(slot == std::int64_t{table[t / P]} * P + t % P && table[t / P] != 0,
            "request {}, leaf {}: slot of token {} is {}, its block {}", p.id.value(), leaf.value(),
            t, slot, table[t / P]);
    const BlockId block{static_cast<std::uint32_t>(slot / P)};
    for (std::uint32_t w = t % P; w < P && (t == n || w == 0); ++w) {
      require(device_->native(device_->at(leaf, block, w), leaf),
              "request {}, leaf {}: block {} still holds bytes of another leaf", p.id.value(),
              leaf.value(), block.value());
    }
    const Device::Index at = device_->at(leaf, block, t % P);
    device_->write(at, text_word(p, leaf, t), static_cast<std::uint8_t>(leaf.value()),
                   &flight.undo);
    flight.reads.emplace_back(at, device_->read(at));
  }
}

void World::forward_state(const StepPlan& plan, Flight& flight, LeafId leaf, std::size_t i,
                          Person& p) {
  const Flight::Row& row = flight.rows[i];
  const std::uint32_t n = row.begin;
  const std::uint32_t end = n + row.count;
  const bool apart = leaf_of(leaf).state_kernel() == StateKernel::in_out;
  const auto entry = [&](std::string_view key) {
    const std::int32_t block = plan.array(leaf, key).row<std::int32_t>(0)[i];
    require(block > 0, "request {}, leaf {}: '{}' is {}", p.id.value(), leaf.value(), key, block);
    return BlockId{static_cast<std::uint32_t>(block)};
  };
  const BlockId write = entry(apart ? "state_write_rows" : "state_rows");
  const BlockId read = apart ? entry("state_read_rows") : write;
  say("  {}: leaf {} reads {} at {}, writes {}", p.id.value(), leaf.value(), read.value(), n,
      write.value());
  const Device::Index from = device_->at(leaf, read, 0);
  require(device_->read(from) == state_word(p, leaf, n) && device_->native(from, leaf),
          "request {}, leaf {}: the state after {} tokens in block {} is wrong", p.id.value(),
          leaf.value(), n, read.value());
  ++checked_words;
  // States kept for draft tokens lie in a ring; only its last one is staged.
  const std::uint32_t rollback = leaf_of(leaf).rollback();
  if (rollback > 0) {
    const State& state =
        BlockManagerTestAccess::impl(*manager_)
            .get(p.id)
            .states[BlockManagerTestAccess::impl(*manager_).info_[leaf.value()].kind_index];
    for (std::uint32_t m = std::max(n + 1, end - std::min(end, rollback)); m < end; ++m) {
      device_->write(device_->at(leaf, state.ring[m % state.ring.size()], 0),
                     state_word(p, leaf, m), static_cast<std::uint8_t>(leaf.value()), &flight.undo);
    }
  } else if (read != write) {
    flight.reads.emplace_back(from, device_->read(from));
  }
  device_->write(device_->at(leaf, write, 0), state_word(p, leaf, end),
                 static_cast<std::uint8_t>(leaf.value()), &flight.undo);
  if (!leaf_of(leaf).emits_in_chunk()) return;
  // A column for each boundary that the step passes; where it names a block, the state goes there
  // too.
  const std::uint32_t P = manager_->tokens_per_page(leaf);
  const StagedArray& boundaries = plan.array(leaf, "state_boundary_rows");
  for (std::int64_t column = 0; column < boundaries.shape[1]; ++column) {
    const std::int32_t block = boundaries.row<std::int32_t>(static_cast<std::int64_t>(i))[column];
    const std::uint32_t tokens = (n / P + 1 + static_cast<std::uint32_t>(column)) * P;
    require(tokens < end || block == -1,
            "request {}, leaf {}: the boundary at {} of a step from {} to {} names block {}",
            p.id.value(), leaf.value(), tokens, n, end, block);
    if (block == -1) continue;
    const Device::Index at = device_->at(leaf, BlockId{static_cast<std::uint32_t>(block)}, 0);
    device_->write(at, state_word(p, leaf, tokens), static_cast<std::uint8_t>(leaf.value()),
                   &flight.undo);
    flight.reads.emplace_back(at, device_->read(at));
    ++emitted_states;
  }
}

void World::settle() {
  if (flights_.empty()) return;
  Flight& flight = flights_.front();
  std::vector<Kept> kept;
  for (const Flight::Row& row : flight.rows) {
    const auto it = people_.find(row.id.value());
    if (it == people_.end() || it->second.serial != row.serial || !mix_.drafts) continue;
    if (it->second.in_flight == 1 && it->second.planned == row.begin + row.count &&
        it->second.planned > it->second.prompt && random_.one_in(4)) {
      kept.push_back({row.id, random_.below(row.count + 1)});
      if (row.begin + kept.back().tokens == 0) kept.pop_back();
    }
  }
  for (const auto& [at, value] : flight.reads) {
    require(device_->read(at) == value,
            "step {}: word {} was overwritten while the step was in flight", flight.id.value(), at);
  }
  std::string text;
  for (const Kept& k : kept) text += fmt::format(" {} keeps {}", k.request.value(), k.tokens);
  say("settle {}{}", flight.id.value(), text);
  try {
    planner_->settle(flight.id, kept);
  } catch (const RequestError& e) {
    require(any_state_ && !kept.empty(), "settle: {}", e.what());
    say("  {}", e.what());
    kept.clear();
    planner_->settle(flight.id, kept);
  }
  for (const Flight::Row& row : flight.rows) {
    const auto it = people_.find(row.id.value());
    if (it == people_.end() || it->second.serial != row.serial) continue;
    Person& p = it->second;
    --p.in_flight;
    for (const Kept& k : kept) {
      if (k.request != row.id || k.tokens == row.count) continue;
      p.planned = row.begin + k.tokens;
      // Ids known when the step was begun were drafts; those that came after are what was sampled.
      cut_truth(p, row.known > p.planned ? p.planned : std::max(p.known, p.planned));
    }
    require(manager_->computed(p.id) <= p.planned, "request {}: computed {}", p.id.value(),
            manager_->computed(p.id));
  }
  flights_.pop_front();
}

void World::abandon() {
  if (flights_.empty() || random_.one_in(3)) return;
  const std::size_t first = random_.below(flights_.size());
  say("abandon {}", flights_[first].id.value());
  for (std::size_t i = flights_.size(); i-- > first;) device_->fail(flights_[i].undo, random_);
  const auto lengths = planner_->abandon(flights_[first].id);
  ++failed_steps;
  while (flights_.size() > first) {
    for (const Flight::Row& row : flights_.back().rows) {
      const auto it = people_.find(row.id.value());
      if (it == people_.end() || it->second.serial != row.serial) continue;
      --it->second.in_flight;
      it->second.scratch_written = false;
      require(std::any_of(lengths.begin(), lengths.end(),
                          [&](const auto& l) { return l.first == row.id; }),
              "abandon does not name request {}", row.id.value());
    }
    flights_.pop_back();
  }
  for (const auto& [id, length] : lengths) {
    say("  {} back to {}", id.value(), length);
    Person& p = people_.at(id.value());
    require(length <= p.planned, "request {} at {} goes back to {}", id.value(), p.planned, length);
    p.planned = length;
    p.options.guarantee.reset();  // kept where it can be
  }
}

// ---- the rest
// --------------------------------------------------------------------------------------

void World::append() {
  Person* p = anyone();
  if (p == nullptr || p->known >= mix_.max_len) return;
  const std::uint32_t most =
      std::max<std::uint32_t>(static_cast<std::uint32_t>(p->truth.size()), p->known + 1);
  const std::uint32_t end =
      std::min(p->known + random_.between(1, most - p->known + 1), mix_.max_len);
  know_truth(*p, end);
  say("append {} {} tokens", p->id.value(), end - p->known);
  manager_->append(p->id, std::span(p->truth).subspan(p->known, end - p->known));
  p->known = end;
}

void World::fork() {
  Person* parent = anyone();
  if (parent == nullptr || people_.size() >= most_people) return;
  const RequestId child{next_id_++};
  say("fork {} into {}", parent->id.value(), child.value());
  try {
    manager_->fork(parent->id, child);
  } catch (const PoolExhausted& e) {
    return say("  {}", e.what());
  } catch (const RequestError& e) {
    require(parent->in_flight > 0, "fork: {}", e.what());
    return say("  {}", e.what());
  }
  require(parent->in_flight == 0, "forked in flight");
  Person p = *parent;
  p.id = child;
  p.serial = ++serials_;
  p.scratch_written = false;
  p.options.guarantee.reset();
  const std::uint32_t known = p.known;
  const std::uint32_t prompt = p.prompt;
  cut_truth(p, std::max(p.known, p.planned));  // from there on it samples by itself
  p.known = known;
  p.prompt = prompt;
  people_[child.value()] = std::move(p);
}

void World::rewind() {
  Person* p = anyone();
  if (p == nullptr) return;
  const std::uint32_t longest = std::max(p->known, manager_->computed(p->id));
  std::uint32_t to = random_.between(1, longest);
  if (random_.one_in(2)) to = std::max(1u, longest - random_.below(6));
  say("rewind {} to {}", p->id.value(), to);
  const auto rewound = [&](std::uint32_t length) {
    p->planned = std::min(p->planned, length);
    cut_truth(*p, length);
  };
  try {
    manager_->rewind(p->id, to);
    rewound(to);
  } catch (const PoolExhausted& e) {
    say("  {}", e.what());  // others were promised what it would pin
  } catch (const RequestError& e) {
    const std::string why = e.what();
    say("  {}", why);
    const auto at = why.find("works is ");
    if (p->in_flight > 0 || to > p->known) return;
    require(at != std::string::npos, "rewind to {}: {}", to, why);
    const auto nearest = static_cast<std::uint32_t>(std::stoul(why.substr(at + 9)));
    require(nearest < to, "rewind to {}: {}", to, why);
    if (nearest == 0 || random_.one_in(2)) return;
    try {
      manager_->rewind(p->id, nearest);
      rewound(nearest);
    } catch (const PoolExhausted& refusal) {
      say("  {}", refusal.what());
    }
  }
}

void World::release() {
  Person* p = anyone();
  if (p == nullptr) return;
  const Prefix prefix = random_.one_in(3) ? Prefix::drop : Prefix::keep;
  std::optional<std::uint32_t> addressable;
  if (random_.one_in(5)) addressable = random_.below(p->known + 1);
  say("release {}{}{}", p->id.value(), prefix == Prefix::drop ? " drop" : "",
      addressable ? fmt::format(" past {}", *addressable) : "");
  manager_->release(p->id, prefix, addressable);
  people_.erase(p->id.value());
}

void World::preempt() {
  Person* p = anyone();
  if (p == nullptr || p->known == 0) return;
  say("preempt {}", p->id.value());
  manager_->preempt(p->id);
  p->truth.resize(p->known);
  p->hashes.resize(p->known + std::size_t{1});
  p->in_flight = 0;
  std::erase_if(p->options.media,
                [&](const MediaItem& item) { return item.offset + item.length > p->known; });
  if (p->options.encoder && p->options.encoder->at >= p->known) p->options.encoder->at = 0;
  p->hashes.clear();
  preempted_[p->id.value()] = *p;
  people_.erase(p->id.value());
}

void World::fill_encoder() {
  Person* p = anyone();
  if (p == nullptr || !p->options.encoder || p->filled) return;
  say("encoder of {} filled", p->id.value());
  for (std::uint32_t leaf = 0; leaf < mix_.leaves.size(); ++leaf) {
    if (leaf_of(LeafId{leaf}).group_id().writing != Writing::write_once) continue;
    const auto blocks = manager_->blocks(p->id, LeafId{leaf});
    const std::uint32_t P = manager_->tokens_per_page(LeafId{leaf});
    for (std::uint32_t t = 0; t < p->options.encoder->tokens; ++t) {
      device_->write(device_->at(LeafId{leaf}, blocks[t / P], t % P),
                     encoder_word(*p, LeafId{leaf}, t), static_cast<std::uint8_t>(leaf), nullptr);
    }
  }
  manager_->encoder_filled(p->id);
  p->filled = true;
}

void World::misuse() {
  // Each must throw its typed error; the audit and the lengths that follow say that nothing
  // changed.
  const auto refused_with = [&]<class Error>(const char* what, auto&& call,
                                             std::type_identity<Error>) {
    try {
      call();
    } catch (const Error&) {
      return;
    }
    throw Broken(fmt::format("not refused: {}", what));
  };
  const RequestId nobody{next_id_ + 1000};
  Person* p = anyone();
  say("misuse");
  using Request = std::type_identity<RequestError>;
  using Step = std::type_identity<StepError>;
  refused_with(
      "settling a step that was not begun", [&] { manager_->settle(StepId{1'000'000}); }, Step{});
  refused_with(
      "abandoning a step that was not begun", [&] { manager_->abandon(StepId{1'000'000}); },
      Step{});
  refused_with(
      "releasing nobody", [&] { manager_->release(nobody); }, Request{});
  if (flights_.size() > 1)
    refused_with(
        "settling out of order", [&] { manager_->settle(flights_.back().id); }, Step{});
  if (p == nullptr) return;
  refused_with(
      "admitting a live request", [&] { manager_->admit(p->id, p->truth, {}); }, Request{});
  refused_with(
      "rewinding to 0", [&] { manager_->rewind(p->id, 0); }, Request{});
  if (flights_.size() < manager_->options().max_steps_in_flight) {
    const StepRequest none{p->id, 0};
    const std::array<StepRequest, 2> twice{StepRequest{p->id, 1}, StepRequest{p->id, 1}};
    const StepRequest unknown{nobody, 1};
    const StepRequest far{p->id, mix_.max_len - p->planned + 1};
    refused_with(
        "a row of 0 tokens",
        [&] {
          planner_->plan({&none, 1});
        },
        Request{});
    refused_with(
        "a request twice", [&] { planner_->plan(twice); }, Request{});
    refused_with(
        "an unknown request",
        [&] {
          planner_->plan({&unknown, 1});
        },
        Request{});
    refused_with(
        "a row past max_len",
        [&] {
          planner_->plan({&far, 1});
        },
        Request{});
  }
}

}  // namespace kvleaf::testing
