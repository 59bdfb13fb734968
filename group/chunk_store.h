// ChunkStore: variable-sized chunks of plain bytes for the prefix tree, in size classes, out of
// large mapped regions. The heap is never called: regions are reserved ahead and touched lazily, so
// a step that commits a page allocates nothing.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace kvleaf {

class ChunkStore {
 public:
  static constexpr std::uint32_t classes = 6;  // capacities of 1, 2, 4 … 32 pages

  /// sizes[c]: bytes of a chunk of class c. `reserve_bytes`: address space reserved at once.
  ChunkStore(std::array<std::size_t, classes> sizes, std::size_t reserve_bytes);
  ~ChunkStore();
  ChunkStore(const ChunkStore&) = delete;
  ChunkStore& operator=(const ChunkStore&) = delete;

  /// 16-byte aligned, contents unspecified. Throws KVError when the system has no more memory.
  std::byte* take(std::uint32_t size_class);
  void give_back(std::byte* chunk, std::uint32_t size_class) noexcept;
  /// Bytes taken from the regions so far, free chunks included.
  std::size_t bytes() const noexcept { return used_bytes_; }

 private:
  void map_region(std::size_t bytes);

  struct FreeChunk {
    FreeChunk* next;
  };
  std::array<std::size_t, classes> sizes_;
  std::array<FreeChunk*, classes> free_{};  // chunks given back, per class
  std::vector<std::pair<std::byte*, std::size_t>> regions_;
  std::byte* next_ = nullptr;  // never used before, up to end_
  std::byte* end_ = nullptr;
  std::size_t used_bytes_ = 0;
  std::size_t region_bytes_;
};

}  // namespace kvleaf
