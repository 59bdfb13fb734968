// The inside of a BlockManager, for tests that must see what no caller may.
#pragma once

#include <span>
#include <vector>

#include "kvleaf/group/manager_impl.h"

namespace kvleaf {

struct BlockManagerTestAccess {
  static auto& impl(BlockManager& manager) { return *manager.impl_; }
};

namespace testing {

/// Which pages of these tokens are findable in this leaf, by the slot. Asks for no memory, as a
/// probe does.
inline std::vector<bool> findable(BlockManager& manager, std::span<const Token> tokens,
                                  LeafId leaf) {
  const auto& impl = BlockManagerTestAccess::impl(manager);
  const LeafInfo& info = impl.info_.at(leaf.value());
  std::vector<bool> slots(tokens.size() / info.tokens_per_page, false);
  const auto root = impl.tree_->find_root("", "");
  if (!root) return slots;
  TreePath path;
  impl.tree_->match(*root, tokens, {},
                    static_cast<std::uint32_t>(tokens.size()) / impl.options_.page_tokens, path);
  for (const TreePath::Part& part : path.parts) {
    for (std::uint32_t page = part.first; page < part.first + part.pages; ++page) {
      if (impl.tree_->resident(part.segment, page, *info.tree)) slots[page / info.pages] = true;
    }
  }
  return slots;
}

}  // namespace testing
}  // namespace kvleaf
