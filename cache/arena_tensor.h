// Arenas as tensors, and in memory of every kind: an Arena (pool) is bytes and a geometry; here
// they meet devices (kernels) and views that frameworks take (tensor.h).
//
//   const Arena arena = make_arena(geometry, require_device("cuda:0"));
//   Tensor pages = leaf_pages(arena, leaf, DType::bfloat16, {16, 8, 128});  // [blocks + 1, 16, 8,
//   128] to_dlpack(pages)                                                        // torch, jax,
//   cupy, …
#pragma once

#include <cstdint>
#include <initializer_list>
#include <span>

#include "kvleaf/cache/tensor.h"
#include "kvleaf/pool/arena.h"

namespace kvleaf {

/// Zeroed memory of geometry.arena_bytes() on `device`; on the host as Arena::host. Throws
/// DeviceError with the bytes wanted and the CUDA runtime's message where there is no such device
/// or no such memory, or where the library was built without CUDA.
Arena make_arena(const Geometry& geometry, Device device);
/// The same in pinned host memory. Throws as make_arena.
Arena make_pinned_arena(const Geometry& geometry);
/// In somebody else's memory, which is kept: uint8 [at least arena_bytes], contiguous, on any
/// device, for example of from_dlpack. Who made it has zeroed the null region. Throws
/// InvalidArgument.
Arena arena_in(const Geometry& geometry, const Tensor& memory);

/// All bytes of the arena: uint8 [arena_bytes]. A view keeps the arena.
Tensor arena_bytes(const Arena& arena);

/// The pages of a leaf, [blocks + 1, page_shape...]: a block id is an index, and 0 is the null page
/// of zeros. strides[0] is the page stride, and so may be more than the shape says; the rest is
/// contiguous.
///   page_shape   elements of one page; left out: all of them in one dimension
///   page_offset  bytes in the page where the first element lies: of one layer, of its values
/// A view keeps the arena. Throws InvalidArgument, with the sizes, for what does not fit in
/// bytes_per_page, for a page stride, a page offset or a begin of the arena that is no multiple of
/// an element, and for no such leaf.
Tensor leaf_pages(const Arena& arena, LeafId leaf, DType dtype,
                  std::span<const std::int64_t> page_shape = {}, std::uint64_t page_offset = 0);
inline Tensor leaf_pages(const Arena& arena, LeafId leaf, DType dtype,
                         std::initializer_list<std::int64_t> page_shape,
                         std::uint64_t page_offset = 0) {
  return leaf_pages(arena, leaf, dtype, std::span(page_shape.begin(), page_shape.size()),
                    page_offset);
}
/// The data of one block: uint8 [bytes_per_page]. Throws BlockError past the leaf's last block.
Tensor page_bytes(const Arena& arena, LeafId leaf, BlockId block);

}  // namespace kvleaf
