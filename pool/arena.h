// Arena: the bytes that a geometry tiles. Host memory, aligned to huge pages where the system has
// them, zeroed, and bound to no NUMA node (a page lies near whoever touches it first); or memory
// that somebody else made, on the host or on a device: kvleaf/cache/arena_tensor.h makes pinned and
// device memory, and reads arenas as tensors. Cheap to copy: copies share the bytes, which live as
// long as the last of them. Who writes where is the caller's business; the arena itself writes
// nothing and reads nothing, so it may be shared between threads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "kvleaf/leaf/device.h"
#include "kvleaf/pool/geometry.h"

namespace kvleaf {

class Arena {
 public:
  /// Zeroed host memory of geometry.arena_bytes(): address space that the system backs with memory
  /// where it is first touched. Throws KVError with the bytes wanted when the system refuses.
  static Arena host(const Geometry& geometry);
  /// Memory that somebody else made, of which the first geometry.arena_bytes() are used. Who made
  /// it has zeroed the null region. `memory` is kept as long as the arena or a copy of it lives.
  /// Throws InvalidArgument if there are fewer bytes.
  static Arena adopted(const Geometry& geometry, std::shared_ptr<std::byte> memory,
                       std::uint64_t bytes, Device device = {});
  /// The same with memory that the caller keeps as long as the arena lives.
  static Arena borrowed(const Geometry& geometry, std::span<std::byte> memory, Device device = {});

  /// Gives the memory of these ranges back to the system, and takes memory for them again: what
  /// BlockPool::resize says may be unmapped, or must be mapped. Of Arena::host only; the addresses
  /// stay reserved, and touching what is unmapped ends the process. Memory comes in pages of the
  /// system: those that lie in a range in part stay as they are; the rest reads as zeros when it is
  /// mapped again. Returns the bytes that changed hands. Throws InvalidArgument for other memory
  /// and for a range outside the arena, with nothing changed; KVError when the system refuses.
  std::uint64_t unmap(std::span<const ByteRange> ranges) const;
  std::uint64_t map(std::span<const ByteRange> ranges) const;

  /// Where the bytes lie. Pinned memory is the host's.
  Device device() const noexcept { return device_; }
  /// All of it. Addresses of a device are for that device alone.
  std::span<std::byte> bytes() const noexcept { return bytes_; }
  /// The data of one block. Throws BlockError past the leaf's last block.
  std::span<std::byte> page(LeafId leaf, BlockId block) const;
  /// First byte of the leaf's view: block b lies at b · page_stride.
  std::byte* view(LeafId leaf) const;
  const Geometry& geometry() const noexcept { return *geometry_; }

 private:
  Arena(const Geometry& geometry, std::shared_ptr<std::byte> memory, Device device);
  std::uint64_t protect(std::span<const ByteRange> ranges, bool usable) const;

  std::shared_ptr<const Geometry> geometry_;
  std::shared_ptr<std::byte> memory_;  // owns nothing when borrowed
  std::span<std::byte> bytes_;
  Device device_;
  bool mapped_here_ = false;  // so it may be unmapped in parts
};

}  // namespace kvleaf
