// Attention and state steps through the planner's tables, mappings and rows, run by the plain
// kernels over a real arena, against the same over contiguous keys, values and states: for random
// batches over all kinds of leaves, through growth, eviction, forks, rewinds, preemptions, failed
// steps and prefix hits.
//
// KVLEAF_RANDOM_RUNS: runs per mix (default 12); KVLEAF_RANDOM_SEED: first seed. A failure prints
// its seed.
#include <doctest/doctest.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <numeric>

#include "device.h"
#include "kvleaf/kernels/kernels.h"

namespace kvleaf {
namespace {
using testing::Broken;
using testing::mix;
using testing::Random;
namespace kn = kernels;

constexpr std::uint32_t page = 4, max_len = 56, max_step = 24, most_people = 5, query_groups = 2;
constexpr float product_scale = 0.4f;
// Of the Mamba-2 states.
constexpr std::uint32_t heads = 2, head_dim = 3, state_dim = 4,
                        state_floats = heads * head_dim * state_dim;

struct Mix {
  std::string name;
  Leaves leaves;
  std::uint32_t huge_blocks = 10;
};

/// A number in [-1, 1) that is a word's alone.
float number(std::uint64_t word, std::uint64_t index) {
  return static_cast<float>(mix(word, index) >> 40) / static_cast<float>(1u << 23) - 1.0f;
}
std::vector<float> numbers(std::uint64_t word, std::size_t count) {
  std::vector<float> values(count);
  for (std::size_t i = 0; i < count; ++i) values[i] = number(word, i);
  return values;
}

class Engine {
 public:
  Engine(const Mix& mix_of, std::uint64_t seed) : mix_(mix_of), random_(seed) {
    ManagerOptions options;
    options.page_tokens = page;
    options.max_len = max_len;
    options.max_step_tokens = max_step;
    options.max_steps_in_flight = random_.between(1, 2);
    options.retention = random_.one_in(2) ? Retention::tail() : Retention::dense();
    std::vector<PageSpec> specs;
    for (const Leaf& leaf : mix_.leaves) specs.push_back(PageSpec::of(*leaf));
    const Geometry least = plan_geometry(1 << 20, specs);
    options.geometry = least.resized(mix_.huge_blocks + random_.below(mix_.huge_blocks));
    manager_ = std::make_unique<BlockManager>(mix_.leaves, options);
    planner_ = std::make_unique<StepPlanner>(*manager_, PlannerOptions{.max_batch = most_people + 1,
                                                                       .max_step_tokens = 128,
                                                                       .max_encoder_tokens = 16});
    // Noise where nothing was written, so that reading it shows; the null region is zeros.
    const Geometry& geometry = manager_->geometry();
    arena_.resize(geometry.arena_bytes() / sizeof(float), NAN);
    std::fill_n(arena_.begin(), geometry.null_bytes() / sizeof(float), 0.0f);
    for (const LeafGeometry& leaf : geometry.leaves()) {
      pages_.push_back({bytes() + leaf.base_offset, leaf.page_stride, leaf.bytes_per_page,
                        static_cast<std::uint32_t>(leaf.blocks)});
    }
  }

  void run(int operations) {
    for (int i = 0; i < operations; ++i) {
      const std::uint32_t roll = random_.below(100);
      if (roll < 18) {
        admit();
      } else if (roll < 58) {
        step();
      } else if (roll < 80) {
        settle();
      } else if (roll < 84) {
        abandon();
      } else if (roll < 88) {
        fork();
      } else if (roll < 93) {
        rewind();
      } else {
        leave();
      }
    }
    const auto zero = [](float x) { return x == 0; };
    if (!std::all_of(arena_.begin(),
                     arena_.begin() + static_cast<std::ptrdiff_t>(
                                          manager_->geometry().null_bytes() / sizeof(float)),
                     zero))
      throw Broken("the null region was written");
  }

  std::uint64_t hits = 0, compared = 0, refused = 0, forks = 0, rewinds = 0, failures = 0;

 private:
  struct Person {
    RequestId id{0};
    std::vector<Token> tokens;
    std::vector<std::uint64_t> words;  // [t]: of the first t + 1 tokens, and all they depend on
    std::optional<EncoderInput> encoder;
    bool filled = false;
    std::uint32_t planned = 0;
    std::uint32_t in_flight = 0;
  };
  struct Flight {
    StepId step{0};
    std::vector<RequestId> rows;
  };

  std::byte* bytes() { return reinterpret_cast<std::byte*>(arena_.data()); }
  const KVLeafRegion& leaf_at(std::uint32_t leaf) const { return *mix_.leaves[leaf]; }

  void know(Person& p) const {
    std::uint64_t word = p.encoder ? mix(1, p.encoder->digest) : 1;
    p.words.clear();
    for (const Token token : p.tokens)
      p.words.push_back(word = mix(word, static_cast<std::uint64_t>(token) + 2));
  }
  Person* anyone() {
    if (people_.empty()) return nullptr;
    auto it = people_.begin();
    std::advance(it, random_.below(people_.size()));
    return &it->second;
  }

  // ---- operations

  void admit() {
    if (people_.size() >= most_people) return;
    Person p;
    p.id = RequestId{next_id_++};
    const std::uint32_t length = random_.between(1, 40);
    if (!past_.empty() && !random_.one_in(4)) {
      p = past_[random_.below(past_.size())];
      p.id = RequestId{next_id_++};
      if (random_.one_in(2)) p.tokens.resize(random_.between(1, p.tokens.size()));
    }
    while (p.tokens.size() < length) p.tokens.push_back(static_cast<Token>(random_.below(2)));
    const bool encodes = std::any_of(mix_.leaves.begin(), mix_.leaves.end(), [](const Leaf& l) {
      return l->group_id().writing == Writing::write_once;
    });
    if (encodes && !p.encoder)
      p.encoder = random_.one_in(2) ? EncoderInput{"x", 5} : EncoderInput{"y", 9};
    know(p);
    AdmitOptions options;
    options.encoder = p.encoder;
    options.partial = random_.one_in(3);
    try {
      const Admission admission = manager_->admit(p.id, p.tokens, options);
      hits += admission.hit_tokens;
      p.planned = admission.hit_tokens;
      p.in_flight = 0;
      p.filled = !encodes || admission.encoder_cached;
      if (!p.filled) fill_encoder(p);
      if (past_.size() < 8) past_.push_back(p);
      people_[p.id.value()] = std::move(p);
    } catch (const PoolExhausted&) {
      ++refused;
    }
  }

  std::uint64_t encoder_word(const Person& p, std::uint32_t leaf, std::uint32_t t) const {
    return mix(mix(leaf + 100, p.encoder->digest), t);
  }

  void fill_encoder(Person& p) {
    for (std::uint32_t l = 0; l < mix_.leaves.size(); ++l) {
      if (leaf_at(l).group_id().writing != Writing::write_once) continue;
      const auto blocks = manager_->blocks(p.id, LeafId{l});
      std::vector<std::int64_t> slots;
      std::vector<std::uint64_t> words;
      for (std::uint32_t t = 0; t < p.encoder->tokens; ++t) {
        slots.push_back(std::int64_t{blocks[t / page].value()} * page + t % page);
        words.push_back(encoder_word(p, l, t));
      }
      append(l, words, slots);
    }
    manager_->encoder_filled(p.id);
    p.filled = true;
  }

  kn::KVPages kv_pages(std::uint32_t leaf) {
    const auto& options = dynamic_cast<const AttentionLeaf&>(leaf_at(leaf)).options();
    return {pages_[leaf].base,
            pages_[leaf].page_stride,
            pages_[leaf].blocks,
            {.layers = 1,
             .slots = page,
             .kv_heads = options.kv_heads,
             .key_dim = options.head_dim,
             .value_dim = *options.value_head_dim,
             .element_bytes = 4},
            kn::Number::float32};
  }

  /// Keys of an entry are the first numbers of its word, values those that follow.
  void append(std::uint32_t leaf, const std::vector<std::uint64_t>& words,
              const std::vector<std::int64_t>& slots) {
    const kn::KVPages into = kv_pages(leaf);
    const std::size_t keys = std::size_t{into.layout.kv_heads} * into.layout.key_dim;
    const std::size_t values = std::size_t{into.layout.kv_heads} * into.layout.value_dim;
    std::vector<float> k, v;
    for (const std::uint64_t word : words) {
      const auto entry = numbers(word, keys + values);
      k.insert(k.end(), entry.begin(), entry.begin() + static_cast<std::ptrdiff_t>(keys));
      v.insert(v.end(), entry.begin() + static_cast<std::ptrdiff_t>(keys), entry.end());
    }
    kn::append_kv({k.data(), v.data(), kn::Number::float32}, slots, into, 0);
  }

  void step() {
    if (flights_.size() == manager_->options().max_steps_in_flight) return;
    std::vector<StepRequest> batch;
    for (auto& [id, p] : people_) {
      if (random_.one_in(4) || p.planned >= max_len) continue;
      const auto known = static_cast<std::uint32_t>(p.tokens.size());
      const std::uint32_t most = p.planned < known ? std::min(known - p.planned, max_step)
                                                   : std::min(max_len - p.planned, 2u);
      const std::uint32_t count = random_.between(1, most);
      if (p.planned + count > known) {
        std::vector<Token> sampled;
        while (p.tokens.size() < p.planned + count) {
          sampled.push_back(static_cast<Token>(random_.below(2)));
          p.tokens.push_back(sampled.back());
        }
        manager_->append(p.id, sampled);
        know(p);
      }
      batch.push_back({p.id, count});
    }
    if (batch.size() > 1 && random_.one_in(3)) std::swap(batch.front(), batch.back());
    std::optional<std::uint32_t> pad;
    if (random_.one_in(2))
      pad =
          static_cast<std::uint32_t>(batch.size()) + random_.below(most_people + 2 - batch.size());
    const StepPlan& plan = planner_->plan(batch, pad);
    refused += plan.refused().size();
    forward(plan);
    flights_.push_back({plan.step(), {plan.rows().begin(), plan.rows().end()}});
    for (std::size_t i = 0; i < plan.rows().size(); ++i) {
      Person& p = people_.at(plan.rows()[i].value());
      p.planned = static_cast<std::uint32_t>(plan.seq_lens()[i]);
      ++p.in_flight;
    }
  }

  void land(const Flight& flight) {
    for (const RequestId id : flight.rows) {
      const auto it = people_.find(id.value());
      if (it != people_.end() && it->second.in_flight > 0) --it->second.in_flight;
    }
  }

  void settle() {
    if (flights_.empty()) return;
    std::vector<Kept> kept;
    const Flight flight = flights_.front();
    flights_.pop_front();
    const bool states = std::any_of(mix_.leaves.begin(), mix_.leaves.end(), [](const Leaf& l) {
      return l->group_id().writing == Writing::in_place;
    });
    for (const RequestId id : flight.rows) {
      const auto it = people_.find(id.value());
      if (it == people_.end() || it->second.in_flight != 1 || states || !random_.one_in(5))
        continue;
      Person& p = it->second;
      if (manager_->planned(id) - manager_->computed(id) < 2) continue;
      kept.push_back({id, 1});  // of two tokens or more
      p.planned = manager_->computed(id) + 1;
      p.tokens.resize(p.planned);
      know(p);
    }
    planner_->settle(flight.step, kept);
    land(flight);
    manager_->audit();
  }

  void abandon() {
    if (flights_.empty()) return;
    const auto lengths = planner_->abandon(flights_.front().step);
    for (const Flight& flight : flights_) land(flight);
    flights_.clear();
    for (const auto& [id, length] : lengths) people_.at(id.value()).planned = length;
    ++failures;
    manager_->audit();
  }

  void fork() {
    Person* parent = anyone();
    if (parent == nullptr || parent->in_flight > 0 || people_.size() >= most_people) return;
    const RequestId child{next_id_++};
    try {
      manager_->fork(parent->id, child);
    } catch (const PoolExhausted&) {
      ++refused;
      return;
    }
    Person p = *parent;
    p.id = child;
    people_[child.value()] = std::move(p);
    ++forks;
  }

  void rewind() {
    Person* p = anyone();
    if (p == nullptr || p->in_flight > 0) return;
    const std::uint32_t to = random_.between(1, p->tokens.size());
    try {
      manager_->rewind(p->id, to);
    } catch (const RequestError&) {
      return;
    }
    p->planned = std::min(p->planned, to);
    p->tokens.resize(to);
    know(*p);
    ++rewinds;
  }

  void leave() {
    Person* p = anyone();
    if (p == nullptr) return;
    if (random_.one_in(3)) {
      manager_->preempt(p->id);
    } else {
      manager_->release(p->id, random_.one_in(4) ? Prefix::drop : Prefix::keep);
    }
    people_.erase(p->id.value());
    manager_->audit();
  }

  // ---- what a device does

  void forward(const StepPlan& plan) {
    std::vector<kn::BlockCopy> copies;
    for (const BlockCopy& copy : plan.copies()) {
      copies.push_back({copy.leaf.value(), static_cast<std::int32_t>(copy.src.value()),
                        static_cast<std::int32_t>(copy.dst.value())});
    }
    std::vector<kn::BlockClear> clears;
    for (const ZeroFill& fill : plan.zero_fills())
      clears.push_back({fill.leaf.value(), static_cast<std::int32_t>(fill.block.value())});
    kn::copy_pages(pages_, copies);
    kn::zero_pages(pages_, clears);
    for (std::uint32_t l = 0; l < mix_.leaves.size(); ++l) {
      switch (leaf_at(l).group_id().writing) {
        case Writing::append: {
          std::vector<std::uint64_t> words(plan.num_tokens(), 0);
          for_each_token(plan, [&](const Person& p, std::uint32_t t, std::size_t q) {
            words[q] = mix(p.words[t], l);
          });
          const auto slots = plan.slot_mapping(LeafId{l});
          append(l, words, {slots.begin(), slots.end()});
          attend(plan, l);
          break;
        }
        case Writing::write_once: attend(plan, l); break;
        case Writing::in_place: advance(plan, l); break;
        case Writing::exclusive: break;
      }
    }
  }

  template <class Use>  // (person, position, query token)
  void for_each_token(const StepPlan& plan, Use use) {
    for (std::size_t i = 0; i < plan.rows().size(); ++i) {
      const Person& p = people_.at(plan.rows()[i].value());
      const auto end = static_cast<std::uint32_t>(plan.cu_seqlens_q()[i + 1]);
      for (auto q = static_cast<std::uint32_t>(plan.cu_seqlens_q()[i]); q < end; ++q)
        use(p, static_cast<std::uint32_t>(plan.seq_lens()[i]) - (end - q), q);
    }
  }

  void attend(const StepPlan& plan, std::uint32_t l) {
    const auto& leaf = dynamic_cast<const AttentionLeaf&>(leaf_at(l));
    const AccessPattern& pattern = leaf.group_id().pattern;
    const bool cross = leaf.group_id().writing == Writing::write_once;
    kn::PagedAttention attention;
    attention.pages = kv_pages(l);
    const kn::KVLayout& layout = attention.pages.layout;
    attention.query_heads = layout.kv_heads * query_groups;
    attention.scale = product_scale;
    attention.latent_width = layout.value_dim == 0 ? layout.key_dim - 1 : 0;
    const std::uint32_t width = layout.value_dim == 0 ? attention.latent_width : layout.value_dim;
    attention.reach.causal = !cross;
    if (const auto* window = dynamic_cast<const SlidingWindowLeaf*>(&leaf)) {
      attention.reach.window = window->window().window;
      attention.reach.sinks = window->window().sinks;
    }
    if (dynamic_cast<const ChunkedAttentionLeaf*>(&leaf) != nullptr)
      attention.reach.chunk = chunk_tokens;

    const std::size_t vectors = std::size_t{plan.num_tokens()} * attention.query_heads;
    std::vector<float> queries(vectors * layout.key_dim), output(vectors * width, NAN);
    for_each_token(plan, [&](const Person& p, std::uint32_t t, std::size_t q) {
      const auto query =
          numbers(mix(p.words[t], l + 50), std::size_t{attention.query_heads} * layout.key_dim);
      std::copy(query.begin(), query.end(),
                queries.begin() + static_cast<std::ptrdiff_t>(q * query.size()));
    });
    std::vector<std::int32_t> lengths(plan.seq_lens().begin(), plan.seq_lens().end());
    if (cross) {
      for (std::size_t i = 0; i < plan.rows().size(); ++i)
        lengths[i] = static_cast<std::int32_t>(people_.at(plan.rows()[i].value()).encoder->tokens);
    }
    attention.queries = queries.data();
    attention.output = output.data();
    attention.cu_seqlens_q = plan.cu_seqlens_q();
    attention.seq_lens = lengths;
    std::vector<std::int32_t> dense;  // of a CSR table, as its reader sees it
    if (leaf.options().table == TableFormat::csr) {
      const auto* indptr = plan.array(LeafId{l}, "indptr").row<std::int32_t>(0);
      const auto* indices = plan.array(LeafId{l}, "indices").row<std::int32_t>(0);
      const auto* last = plan.array(LeafId{l}, "last_page_len").row<std::int32_t>(0);
      const std::int64_t columns = max_len / page;
      dense.assign(static_cast<std::size_t>(plan.batch()) * static_cast<std::size_t>(columns), 0);
      for (std::size_t i = 0; i < plan.batch(); ++i) {
        std::copy(indices + indptr[i], indices + indptr[i + 1],
                  dense.begin() + static_cast<std::ptrdiff_t>(i) * columns);
        const std::int32_t length =
            (indptr[i + 1] - indptr[i] - 1) * static_cast<std::int32_t>(page) + last[i];
        if (length != lengths[i])
          throw Broken(
              fmt::format("CSR says {} tokens of row {}, which has {}", length, i, lengths[i]));
      }
      attention.table = {dense.data(), columns, columns};
    } else {
      const StagedArray& table = plan.array(LeafId{l}, "block_table");
      attention.table = {table.row<std::int32_t>(0), table.shape[1], table.strides[0]};
      if (leaf.stages_live_span()) {
        attention.table.first_slot = plan.array(LeafId{l}, "first_slot").row<std::int32_t>(0);
        attention.table.sink_slots = (attention.reach.sinks + page - 1) / page;
      }
    }
    kn::paged_attention(attention);

    for_each_token(plan, [&](const Person& p, std::uint32_t t, std::size_t q) {
      // The keys that it sees, from the pattern's own words, one behind the other.
      std::vector<std::uint64_t> seen;
      if (cross) {
        for (std::uint32_t i = 0; i < p.encoder->tokens; ++i) seen.push_back(encoder_word(p, l, i));
      } else {
        const std::uint32_t tail = pattern.tail_begin(t);
        for (std::uint32_t i = 0; i <= t; ++i) {
          if (i < pattern.head() || i >= tail) seen.push_back(mix(p.words[i], l));
        }
      }
      compare(attention, &queries[q * attention.query_heads * layout.key_dim],
              &output[q * attention.query_heads * width], seen, width,
              fmt::format("leaf '{}', request {}, token {}", leaf.leaf_id(), p.id.value(), t));
    });
    // Dummy rows read the null block, or nothing: zeros.
    for (auto q = static_cast<std::size_t>(plan.cu_seqlens_q()[plan.rows().size()]);
         q < plan.num_tokens(); ++q) {
      for (std::size_t i = 0; i < attention.query_heads * width; ++i) {
        if (output[q * attention.query_heads * width + i] != 0)
          throw Broken("a dummy row does not give zeros");
      }
    }
  }

  void compare(const kn::PagedAttention& attention, const float* queries, const float* output,
               const std::vector<std::uint64_t>& seen, std::uint32_t width,
               const std::string& what) {
    const kn::KVLayout& layout = attention.pages.layout;
    const std::size_t keys = std::size_t{layout.kv_heads} * layout.key_dim;
    std::vector<std::vector<float>> entries;
    for (const std::uint64_t word : seen)
      entries.push_back(numbers(word, keys + std::size_t{layout.kv_heads} * layout.value_dim));
    for (std::uint32_t head = 0; head < attention.query_heads; ++head) {
      const std::uint32_t kv = head / query_groups;
      std::vector<double> weights;
      for (const auto& entry : entries) {
        double product = 0;
        for (std::uint32_t d = 0; d < layout.key_dim; ++d)
          product += double{queries[head * layout.key_dim + d]} * entry[kv * layout.key_dim + d];
        weights.push_back(std::exp(product * product_scale));
      }
      const double total = std::accumulate(weights.begin(), weights.end(), 0.0);
      for (std::uint32_t d = 0; d < width; ++d) {
        double expected = 0;
        for (std::size_t i = 0; i < entries.size(); ++i) {
          const std::size_t at = layout.value_dim == 0
                                     ? std::size_t{kv} * layout.key_dim + d
                                     : keys + std::size_t{kv} * layout.value_dim + d;
          expected += weights[i] / total * entries[i][at];
        }
        const double got = output[head * width + d];
        if (!(std::fabs(got - expected) < 2e-5))
          throw Broken(
              fmt::format("{}, head {}: element {} is {}, not {}", what, head, d, got, expected));
        ++compared;
      }
    }
  }

  /// A token's inputs of a Mamba-2 step.
  struct Inputs {
    std::vector<float> x, dt, b, c;
    void add(std::uint64_t word) {
      const auto all = numbers(word, heads * head_dim + heads + 2 * state_dim);
      auto at = all.begin();
      for (std::uint32_t i = 0; i < heads * head_dim; ++i) x.push_back(*at++);
      for (std::uint32_t i = 0; i < heads; ++i) dt.push_back(0.6f + 0.5f * *at++);
      for (std::uint32_t i = 0; i < state_dim; ++i) b.push_back(*at++);
      for (std::uint32_t i = 0; i < state_dim; ++i) c.push_back(*at++);
    }
  };
  static void mamba(const kn::StateBatch& batch, const Inputs& in, std::vector<float>& output) {
    static const float a[heads] = {-0.7f, -0.2f};
    output.assign(in.x.size(), NAN);
    kn::mamba2({batch, heads, 1, head_dim, state_dim, in.x.data(), in.dt.data(), a, in.b.data(),
                in.c.data(), nullptr, output.data()});
  }

  void advance(const StepPlan& plan, std::uint32_t l) {
    const auto& leaf = dynamic_cast<const RecurrentStateLeaf&>(leaf_at(l));
    const bool apart = leaf.state_kernel() == StateKernel::in_out;
    const bool by_row = leaf.options().table == StateTable::rows;
    // The second of two layers where addressed by row; else the one slab of a block.
    const auto rows = [&](std::string_view key) {
      const auto* first = plan.array(LeafId{l}, key).row<std::int32_t>(by_row ? 1 : 0);
      return std::span(first, plan.batch());
    };
    const auto write = rows(apart ? "state_write_rows" : "state_rows");
    const auto read = apart ? rows("state_read_rows") : write;
    const std::uint64_t stride = by_row ? state_floats * sizeof(float) : pages_[l].page_stride;
    const std::uint64_t per_block = pages_[l].page_stride / stride;
    const kn::StateRows states{pages_[l].base, stride, static_cast<std::uint32_t>(per_block),
                               (pages_[l].blocks + 1) * per_block, kn::Number::float32};
    Inputs in;
    for (std::uint32_t q = 0; q < plan.num_tokens(); ++q)
      in.add(q);  // overwritten but for dummy rows
    Inputs real;
    for_each_token(plan, [&](const Person& p, std::uint32_t t, std::size_t) {
      real.add(mix(p.words[t], l + 70));
    });
    std::copy(real.x.begin(), real.x.end(), in.x.begin());
    std::copy(real.dt.begin(), real.dt.end(), in.dt.begin());
    std::copy(real.b.begin(), real.b.end(), in.b.begin());
    std::copy(real.c.begin(), real.c.end(), in.c.begin());
    std::vector<float> output;
    // Where a kernel emits states inside the step, it stops there: as many launches as there are
    // pieces.
    run_pieces(plan, l, leaf, states, read, write, in, output);

    for (std::size_t i = 0; i < plan.rows().size(); ++i) {
      const Person& p = people_.at(plan.rows()[i].value());
      const auto end = static_cast<std::uint32_t>(plan.seq_lens()[i]);
      Inputs all;
      for (std::uint32_t t = 0; t < end; ++t) all.add(mix(p.words[t], l + 70));
      std::vector<float> memory(2 * state_floats, 0.0f), whole;
      const std::vector<std::int32_t> one{1};
      const std::vector<std::int32_t> all_tokens{0, static_cast<std::int32_t>(end)};
      mamba({{reinterpret_cast<std::byte*>(memory.data()), state_floats * sizeof(float), 1, 2,
              kn::Number::float32},
             one,
             one,
             all_tokens},
            all, whole);
      const std::size_t width = heads * head_dim;
      const auto count =
          static_cast<std::uint32_t>(plan.cu_seqlens_q()[i + 1] - plan.cu_seqlens_q()[i]);
      for (std::size_t k = 0; k < count * width; ++k) {
        const float got = output[static_cast<std::size_t>(plan.cu_seqlens_q()[i]) * width + k];
        const float expected = whole[(end - count) * width + k];
        if (!(std::fabs(got - expected) < 1e-4f))
          throw Broken(fmt::format("leaf '{}', request {} from {} to {}: output {} is {}, not {}",
                                   leaf.leaf_id(), p.id.value(), end - count, end, k, got,
                                   expected));
        ++compared;
      }
    }
  }

  void run_pieces(const StepPlan& plan, std::uint32_t l, const RecurrentStateLeaf& leaf,
                  const kn::StateRows& states, std::span<const std::int32_t> read,
                  std::span<const std::int32_t> write, const Inputs& in,
                  std::vector<float>& output) {
    mamba({states, read, write, plan.cu_seqlens_q()}, in, output);
    if (!leaf.emits_in_chunk()) return;
    const StagedArray& table = plan.array(LeafId{l}, "state_boundary_rows");
    for (std::size_t i = 0; i < plan.rows().size(); ++i) {
      const Person& p = people_.at(plan.rows()[i].value());
      const auto count =
          static_cast<std::uint32_t>(plan.cu_seqlens_q()[i + 1] - plan.cu_seqlens_q()[i]);
      const std::uint32_t begin = static_cast<std::uint32_t>(plan.seq_lens()[i]) - count;
      for (std::int64_t column = 0; column < table.shape.back(); ++column) {
        const std::int32_t row = table.row<std::int32_t>(static_cast<std::int64_t>(i))[column];
        if (row < 0) continue;
        // What a kernel has in its registers when it passes the boundary.
        const auto tokens = (begin / page + 1 + static_cast<std::uint32_t>(column)) * page;
        Inputs all;
        for (std::uint32_t t = 0; t < tokens; ++t) all.add(mix(p.words[t], l + 70));
        std::vector<float> memory(2 * state_floats, 0.0f), ignored;
        const std::vector<std::int32_t> one{1}, lengths{0, static_cast<std::int32_t>(tokens)};
        mamba({{reinterpret_cast<std::byte*>(memory.data()), state_floats * sizeof(float), 1, 2,
                kn::Number::float32},
               one,
               one,
               lengths},
              all, ignored);
        std::memcpy(states.base + states.row_offset(row), memory.data() + state_floats,
                    state_floats * sizeof(float));
        ++emitted;
      }
    }
  }

 public:
  static constexpr std::uint32_t chunk_tokens = 6;
  std::uint64_t emitted = 0;

 private:
  const Mix& mix_;
  Random random_;
  std::unique_ptr<BlockManager> manager_;
  std::unique_ptr<StepPlanner> planner_;
  std::vector<float> arena_;
  std::vector<kn::Pages> pages_;
  std::map<std::uint64_t, Person> people_;
  std::vector<Person> past_;
  std::deque<Flight> flights_;
  std::uint64_t next_id_ = 1;
};

AttentionOptions attention(std::uint32_t kv_heads, std::uint32_t key,
                           std::optional<std::uint32_t> value = {},
                           TableFormat table = TableFormat::dense) {
  return {.layers = 1,
          .kv_heads = kv_heads,
          .head_dim = key,
          .value_head_dim = value,
          .dtype = DType::float32,
          .tokens_per_page = page,
          .slots_per_page = {},
          .table = table};
}
Leaf state(StateKernel kernel, StateTable table, std::string id, bool in_chunk = false) {
  StateOptions options;
  options.layers = table == StateTable::rows ? 2 : 1;
  options.slabs = {{"ssm", {heads, head_dim, state_dim}, DType::float32}};
  options.kernel = kernel;
  options.table = table;
  options.in_chunk = in_chunk;
  options.group = id;
  return std::make_shared<RecurrentStateLeaf>(id, options);
}
Leaf window(std::uint32_t tokens, std::uint32_t sinks, bool compact,
            TableFormat table = TableFormat::dense) {
  return std::make_shared<SlidingWindowLeaf>(
      "window", WindowOptions{.window = tokens, .sinks = sinks, .compact = compact},
      attention(2, 4, {}, table));
}

std::vector<Mix> mixes() {
  const auto full = [](TableFormat table = TableFormat::dense) {
    return std::make_shared<FullAttentionLeaf>("full", attention(2, 4, 3, table));
  };
  const auto latent = std::make_shared<LatentAttentionLeaf>(
      "latent",
      LatentOptions{.layers = 1, .width = 6, .dtype = DType::float32, .tokens_per_page = page});
  const auto chunk =
      std::make_shared<ChunkedAttentionLeaf>("chunk", Engine::chunk_tokens, attention(1, 4));
  const auto cross = std::make_shared<CrossAttentionLeaf>("cross", attention(1, 5, 4));
  return {
      {"full and window with sinks, compact", {full(), window(9, 3, true)}, 6},
      {"csr, full and window", {full(TableFormat::csr), window(7, 0, false, TableFormat::csr)}, 6},
      {"chunk and latent", {chunk, latent}, 14},
      {"full and cross", {full(), cross}, 6},
      {"full and states by row, in and out",
       {full(), state(StateKernel::in_out, StateTable::rows, "rows")},
       16},
      {"full and states by block, in place",
       {full(), state(StateKernel::in_place, StateTable::blocks, "blocks")},
       4},
      {"window and states in chunks",
       {window(9, 0, true), state(StateKernel::in_out, StateTable::blocks, "emits", true)},
       16},
      {"everything",
       {full(), window(9, 3, true), chunk, latent, cross,
        state(StateKernel::in_out, StateTable::rows, "rows"),
        state(StateKernel::in_place, StateTable::blocks, "blocks"),
        std::make_shared<ScratchLeaf>("scratch", 64)},
       10},
  };
}

TEST_CASE("attention and states through the planner's tables equal those over contiguous memory") {
  const auto from_environment = [](const char* name, std::uint64_t otherwise) {
    const char* text = std::getenv(name);
    return text != nullptr ? std::strtoull(text, nullptr, 10) : otherwise;
  };
  const std::uint64_t runs = from_environment("KVLEAF_RANDOM_RUNS", 12);
  const std::uint64_t first = from_environment("KVLEAF_RANDOM_SEED", 1);
  for (const Mix& mix : mixes()) {
    std::uint64_t hits = 0, compared = 0, refused = 0, forks = 0, rewinds = 0, failures = 0,
                  emitted = 0;
    bool good = true;
    for (std::uint64_t seed = first; seed < first + runs && good; ++seed) {
      try {
        Engine engine(mix, seed);
        engine.run(250);
        hits += engine.hits;
        compared += engine.compared;
        refused += engine.refused;
        forks += engine.forks;
        rewinds += engine.rewinds;
        failures += engine.failures;
        emitted += engine.emitted;
      } catch (const std::exception& e) {
        good = false;
        FAIL_CHECK(fmt::format("mix '{}', seed {}: {}", mix.name, seed, e.what()));
      }
    }
    if (!good || runs < 8) continue;
    INFO(mix.name);  // the run was worth something
    CHECK(compared > runs * 1000);
    CHECK(hits > 0);
    if (mix.leaves.size() < 4)
      CHECK(refused > 0);  // many leaves have many huge blocks, and room in them
    CHECK(forks > 0);
    CHECK(rewinds > 0);
    CHECK(failures > 0);
    if (mix.name.find("in chunks") != std::string::npos) CHECK(emitted > 0);
  }
}

}  // namespace
}  // namespace kvleaf
