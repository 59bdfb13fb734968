// KVCache's own promises: slots, tensors, errors that change nothing, reset.
#include "kvleaf/cache/kv_cache.h"

#include <doctest/doctest.h>

#include <cstring>
#include <numeric>
#include <string>
#include <vector>

namespace {

using namespace kvleaf;

KVLayerSpec full(std::uint32_t heads = 2, std::uint32_t dim = 8) {
  return KVLayerSpec::attention({.kv_heads = heads, .head_dim = dim});
}
KVLayerSpec window(std::uint32_t tokens) {
  return KVLayerSpec::attention({.kv_heads = 2, .head_dim = 8, .window = tokens});
}
KVLayerSpec state() {
  return KVLayerSpec::state(LayerState{
      .conv = {{6, 3}, {4, 2}}, .heads = 2, .k_dim = 4, .v_dim = 5, .conv_dtype = DType::bfloat16});
}
std::vector<Token> tokens(std::size_t count, Token first = 0) {
  std::vector<Token> ids(count);
  std::iota(ids.begin(), ids.end(), first);
  return ids;
}
Tensor ids(const std::vector<Token>& values) {
  return Tensor::of(std::span<const std::int32_t>(values));
}
std::int32_t length(const KVCache& cache, std::size_t slot) {
  return cache.seq_lens().data_as<std::int32_t>()[slot];
}
std::vector<std::int64_t> shape(const Tensor& tensor) {
  return {tensor.shape().begin(), tensor.shape().end()};
}
std::vector<std::int64_t> strides(const Tensor& tensor) {
  return {tensor.strides().begin(), tensor.strides().end()};
}
/// Admits, computes and retires a prompt.
void serve(KVCache& cache, std::int32_t slot, const std::vector<Token>& prompt) {
  const auto hit = static_cast<std::int32_t>(cache.admit(slot, ids(prompt)));
  const auto all = static_cast<std::int32_t>(prompt.size());
  cache.prepare_step({0, all - hit}, {hit}, {slot});
  cache.retire(slot, ids(prompt));
}

using Shape = std::vector<std::int64_t>;

}  // namespace

TEST_CASE("C-01 a slotted cache has no table, a paged one has a row per slot") {
  KVCache slotted = KVCache::make(
      {.num_layers = 1, .max_seqs = 4, .max_len = 64, .mode = KVCacheMode::slotted}, {full()});
  CHECK(slotted.mode() == KVCacheMode::slotted);
  CHECK_FALSE(slotted.paged_block_table().defined());
  CHECK(shape(slotted.keys(0)) == Shape{4, 64, 2, 8});
  CHECK(slotted.keys(0).contiguous());
  CHECK(shape(slotted.values(0)) == Shape{4, 64, 2, 8});
  CHECK_THROWS_AS(slotted.prepare_step({0, 1}, {0}, {4}), InvalidArgument);
  CHECK_THROWS_WITH_AS(slotted.admit(0, ids({1, 2})),
                       "admit is for paged caches; this one is slotted", RequestError);

  KVCache paged = KVCache::make({.num_layers = 1, .max_seqs = 4, .max_len = 100}, {full()});
  CHECK(paged.mode() == KVCacheMode::paged);
  CHECK(shape(paged.paged_block_table()) == Shape{4, 7});
  CHECK(shape(paged.seq_lens()) == Shape{4});
  CHECK(paged.seq_lens().dtype() == DType::int32);
  CHECK(paged.keys(0).shape()[1] == 16);
}

TEST_CASE("C-02 pages that are padded show their stride, and their shape as it is") {
  // 640 B of data: one layer, 8 entries, K and V of one head of 20 elements.
  const KVLayerSpec narrow = KVLayerSpec::attention({.kv_heads = 1, .head_dim = 20});
  // Beside it, a page that only a huge block of 1,280 B serves.
  KVCache cache = KVCache::make(
      {.num_layers = 2, .max_seqs = 1, .max_len = 8, .page_tokens = 8, .budget_bytes = 64 << 10},
      {narrow, KVLayerSpec::attention({.kv_heads = 1, .head_dim = 20, .window = 3})});
  const Tensor keys = cache.keys(0);
  CHECK(shape(keys)[1] == 8);
  CHECK(shape(keys)[2] == 1);
  CHECK(shape(keys)[3] == 20);
  CHECK(strides(keys)[0] * 2 ==
        static_cast<std::int64_t>(cache.manager().geometry().leaf(LeafId{0}).page_stride));
  // Out and in again: the same bytes, the same strides.
  std::memset(keys.at({1, 3}).data(), 0x5a, 40);
  const Tensor back = from_dlpack(to_dlpack(keys));
  CHECK(back.data() == keys.data());
  CHECK(strides(back) == strides(keys));
  CHECK(shape(back) == shape(keys));
  CHECK(back.dtype() == DType::bfloat16);
  CHECK(std::to_integer<int>(*back.at({1, 3, 0, 7}).data()) == 0x5a);
  const Tensor versioned = from_dlpack(to_dlpack_versioned(keys));
  CHECK(versioned.data() == keys.data());
  CHECK(strides(versioned) == strides(keys));
}

TEST_CASE("C-02 a view of 640 bytes in a stride of 1,280 is 640 elements apart") {
  std::vector<std::byte> memory(4 * 1280);
  const std::int64_t wanted[] = {4, 8, 40};
  const std::int64_t apart[] = {640, 40, 1};
  const Tensor view(memory.data(), wanted, apart, DType::bfloat16);
  CHECK_FALSE(view.contiguous());
  std::memset(view.at({3, 7}).data(), 0x11, 80);
  DLManagedTensor* out = to_dlpack(view);
  CHECK(out->dl_tensor.strides[0] == 640);
  CHECK(out->dl_tensor.dtype.code == kDLBfloat);
  const Tensor in = from_dlpack(out);
  CHECK(strides(in) == Shape{640, 40, 1});
  CHECK(std::to_integer<int>(memory[3 * 1280 + 7 * 80]) == 0x11);
  CHECK(std::to_integer<int>(*in.at({3, 7, 39}).data()) == 0x11);
}

TEST_CASE("B-05 bf16 and fp8 keep type and strides through DLPack; foreign types are refused") {
  std::vector<std::byte> memory(256);
  for (const DType dtype : {DType::bfloat16, DType::float8_e4m3, DType::float8_e5m2, DType::float16,
                            DType::int8, DType::int64}) {
    const Tensor in = from_dlpack(to_dlpack(Tensor(memory.data(), {2, 3}, dtype)));
    CHECK(in.dtype() == dtype);
    CHECK(strides(in) == Shape{3, 1});
  }
  int deleted = 0;
  DLManagedTensor foreign{};
  std::int64_t extents[] = {4};
  foreign.dl_tensor = {memory.data(), {kDLCPU, 0}, 1, {kDLFloat, 64, 1}, extents, nullptr, 0};
  foreign.manager_ctx = &deleted;
  foreign.deleter = [](DLManagedTensor* self) { ++*static_cast<int*>(self->manager_ctx); };
  CHECK_THROWS_AS(from_dlpack(&foreign), InvalidArgument);
  CHECK(deleted == 0);  // it was not taken over
  foreign.dl_tensor.dtype = {kDLFloat, 32, 1};
  foreign.dl_tensor.device = {static_cast<DLDeviceType>(8), 0};
  CHECK_THROWS_AS(from_dlpack(&foreign), InvalidArgument);
  foreign.dl_tensor.device = {kDLCUDA, 1};
  {
    const Tensor device = from_dlpack(&foreign);
    CHECK(device.device() == Device{Device::Kind::cuda, 1});
    KVCache cache = KVCache::make({.num_layers = 1, .max_seqs = 1, .max_len = 8}, {full()});
    CHECK_THROWS_AS(cache.admit(0, device), PlanShapeError);  // the wrong device
  }
  CHECK(deleted == 1);
}

TEST_CASE("C-03 two caches hand out their own slots; one is free in the other") {
  const KVCacheConfig config{.num_layers = 1, .max_seqs = 2, .max_len = 32};
  KVCache one = KVCache::make(config, {full()});
  KVCache two = KVCache::make(config, {full()});
  CHECK(one.admit(1, ids(tokens(20))) == 0);
  CHECK_THROWS_AS(two.prepare_step({0, 20}, {0}, {1}), RequestError);
  CHECK_THROWS_AS(two.retire(1, ids(tokens(20))), RequestError);
  one.prepare_step({0, 20}, {0}, {1});
  CHECK(length(two, 1) == 0);
  CHECK(two.manager().stats().requests == 0);
  CHECK(one.keys(0).data() != two.keys(0).data());
}

TEST_CASE("C-04 reset with a slot running: as new, and views of before are stale") {
  KVCache cache = KVCache::make({.num_layers = 2, .max_seqs = 2, .max_len = 64, .page_tokens = 4},
                                {full(), state()});
  cache.admit(0, ids(tokens(13)));
  cache.prepare_step({0, 12}, {0}, {0});  // a state is resumed only where a step ended
  cache.prepare_step({0, 1}, {12}, {0});
  cache.retire(0, ids(tokens(13)));
  CHECK(cache.admit(1, ids(tokens(20))) == 12);
  const StepIndices step = cache.prepare_step({0, 4}, {length(cache, 1)}, {1});
  const Tensor keys = cache.keys(0);
  const Tensor lens = cache.seq_lens();
  const Tensor table = cache.paged_block_table(0);
  const Tensor mapping = step.slot_mapping(0);
  const Tensor recurrent = cache.recurrent_state(1);
  std::byte* old = keys.data();
  cache.reset();
  for (const Tensor& view : {keys, lens, table, mapping, recurrent}) {
    CHECK(view.stale());
    CHECK_THROWS_AS(view.data(), StepError);
    CHECK_THROWS_AS(to_dlpack(view), StepError);
  }
  // What was handed out still reads its own bytes, which nobody uses again.
  CHECK(cache.keys(0).data() != old);
  CHECK(length(cache, 1) == 0);
  CHECK(cache.manager().stats().requests == 0);
  CHECK(cache.admit(1, ids(tokens(20))) == 0);
  cache.audit();
}

TEST_CASE("C-05 a budget of 33 pages serves 512 tokens, one of 32 serves 496") {
  const KVLayerSpec layer = KVLayerSpec::attention({.kv_heads = 1, .head_dim = 8});
  KVCacheConfig config{.num_layers = 1, .max_seqs = 1, .max_len = 512};
  const std::uint64_t page = 16 * 2 * 8 * 2;
  // One block per huge block: the null region is rounded up to the alignment of a device, 256.
  REQUIRE(page % 256 == 0);
  config.budget_bytes = 33 * page;
  CHECK(KVCache::make(config, {layer}).longest_request() == 512);
  config.budget_bytes = 32 * page;
  KVCache small = KVCache::make(config, {layer});
  CHECK(small.longest_request() == 496);
  CHECK_THROWS_AS(small.admit(0, ids(tokens(500))), PoolExhausted);
  CHECK(small.admit(0, ids(tokens(496))) == 0);
  small.prepare_step({0, 496}, {0}, {0});
  CHECK_THROWS_AS(small.prepare_step({0, 1}, {496}, {0}), PoolExhausted);
  CHECK(length(small, 0) == 496);
  small.audit();
}

TEST_CASE("guarded pages: a forward that writes to a page after its sequence was let go is found") {
  KVCache cache = KVCache::make({.num_layers = 1,
                                 .max_seqs = 2,
                                 .max_len = 64,
                                 .enable_prefix_caching = false,
                                 .guard_pages = true},
                                {full()});
  serve(cache, 0, tokens(40));
  serve(cache, 0, tokens(40));  // nobody wrote in between
  std::byte* const page = cache.keys(0).data() + cache.keys(0).strides()[0] * 2;  // block 1
  std::memset(page, 1, 16);
  CHECK_THROWS_AS(serve(cache, 0, tokens(40)), InvariantError);
}

TEST_CASE("without a budget every slot reaches max_len at once") {
  KVCache cache = KVCache::make({.num_layers = 4, .max_seqs = 3, .max_len = 90, .page_tokens = 8},
                                {full(), window(20), state(), KVLayerSpec::latent(24)});
  for (std::int32_t slot = 0; slot < 3; ++slot) cache.admit(slot, ids(tokens(90, slot * 100)));
  cache.prepare_step({0, 60, 120, 180}, {0, 0, 0}, {0, 1, 2});
  cache.prepare_step({0, 30, 60, 90}, {60, 60, 60}, {2, 1, 0});
  for (std::size_t slot = 0; slot < 3; ++slot) CHECK(length(cache, slot) == 90);
  cache.audit();
}

TEST_CASE("tensors of states: [max_seqs, ...], one for each convolution window") {
  for (const KVCacheMode mode : {KVCacheMode::paged, KVCacheMode::slotted}) {
    KVCache cache = KVCache::make({.num_layers = 2, .max_seqs = 3, .max_len = 32, .mode = mode},
                                  {state(), full()});
    CHECK(shape(cache.conv_state(0)) == Shape{3, 6, 3});
    CHECK(shape(cache.conv_state(0, 1)) == Shape{3, 4, 2});
    CHECK(cache.conv_state(0).dtype() == DType::bfloat16);
    CHECK(shape(cache.recurrent_state(0)) == Shape{3, 2, 4, 5});
    CHECK(cache.recurrent_state(0).dtype() == DType::float32);
    CHECK(cache.recurrent_state(0).contiguous());
    CHECK_THROWS_AS(cache.conv_state(0, 2), InvalidArgument);
    CHECK_THROWS_AS(cache.conv_state(0, -1), InvalidArgument);
    CHECK_FALSE(cache.conv_state(1).defined());
    CHECK_FALSE(cache.recurrent_state(1).defined());
    CHECK_FALSE(cache.keys(0).defined());
    CHECK_THROWS_AS(cache.keys(2), InvalidArgument);
    CHECK_THROWS_AS(cache.recurrent_state(-1), InvalidArgument);
  }
}

TEST_CASE("a state is cleared for a new sequence, and brought back at a boundary") {
  for (const KVCacheMode mode : {KVCacheMode::paged, KVCacheMode::slotted}) {
    KVCache cache = KVCache::make(
        {.num_layers = 2, .max_seqs = 2, .max_len = 32, .mode = mode, .page_tokens = 4},
        {state(), full()});
    const auto first = [&](std::int64_t slot) { return cache.recurrent_state(0).at({slot}); };
    const auto fill = [&](std::int64_t slot, float value) {
      std::fill_n(first(slot).data_as<float>(), first(slot).size(), value);
    };
    const bool paged = mode == KVCacheMode::paged;
    fill(0, 7);
    if (paged) cache.admit(0, ids(tokens(9)));
    cache.prepare_step({0, 8}, {0}, {0});
    CHECK(first(0).data_as<float>()[39] == 0);
    fill(0, 8);  // as the forward leaves it at 8 tokens
    cache.prepare_step({0, 1}, {8}, {0});
    CHECK(first(0).data_as<float>()[39] == 8);
    fill(0, 9);
    if (!paged) {
      cache.evict_batch(0);
      CHECK(length(cache, 0) == 0);
      continue;
    }
    cache.retire(0, ids(tokens(9)));
    fill(1, 3);
    CHECK(cache.admit(1, ids(tokens(9))) == 8);
    cache.prepare_step({0, 1}, {8}, {1});
    for (int i = 0; i < 40; ++i) CHECK(first(1).data_as<float>()[i] == 8);
    cache.evict_batch(1);
    CHECK(cache.admit(0, ids(tokens(9, 1))) == 0);
    cache.prepare_step({0, 9}, {0}, {0});
    CHECK(first(0).data_as<float>()[0] == 0);
  }
}

TEST_CASE("layers that share read the storage of the layer that owns it") {
  KVCache cache = KVCache::make({.num_layers = 3, .max_seqs = 2, .max_len = 32},
                                {full(), KVLayerSpec::shared(0), KVLayerSpec::shared(1)});
  CHECK(cache.keys(2).data() == cache.keys(0).data());
  CHECK(cache.values(1).data() == cache.values(0).data());
  CHECK(cache.paged_block_table(2).data() == cache.paged_block_table().data());
  CHECK_THROWS_AS(KVCache::make({.num_layers = 2, .max_seqs = 2, .max_len = 32},
                                {KVLayerSpec::shared(1), full()}),
                  InvalidArgument);
}

TEST_CASE("latents are one head of keys without values") {
  KVCache cache =
      KVCache::make({.num_layers = 1, .max_seqs = 2, .max_len = 32}, {KVLayerSpec::latent(576)});
  CHECK(shape(cache.keys(0))[2] == 1);
  CHECK(shape(cache.keys(0))[3] == 576);
  CHECK_FALSE(cache.values(0).defined());
  CHECK_FALSE(cache.keys_values(0).defined());
}

TEST_CASE("a cache with several tables is asked for one by its layer") {
  KVCache cache = KVCache::make(
      {.num_layers = 3, .max_seqs = 2, .max_len = 64, .page_tokens = 8, .max_encoder_len = 20},
      {full(), window(16), KVLayerSpec::cross_attention(2, 8)});
  CHECK_THROWS_AS(cache.paged_block_table(), InvalidArgument);
  CHECK(shape(cache.paged_block_table(0)) == Shape{2, 8});
  CHECK(cache.paged_block_table(0).data() != cache.paged_block_table(1).data());
  CHECK(shape(cache.paged_block_table(2)) == Shape{2, 3});  // a layer of cross attention only
  KVCache states = KVCache::make({.num_layers = 1, .max_seqs = 2, .max_len = 64}, {state()});
  CHECK_FALSE(states.paged_block_table().defined());
  CHECK_FALSE(states.paged_block_table(0).defined());
}

TEST_CASE("what is wrong is told by a typed error, and nothing has changed") {
  KVCache cache = KVCache::make({.num_layers = 2,
                                 .max_seqs = 2,
                                 .max_len = 32,
                                 .page_tokens = 4,
                                 .max_encoder_len = 6,
                                 .max_step_tokens = 24},
                                {full(), KVLayerSpec::cross_attention(2, 8)});
  std::vector<std::uint16_t> encoded(6 * 2 * 8);
  const auto kv = [&](std::int64_t count, DType dtype = DType::bfloat16) {
    return Tensor(reinterpret_cast<std::byte*>(encoded.data()), {count, 2, 8}, dtype);
  };
  cache.admit(0, ids(tokens(10)), -1, {.encoder_digest = "a"});
  const ManagerStats before = cache.manager().stats();
  const auto unchanged = [&] {
    const ManagerStats now = cache.manager().stats();
    CHECK(now.requests == before.requests);
    CHECK(now.steps_in_flight == before.steps_in_flight);
    CHECK(length(cache, 0) == 0);
    CHECK(length(cache, 1) == 0);
    CHECK_FALSE(cache.encoder_filled(0));
    cache.audit();
  };
  SUBCASE("admit") {
    CHECK_THROWS_AS(cache.admit(2, ids(tokens(5))), InvalidArgument);
    CHECK_THROWS_AS(cache.admit(-1, ids(tokens(5))), InvalidArgument);
    CHECK_THROWS_AS(cache.admit(0, ids(tokens(5))), RequestError);  // in use
    CHECK_THROWS_AS(cache.admit(1, ids({})), RequestError);
    CHECK_THROWS_AS(cache.admit(1, ids(tokens(33))), RequestError);
    CHECK_THROWS_AS(cache.admit(1, ids(tokens(5)), -2), InvalidArgument);
    CHECK_THROWS_AS(cache.admit(1, kv(2)), PlanShapeError);
    CHECK_THROWS_AS(cache.admit(1, Tensor()), PlanShapeError);
    const std::vector<std::int64_t> wide = {1, std::int64_t{1} << 40};
    CHECK_THROWS_AS(cache.admit(1, Tensor::of(std::span<const std::int64_t>(wide))),
                    InvalidArgument);
    CHECK_THROWS_AS(cache.admit(1, ids(tokens(5)), -1, {.encoder_len = 7}), RequestError);
  }
  SUBCASE("prepare_step") {
    CHECK_THROWS_AS(cache.prepare_step({0, 10}, {0}, {1}), RequestError);     // free
    CHECK_THROWS_AS(cache.prepare_step({0, 10}, {0}, {2}), InvalidArgument);  // no such slot
    CHECK_THROWS_AS(cache.prepare_step({0, 10}, {1}, {0}), RequestError);     // another past
    CHECK_THROWS_AS(cache.prepare_step({0, 0}, {0}, {0}), PlanShapeError);
    CHECK_THROWS_AS(cache.prepare_step({1, 4}, {0}, {0}), PlanShapeError);
    CHECK_THROWS_AS(cache.prepare_step({0, 4, 8}, {0}, {0}), PlanShapeError);
    CHECK_THROWS_AS(cache.prepare_step({0, 4, 8}, {0, 0}, {0, 0}), RequestError);  // twice
    CHECK_THROWS_AS(cache.prepare_step({0, 25}, {0}, {0}), PlanShapeError);
    CHECK_THROWS_AS(cache.prepare_step({0, 11}, {0}, {0}), RequestError);  // not filled
    CHECK_THROWS_AS(cache.prepare_step({}, {}, {}), PlanShapeError);
    const std::uint32_t two[] = {1, 2};
    CHECK_THROWS_AS(cache.reserve(ids({0}), two), PlanShapeError);
    CHECK_THROWS_AS(cache.reserve(ids({1, 0}), two), RequestError);
  }
  SUBCASE("fill") {
    CHECK_THROWS_AS(cache.fill(0, 0, kv(4), kv(4)), InvalidArgument);  // not cross attention
    CHECK_THROWS_AS(cache.fill(2, 0, kv(4), kv(4)), InvalidArgument);
    CHECK_THROWS_AS(cache.fill(-1, 0, kv(4), kv(4)), InvalidArgument);
    CHECK_THROWS_AS(cache.fill(1, 1, kv(4), kv(4)), RequestError);  // free
    CHECK_THROWS_AS(cache.fill(1, 3, kv(4), kv(4)), InvalidArgument);
    CHECK_THROWS_AS(cache.fill(1, 0, kv(4, DType::float16), kv(4)), PlanShapeError);
    CHECK_THROWS_AS(cache.fill(1, 0, kv(4), kv(5)), PlanShapeError);
    CHECK_THROWS_AS(cache.fill(1, 0, kv(4), Tensor()), PlanShapeError);
    CHECK_THROWS_AS(cache.fill(1, 0, ids({1}), kv(4)), PlanShapeError);
    const Tensor wrong(reinterpret_cast<std::byte*>(encoded.data()), {4, 8, 2}, DType::bfloat16);
    CHECK_THROWS_AS(cache.fill(1, 0, wrong, wrong), PlanShapeError);
    encoded.resize(7 * 16);
    CHECK_THROWS_AS(cache.fill(1, 0, kv(7), kv(7)), RequestError);
    CHECK_THROWS_AS(cache.fill(1, 0, kv(0), kv(0)), RequestError);
  }
  SUBCASE("positions and ends") {
    CHECK_THROWS_AS(cache.update_position(0, 1), RequestError);  // never reserved
    CHECK_THROWS_AS(cache.update_position(0, 33), RequestError);
    CHECK_THROWS_AS(cache.update_position(0, -1), RequestError);
    CHECK_THROWS_AS(cache.update_position(1, 0), RequestError);
    CHECK_THROWS_AS(cache.update_position(2, 0), InvalidArgument);
    CHECK_THROWS_AS(cache.retire(1, ids(tokens(4))), RequestError);
    CHECK_THROWS_AS(cache.retire(0, ids(tokens(10, 1))), RequestError);  // another prompt
    CHECK_THROWS_AS(cache.retire(0, ids(tokens(10)), -2), InvalidArgument);
    CHECK_THROWS_AS(cache.evict_batch(2), InvalidArgument);
    cache.evict_batch(1);  // a free slot: nothing
  }
  unchanged();
}

TEST_CASE("a step past max_len is refused, naming the row, in both modes") {
  for (const KVCacheMode mode : {KVCacheMode::paged, KVCacheMode::slotted}) {
    KVCache cache =
        KVCache::make({.num_layers = 1, .max_seqs = 2, .max_len = 32, .mode = mode}, {full()});
    if (mode == KVCacheMode::paged) cache.admit(1, ids(tokens(30)));
    CHECK_THROWS_WITH_AS(cache.prepare_step({0, 33}, {0}, {1}),
                         "row 0: slot 1 at 0 tokens, 33 more pass max_len 32", RequestError);
    cache.prepare_step({0, 30}, {0}, {1});
    CHECK_THROWS_AS(cache.prepare_step({0, 3}, {30}, {1}), RequestError);
    cache.prepare_step({0, 2}, {30}, {1});
    CHECK(length(cache, 1) == 32);
    CHECK_THROWS_AS(cache.prepare_step({0, 1}, {32}, {1}), RequestError);
  }
}

TEST_CASE("a cache that cannot be is refused, and says what would be accepted") {
  const KVCacheConfig good{.num_layers = 1, .max_seqs = 2, .max_len = 32};
  const auto with = [&](auto change) {
    KVCacheConfig config = good;
    change(config);
    return config;
  };
  CHECK_THROWS_AS(KVCache::make(good, {full(), full()}), InvalidArgument);
  CHECK_THROWS_AS(KVCache::make(good, {KVLayerSpec::none()}), InvalidArgument);
  CHECK_THROWS_AS(KVCache::make(good, {KVLayerSpec::cross_attention(2, 8)}), InvalidArgument);
  CHECK_THROWS_AS(KVCache::make(with([](auto& c) { c.max_seqs = 0; }), {full()}), InvalidArgument);
  CHECK_THROWS_AS(KVCache::make(with([](auto& c) { c.max_len = 0; }), {full()}), InvalidArgument);
  CHECK_THROWS_AS(KVCache::make(with([](auto& c) { c.device = "tpu"; }), {full()}),
                  InvalidArgument);
  CHECK_THROWS_WITH_AS(KVCache::make(with([](auto& c) { c.device = "cuda:0"; }), {full()}),
                       doctest::Contains("expected cpu"), InvalidArgument);
  CHECK_THROWS_AS(KVCache::make(with([](auto& c) { c.budget_bytes = 100; }), {full()}),
                  GeometryError);
  CHECK_THROWS_AS(KVLayerSpec::state(LayerState{}), InvalidArgument);
  CHECK_THROWS_AS(KVLayerSpec::state(LayerState{.heads = 2}), InvalidArgument);
  CHECK_THROWS_AS(KVLayerSpec::state(LayerState{.conv = {{4, 0}}}), InvalidArgument);
}

TEST_CASE("addressable_len bounds what admit matches and what retire leaves") {
  KVCache cache =
      KVCache::make({.num_layers = 1, .max_seqs = 2, .max_len = 64, .page_tokens = 4}, {full()});
  serve(cache, 0, tokens(33));
  CHECK(cache.admit(0, ids(tokens(33)), 17) == 16);
  cache.evict_batch(0);
  CHECK(cache.admit(0, ids(tokens(33)), 0) == 0);
  cache.evict_batch(0);
  CHECK(cache.admit(0, ids(tokens(33))) == 32);
  cache.evict_batch(0);
  // What was not matched for want of addressable tokens was not published either.
  const std::vector<Token> other = tokens(33, 500);
  cache.admit(0, ids(other));
  cache.prepare_step({0, 33}, {0}, {0});
  cache.retire(0, ids(other), 10);
  CHECK(cache.admit(0, ids(other)) == 8);
}

TEST_CASE("what was generated is findable after retire; after evict_batch nothing is") {
  KVCache cache =
      KVCache::make({.num_layers = 1, .max_seqs = 2, .max_len = 64, .page_tokens = 4}, {full()});
  const std::vector<Token> all = tokens(21);
  cache.admit(0, ids(tokens(9)));
  cache.prepare_step({0, 9}, {0}, {0});
  for (std::int32_t n = 9; n < 20; ++n) cache.prepare_step({0, 1}, {n}, {0});
  cache.retire(0, ids(all));  // one more id than was computed
  CHECK(cache.admit(1, ids(tokens(30))) == 20);
  cache.evict_batch(1);
  const std::vector<Token> lost = tokens(20, 700);
  cache.admit(0, ids(lost));
  cache.prepare_step({0, 20}, {0}, {0});
  cache.evict_batch(0);
  CHECK(cache.admit(0, ids(lost)) == 0);
}

TEST_CASE("salt and adapter keep prompts apart") {
  KVCache cache =
      KVCache::make({.num_layers = 1, .max_seqs = 2, .max_len = 64, .page_tokens = 4}, {full()});
  const auto run = [&](const AdmitExtras& extras) {
    const auto hit = static_cast<std::int32_t>(cache.admit(0, ids(tokens(17)), -1, extras));
    cache.prepare_step({0, 17 - hit}, {hit}, {0});
    cache.retire(0, ids(tokens(17)));
    return hit;
  };
  CHECK(run({}) == 0);
  CHECK(run({}) == 16);
  CHECK(run({.salt = "tenant"}) == 0);
  CHECK(run({.adapter = "a@1"}) == 0);
  CHECK(run({.adapter = "a@1"}) == 16);
  CHECK(run({.adapter = "a@2"}) == 0);
}

TEST_CASE("an encoder's input is found by its digest, and without one nothing is reused") {
  KVCache cache = KVCache::make(
      {.num_layers = 2, .max_seqs = 2, .max_len = 64, .page_tokens = 4, .max_encoder_len = 10},
      {full(), KVLayerSpec::cross_attention(2, 8)});
  std::vector<std::uint16_t> encoded(10 * 16);
  std::iota(encoded.begin(), encoded.end(), std::uint16_t{1});
  const Tensor kv(reinterpret_cast<std::byte*>(encoded.data()), {7, 2, 8}, DType::bfloat16);
  const auto run = [&](std::int32_t slot, const AdmitExtras& extras) {
    const auto hit = static_cast<std::int32_t>(cache.admit(slot, ids(tokens(17)), -1, extras));
    if (!cache.encoder_filled(slot)) cache.fill(1, slot, kv, kv);
    cache.prepare_step({0, 17 - hit}, {hit}, {slot});
    return hit;
  };
  CHECK(run(0, {.encoder_digest = "image"}) == 0);
  CHECK(cache.encoder_lens().data_as<std::int32_t>()[0] == 7);
  cache.retire(0, ids(tokens(17)));
  CHECK(cache.encoder_lens().data_as<std::int32_t>()[0] == 0);
  CHECK(cache.admit(1, ids(tokens(17)), -1, {.encoder_digest = "image"}) == 16);
  CHECK(cache.encoder_filled(1));
  CHECK(cache.encoder_lens().data_as<std::int32_t>()[1] == 7);
  const StepIndices step = cache.prepare_step({0, 1}, {16}, {1});
  CHECK(step.encoder_lens().data_as<std::int32_t>()[0] == 7);
  const StepIndices::Csr csr = step.csr(1);
  CHECK(csr.indices.size() == 2);
  CHECK(csr.last_page_len.data_as<std::int32_t>()[0] == 3);
  // Its pages hold what was filled.
  const auto* table = cache.paged_block_table(1).at({1}).data_as<std::int32_t>();
  for (std::int64_t t = 0; t < 7; ++t)
    CHECK(std::memcmp(cache.keys(1).at({table[t / 4], t % 4}).data(), encoded.data() + t * 16,
                      32) == 0);
  cache.evict_batch(1);
  CHECK(run(0, {.encoder_digest = "another"}) == 0);
  cache.evict_batch(0);
  CHECK(run(0, {}) == 0);
  cache.retire(0, ids(tokens(17)));
  CHECK(run(0, {}) == 0);
  cache.evict_batch(0);
  // Text alone, where the model allows it: its own prefixes.
  CHECK(run(0, {.encoder_len = 0}) == 0);
  cache.retire(0, ids(tokens(17)));
  CHECK(run(0, {.encoder_len = 0}) == 16);
  cache.audit();
}

TEST_CASE("strided keys and values of an encoder are packed as they are filled") {
  KVCache cache = KVCache::make({.num_layers = 1,
                                 .max_seqs = 2,
                                 .max_len = 16,
                                 .mode = KVCacheMode::slotted,
                                 .dtype = DType::float32,
                                 .max_encoder_len = 5},
                                {KVLayerSpec::cross_attention(2, 3)});
  std::vector<float> source(5 * 2 * 3);
  std::iota(source.begin(), source.end(), 0.0f);
  // [heads, dim, tokens] in memory, seen as [tokens, heads, dim].
  const std::int64_t wanted[] = {5, 2, 3};
  const std::int64_t apart[] = {1, 15, 5};
  const Tensor odd(reinterpret_cast<std::byte*>(source.data()), wanted, apart, DType::float32);
  cache.fill(0, 1, odd, odd);
  for (std::int64_t t = 0; t < 5; ++t)
    for (std::int64_t h = 0; h < 2; ++h)
      for (std::int64_t d = 0; d < 3; ++d) {
        CHECK(*cache.keys(0).at({1, t, h, d}).data_as<float>() ==
              static_cast<float>(h * 15 + d * 5 + t));
        CHECK(*cache.values(0).at({1, t, h, d}).data_as<float>() ==
              *cache.keys(0).at({1, t, h, d}).data_as<float>());
      }
}

TEST_CASE("step indices: the arrays of a variable-length forward") {
  for (const KVCacheMode mode : {KVCacheMode::paged, KVCacheMode::slotted}) {
    KVCache cache = KVCache::make(
        {.num_layers = 1, .max_seqs = 3, .max_len = 64, .mode = mode, .page_tokens = 4}, {full()});
    const bool paged = mode == KVCacheMode::paged;
    if (paged) {
      cache.admit(2, ids(tokens(7)));
      cache.admit(0, ids(tokens(3, 90)));
    }
    cache.prepare_step({0, 5}, {0}, {2});
    const StepIndices step = cache.prepare_step({0, 3, 5}, {0, 5}, {0, 2});
    CHECK(step.batch() == 2);
    CHECK(step.num_tokens() == 5);
    CHECK(step.max_seqlen_q() == 3);
    CHECK(step.max_seqlen_k() == 7);
    const auto list = [](const Tensor& tensor) {
      const auto* first = tensor.data_as<std::int32_t>();
      return std::vector<std::int32_t>(first, first + tensor.size());
    };
    using List = std::vector<std::int32_t>;
    CHECK(list(step.slot_ids()) == List{0, 2});
    CHECK(list(step.cu_seqlens_q()) == List{0, 3, 5});
    CHECK(list(step.cu_seqlens_k()) == List{0, 3, 10});
    CHECK(list(step.past_lens()) == List{0, 5});
    CHECK(list(step.seq_lens()) == List{3, 7});
    const auto* positions = step.positions().data_as<std::int64_t>();
    CHECK(std::vector<std::int64_t>(positions, positions + 5) ==
          std::vector<std::int64_t>{0, 1, 2, 5, 6});
    const auto* mapping = step.slot_mapping().data_as<std::int64_t>();
    if (!paged) {
      CHECK(std::vector<std::int64_t>(mapping, mapping + 5) ==
            std::vector<std::int64_t>{0, 1, 2, 2 * 64 + 5, 2 * 64 + 6});
      CHECK_FALSE(step.block_table().defined());
      CHECK_FALSE(step.csr().indptr.defined());
      continue;
    }
    const auto* table = cache.paged_block_table().at({2}).data_as<std::int32_t>();
    CHECK(mapping[3] == table[1] * 4 + 1);
    CHECK(mapping[4] == table[1] * 4 + 2);
    CHECK(step.block_table().at({1}).data_as<std::int32_t>()[1] == table[1]);
    const StepIndices::Csr csr = step.csr();
    CHECK(list(csr.indptr) == List{0, 1, 3});
    CHECK(list(csr.indices)[2] == table[1]);
    CHECK(list(csr.last_page_len) == List{3, 3});
  }
}

TEST_CASE("a step's tensors are stale once its arrays serve another step") {
  KVCache cache =
      KVCache::make({.num_layers = 1, .max_seqs = 1, .max_len = 64, .page_tokens = 4}, {full()});
  cache.admit(0, ids(tokens(7)));
  const Tensor first = cache.prepare_step({0, 7}, {0}, {0}).slot_mapping();
  CHECK(first.data_as<std::int64_t>() != nullptr);
  cache.prepare_step({0, 1}, {7}, {0});
  CHECK_FALSE(first.stale());
  cache.prepare_step({0, 1}, {8}, {0});
  CHECK(first.stale());
  CHECK_THROWS_AS(first.data(), StepError);
}

TEST_CASE("a step that did not fit counts: what came before the one before it is stale") {
  KVCache cache = KVCache::make(
      {.num_layers = 1, .max_seqs = 2, .max_len = 512, .budget_bytes = 32 * 1024}, {full()});
  cache.admit(0, ids(tokens(200)));
  const StepIndices step = cache.prepare_step({0, 200}, {0}, {0});
  const Tensor table = step.block_table();
  const std::int32_t first = table.data_as<std::int32_t>()[0];
  CHECK_THROWS_AS(cache.prepare_step({0, 300}, {200}, {0}), PoolExhausted);
  CHECK_FALSE(table.stale());
  CHECK(table.data_as<std::int32_t>()[0] == first);
  CHECK(length(cache, 0) == 200);
  cache.prepare_step({0, 1}, {200}, {0});
  CHECK(table.stale());
  CHECK(cache.paged_block_table().data_as<std::int32_t>()[0] == first);
  cache.audit();
}

TEST_CASE("reserve tells where each sequence goes on, and prepare_step then describes that step") {
  KVCache cache =
      KVCache::make({.num_layers = 1, .max_seqs = 2, .max_len = 64, .page_tokens = 4}, {full()});
  cache.admit(0, ids(tokens(7)));
  cache.admit(1, ids(tokens(5, 50)));
  const std::uint32_t counts[] = {5, 7};
  const Tensor offsets = cache.reserve(ids({1, 0}), counts);
  CHECK(offsets.data_as<std::int32_t>()[0] == 0);
  CHECK(length(cache, 0) == 7);
  const StepIndices step = cache.prepare_step({0, 5, 12}, {0, 0}, {1, 0});
  CHECK(length(cache, 0) == 7);  // not once more
  CHECK(step.num_tokens() == 12);
  const std::uint32_t one[] = {1};
  CHECK(cache.reserve(ids({0}), one).data_as<std::int32_t>()[0] == 7);
  // Another step than the one reserved is a new one.
  cache.prepare_step({0, 1}, {8}, {0});
  CHECK(length(cache, 0) == 9);
}

TEST_CASE("update_position takes back drafts, to any length that is still held") {
  KVCache cache = KVCache::make({.num_layers = 2, .max_seqs = 1, .max_len = 64, .page_tokens = 4},
                                {full(), window(6)});
  cache.admit(0, ids(tokens(20)));
  cache.prepare_step({0, 20}, {0}, {0});
  cache.update_position(0, 17);
  CHECK(length(cache, 0) == 17);
  cache.update_position(0, 19);  // the step is under way: more of it stands after all
  cache.prepare_step({0, 3}, {19}, {0});
  cache.prepare_step({0, 8}, {22}, {0});
  CHECK_THROWS_AS(cache.update_position(0, 10), RequestError);  // the window has gone on
  CHECK(length(cache, 0) == 30);
  cache.update_position(0, 29);
  CHECK(length(cache, 0) == 29);
  cache.prepare_step({0, 1}, {29}, {0});
  KVCache slotted = KVCache::make(
      {.num_layers = 1, .max_seqs = 1, .max_len = 64, .mode = KVCacheMode::slotted}, {full()});
  slotted.update_position(0, 12);
  slotted.prepare_step({0, 1}, {12}, {0});
  CHECK(length(slotted, 0) == 13);
}

TEST_CASE("a cache lies in memory that its caller gives") {
  const std::vector<KVLayerSpec> specs = {full(), state()};
  const KVCacheConfig config{.num_layers = 2, .max_seqs = 2, .max_len = 32, .page_tokens = 4};
  const std::uint64_t bytes = KVCache::memory_bytes(config, specs);
  std::vector<std::byte> memory(bytes + 256, std::byte{0xff});
  std::byte* aligned = memory.data();
  while (reinterpret_cast<std::uintptr_t>(aligned) % 256 != 0) ++aligned;
  const auto give = [&](std::byte* first, std::uint64_t count) {
    return Tensor(first, {static_cast<std::int64_t>(count)}, DType::uint8);
  };
  CHECK_THROWS_AS(KVCache::make(config, specs, give(aligned, bytes - 1)), InvalidArgument);
  CHECK_THROWS_AS(KVCache::make(config, specs, give(aligned + 1, bytes)), InvalidArgument);
  const Tensor wide(aligned, {static_cast<std::int64_t>(bytes)}, DType::int8);
  CHECK_THROWS_AS(KVCache::make(config, specs, wide), InvalidArgument);
  KVCache cache = KVCache::make(config, specs, give(aligned, bytes));
  const auto inside = [&](const Tensor& tensor) {
    return tensor.data() >= aligned && tensor.data() < aligned + bytes;
  };
  CHECK(inside(cache.keys(0)));
  CHECK(inside(cache.recurrent_state(1)));
  CHECK(std::to_integer<int>(*cache.keys(0).data()) == 0);  // the null page
  const Tensor before = cache.keys(0);
  cache.reset();
  CHECK(before.stale());
  CHECK(inside(cache.keys(0)));
}

TEST_CASE("views keep the memory of a cache that is gone") {
  std::optional<Tensor> keys;
  {
    KVCache cache = KVCache::make({.num_layers = 1, .max_seqs = 2, .max_len = 32}, {full()});
    keys = cache.keys(0);
  }
  CHECK_FALSE(keys->stale());
  std::memset(keys->at({1}).data(), 1, 64);
  CHECK(std::to_integer<int>(*keys->at({1}).data()) == 1);
}

TEST_CASE("a published configuration becomes a cache with its layers") {
  KVCache cache = KVCache::from_config(KVLEAF_TEST_DATA "/models/qwen3-next-80b-a3b.json",
                                       {.max_seqs = 2, .max_len = 256, .budget_bytes = 1ull << 30});
  CHECK(cache.config().num_layers == 48);
  CHECK(cache.keys(3).defined());
  CHECK_FALSE(cache.keys(0).defined());
  CHECK(shape(cache.recurrent_state(0)) == Shape{2, 32, 128, 128});
  CHECK(shape(cache.conv_state(0)) == Shape{2, 8192, 3});
  KVCache whisper =
      KVCache::from_config(KVLEAF_TEST_DATA "/models/whisper-large-v3.json", {.max_seqs = 1});
  CHECK(whisper.config().max_encoder_len == 1500);
  CHECK(whisper.keys(0, KVPart::cross).defined());
  CHECK(whisper.paged_block_table(0).data() != whisper.paged_block_table(0, KVPart::cross).data());
  CHECK_THROWS_AS(KVCache::from_config(KVLEAF_TEST_DATA "/models/qwen3-next-80b-a3b.json",
                                       {.num_layers = 47, .max_seqs = 2, .max_len = 256}),
                  InvalidArgument);
}

TEST_CASE("every published configuration is laid out, in both modes") {
  int read = 0;
  for (const auto& entry : std::filesystem::directory_iterator(KVLEAF_TEST_DATA "/models")) {
    if (entry.path().extension() != ".json") continue;
    CAPTURE(entry.path().string());
    for (const KVCacheMode mode : {KVCacheMode::paged, KVCacheMode::slotted}) {
      const ModelConfig model = read_model_config(entry.path());
      const KVCacheConfig config{.num_layers = static_cast<std::uint32_t>(model.layers.size()),
                                 .max_seqs = 2,
                                 .max_len = 64,
                                 .mode = mode,
                                 .max_encoder_len = model.encoder_tokens.value_or(0)};
      CHECK(KVCache::memory_bytes(config, model.layers) > 0);
    }
    ++read;
  }
  CHECK(read > 40);
}
