// What tests see of a pool's inside, and how they break it.
#pragma once

#include <cstdint>
#include <string>

#include "kvleaf/pool/block_pool.h"

namespace kvleaf {

struct BlockPoolTestAccess {
  /// Every byte that the pool's future behaviour depends on.
  static std::string bytes(const BlockPool& pool) {
    std::string all;
    const auto add = [&](const void* data, std::size_t size) {
      all.append(static_cast<const char*>(data), size);
    };
    const auto records = [&](const auto& array) { add(array.data(), array.bytes()); };
    records(pool.blocks_);
    records(pool.huge_);
    records(pool.links_);
    records(pool.block_nodes_);
    records(pool.bounds_);
    records(pool.worths_);
    for (const auto& page_class : pool.classes_) {
      for (const Counter* counter : {&page_class.claimed, &page_class.idle}) {
        add(counter, sizeof(Counter));
      }
      for (const FullestFirst& clean : page_class.clean) {
        for (const std::uint32_t unlisted : {clean.current(), clean.spare()}) {
          add(&unlisted, sizeof unlisted);
        }
        for (std::uint32_t number = 0; number < clean.lists(); ++number) {
          const std::uint32_t front = clean.front(number);
          add(&front, sizeof front);
        }
      }
      for (const auto& order : page_class.order) {
        for (const Rank& node : order.nodes) add(&node, sizeof node);
        add(&order.root, sizeof(Rank));
      }
    }
    for (const auto& leaf : pool.leaves_) {
      for (const Counter* counter : {&leaf.live, &leaf.cached}) {
        add(counter, sizeof(Counter));
      }
    }
    for (const Counter* counter : {&pool.empty_, &pool.idle_, &pool.retyped_}) {
      add(counter, sizeof(Counter));
    }
    add(&pool.first_empty_, sizeof pool.first_empty_);
    add(&pool.clock_, sizeof pool.clock_);
    return all;
  }

  /// What the slow pool cannot know once a transaction was undone: which idle huge blocks it
  /// claimed.
  static int fate(const BlockPool& pool, std::uint32_t huge) { return pool.huge_[huge].fate; }

  // Break a pool on purpose.
  static void miscount_live(BlockPool& pool, std::uint32_t leaf) { ++pool.leaves_[leaf].live; }
  static void miscount_huge(BlockPool& pool, std::uint32_t huge) { ++pool.huge_[huge].cached; }
};

}  // namespace kvleaf
