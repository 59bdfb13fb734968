// Whether the new kinds keep the leaf contract: exit code 0, or the report.
#include <kvleaf/testing/leaf_contract.h>

#include <iostream>
#include <memory>

#include "dilated_window.h"
#include "landmarks.h"

int main() {
  const kvleaf::AttentionOptions attention{
      .layers = 4, .kv_heads = 8, .head_dim = 128, .tokens_per_page = 16};
  const auto landmarks = kvleaf::testing::check_leaf([&] {
    return std::make_shared<new_leaf_kind::LandmarkLeaf>("landmarks", 4, 256, 8, attention);
  });
  const auto dilated = kvleaf::testing::check_leaf([&] {
    return std::make_shared<new_leaf_kind::DilatedWindowLeaf>("dilated", 64, 16, attention);
  });
  std::cout << landmarks << dilated;
  return landmarks.ok() && dilated.ok() ? 0 : 1;
}
