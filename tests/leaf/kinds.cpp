// The leaf kinds: the bytes and alignments they come to, what a request holds of each, what is
// refused.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "kvleaf/leaf/leaf.h"

using namespace kvleaf;

namespace {

constexpr AttentionOptions small = {
    .layers = 2, .kv_heads = 4, .head_dim = 8, .tokens_per_page = 16};

Slab conv(std::uint32_t dim, std::uint32_t width) {
  return {.name = "conv", .shape = {dim, width}, .dtype = DType::bfloat16};
}
Slab recurrent(std::uint32_t heads, std::uint32_t k, std::uint32_t v) {
  return {.name = "recurrent", .shape = {heads, k, v}, .dtype = DType::float32};
}

// A kind that the library does not know: a window with bytes of its own.
class ForeignWindow : public KVLeafRegion {
 public:
  explicit ForeignWindow(std::string leaf_id)
      : KVLeafRegion(std::move(leaf_id),
                     KVCacheGroupId("foreign", AccessPattern::custom({.tail_begin = begin}),
                                    Writing::append),
                     12345, {.stride_alignment = 1, .tokens_per_page = 8}) {}

 private:
  static std::uint32_t begin(std::uint32_t n) { return n < 32 ? 0 : n - 31; }
};

// Every kind shipped, and one that is not.
Leaves all_kinds() {
  const auto values =
      std::make_shared<FullAttentionLeaf>("values", AttentionOptions{.layers = 2,
                                                                     .kv_heads = 4,
                                                                     .head_dim = 8,
                                                                     .dtype = DType::float8_e4m3,
                                                                     .tokens_per_page = 16});
  const auto state = [](StateKernel kernel, std::uint32_t rollback) {
    return StateOptions{.layers = 2,
                        .slabs = {recurrent(2, 4, 4)},
                        .kernel = kernel,
                        .rollback = rollback,
                        .tokens_per_page = 16};
  };
  return {
      values,
      std::make_shared<ScalesLeaf>(*values, ScalesOptions{.granularity = 8}),
      std::make_shared<LatentAttentionLeaf>(
          "latent", LatentOptions{.layers = 2, .width = 24, .tokens_per_page = 4}),
      std::make_shared<SlidingWindowLeaf>("window", WindowOptions{.window = 40}, small),
      std::make_shared<SlidingWindowLeaf>("sinks", WindowOptions{.window = 13, .sinks = 20}, small),
      std::make_shared<SlidingWindowLeaf>(
          "compact", WindowOptions{.window = 8, .sinks = 1, .compact = true}, small),
      std::make_shared<ChunkedAttentionLeaf>("chunk", 24, small),
      std::make_shared<RecurrentStateLeaf>("state", state(StateKernel::in_place, 0)),
      std::make_shared<RecurrentStateLeaf>("drafts", state(StateKernel::in_out, 3)),
      std::make_shared<CrossAttentionLeaf>("cross", small),
      std::make_shared<ScratchLeaf>("scratch", 1000),
      std::make_shared<KVLeafRegion>("bare", KVCacheGroupId::full(), 512),
      std::make_shared<ForeignWindow>("foreign")};
}

std::string refusal(const std::function<void()>& construct) {
  try {
    construct();
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  return "accepted";
}

bool names(const std::string& message, std::string_view leaf) {
  return message != "accepted" && message.find("'" + std::string(leaf)) != std::string::npos;
}

}  // namespace

TEST_CASE(
    "L-05 a state reserves one block, a checkpoint only with caching, and its drafts' states") {
  for (const std::uint32_t rollback : {0U, 3U}) {
    const RecurrentStateLeaf leaf(
        "state", {.layers = 1, .slabs = {recurrent(1, 2, 2)}, .rollback = rollback});
    for (const std::uint32_t slots : {1U, 7U, 100000U}) {
      CHECK(leaf.blocks_to_reserve(slots, 16, {}) == 1 + rollback);
      CHECK(leaf.blocks_to_reserve(slots, 16, {.enable_prefix_caching = true}) == 2 + rollback);
      CHECK(leaf.blocks_to_reserve(slots, 16, {.step_tokens = 4096}) == 1 + rollback);
    }
    CHECK(leaf.blocks_to_reserve(0, 16, {.enable_prefix_caching = true}) == 0);
  }
}

TEST_CASE("L-06 scratch is one block of any request, and is never cached") {
  const ScratchLeaf leaf("scratch", 4096);
  for (const std::uint32_t slots : {1U, 100U}) {
    CHECK(leaf.blocks_to_reserve(slots, 16, {.enable_prefix_caching = true, .step_tokens = 64}) ==
          1);
  }
  CHECK(leaf.blocks_to_reserve(0, 16, {}) == 0);
  CHECK_FALSE(leaf.cacheable());
  CHECK(leaf.group_id().pattern.reach(1000, 16).empty());
  CHECK(leaf.stride_alignment() == 1);
  for (const Leaf& other : all_kinds()) {
    CHECK(other->cacheable() == (other->group_id().writing != Writing::exclusive));
  }
}

TEST_CASE("L-07 fp8 values and their scales have pages of their own in one group") {
  const FullAttentionLeaf values("kv", {.layers = 50,
                                        .kv_heads = 16,
                                        .head_dim = 256,
                                        .dtype = DType::float8_e4m3,
                                        .tokens_per_page = 128});
  const ScalesLeaf scales(values, {.granularity = 128, .dtype = DType::bfloat16});
  CHECK(values.bytes_per_page() == 52'428'800);
  CHECK(scales.bytes_per_page() == 819'200);
  CHECK(scales.leaf_id() == "kv.scales");
  CHECK(scales.group_id() == values.group_id());
  CHECK(scales.tokens_per_page() == 128U);
  CHECK(scales.layers() == 50);
  CHECK(values.stride_alignment() == 16 * 256);
  CHECK(scales.stride_alignment() == 16 * 2 * 2);
  const std::string message =
      refusal([&] { ScalesLeaf(values, {.granularity = 96, .dtype = DType::bfloat16}); });
  CHECK(names(message, "kv.scales"));
  CHECK(message.find("96") != std::string::npos);
  CHECK(names(refusal([&] { ScalesLeaf(values, {.granularity = 0}); }), "kv.scales"));
}

TEST_CASE("scales follow their values: window, latent width and entries per page") {
  const SlidingWindowLeaf window("w", {.window = 64, .sinks = 4, .compact = true},
                                 {.layers = 3,
                                  .kv_heads = 2,
                                  .head_dim = 64,
                                  .value_head_dim = 32,
                                  .dtype = DType::float8_e5m2,
                                  .tokens_per_page = 16});
  const ScalesLeaf beside(window, {.granularity = 32});
  CHECK(beside.group_id() == KVCacheGroupId::sliding_window(64, 4));
  CHECK(beside.bytes_per_page() == 3 * 16 * 2 * (2 + 1) * 4);
  const LatentAttentionLeaf latent(
      "mla", {.layers = 61, .width = 512, .dtype = DType::float8_e4m3, .tokens_per_page = 64});
  CHECK(ScalesLeaf(latent, {.granularity = 128}).bytes_per_page() == 61 * 64 * 4 * 4);
  const FullAttentionLeaf compressed("c", {.layers = 1,
                                           .kv_heads = 1,
                                           .head_dim = 128,
                                           .dtype = DType::float8_e4m3,
                                           .tokens_per_page = 128,
                                           .slots_per_page = 32});
  CHECK(ScalesLeaf(compressed, {.granularity = 128}).slots_per_page(128) == 32);
}

TEST_CASE("L-08 a compressed page counts tokens but stores fewer entries") {
  const LatentOptions options = {
      .layers = 4, .width = 100, .tokens_per_page = 128, .slots_per_page = 32};
  const LatentAttentionLeaf leaf("compressed", options);
  CHECK(leaf.bytes_per_page() == 4 * 100 * 2 * 32);
  CHECK(leaf.slots_per_page(128) == 32);
  CHECK(leaf.group_id().pattern.slots(256, 128).count() == 2);
  CHECK(leaf.blocks_to_reserve(2, 128, {}) == 2);
  LatentOptions uneven = options;
  uneven.slots_per_page = 48;
  const std::string message = refusal([&] { LatentAttentionLeaf("compressed", uneven); });
  CHECK(names(message, "compressed"));
  CHECK(message.find("48") != std::string::npos);
  CHECK(message.find("128") != std::string::npos);
  uneven.slots_per_page = 0;
  CHECK(names(refusal([&] { LatentAttentionLeaf("compressed", uneven); }), "compressed"));
  CHECK(FullAttentionLeaf("plain", small).slots_per_page(16) == 16);
}

TEST_CASE("L-09 a window past the model's length reserves as a full leaf") {
  const SlidingWindowLeaf window("w", {.window = 8192}, small);
  for (std::uint32_t slots = 0; slots <= 256; ++slots) {
    CHECK(window.blocks_to_reserve(slots, 16, {}) == slots);
  }
}

TEST_CASE("L-11 what a leaf reserves covers every holding, and some start reaches it") {
  for (const Leaf& leaf : all_kinds()) {
    CAPTURE(leaf->leaf_id());
    const AccessPattern& pattern = leaf->group_id().pattern;
    const std::uint32_t page = leaf->tokens_per_page().value_or(16);
    const std::uint32_t slots = 5 * 40 / page;
    for (const std::uint32_t step : {1U, 2U, 7U, 16U, 33U}) {
      if (leaf->group_id().writing == Writing::append) {
        std::uint32_t most = 0;
        for (std::uint32_t n = 0; n <= slots * page; ++n) {
          const SlotReach held = pattern.slots(n, page);
          const std::uint32_t end = (std::min(n + step, slots * page) + page - 1) / page;
          most = std::max(most, held.head_end + end - held.tail_begin);
        }
        CHECK(leaf->blocks_to_reserve(slots, page, {.step_tokens = step}) == most);
      } else if (leaf->group_id().writing == Writing::write_once) {
        CHECK(leaf->blocks_to_reserve(slots, page, {.step_tokens = step}) ==
              pattern.slots(100, page, slots * page).count());
      } else {
        CHECK(leaf->blocks_to_reserve(slots, page, {.step_tokens = step}) == 1 + leaf->rollback());
      }
    }
    std::vector<char> gone(slots + 1, 0);
    for (std::uint32_t n = 0; n <= slots * page; ++n) {
      const SlotReach held = pattern.slots(n, page, slots * page);
      for (std::uint32_t slot = 0; slot * page < n; ++slot) {
        REQUIRE_FALSE((gone[slot] != 0 && held.contains(slot)));
        if (!held.contains(slot)) gone[slot] = 1;
      }
    }
  }
}

TEST_CASE("L-12 sizes of zero are refused, and the leaf is named") {
  const auto with = [](auto change) {
    AttentionOptions options = small;
    change(options);
    return options;
  };
  const auto bare = [](std::uint64_t bytes, KVLeafRegion::Options options) {
    return [=] { KVLeafRegion("bare", KVCacheGroupId::full(), bytes, options); };
  };
  CHECK(names(refusal(bare(0, {})), "bare"));
  CHECK(names(refusal(bare(64, {.stride_alignment = 0, .tokens_per_page = 16})), "bare"));
  CHECK(names(refusal(bare(64, {.stride_alignment = {}, .tokens_per_page = 0})), "bare"));
  CHECK(refusal(bare(64, {})) == "accepted");
  CHECK(refusal([] { KVLeafRegion("", KVCacheGroupId::full(), 64); }).find("no id") !=
        std::string::npos);

  for (const AttentionOptions& options :
       {with([](auto& o) { o.layers = 0; }), with([](auto& o) { o.kv_heads = 0; }),
        with([](auto& o) { o.head_dim = 0; }), with([](auto& o) { o.tokens_per_page = 0; })}) {
    CHECK(names(refusal([&] { FullAttentionLeaf("full", options); }), "full"));
    CHECK(names(refusal([&] { CrossAttentionLeaf("cross", options); }), "cross"));
  }
  CHECK(names(refusal([] { SlidingWindowLeaf("win", {.window = 0}, small); }), "win"));
  CHECK(refusal([] { SlidingWindowLeaf("win", {.window = 1}, small); }) == "accepted");
  CHECK(names(refusal([&] {
                SlidingWindowLeaf("win", {.window = 8, .compact = true},
                                  with([](auto& o) { o.table = TableFormat::csr; }));
              }),
              "win"));
  CHECK(names(refusal([] { ChunkedAttentionLeaf("chunk", 0, small); }), "chunk"));
  CHECK(names(
      refusal([] { LatentAttentionLeaf("mla", {.layers = 1, .width = 0, .tokens_per_page = 16}); }),
      "mla"));
  CHECK(names(refusal([] { ScratchLeaf("scratch", 0); }), "scratch"));
  CHECK(names(refusal([&] {
                FullAttentionLeaf("huge", with([](auto& o) {
                                    o.layers = o.kv_heads = o.head_dim =
                                        std::numeric_limits<std::uint32_t>::max();
                                  }));
              }),
              "huge"));
}

TEST_CASE("L-12 states that cannot be are refused, and the leaf is named") {
  const auto state = [](StateOptions options) {
    return refusal([&] { RecurrentStateLeaf("ssm", options); });
  };
  CHECK(names(state({.layers = 0, .slabs = {recurrent(1, 2, 2)}}), "ssm"));
  CHECK(names(state({.layers = 1, .slabs = {}}), "ssm"));
  CHECK(names(state({.layers = 1, .slabs = {{.name = "s", .shape = {}}}}), "ssm"));
  CHECK(names(state({.layers = 1, .slabs = {{.name = "s", .shape = {4, 0}}}}), "ssm"));
  CHECK(names(state({.layers = 1, .slabs = {{.name = "", .shape = {4}}}}), "ssm"));
  CHECK(names(state({.layers = 1, .slabs = {conv(4, 3), conv(4, 3)}}), "ssm"));
  CHECK(names(
      state({.layers = 1, .slabs = {conv(4, 3), recurrent(1, 2, 2)}, .table = StateTable::rows}),
      "ssm"));
  CHECK(names(state({.layers = 1, .slabs = {recurrent(1, 2, 2)}, .tokens_per_page = 0}), "ssm"));
  constexpr std::uint32_t largest = std::numeric_limits<std::uint32_t>::max();
  CHECK(names(state({.layers = largest, .slabs = {recurrent(largest, largest, largest)}}), "ssm"));
  CHECK(state({.layers = 1, .slabs = {conv(4, 3), recurrent(1, 2, 2)}}) == "accepted");
}

TEST_CASE("L-13 a window defined elsewhere counts as SlidingWindowLeaf does over a random trace") {
  const ForeignWindow foreign("foreign");
  const SlidingWindowLeaf shipped(
      "shipped", {.window = 32}, {.layers = 1, .kv_heads = 1, .head_dim = 8, .tokens_per_page = 8});
  CHECK(foreign.bytes_per_page() == 12345);
  CHECK_FALSE(foreign.can_write_delta());  // its full write is the one it declares
  CHECK(foreign.cacheable());
  std::mt19937 random(13);
  std::uint32_t n = 0;
  for (int step = 0; step < 1000; ++step) {
    const std::uint32_t planned = 1 + random() % 50;
    REQUIRE(foreign.group_id().pattern.slots(n, 8) == shipped.group_id().pattern.slots(n, 8));
    const std::uint32_t slots = (n + planned + 7) / 8;
    const ReserveOptions options = {.enable_prefix_caching = random() % 2 == 0,
                                    .step_tokens = planned};
    REQUIRE(foreign.blocks_to_reserve(slots, 8, options) ==
            shipped.blocks_to_reserve(slots, 8, options));
    n = random() % 20 == 0 ? 0 : n + planned;
  }
}

TEST_CASE("M-01 layers of one kind come to one page size") {
  AttentionOptions gemma = {.layers = 10, .kv_heads = 16, .head_dim = 128, .tokens_per_page = 16};
  CHECK(FullAttentionLeaf("full", gemma).bytes_per_page() == 1'310'720);
  gemma.layers = 52;
  CHECK(SlidingWindowLeaf("window", {.window = 1024}, gemma).bytes_per_page() == 6'815'744);
  const AttentionOptions oss = {.layers = 12, .kv_heads = 8, .head_dim = 64, .tokens_per_page = 16};
  CHECK(FullAttentionLeaf("full", oss).bytes_per_page() == 393'216);
  CHECK(SlidingWindowLeaf("window", {.window = 128}, oss).bytes_per_page() == 393'216);
}

TEST_CASE("M-02 a latent leaf holds one entry per token and layer") {
  const LatentAttentionLeaf leaf("mla", {.layers = 61, .width = 512 + 64, .tokens_per_page = 64});
  CHECK(leaf.bytes_per_page() == 4'497'408);
  CHECK(leaf.stride_alignment() == 576 * 2);
  CHECK(leaf.options().value_head_dim == 0U);
  const ChunkedAttentionLeaf chunked("chunked", 8192, small);
  CHECK(chunked.group_id().name == "chunk_8192");
}

TEST_CASE("M-03 a state leaf holds its convolution and its recurrent slab") {
  // 16 key and 32 value heads of 128: the convolution sees 2 · 16 · 128 + 32 · 128 channels.
  const Slab window = conv(8192, 3);
  const Slab state = recurrent(32, 128, 128);
  CHECK(window.bytes() == 49'152);
  CHECK(state.bytes() == 2'097'152);
  const RecurrentStateLeaf leaf("state", {.layers = 36, .slabs = {window, state}});
  CHECK(leaf.bytes_per_page() == 77'266'944);
  CHECK(leaf.stride_alignment() == 256);
  CHECK(leaf.layers() == 36);
}

TEST_CASE("M-04 a state-space model's slabs add up to one page") {
  const RecurrentStateLeaf both("state",
                                {.layers = 23, .slabs = {conv(6144, 3), recurrent(64, 64, 128)}});
  const RecurrentStateLeaf first("conv", {.layers = 23, .slabs = {conv(6144, 3)}});
  const RecurrentStateLeaf second("ssm", {.layers = 23, .slabs = {recurrent(64, 64, 128)}});
  CHECK(first.bytes_per_page() == 847'872);
  CHECK(second.bytes_per_page() == 48'234'496);
  CHECK(both.bytes_per_page() == 49'082'368);
}

TEST_CASE("attention leaves align to one token's row of K and of V") {
  AttentionOptions options = small;
  CHECK(FullAttentionLeaf("a", options).stride_alignment() == 4 * 8 * 2);
  options.value_head_dim = 12;
  const FullAttentionLeaf uneven("a", options);
  CHECK(uneven.stride_alignment() == 4 * 24 * 2);
  CHECK(uneven.bytes_per_page() == 2 * 16 * 4 * (8 + 12) * 2);
  options.value_head_dim = 0;
  const FullAttentionLeaf keys_only("a", options);
  CHECK(keys_only.stride_alignment() == 4 * 8 * 2);
  CHECK(keys_only.bytes_per_page() == 2 * 16 * 4 * 8 * 2);
}

TEST_CASE("each kind declares its group and how it is written") {
  const auto group = [](const std::string& id) {
    for (const Leaf& leaf : all_kinds()) {
      if (leaf->leaf_id() == id) return leaf->group_id();
    }
    throw std::logic_error(id);
  };
  CHECK(group("values") == KVCacheGroupId::full());
  CHECK(group("latent") == KVCacheGroupId::full());
  CHECK(group("window").name == "window_40");
  CHECK(group("sinks").name == "window_13_sinks_20");
  CHECK(group("chunk") == KVCacheGroupId::chunked(24));
  CHECK(group("state") == KVCacheGroupId::state());
  CHECK(group("cross") == KVCacheGroupId::encoder());
  CHECK(group("scratch") == KVCacheGroupId::scratch());
  CHECK(group("state").writing == Writing::in_place);
  CHECK(group("cross").writing == Writing::write_once);
  CHECK(group("scratch").writing == Writing::exclusive);
}

TEST_CASE("a group whose entries cannot be written as declared is refused") {
  const auto group = [](AccessPattern pattern, Writing writing) {
    return refusal([&] { KVCacheGroupId("g", pattern, writing); });
  };
  CHECK(names(group(AccessPattern::full(), Writing::write_once), "g"));
  CHECK(names(group(AccessPattern::full(), Writing::exclusive), "g"));
  CHECK(names(group(AccessPattern::encoder(), Writing::append), "g"));
  CHECK(names(group(AccessPattern::none(), Writing::in_place), "g"));
  CHECK(group(AccessPattern::window(4), Writing::append) == "accepted");
  CHECK(group(AccessPattern::point(), Writing::in_place) == "accepted");
  CHECK(refusal([] { KVCacheGroupId::state(""); }) == "a group needs a name");
}

TEST_CASE("names are read back, and an unknown one lists what is accepted") {
  for (const Writing writing :
       {Writing::append, Writing::in_place, Writing::write_once, Writing::exclusive}) {
    CHECK(require_writing(name_of(writing)) == writing);
  }
  CHECK(name_of(Writing::exclusive) == "private");
  for (const DType dtype :
       {DType::uint8, DType::int8, DType::int32, DType::int64, DType::float16, DType::bfloat16,
        DType::float32, DType::float8_e4m3, DType::float8_e5m2}) {
    CHECK(require_dtype(name_of(dtype)) == dtype);
    CHECK(dtype_of("torch." + std::string(name_of(dtype))) == dtype);
    CHECK(size_of(dtype) > 0);
  }
  for (const char* name : {"bf16", "bfloat16"}) CHECK(dtype_of(name) == DType::bfloat16);
  for (const char* name : {"fp16", "half", "float16"}) CHECK(dtype_of(name) == DType::float16);
  for (const char* name : {"fp32", "float", "float32"}) CHECK(dtype_of(name) == DType::float32);
  for (const char* name : {"fp8", "fp8_e4m3", "float8_e4m3fn", "float8_e4m3"}) {
    CHECK(dtype_of(name) == DType::float8_e4m3);
  }
  for (const char* name : {"fp8_e5m2", "float8_e5m2"}) CHECK(dtype_of(name) == DType::float8_e5m2);
  CHECK_FALSE(dtype_of("float64"));
  CHECK_FALSE(dtype_of(""));
  CHECK_FALSE(dtype_of("torch."));
  CHECK(refusal([] { require_dtype("float64"); }).find("bfloat16") != std::string::npos);
  CHECK(refusal([] { require_writing("exclusive"); }).find("private") != std::string::npos);
  CHECK(require_table_format("csr") == TableFormat::csr);
  CHECK(refusal([] { require_table_format("paged"); }).find("dense, csr") != std::string::npos);
  CHECK(require_state_table("rows") == StateTable::rows);
  CHECK(refusal([] { require_state_table("row"); }).find("blocks, rows") != std::string::npos);
  CHECK(require_state_kernel("in_out") == StateKernel::in_out);
  CHECK(refusal([] { require_state_kernel("inout"); }).find("in_place, in_out") !=
        std::string::npos);
}
