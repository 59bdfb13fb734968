#include "kvleaf/kernels/layout.h"

#include "kernels/machine.h"

namespace kvleaf::kernels::test {
namespace {

TEST_CASE_TEMPLATE(
    "V-02 index functions on 10^6 random layouts, blocks and tokens equal a walk over the page",
    Machine, KVLEAF_MACHINES) {
  if (skipped<Machine>()) return;
  Random random(41);
  std::vector<IndexCase> cases;
  const std::uint32_t element_bytes[] = {1, 2, 4};
  for (int i = 0; i < 1000000; ++i) {
    IndexCase one;
    KVLayout& layout = one.pages.layout;
    layout.layers = static_cast<std::uint32_t>(draw(random, 1, 80));
    layout.slots = static_cast<std::uint32_t>(draw(random, 1, 256));
    layout.kv_heads = static_cast<std::uint32_t>(draw(random, 1, 16));
    layout.key_dim = static_cast<std::uint32_t>(draw(random, 1, 576));
    layout.value_dim = static_cast<std::uint32_t>(draw(random, 1, 256));
    layout.element_bytes = element_bytes[draw(random, 0, 2)];
    one.pages.page_stride = layout.page_bytes() + 16 * draw(random, 0, 100);
    one.pages.blocks = static_cast<std::uint32_t>(draw(random, 1, (1u << 31) - 1));
    one.entry = static_cast<std::int64_t>(
        draw(random, 0, (std::uint64_t{one.pages.blocks} + 1) * layout.slots - 1));
    one.layer = static_cast<std::uint32_t>(draw(random, 0, layout.layers - 1));
    one.head = static_cast<std::uint32_t>(draw(random, 0, layout.kv_heads - 1));
    one.element =
        static_cast<std::uint32_t>(draw(random, 0, std::min(layout.key_dim, layout.value_dim) - 1));
    cases.push_back(one);
  }
  const std::vector<IndexResult> results = Machine::index(cases);
  REQUIRE(results.size() == cases.size());
  bool past_32_bits = false;
  for (std::size_t i = 0; i < cases.size(); ++i) {
    const IndexCase& one = cases[i];
    const KVLayout& layout = one.pages.layout;
    // In 128 bits, so that nothing here can wrap either.
    __extension__ using Wide = unsigned __int128;
    const Wide block = static_cast<Wide>(one.entry) / layout.slots;
    const Wide slot = static_cast<Wide>(one.entry) % layout.slots;
    Wide key = block * one.pages.page_stride;
    for (std::uint32_t layer = 0; layer < one.layer; ++layer) {
      key += Wide{layout.slots} * layout.kv_heads * layout.key_dim * layout.element_bytes;
      key += Wide{layout.slots} * layout.kv_heads * layout.value_dim * layout.element_bytes;
    }
    Wide value = key + Wide{layout.slots} * layout.kv_heads * layout.key_dim * layout.element_bytes;
    key +=
        ((slot * layout.kv_heads + one.head) * layout.key_dim + one.element) * layout.element_bytes;
    value += ((slot * layout.kv_heads + one.head) * layout.value_dim + one.element) *
             layout.element_bytes;
    const Wide end = (Wide{one.pages.blocks} + 1) * one.pages.page_stride;
    REQUIRE((results[i].key == key));
    REQUIRE((results[i].value == value));
    REQUIRE((results[i].key + layout.element_bytes <= end));
    REQUIRE((results[i].value + layout.element_bytes <= end));
    // The rows that append and gather walk are the same places.
    if (one.head == 0 && one.element == 0) {
      REQUIRE((results[i].key_row == key));
      REQUIRE((results[i].value_row == value));
    }
    past_32_bits |= key > 0xffffffffu;
  }
  CHECK(past_32_bits);
}

TEST_CASE("a page is filled by its rows, each byte once") {
  const KVLayout layout{
      .layers = 3, .slots = 4, .kv_heads = 2, .key_dim = 6, .value_dim = 5, .element_bytes = 2};
  std::vector<int> covered(layout.page_bytes(), 0);
  for (std::uint32_t layer = 0; layer < 3; ++layer) {
    for (std::uint32_t slot = 0; slot < 4; ++slot) {
      for (std::uint32_t head = 0; head < 2; ++head) {
        for (std::uint32_t i = 0; i < 6 * 2; ++i)
          ++covered[layout.key_offset(layer, slot, head) + i];
        for (std::uint32_t i = 0; i < 5 * 2; ++i)
          ++covered[layout.value_offset(layer, slot, head) + i];
      }
    }
  }
  CHECK(covered == std::vector<int>(layout.page_bytes(), 1));
}

TEST_CASE("a slot mapping entry splits into the block and slot that made it") {
  CHECK(join_entry(7, 3, 16) == 115);  // N-04
  for (const std::uint32_t slots : {1u, 3u, 16u, 128u}) {
    for (const std::int64_t block :
         {std::int64_t{0}, std::int64_t{1}, (std::int64_t{1} << 31) - 1}) {
      for (std::uint32_t slot = 0; slot < slots; ++slot) {
        const SlotPosition at = split_entry(join_entry(block, slot, slots), slots);
        CHECK(at.block == block);
        CHECK(at.slot == slot);
      }
    }
  }
}

TEST_CASE("a query sees the keys that its pattern names") {
  const auto seen = [](Reach reach, std::int64_t position, std::int64_t keys) {
    std::vector<std::int64_t> seen;
    const std::int64_t tail = reach.tail_begin(position), end = reach.end(position, keys);
    for (std::int64_t i = 0; i < end; ++i) {
      if (i < reach.sinks || i >= tail) seen.push_back(i);
    }
    return seen;
  };
  using Keys = std::vector<std::int64_t>;
  CHECK(seen({}, 3, 10) == Keys{0, 1, 2, 3});
  CHECK(seen({.window = 3}, 1, 10) == Keys{0, 1});
  CHECK(seen({.window = 3}, 2, 10) == Keys{0, 1, 2});
  CHECK(seen({.window = 3}, 7, 10) == Keys{5, 6, 7});  // the query counts
  CHECK(seen({.window = 3, .sinks = 2}, 7, 10) == Keys{0, 1, 5, 6, 7});
  CHECK(seen({.window = 3, .sinks = 2}, 3, 10) == Keys{0, 1, 2, 3});
  CHECK(seen({.chunk = 4}, 3, 10) == Keys{0, 1, 2, 3});
  CHECK(seen({.chunk = 4}, 4, 10) == Keys{4});
  CHECK(seen({.chunk = 4}, 9, 10) == Keys{8, 9});
  CHECK(seen({.causal = false}, 0, 4) == Keys{0, 1, 2, 3});
  CHECK(seen({.causal = false}, 0, 0) == Keys{});
}

TEST_CASE("a compact table gives the block that the long table gives") {
  // Slots 0, 1 are sinks, the span is slots 7 … 10.
  const std::int32_t long_table[] = {11, 12, 0, 0, 0, 0, 0, 17, 18, 19, 20};
  const std::int32_t short_table[] = {11, 12, 17, 18, 19, 20};
  const std::int32_t first_slot[] = {7};
  const BlockTable dense{long_table, 11, 11};
  const BlockTable compact{short_table, 6, 6, first_slot, 2};
  for (std::int64_t slot = 0; slot < 11; ++slot) {
    CHECK(compact.block(0, slot) == dense.block(0, slot));
  }
  CHECK(compact.block(0, 11) == 0);
  CHECK(compact.column(0, 3) == -1);
  CHECK(dense.block(0, 11) == 0);
}

}  // namespace
}  // namespace kvleaf::kernels::test
