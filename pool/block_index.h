// BlockIndex: finds a committed block by leaf and key. An open-addressed table of record numbers,
// at most two thirds full, sized at construction; leaves and keys stay in the pool's records.
#pragma once

#include <cstdint>
#include <optional>

#include "kvleaf/pool/huge_block.h"
#include "kvleaf/pool/records.h"

namespace kvleaf {

class BlockIndex {
 public:
  BlockIndex() = default;
  explicit BlockIndex(std::uint64_t blocks);

  /// Number of the record that is committed under this key.
  std::optional<std::uint32_t> find(const Block* blocks, const PageKey* keys, std::uint16_t leaf,
                                    PageKey key) const noexcept;
  /// The key of `record` must not be present.
  void insert(const Block* blocks, const PageKey* keys, std::uint32_t record) noexcept;
  /// `record` must be present, its key unchanged since.
  void erase(const Block* blocks, const PageKey* keys, std::uint32_t record) noexcept;

  std::uint64_t bytes() const noexcept { return slots_.bytes(); }
  std::uint64_t entries() const noexcept { return entries_; }

 private:
  std::uint64_t home(std::uint16_t leaf, PageKey key) const noexcept;

  Records<std::uint32_t> slots_;  // record + 1, or 0; a power of two of them
  std::uint64_t mask_ = 0;
  std::uint64_t entries_ = 0;
};

}  // namespace kvleaf
