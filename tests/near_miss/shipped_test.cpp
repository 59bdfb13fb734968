// Every kind that ships, in every variant, keeps the leaf contract.
#include <doctest/doctest.h>

#include <memory>

#include "kvleaf/leaf/leaf.h"
#include "kvleaf/testing/leaf_contract_doctest.h"

namespace kvleaf {
namespace {

AttentionOptions attention(std::uint32_t page, TableFormat table = TableFormat::dense) {
  return {.layers = 2, .kv_heads = 2, .head_dim = 8, .tokens_per_page = page, .table = table};
}
StateOptions state(StateKernel kernel, StateTable table, std::uint32_t rollback = 0,
                   bool in_chunk = false) {
  StateOptions options{.layers = 3,
                       .slabs = {{.name = "recurrent", .shape = {2, 8, 4}}},
                       .kernel = kernel,
                       .rollback = rollback,
                       .in_chunk = in_chunk,
                       .table = table,
                       .tokens_per_page = 16};
  if (table == StateTable::blocks)
    options.slabs.push_back({.name = "conv", .shape = {12, 3}, .dtype = DType::bfloat16});
  return options;
}

TEST_CASE("L-11: full attention keeps the contract, dense and csr, and in pages of one token") {
  for (const std::uint32_t page : {1u, 4u, 16u, 128u}) {
    for (const TableFormat table : {TableFormat::dense, TableFormat::csr}) {
      CAPTURE(page);
      KVLEAF_CHECK_LEAF(
          [&] { return std::make_shared<FullAttentionLeaf>("full", attention(page, table)); });
    }
  }
}

TEST_CASE("L-11: latent and compressed attention keep the contract") {
  KVLEAF_CHECK_LEAF([] {
    return std::make_shared<LatentAttentionLeaf>(
        "latent", LatentOptions{.layers = 2, .width = 576, .tokens_per_page = 64});
  });
  KVLEAF_CHECK_LEAF([] {
    return std::make_shared<LatentAttentionLeaf>(
        "latent",
        LatentOptions{.layers = 2, .width = 64, .tokens_per_page = 128, .slots_per_page = 32});
  });
  KVLEAF_CHECK_LEAF([] {
    return std::make_shared<LatentAttentionLeaf>(
        "latent",
        LatentOptions{.layers = 1, .width = 64, .tokens_per_page = 16, .table = TableFormat::csr});
  });
}

TEST_CASE(
    "L-11: windows keep the contract: sinks, compact, csr, of one token, longer than a page or "
    "not") {
  struct Case {
    std::uint32_t window, sinks, page;
    bool compact;
    TableFormat table = TableFormat::dense;
  };
  for (const Case& c :
       {Case{1, 0, 4, false}, Case{4, 0, 4, false}, Case{48, 0, 16, false}, Case{48, 0, 16, true},
        Case{33, 5, 4, false}, Case{33, 5, 4, true}, Case{128, 4, 16, true}, Case{7, 0, 16, true},
        Case{48, 4, 16, false, TableFormat::csr}, Case{4096, 0, 16, true}}) {
    CAPTURE(c.window);
    CAPTURE(c.sinks);
    CAPTURE(c.compact);
    KVLEAF_CHECK_LEAF([&] {
      return std::make_shared<SlidingWindowLeaf>(
          "window", WindowOptions{.window = c.window, .sinks = c.sinks, .compact = c.compact},
          attention(c.page, c.table));
    });
  }
}

TEST_CASE("L-11: chunks keep the contract, of whole pages or not") {
  for (const auto& [chunk, page] : {std::pair{8u, 4u}, {6u, 4u}, {64u, 16u}, {8192u, 128u}}) {
    CAPTURE(chunk);
    KVLEAF_CHECK_LEAF(
        [&] { return std::make_shared<ChunkedAttentionLeaf>("chunk", chunk, attention(page)); });
  }
}

TEST_CASE(
    "L-11: states keep the contract: in place, in and out, rollback, in chunk, by block and by "
    "row") {
  for (const StateKernel kernel : {StateKernel::in_place, StateKernel::in_out}) {
    for (const StateTable table : {StateTable::blocks, StateTable::rows}) {
      for (const std::uint32_t rollback : {0u, 3u}) {
        CAPTURE(rollback);
        KVLEAF_CHECK_LEAF([&] {
          return std::make_shared<RecurrentStateLeaf>("state", state(kernel, table, rollback));
        });
      }
      KVLEAF_CHECK_LEAF([&] {
        return std::make_shared<RecurrentStateLeaf>("state", state(kernel, table, 0, true));
      });
    }
  }
}

TEST_CASE("L-11: cross attention, scratch and scales keep the contract") {
  KVLEAF_CHECK_LEAF([] { return std::make_shared<CrossAttentionLeaf>("cross", attention(16)); });
  KVLEAF_CHECK_LEAF([] {
    return std::make_shared<CrossAttentionLeaf>("cross", attention(16, TableFormat::csr));
  });
  KVLEAF_CHECK_LEAF([] { return std::make_shared<ScratchLeaf>("scratch", 4096); });
  for (const TableFormat table : {TableFormat::dense, TableFormat::csr}) {
    KVLEAF_CHECK_LEAF([&] {
      AttentionOptions values = attention(16, table);
      values.dtype = DType::float8_e4m3;
      return std::make_shared<ScalesLeaf>(FullAttentionLeaf("full", values),
                                          ScalesOptions{.granularity = 8});
    });
  }
  KVLEAF_CHECK_LEAF([] {
    const SlidingWindowLeaf values("window", WindowOptions{.window = 40, .sinks = 4},
                                   attention(16));
    return std::make_shared<ScalesLeaf>(values, ScalesOptions{.granularity = 8});
  });
}

TEST_CASE("L-11: a bare region keeps the contract, packed, as a state, and with its cache's page") {
  KVLEAF_CHECK_LEAF(
      [] { return std::make_shared<KVLeafRegion>("bare", KVCacheGroupId::state(), 1000); });
  KVLEAF_CHECK_LEAF(
      [] { return std::make_shared<KVLeafRegion>("bare", KVCacheGroupId::encoder(), 1000); });
  KVLEAF_CHECK_LEAF(
      [] { return std::make_shared<KVLeafRegion>("bare", KVCacheGroupId::scratch(), 1000); });
  KVLEAF_CHECK_LEAF(
      [] { return std::make_shared<KVLeafRegion>("bare", KVCacheGroupId::full(), 1000); });
  KVLEAF_REQUIRE_LEAF(
      [] {
        return std::make_shared<KVLeafRegion>("bare", KVCacheGroupId::sliding_window(20, 3), 1000);
      },
      testing::ContractOptions{.page_tokens = 8});
}

}  // namespace
}  // namespace kvleaf
