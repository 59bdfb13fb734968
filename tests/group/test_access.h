// The inside of a BlockManager, for tests that must see what no caller may.
#pragma once

#include "kvleaf/group/manager_impl.h"

namespace kvleaf {

struct BlockManagerTestAccess {
  static auto& impl(BlockManager& manager) { return *manager.impl_; }
};

}  // namespace kvleaf
