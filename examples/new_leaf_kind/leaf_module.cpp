// What `kvleaf replay --leaf-module new_leaf_kinds.so` serves: the model's full attention becomes
// landmarks, and dilated attention stands beside it.
#include <kvleaf/cache/leaf_module.h>

#include <memory>

#include "dilated_window.h"
#include "landmarks.h"

static kvleaf::Leaves leaves(const kvleaf::Leaves& model,
                             const kvleaf::LeafModuleOptions& options) {
  kvleaf::AttentionOptions attention{
      .layers = 4, .kv_heads = 8, .head_dim = 128, .tokens_per_page = options.tokens_per_page};
  kvleaf::Leaves served;
  for (const kvleaf::Leaf& leaf : model) {
    if (leaf->leaf_id() != "full") served.push_back(leaf);
  }
  served.push_back(
      std::make_shared<new_leaf_kind::LandmarkLeaf>("landmarks", 4, 256, 8, attention));
  served.push_back(
      std::make_shared<new_leaf_kind::DilatedWindowLeaf>("dilated", 64, 16, attention));
  return served;
}
KVLEAF_LEAF_MODULE(leaves)
