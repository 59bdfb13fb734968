#include "kvleaf/group/chunk_store.h"

#include <fmt/format.h>
#include <sys/mman.h>

#include <algorithm>

#include "kvleaf/leaf/errors.h"

namespace kvleaf {
namespace {
constexpr std::size_t alignment = 16;
constexpr std::size_t least_region = std::size_t{1} << 20;
}  // namespace

ChunkStore::ChunkStore(std::array<std::size_t, classes> sizes, std::size_t reserve_bytes)
    : sizes_(sizes), region_bytes_(std::max(reserve_bytes, least_region)) {
  for (auto& size : sizes_) size = (size + alignment - 1) / alignment * alignment;
  map_region(region_bytes_);
}

ChunkStore::~ChunkStore() {
  for (const auto& [begin, bytes] : regions_) munmap(begin, bytes);
}

void ChunkStore::map_region(std::size_t bytes) {
  void* region = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (region == MAP_FAILED) {
    throw KVError(fmt::format("the prefix tree wants {} more bytes; the system has none", bytes));
  }
  // Lookups jump from chunk to chunk: fewer TLB misses are worth the rounding.
  madvise(region, bytes, MADV_HUGEPAGE);
  regions_.emplace_back(static_cast<std::byte*>(region), bytes);
  next_ = regions_.back().first;
  end_ = next_ + bytes;
}

std::byte* ChunkStore::take(std::uint32_t size_class) {
  if (FreeChunk* chunk = free_[size_class]; chunk != nullptr) {
    free_[size_class] = chunk->next;
    return reinterpret_cast<std::byte*>(chunk);
  }
  const std::size_t size = sizes_[size_class];
  if (static_cast<std::size_t>(end_ - next_) < size) map_region(std::max(region_bytes_, size));
  std::byte* chunk = next_;
  next_ += size;
  used_bytes_ += size;
  return chunk;
}

void ChunkStore::give_back(std::byte* chunk, std::uint32_t size_class) noexcept {
  auto* freed = reinterpret_cast<FreeChunk*>(chunk);
  freed->next = free_[size_class];
  free_[size_class] = freed;
}

}  // namespace kvleaf
