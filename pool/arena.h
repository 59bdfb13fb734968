// Arena: the bytes that a geometry tiles. Host memory, aligned to huge pages where the system has
// them, zeroed; or memory that the caller gives and keeps. Cheap to copy: copies share the bytes,
// and host memory is unmapped with the last of them. Who writes where is the caller's business; the
// arena itself writes nothing, so it may be shared between threads and its bytes may lie on a
// device.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "kvleaf/pool/geometry.h"

namespace kvleaf {

class Arena {
 public:
  /// Zeroed host memory of geometry.arena_bytes(): address space that the system backs with memory
  /// where it is first touched. Throws KVError with the bytes wanted when the system refuses.
  static Arena host(const Geometry& geometry);
  /// The caller's memory, of which the first geometry.arena_bytes() are used. The caller keeps it
  /// as long as the arena lives, and has zeroed the null region. Throws InvalidArgument if it is
  /// smaller.
  static Arena borrowed(const Geometry& geometry, std::span<std::byte> memory);

  /// Gives the memory of these ranges back to the system, and takes memory for them again: what
  /// BlockPool::resize says may be unmapped, or must be mapped. Of host memory only; the addresses
  /// stay reserved, and touching what is unmapped ends the process. Memory comes in pages of the
  /// system: those that lie in a range in part stay as they are; the rest reads as zeros when it is
  /// mapped again. Returns the bytes that changed hands. Throws InvalidArgument for borrowed memory
  /// and for a range outside the arena, with nothing changed; KVError when the system refuses.
  std::uint64_t unmap(std::span<const ByteRange> ranges) const;
  std::uint64_t map(std::span<const ByteRange> ranges) const;

  std::span<std::byte> bytes() const noexcept { return bytes_; }
  /// The data of one block. Throws BlockError past the leaf's last block.
  std::span<std::byte> page(LeafId leaf, BlockId block) const;
  /// First byte of the leaf's view: block b lies at b · page_stride.
  std::byte* view(LeafId leaf) const;
  const Geometry& geometry() const noexcept { return *geometry_; }

 private:
  Arena() = default;
  std::uint64_t protect(std::span<const ByteRange> ranges, bool usable) const;
  std::shared_ptr<const Geometry> geometry_;
  std::shared_ptr<std::byte> owner_;  // null when borrowed
  std::span<std::byte> bytes_;
};

}  // namespace kvleaf
