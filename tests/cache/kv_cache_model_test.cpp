// A model computed through KVCache's tensors equals the same model computed over plain arrays,
// token by token: with prefix reuse, chunks, several slots, drafts, cross attention, in both modes.
#include <doctest/doctest.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <numeric>
#include <optional>
#include <random>

#include "toy_model.h"

namespace {

using namespace kvleaf;
using toy::Kind;

struct Session {
  std::vector<Token> tokens;  // known: prompt and sampled
  std::size_t prompt = 0;
  std::size_t computed = 0;
  std::size_t until = 0;  // tokens when it ends
  int input = 0;          // encoder's
  std::size_t encoder = 0;
};

struct Options {
  KVCacheMode mode = KVCacheMode::paged;
  std::uint32_t max_seqs = 4;
  std::uint32_t max_len = 96;
  std::optional<std::uint64_t> budget = {};
  std::uint32_t encoder = 0;
  bool drafts = false;
  bool stops = true;  // chunks end where the cache asks for
  int steps = 300;
  std::uint64_t seed = 1;
};

struct Report {
  std::uint64_t admitted = 0, hits = 0, hit_tokens = 0, tokens = 0, refused = 0, rejected = 0,
                went_back = 0;
};

class Engine {
 public:
  Engine(toy::Model model, Options options)
      : model_(std::move(model)),
        options_(options),
        random_(options.seed),
        specs_(toy::specs(model_)),
        cache_(KVCache::make({.num_layers = static_cast<std::uint32_t>(model_.size()),
                              .max_seqs = options.max_seqs,
                              .max_len = options.max_len,
                              .mode = options.mode,
                              .page_tokens = 4,
                              .budget_bytes = options.budget,
                              .dtype = DType::float32,
                              .max_encoder_len = options.encoder},
                             specs_)),
        sessions_(options.max_seqs),
        order_(options.max_seqs) {
    std::iota(order_.begin(), order_.end(), std::size_t{0});
  }

  Report run() {
    for (int i = 0; i < options_.steps; ++i) {
      for (std::size_t slot = 0; slot < sessions_.size(); ++slot)
        if (!sessions_[slot] && pick(0, 2) == 0) start(slot);
      step();
      if (i % 16 == 0) cache_.audit();
    }
    return report_;
  }

 private:
  std::size_t pick(std::size_t least, std::size_t most) {
    return std::uniform_int_distribution<std::size_t>(least, most)(random_);
  }
  bool paged() const { return options_.mode == KVCacheMode::paged; }

  void start(std::size_t slot) {
    Session session;
    // Prompts are branches of a few texts, so prefixes repeat.
    const std::size_t text = pick(0, 2);
    const std::size_t length = pick(2, options_.max_len / 2);
    const std::size_t branch = pick(0, 3) == 0 ? pick(0, length) : length;
    for (std::size_t i = 0; i < length; ++i)
      session.tokens.push_back(
          static_cast<Token>(i < branch ? (text * 31 + i * i) % 50 : 50 + (branch * 7 + i) % 20));
    if (pick(0, 4) == 0 && !finished_.empty()) {  // goes on where another ended
      session.tokens = finished_[pick(0, finished_.size() - 1)];
      session.tokens.push_back(static_cast<Token>(pick(0, 49)));
      if (session.tokens.size() + 2 > options_.max_len) return;
    }
    session.prompt = session.tokens.size();
    session.until = std::min<std::size_t>(options_.max_len, session.prompt + pick(1, 24));
    const auto index = static_cast<std::int32_t>(slot);
    if (options_.encoder > 0) {
      session.input = static_cast<int>(pick(0, 2));
      session.encoder = 1 + options_.encoder * (static_cast<std::size_t>(session.input) + 1) / 4;
    }
    if (paged()) {
      AdmitExtras extras;
      if (options_.encoder > 0 && pick(0, 4) > 0)
        extras.encoder_digest = fmt::format("input {}", session.input);
      std::uint32_t hit = 0;
      try {
        hit = cache_.admit(index, Tensor::of(std::span<const Token>(session.tokens)), -1, extras);
      } catch (const PoolExhausted&) {
        ++report_.refused;
        return;
      }
      CHECK(hit < session.tokens.size());
      if (options_.encoder > 0 && !extras.encoder_digest) CHECK(hit == 0);
      session.computed = hit;
      report_.hits += hit > 0;
      report_.hit_tokens += hit;
    }
    if (options_.encoder > 0 && !(paged() && cache_.encoder_filled(index)))
      toy::fill(model_, cache_, index, session.input, session.encoder);
    ++report_.admitted;
    CHECK(cache_.seq_lens().data_as<std::int32_t>()[slot] ==
          static_cast<std::int32_t>(session.computed));
    sessions_[slot] = std::move(session);
  }

  void step() {
    std::vector<std::int32_t> slots, past, cu{0};
    std::vector<Token> new_tokens;
    std::vector<std::size_t> drafts;
    if (pick(0, 7) == 0) std::shuffle(order_.begin(), order_.end(), random_);
    for (const std::size_t slot : order_) {
      if (!sessions_[slot] || pick(0, 5) == 0) continue;
      if (paged() && pick(0, 12) == 0) go_back(slot);
      Session& session = *sessions_[slot];
      std::size_t count = session.tokens.size() - session.computed;
      std::size_t draft = 0;
      if (count > 1) {
        count = pick(1, count);
        if (options_.stops && paged())
          if (const auto stop = cache_.next_stop(static_cast<std::int32_t>(slot)))
            count = std::min(count, *stop - session.computed);
      } else if (options_.drafts) {
        draft = std::min(pick(0, 5), options_.max_len - session.tokens.size());
      }
      slots.push_back(static_cast<std::int32_t>(slot));
      past.push_back(static_cast<std::int32_t>(session.computed));
      for (std::size_t i = 0; i < count; ++i)
        new_tokens.push_back(session.tokens[session.computed + i]);
      for (std::size_t i = 0; i < draft; ++i) new_tokens.push_back(static_cast<Token>(pick(0, 49)));
      drafts.push_back(draft);
      cu.push_back(static_cast<std::int32_t>(new_tokens.size()));
    }
    if (slots.empty()) return;
    StepIndices indices;
    try {
      if (paged() && pick(0, 3) == 0) {
        std::vector<std::uint32_t> counts;
        for (std::size_t i = 0; i < slots.size(); ++i)
          counts.push_back(static_cast<std::uint32_t>(cu[i + 1] - cu[i]));
        const Tensor offsets =
            cache_.reserve(Tensor::of(std::span<const std::int32_t>(slots)), counts);
        for (std::size_t i = 0; i < slots.size(); ++i)
          CHECK(offsets.data_as<std::int32_t>()[i] == past[i]);
      }
      indices = cache_.prepare_step(cu, past, slots);
    } catch (const PoolExhausted&) {
      ++report_.refused;
      for (std::size_t i = 0; i < slots.size(); ++i)
        CHECK(cache_.seq_lens().data_as<std::int32_t>()[slots[i]] == past[i]);
      // Room is made as an engine would: one session is given up.
      cache_.evict_batch(slots.front());
      sessions_[static_cast<std::size_t>(slots.front())].reset();
      return;
    }
    check_tables(indices);
    if (pick(0, 30) == 0 && paged()) {  // the device failed
      // Whatever it had written is garbage.
      for (std::size_t l = 0; l < model_.size(); ++l) {
        if (model_[l].kind != Kind::state) continue;
        for (const std::int32_t slot : slots) {
          const Tensor state = cache_.recurrent_state(static_cast<std::int32_t>(l)).at({slot});
          std::fill_n(state.data_as<float>(), state.size(), 1e30f);
          const Tensor conv = cache_.conv_state(static_cast<std::int32_t>(l)).at({slot});
          std::fill_n(conv.data_as<float>(), conv.size(), 1e30f);
        }
      }
      cache_.abandon_step();
      for (std::size_t i = 0; i < slots.size(); ++i) {
        const auto slot = static_cast<std::size_t>(slots[i]);
        sessions_[slot]->computed =
            static_cast<std::size_t>(cache_.seq_lens().data_as<std::int32_t>()[slots[i]]);
        CHECK(sessions_[slot]->computed <= static_cast<std::size_t>(past[i]));
      }
      return;
    }
    const toy::Rows hidden = toy::compute(model_, cache_, indices, new_tokens);
    for (std::size_t i = 0; i < slots.size(); ++i) {
      const auto slot = static_cast<std::size_t>(slots[i]);
      Session& session = *sessions_[slot];
      // With drafts, what is compared is what the drafts say too.
      std::vector<Token> text(
          session.tokens.begin(),
          session.tokens.begin() + static_cast<std::ptrdiff_t>(session.computed));
      text.insert(text.end(), new_tokens.begin() + cu[i], new_tokens.begin() + cu[i + 1]);
      const toy::Rows wanted = toy::compute(model_, text, session.input, session.encoder);
      report_.tokens += text.size() - session.computed;
      for (std::size_t t = session.computed; t < text.size(); ++t) {
        const toy::Row& got = hidden[static_cast<std::size_t>(cu[i]) + t - session.computed];
        for (std::size_t d = 0; d < toy::width; ++d)
          if (std::fabs(got[d] - wanted[t][d]) > 1e-4f)
            FAIL(fmt::format("seed {}: slot {}, token {} of {}, element {}: {} instead of {}",
                             options_.seed, slot, t, text.size(), d, got[d], wanted[t][d]));
      }
      const std::size_t stands = text.size() - drafts[i];
      if (drafts[i] > 0) {  // some of them are rejected
        const std::size_t kept = stands + pick(0, drafts[i]);
        cache_.update_position(slots[i], static_cast<std::int32_t>(kept));
        for (std::size_t t = stands; t < kept; ++t) session.tokens.push_back(text[t]);
        session.computed = kept;
        report_.rejected += text.size() - kept;
      } else {
        session.computed = stands;
      }
      if (session.computed == session.tokens.size() && session.tokens.size() < options_.max_len)
        session.tokens.push_back(toy::next_token(wanted[session.computed - 1], 50));
    }
    for (const std::int32_t slot : slots) {
      const Session& session = *sessions_[static_cast<std::size_t>(slot)];
      if (session.computed >= session.until || session.computed >= options_.max_len)
        finish(static_cast<std::size_t>(slot));
    }
  }

  /// The session is to compute some of its tokens again.
  void go_back(std::size_t slot) {
    Session& session = *sessions_[slot];
    if (session.computed == 0) return;
    const std::size_t length =
        session.computed -
        pick(1, pick(0, 3) == 0 ? session.computed : std::min<std::size_t>(6, session.computed));
    try {
      cache_.update_position(static_cast<std::int32_t>(slot), static_cast<std::int32_t>(length));
      session.computed = length;
      ++report_.went_back;
    } catch (const RequestError&) {  // a window or a state is no longer held there
    }
    CHECK(cache_.seq_lens().data_as<std::int32_t>()[slot] ==
          static_cast<std::int32_t>(session.computed));
  }

  void finish(std::size_t slot) {
    Session& session = *sessions_[slot];
    if (paged() && pick(0, 9) > 0) {
      cache_.retire(static_cast<std::int32_t>(slot),
                    Tensor::of(std::span<const Token>(session.tokens)));
    } else {
      cache_.evict_batch(static_cast<std::int32_t>(slot));
    }
    finished_.push_back(session.tokens);
    sessions_[slot].reset();
    CHECK(cache_.seq_lens().data_as<std::int32_t>()[slot] == 0);
  }

  /// The tables by slot say what the tables of the step say.
  void check_tables(const StepIndices& step) {
    if (!paged()) return;
    for (std::size_t l = 0; l < model_.size(); ++l) {
      if (model_[l].kind == Kind::state) continue;
      const Tensor batch = step.block_table(static_cast<std::uint32_t>(l));
      const Tensor slots = cache_.paged_block_table(static_cast<std::int32_t>(l));
      for (std::uint32_t row = 0; row < step.batch(); ++row) {
        const std::int32_t slot = step.slot_ids().data_as<std::int32_t>()[row];
        const auto* of_batch = batch.at({row}).data_as<std::int32_t>();
        const auto* of_slot = slots.at({slot}).data_as<std::int32_t>();
        for (std::int64_t column = 0; column < slots.shape()[1]; ++column) {
          const std::int32_t wanted = column < batch.shape()[1] ? of_batch[column] : 0;
          if (of_slot[column] != wanted)
            FAIL(fmt::format("seed {}: layer {}, slot {}, column {}: {} instead of {}",
                             options_.seed, l, slot, column, of_slot[column], wanted));
        }
      }
    }
  }

  toy::Model model_;
  Options options_;
  std::mt19937_64 random_;
  std::vector<KVLayerSpec> specs_;
  KVCache cache_;
  std::vector<std::optional<Session>> sessions_;
  std::vector<std::size_t> order_;  // of slots in a batch
  std::vector<std::vector<Token>> finished_;
  Report report_;
};

const toy::Model hybrid = {{Kind::full}, {Kind::state}, {Kind::window, 10}, {Kind::state}};
const toy::Model attention = {{Kind::full}, {Kind::window, 7, 3}, {Kind::chunk, 12}, {Kind::full}};
const toy::Model crossed = {{Kind::full}, {Kind::cross}, {Kind::window, 9}, {Kind::cross}};

/// More seeds for a longer hunt: KVLEAF_SEEDS=50.
int seeds() {
  const char* text = std::getenv("KVLEAF_SEEDS");
  return text == nullptr ? 1 : std::atoi(text);
}

Report run(const toy::Model& model, Options options) {
  Report all;
  for (int i = 0; i < seeds(); ++i, ++options.seed) {
    CAPTURE(options.seed);
    const Report report = Engine(model, options).run();
    all.hits += report.hits;
    all.hit_tokens += report.hit_tokens;
    all.tokens += report.tokens;
    all.refused += report.refused;
    all.rejected += report.rejected;
    all.went_back += report.went_back;
  }
  return all;
}

}  // namespace

TEST_CASE("a model of attention layers computes the same through a paged cache, with reuse") {
  const Report report = run(attention, {.seed = 11});
  CHECK(report.hits > 10);
  CHECK(report.hit_tokens > 100);
  CHECK(report.went_back > 5);
}

TEST_CASE("drafts that are rejected leave no trace in what follows") {
  const Report report = run(attention, {.drafts = true, .seed = 21});
  CHECK(report.hits > 10);
  CHECK(report.rejected > 100);
}

TEST_CASE("a model with states computes the same through a paged cache, resumed from checkpoints") {
  const Report report = run(hybrid, {.seed = 31});
  CHECK(report.hits > 5);
}

TEST_CASE("chunks that end anywhere cost reuse of states, and nothing else") {
  run(hybrid, {.stops = false, .seed = 41});
}

TEST_CASE("a model with states in a pool too small for all slots: refused steps change nothing") {
  const toy::Model model = hybrid;
  const auto specs = toy::specs(model);
  const std::uint64_t whole = KVCache::memory_bytes(
      {.num_layers = 4, .max_seqs = 4, .max_len = 96, .page_tokens = 4, .dtype = DType::float32},
      specs);
  const Report report = run(model, {.budget = whole / 4, .seed = 51});
  CHECK(report.refused > 0);
  CHECK(report.hits > 0);
}

TEST_CASE("attention in a pool too small for all slots: refused steps change nothing") {
  const auto specs = toy::specs(attention);
  const std::uint64_t whole = KVCache::memory_bytes(
      {.num_layers = 4, .max_seqs = 4, .max_len = 96, .page_tokens = 4, .dtype = DType::float32},
      specs);
  const Report report = run(attention, {.budget = whole / 3, .drafts = true, .seed = 61});
  CHECK(report.refused > 0);
}

TEST_CASE("cross attention: filled once for an input, found again by its digest") {
  const Report report = run(crossed, {.encoder = 14, .seed = 71});
  CHECK(report.hits > 5);
}

TEST_CASE("slotted caches compute the same, without tables") {
  run(attention, {.mode = KVCacheMode::slotted, .drafts = true, .seed = 81});
  run(hybrid, {.mode = KVCacheMode::slotted, .seed = 82});
  run(crossed, {.mode = KVCacheMode::slotted, .encoder = 14, .seed = 83});
}
