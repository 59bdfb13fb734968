#include "kvleaf/kernels/attention.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <string>
#include <vector>

#include "kernels/machine.h"
#include "kvleaf/kernels/append.h"
#include "kvleaf/kernels/convert.h"
#include "kvleaf/kernels/gather.h"

namespace kvleaf::kernels::test {
namespace {

struct Kind {
  const char* name;
  Reach reach;
  bool latent = false;
  bool compact = false;
};
constexpr Kind kinds[] = {
    {"full", {}},
    {"window", {.window = 7}},
    {"window and sinks", {.window = 6, .sinks = 5}},
    {"compact window", {.window = 6}, false, true},
    {"compact window and sinks", {.window = 9, .sinks = 5}, false, true},
    {"chunk", {.chunk = 8}},
    {"latent", {}, true},
    {"cross", {.causal = false}},
};

// Whether the query at position p sees key i, from the words and not from the formula.
bool sees(const Reach& reach, std::int64_t p, std::int64_t i) {
  if (!reach.causal) return true;
  if (i > p) return false;
  if (reach.chunk != 0) return p / reach.chunk == i / reach.chunk;
  if (reach.window != 0) return i < reach.sinks || p - i < reach.window;
  return true;
}

// Rows of a batch with their keys and values twice: contiguous, and in pages that lie anywhere.
class Bench {
 public:
  struct Length {
    std::int32_t tokens;   // queries
    std::int32_t entries;  // keys
  };

  Bench(Random& random, const Kind& kind, Number stored, std::uint32_t granularity,
        std::vector<Length> lengths)
      : kind_(kind), lengths_(std::move(lengths)), granularity_(granularity) {
    layout_ = {.layers = 2,
               .slots = 4,
               .kv_heads = kind.latent ? 1u : 2u,
               .key_dim = 24,
               .value_dim = kind.latent ? 0u : 16u,
               .element_bytes = size_of(stored)};
    std::uint32_t blocks = 1;
    for (const Length& length : lengths_) blocks += length.entries / 4 + 1;
    make_pages(stored, blocks);
    std::normal_distribution<float> normal;
    std::vector<std::int32_t> ids(blocks), scale_ids(blocks);
    std::iota(ids.begin(), ids.end(), 1);
    scale_ids = ids;
    std::shuffle(ids.begin(), ids.end(), random);
    std::shuffle(scale_ids.begin(), scale_ids.end(), random);

    cu_seqlens_.push_back(0);
    for (const Length& length : lengths_) {
      cu_seqlens_.push_back(cu_seqlens_.back() + length.tokens);
      seq_lens_.push_back(length.entries);
      columns_ = std::max<std::int64_t>(columns_, (length.entries + 3) / 4);
    }
    table_.assign(lengths_.size() * columns_, 0);
    scale_table_ = table_;
    for (std::size_t row = 0; row < lengths_.size(); ++row) {
      fill_row(row, ids, scale_ids, [&] { return normal(random); });
    }
    queries_.resize(static_cast<std::size_t>(cu_seqlens_.back()) * query_heads() * layout_.key_dim);
    for (float& query : queries_) query = normal(random);
  }

  // The largest difference from a dense computation in double.
  template <class Machine>
  double worst() {
    std::vector<float> out(cu_seqlens_.back() * query_heads() * width(), NAN);
    Machine::paged_attention(attention(out), memory(out));
    double worst = 0;
    for (std::size_t row = 0; row < lengths_.size(); ++row) {
      for (std::int32_t t = 0; t < lengths_[row].tokens; ++t) {
        for (std::uint32_t head = 0; head < query_heads(); ++head) {
          const std::size_t vector = (cu_seqlens_[row] + t) * query_heads() + head;
          const std::vector<double> expected = dense(row, t, head);
          for (std::uint32_t d = 0; d < width(); ++d) {
            const double difference = std::fabs(out[vector * width() + d] - expected[d]);
            worst = std::isnan(difference) ? INFINITY : std::max(worst, difference);
          }
        }
      }
    }
    return worst;
  }

  AttentionMemory memory(std::vector<float>& out) const {
    return {arena_, scale_arena_, as_bytes(queries_), std::as_writable_bytes(std::span(out)),
            table_, scale_table_, first_slot_};
  }

  PagedAttention attention(std::vector<float>& out) {
    PagedAttention attention;
    attention.queries = queries_.data();
    attention.output = out.data();
    attention.query_heads = query_heads();
    attention.scale = scale;
    attention.cu_seqlens_q = cu_seqlens_;
    attention.seq_lens = seq_lens_;
    attention.pages = pages_;
    attention.layer = 1;
    attention.latent_width = kind_.latent ? 18 : 0;
    attention.reach = kind_.reach;
    attention.table = block_table(table_);
    if (granularity_ != 0) {
      scale_tables_ = {scale_pages_, granularity_, block_table(scale_table_)};
      attention.scales = &scale_tables_;
    }
    return attention;
  }

 private:
  static constexpr float scale = 0.3f;

  std::uint32_t query_heads() const { return layout_.kv_heads * 3; }
  std::uint32_t width() const { return kind_.latent ? 18 : layout_.value_dim; }

  void make_pages(Number stored, std::uint32_t blocks) {
    // All bits set is NaN in every float type: reading what was not written shows.
    const std::uint64_t stride = layout_.page_bytes() + 16;
    arena_.assign((blocks + 1) * stride, std::byte{0xff});
    std::fill_n(arena_.begin(), stride, std::byte{0});
    pages_ = {arena_.data(), stride, blocks, layout_, stored};
    if (granularity_ == 0) return;
    const KVLayout scales = scales_layout(layout_, granularity_, 2);
    scale_arena_.assign((blocks + 1) * scales.page_bytes(), std::byte{0xff});
    std::fill_n(scale_arena_.begin(), scales.page_bytes(), std::byte{0});
    scale_pages_ = {scale_arena_.data(), scales.page_bytes(), blocks, scales, Number::bfloat16};
  }

  template <class Draw>
  void fill_row(std::size_t row, std::vector<std::int32_t>& ids,
                std::vector<std::int32_t>& scale_ids, Draw normal) {
    const auto [tokens, entries] = lengths_[row];
    std::vector<std::int64_t> slots(entries, -1), scale_slots(entries, -1);
    std::int32_t first_held = -1;
    for (std::int32_t slot = 0; slot * 4 < entries; ++slot) {
      // Held if any query sees any of its entries.
      bool held = false;
      for (std::int32_t t = 0; t < tokens; ++t) {
        for (std::int32_t i = slot * 4; i < std::min(entries, slot * 4 + 4); ++i) {
          held |= sees(kind_.reach, entries - tokens + t, i);
        }
      }
      if (!held) continue;
      const std::int32_t sinks = sink_slots();
      if (slot >= sinks && first_held < 0) first_held = slot;
      const std::int64_t column = !kind_.compact || slot < sinks ? slot : sinks + slot - first_held;
      table_[row * columns_ + column] = ids.back();
      scale_table_[row * columns_ + column] = scale_ids.back();
      for (std::int32_t i = slot * 4; i < std::min(entries, slot * 4 + 4); ++i) {
        slots[i] = join_entry(ids.back(), i % 4, 4);
        scale_slots[i] = join_entry(scale_ids.back(), i % 4, 4);
      }
      ids.pop_back();
      scale_ids.pop_back();
    }
    first_slot_.push_back(first_held < 0 ? sink_slots() : first_held);

    std::vector<float> keys(entries * layout_.kv_heads * layout_.key_dim);
    std::vector<float> values(entries * layout_.kv_heads * layout_.value_dim);
    for (float& key : keys) key = normal();
    for (float& value : values) value = normal();
    ScalePages scales{scale_pages_, granularity_, scale_slots};
    const ScalePages* with = granularity_ != 0 ? &scales : nullptr;
    append_kv({keys.data(), values.data(), Number::float32}, slots, pages_, 1, with);
    // As they were stored, which other tests vouch for. Entries that nobody holds are poison.
    gather_kv(pages_, 1, slots, {keys.data(), values.data(), Number::float32}, with);
    for (std::int32_t i = 0; i < entries; ++i) {
      if (slots[i] != -1) continue;
      std::fill_n(keys.begin() + i * layout_.kv_heads * layout_.key_dim,
                  layout_.kv_heads * layout_.key_dim, NAN);
      std::fill_n(values.begin() + i * layout_.kv_heads * layout_.value_dim,
                  layout_.kv_heads * layout_.value_dim, NAN);
    }
    keys_.push_back(keys);
    values_.push_back(values);
  }

  std::vector<double> dense(std::size_t row, std::int32_t token, std::uint32_t head) const {
    const auto [tokens, entries] = lengths_[row];
    const std::uint32_t kv_head = head / 3;
    const float* query =
        &queries_[((cu_seqlens_[row] + token) * query_heads() + head) * layout_.key_dim];
    std::vector<double> products(entries, -INFINITY);
    for (std::int32_t i = 0; i < entries; ++i) {
      if (!sees(kind_.reach, entries - tokens + token, i)) continue;
      products[i] = 0;
      for (std::uint32_t d = 0; d < layout_.key_dim; ++d) {
        products[i] += double{query[d]} *
                       keys_[row][(i * layout_.kv_heads + kv_head) * layout_.key_dim + d] * scale;
      }
    }
    std::vector<double> out(width(), 0.0);
    if (entries == 0) return out;
    const double largest = *std::max_element(products.begin(), products.end());
    double weights = 0;
    for (std::int32_t i = 0; i < entries; ++i) {
      if (products[i] == -INFINITY) continue;
      const double weight = std::exp(products[i] - largest);
      weights += weight;
      for (std::uint32_t d = 0; d < width(); ++d) {
        out[d] +=
            weight * (kind_.latent
                          ? keys_[row][i * layout_.key_dim + d]
                          : values_[row][(i * layout_.kv_heads + kv_head) * layout_.value_dim + d]);
      }
    }
    for (double& value : out) value /= weights;
    return out;
  }

  std::int32_t sink_slots() const { return static_cast<std::int32_t>((kind_.reach.sinks + 3) / 4); }
  BlockTable block_table(const std::vector<std::int32_t>& table) const {
    if (!kind_.compact) return {table.data(), columns_, columns_};
    return {table.data(), columns_, columns_, first_slot_.data(),
            static_cast<std::uint32_t>(sink_slots())};
  }

  Kind kind_;
  std::vector<Length> lengths_;
  std::uint32_t granularity_;
  KVLayout layout_;
  Bytes arena_, scale_arena_;
  KVPages pages_, scale_pages_;
  ScaleTables scale_tables_;
  std::vector<std::int32_t> cu_seqlens_, seq_lens_, table_, scale_table_, first_slot_;
  std::int64_t columns_ = 0;
  std::vector<float> queries_;
  std::vector<std::vector<float>> keys_, values_;  // per row, as stored
};

TEST_CASE_TEMPLATE("V-04 attention over pages with lengths 0, 1, P, P+1 equals a dense computation",
                   Machine, KVLEAF_LANE_MACHINES) {
  if (skipped<Machine>()) return;
  Random random(51);
  for (const Kind& kind : kinds) {
    CAPTURE(kind.name);
    const std::vector<Bench::Length> lengths =
        kind.reach.causal
            ? std::vector<Bench::Length>{{0, 0}, {0, 5}, {1, 1}, {1, 4}, {4, 4}, {1, 5}, {5, 5}}
            : std::vector<Bench::Length>{{1, 0}, {0, 4}, {3, 1}, {2, 4}, {1, 5}};
    Bench bench(random, kind, Number::float32, 0, lengths);
    CHECK(bench.template worst<Machine>() < 1e-5);
  }
}

TEST_CASE_TEMPLATE(
    "attention over pages of any kind and type equals a dense computation over random batches",
    Machine, KVLEAF_LANE_MACHINES) {
  if (skipped<Machine>()) return;
  Random random(52);
  struct Storage {
    Number number;
    std::uint32_t granularity;
  };
  const Storage storages[] = {{Number::float32, 0},     {Number::bfloat16, 0},
                              {Number::float16, 0},     {Number::float8_e4m3, 0},
                              {Number::float8_e4m3, 8}, {Number::float8_e5m2, 8},
                              {Number::int8, 8}};
  for (const Kind& kind : kinds) {
    for (const Storage& storage : storages) {
      CAPTURE(kind.name);
      CAPTURE(name_of(storage.number));
      CAPTURE(storage.granularity);
      for (int round = 0; round < 6; ++round) {
        std::vector<Bench::Length> lengths;
        for (std::size_t rows = draw(random, 1, 5); rows > 0; --rows) {
          const auto entries = static_cast<std::int32_t>(draw(random, 0, 70));
          const auto tokens =
              static_cast<std::int32_t>(draw(random, 0, kind.reach.causal ? entries : 9));
          lengths.push_back({draw(random, 0, 1) == 0 ? std::min(tokens, 1) : tokens, entries});
        }
        Bench bench(random, kind, storage.number, storage.granularity, lengths);
        REQUIRE(bench.template worst<Machine>() < 1e-4);
      }
    }
  }
}

TEST_CASE("a dummy row reads the null block and gives zeros") {
  const KVLayout layout{
      .layers = 1, .slots = 4, .kv_heads = 1, .key_dim = 8, .value_dim = 8, .element_bytes = 4};
  Bytes arena(2 * layout.page_bytes());
  const std::vector<float> queries(8, 1.0f);
  std::vector<float> out(8, NAN);
  const std::vector<std::int32_t> cu_seqlens{0, 1}, seq_lens{1}, table{0};
  PagedAttention attention;
  attention.queries = queries.data();
  attention.output = out.data();
  attention.query_heads = 1;
  attention.cu_seqlens_q = cu_seqlens;
  attention.seq_lens = seq_lens;
  attention.table = {table.data(), 1, 1};
  attention.pages = {arena.data(), layout.page_bytes(), 1, layout, Number::float32};
  paged_attention(attention);
  CHECK(out == std::vector<float>(8, 0.0f));
}

TEST_CASE("queries and outputs may be of a half type") {
  Random random(53);
  Bench bench(random, kinds[0], Number::bfloat16, 0, {{3, 9}, {1, 30}});
  const std::size_t outputs = 4 * 6 * 16;
  std::vector<float> wide(outputs), same(outputs);
  PagedAttention attention = bench.attention(wide);
  std::vector<std::uint16_t> queries(4 * 6 * 24), halves(outputs);
  converter(Number::float32, Number::bfloat16)(attention.queries, queries.data(), queries.size(),
                                               1);
  // The same queries, rounded, in both runs.
  std::vector<float> rounded(queries.size());
  converter(Number::bfloat16, Number::float32)(queries.data(), rounded.data(), rounded.size(), 1);
  attention.queries = rounded.data();
  paged_attention(attention);
  attention.queries = queries.data();
  attention.output = halves.data();
  attention.number = Number::bfloat16;
  paged_attention(attention);
  for (std::size_t i = 0; i < outputs; ++i) {
    REQUIRE(halves[i] == from_float<BF16>(wide[i]).bits);
  }
}

TEST_CASE(
    "what a device runs passes over slots that the table does not hold, and tokens behind the last "
    "row") {
  Random random(55);
  Bench bench(random, kinds[0], Number::float32, 0, {{2, 30}, {1, 9}});
  std::vector<float> out(5 * 6 * 16, NAN), good(3 * 6 * 16);
  PagedAttention attention = bench.attention(out);
  std::vector<float> queries(5 * 6 * 24);  // with those of the padding
  std::copy_n(static_cast<const float*>(attention.queries), 3 * 6 * 24, queries.begin());
  attention.queries = queries.data();
  AttentionWork work = work_of(attention, 5);  // two tokens more than there are
  const auto run = [&] {
    std::fill(out.begin(), out.end(), NAN);
    for (std::int64_t token = 0; token < work.tokens; ++token) {
      for (std::uint32_t head = 0; head < work.query_heads; ++head)
        attend<max_head_dim>(work, token, head, OneLane{});
    }
  };
  run();
  CHECK(std::all_of(out.begin() + 3 * 6 * 16, out.end(), [](float x) { return x == 0; }));
  good.assign(out.begin(), out.begin() + 3 * 6 * 16);
  CHECK(std::none_of(good.begin(), good.end(), [](float x) { return std::isnan(x); }));
  // Row 1 has three slots. With its last out of the table or naming no block its ninth entry is not
  // there, and row 0 is as it was.
  std::vector<std::int32_t> table(attention.table.blocks,
                                  attention.table.blocks + 2 * attention.table.row_stride);
  work.table.blocks = table.data();
  for (const std::int32_t nobody : {-1, 1000}) {
    table[static_cast<std::size_t>(attention.table.row_stride) + 2] = nobody;
    run();
    CHECK(std::equal(out.begin(), out.begin() + 2 * 6 * 16, good.begin()));
    CHECK_FALSE(
        std::equal(out.begin() + 2 * 6 * 16, out.begin() + 3 * 6 * 16, good.begin() + 2 * 6 * 16));
    CHECK(std::none_of(out.begin(), out.end(), [](float x) { return std::isnan(x); }));
  }
  work.table.columns = 2;
  const std::vector<float> before = out;
  run();
  CHECK(
      std::equal(out.begin() + 2 * 6 * 16, out.begin() + 3 * 6 * 16, before.begin() + 2 * 6 * 16));
}

TEST_CASE("attention that cannot be is refused, and nothing is written") {
  Random random(54);
  Bench bench(random, kinds[2], Number::float32, 0, {{2, 30}, {1, 9}});
  const std::vector<float> before(3 * 6 * 16, 4.0f);
  std::vector<float> out = before;
  const PagedAttention good = bench.attention(out);
  const auto refused = [&](auto spoil, const char* message) {
    PagedAttention bad = good;
    spoil(bad);
    CHECK_THROWS_WITH_AS(paged_attention(bad), message, KernelError);
    CHECK(out == before);
  };
  const std::vector<std::int32_t> decreasing{0, 2, 1}, early{0, 2, 12}, short_lens{30};
  refused([&](auto& bad) { bad.cu_seqlens_q = decreasing; },
          "row 1 has -1 query tokens from 2 and 9 entries");
  refused([&](auto& bad) { bad.cu_seqlens_q = early; },
          "row 1 has 10 query tokens from 2 and 9 entries");
  refused([&](auto& bad) { bad.seq_lens = short_lens; }, "3 cumulative lengths for 1 rows");
  refused([&](auto& bad) { bad.query_heads = 5; }, "5 query heads over 2 KV heads");
  refused([&](auto& bad) { bad.layer = 2; }, "layer 2 of pages with 2 layers");
  refused([&](auto& bad) { bad.number = Number::int8; }, "entries of int8 with pages of float32");
  refused([&](auto& bad) { bad.table.columns = 7; },
          "slot 7 of row 0 is in reach and not in a table of 7 columns");
  std::vector<std::int32_t> foreign(good.table.blocks,
                                    good.table.blocks + 2 * good.table.row_stride);
  foreign[1] = 1000;  // a sink of row 0
  refused([&](auto& bad) { bad.table.blocks = foreign.data(); },
          ("slot 1 of row 0 names block 1000 of " + std::to_string(good.pages.blocks)).c_str());
  CHECK_NOTHROW(paged_attention(good));
}

}  // namespace
}  // namespace kvleaf::kernels::test
