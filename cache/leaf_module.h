// A leaf module: kinds of memory from elsewhere, as a shared library that `kvleaf replay
// --leaf-module FILE.so` serves a trace with. The module sees the leaves of the model, and gives
// those to be served: other ones in their place, or more beside them.
//
//   static kvleaf::Leaves leaves(const kvleaf::Leaves& model, const kvleaf::LeafModuleOptions&) {
//     kvleaf::Leaves served = model;
//     served.push_back(std::make_shared<MyLeaf>(…));
//     return served;
//   }
//   KVLEAF_LEAF_MODULE(leaves)
//
// Compile it with -shared -fPIC and the flags of `pkg-config --cflags --libs kvleaf`.
#pragma once

#include <cstdint>

#include "kvleaf/leaf/leaf.h"

namespace kvleaf {

struct LeafModuleOptions {
  std::uint32_t tokens_per_page = 16;  // of the model's attention leaves
};

/// What module and command must agree in: a module of another version of the library is refused.
struct LeafModuleAbi {
  std::uint32_t version = 1;
  std::uint32_t region_bytes = sizeof(KVLeafRegion);
  std::uint32_t array_bytes = sizeof(StagedArray);
  std::uint32_t delta_bytes = sizeof(RowDelta);
  std::uint32_t options_bytes = sizeof(LeafModuleOptions);
  bool operator==(const LeafModuleAbi&) const = default;
};

struct LeafModule {
  LeafModuleAbi abi;
  Leaves (*leaves)(const Leaves& model, const LeafModuleOptions& options) = nullptr;
};

}  // namespace kvleaf

/// Exports `function`; once in a shared library, outside any namespace.
#define KVLEAF_LEAF_MODULE(function)                                                               \
  extern "C" __attribute__((visibility("default"))) const ::kvleaf::LeafModule kvleaf_leaf_module; \
  const ::kvleaf::LeafModule kvleaf_leaf_module = {{}, function};
