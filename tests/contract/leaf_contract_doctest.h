// The leaf contract for doctest:
//
//   TEST_CASE("my leaf keeps the contract") {
//     KVLEAF_CHECK_LEAF([] { return std::make_shared<MyLeaf>(…); });
//   }
//
// Arguments are those of check_leaf. A failure prints the whole report.
#pragma once

#include <doctest/doctest.h>

#include "kvleaf/testing/leaf_contract.h"

#define KVLEAF_LEAF_CONTRACT_(assertion, ...)               \
  do {                                                      \
    const ::kvleaf::testing::ContractReport kvleaf_report = \
        ::kvleaf::testing::check_leaf(__VA_ARGS__);         \
    assertion(kvleaf_report.ok(), kvleaf_report.text());    \
  } while (false)

#define KVLEAF_CHECK_LEAF(...) KVLEAF_LEAF_CONTRACT_(CHECK_MESSAGE, __VA_ARGS__)
#define KVLEAF_REQUIRE_LEAF(...) KVLEAF_LEAF_CONTRACT_(REQUIRE_MESSAGE, __VA_ARGS__)
