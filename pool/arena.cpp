#include "kvleaf/pool/arena.h"

#include <fmt/format.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <limits>

#include "kvleaf/leaf/errors.h"

namespace kvleaf {
namespace {

// What a transparent huge page of the common systems spans. The mapping starts at a multiple of it,
// so that the first and last bytes can be backed by huge pages too.
constexpr std::size_t kHugePage = std::size_t{2} << 20;

std::shared_ptr<std::byte> map_zeroed(std::size_t bytes) {
  const auto refuse = [&](const char* why) {
    throw KVError(fmt::format("an arena of {} B of host memory cannot be mapped: {}", bytes, why));
  };
  if (bytes > std::numeric_limits<std::size_t>::max() / 2) refuse("it passes the address space");
  // Not reserved: what no block ever touches costs no memory, so an arena may be larger than what
  // is free now. Fresh anonymous memory reads as zeros.
  const std::size_t mapped = bytes + kHugePage;
  void* raw = ::mmap(nullptr, mapped, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (raw == MAP_FAILED) refuse(std::strerror(errno));
  // Owned from here on, so that nothing below can lose the mapping.
  std::shared_ptr<std::byte> whole(static_cast<std::byte*>(raw),
                                   [mapped](std::byte* begin) { ::munmap(begin, mapped); });
  const auto address = reinterpret_cast<std::uintptr_t>(raw);
  const std::size_t skip = (kHugePage - address % kHugePage) % kHugePage;
  std::byte* begin = whole.get() + skip;
#ifdef MADV_HUGEPAGE
  // Advice: a system without huge pages refuses it, and the arena works as well, a little slower.
  (void)::madvise(begin, bytes, MADV_HUGEPAGE);
#endif
  return std::shared_ptr<std::byte>(std::move(whole), begin);
}

}  // namespace

Arena::Arena(const Geometry& geometry, std::shared_ptr<std::byte> memory, Device device)
    : geometry_(std::make_shared<const Geometry>(geometry)),
      memory_(std::move(memory)),
      bytes_(memory_.get(), geometry.arena_bytes()),
      device_(device) {}

Arena Arena::host(const Geometry& geometry) {
  Arena arena(geometry, map_zeroed(geometry.arena_bytes()), {});
  arena.mapped_here_ = true;
  return arena;
}

Arena Arena::adopted(const Geometry& geometry, std::shared_ptr<std::byte> memory,
                     std::uint64_t bytes, Device device) {
  if (bytes < geometry.arena_bytes()) {
    throw InvalidArgument(fmt::format("the memory given has {} B; the geometry's arena takes {} B",
                                      bytes, geometry.arena_bytes()));
  }
  return Arena(geometry, std::move(memory), device);
}

Arena Arena::borrowed(const Geometry& geometry, std::span<std::byte> memory, Device device) {
  // An alias of nothing: it points there, and owns nothing.
  return adopted(geometry, {std::shared_ptr<void>(), memory.data()}, memory.size(), device);
}

std::uint64_t Arena::protect(std::span<const ByteRange> ranges, bool usable) const {
  const char* call = usable ? "map" : "unmap";
  if (!mapped_here_) {
    throw InvalidArgument(
        fmt::format("{}: the arena did not make this memory; who made it maps it", call));
  }
  for (const ByteRange& range : ranges) {
    if (range.begin > range.end || range.end > bytes_.size()) {
      throw InvalidArgument(fmt::format("{}: bytes {} to {} of an arena of {}", call, range.begin,
                                        range.end, bytes_.size()));
    }
  }
  const auto page = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
  std::uint64_t changed = 0;
  for (const ByteRange& range : ranges) {
    // The arena starts at a page of the system, so offsets are aligned where addresses are.
    const std::uint64_t begin = (range.begin + page - 1) / page * page;
    const std::uint64_t end = range.end / page * page;
    if (begin >= end) continue;
    std::byte* address = bytes_.data() + begin;
    // A fresh mapping over the old one: its memory is free at once, and nobody can take the
    // addresses in between.
    if (::mmap(address, end - begin, usable ? PROT_READ | PROT_WRITE : PROT_NONE,
               MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) == MAP_FAILED) {
      throw KVError(fmt::format("{}: the system refuses {} B of host memory: {}", call, end - begin,
                                std::strerror(errno)));
    }
#ifdef MADV_HUGEPAGE
    if (usable) (void)::madvise(address, end - begin, MADV_HUGEPAGE);
#endif
    changed += end - begin;
  }
  return changed;
}

std::uint64_t Arena::unmap(std::span<const ByteRange> ranges) const {
  return protect(ranges, false);
}
std::uint64_t Arena::map(std::span<const ByteRange> ranges) const { return protect(ranges, true); }

std::span<std::byte> Arena::page(LeafId leaf, BlockId block) const {
  const ByteRange range = geometry_->byte_range(leaf, block);
  return bytes_.subspan(range.begin, range.end - range.begin);
}

std::byte* Arena::view(LeafId leaf) const {
  return bytes_.data() + geometry_->leaf(leaf).base_offset;
}

}  // namespace kvleaf
