// Arenas: bytes behind a handle, in memory of every kind, exported by DLPack.
#include "kvleaf/cache/arena_tensor.h"

#include <memory>

#include "border.h"

struct kvleaf_arena {
  kvleaf::Arena arena;
};

namespace kvleaf::c {
namespace {

Device device_of(kvleaf_memory memory, std::int32_t index) {
  require_constant("memory", memory, KVLEAF_MEMORY_CUDA);
  const bool cuda = memory == KVLEAF_MEMORY_CUDA;
  if (index < 0 || (!cuda && index != 0)) {
    throw InvalidArgument(fmt::format("device is {}; expected {}", index,
                                      cuda ? "a number of 0 or more" : "0 for host memory"));
  }
  return {cuda ? Device::Kind::cuda : Device::Kind::cpu, index};
}

/// Takes memory over: `release` is called with the last use of it, and not at all on failure.
void adopt(const Geometry& geometry, Device device, std::byte* data, std::uint64_t bytes,
           void (*release)(void*), void* user_data, kvleaf_arena** out) {
  struct Owner {
    void (*release)(void*) = nullptr;
    void* user_data = nullptr;
    ~Owner() {
      if (release != nullptr) release(user_data);
    }
  };
  const auto owner = std::make_shared<Owner>();
  auto arena = std::make_unique<kvleaf_arena>(
      kvleaf_arena{Arena::adopted(geometry, {owner, data}, bytes, device)});
  *owner = {release, user_data};  // nothing fails from here on
  *out = arena.release();
}

using Change = std::uint64_t (Arena::*)(std::span<const ByteRange>) const;

kvleaf_status change(const kvleaf_arena* arena, const kvleaf_byte_range* ranges, std::size_t count,
                     std::uint64_t* out_bytes, Change how) {
  return guarded([&] {
    require(out_bytes, "out_bytes");
    const Arena& core = require(arena, "arena").arena;
    const auto given = span_of(ranges, count, "ranges");
    *out_bytes = (core.*how)({same<const ByteRange>(given.data()), given.size()});
  });
}

}  // namespace
}  // namespace kvleaf::c

using namespace kvleaf;
using namespace kvleaf::c;

void kvleaf_arena_destroy(kvleaf_arena* arena) { delete arena; }

kvleaf_status kvleaf_arena_create(const kvleaf_geometry* geometry, kvleaf_memory memory,
                                  int32_t device, kvleaf_arena** out) {
  return guarded([&] {
    require(out, "out");
    const Geometry& tiling = require(geometry, "geometry").geometry;
    const Device where = device_of(memory, device);
    Arena arena =
        memory == KVLEAF_MEMORY_PINNED ? make_pinned_arena(tiling) : make_arena(tiling, where);
    *out = std::make_unique<kvleaf_arena>(kvleaf_arena{std::move(arena)}).release();
  });
}

kvleaf_status kvleaf_arena_over(const kvleaf_geometry* geometry, kvleaf_memory memory,
                                int32_t device, void* data, uint64_t bytes,
                                void (*release)(void* user_data), void* user_data,
                                kvleaf_arena** out) {
  return guarded([&] {
    require(out, "out");
    const Geometry& tiling = require(geometry, "geometry").geometry;
    const Device where = device_of(memory, device);
    adopt(tiling, where, &require(static_cast<std::byte*>(data), "data"), bytes, release, user_data,
          out);
  });
}

kvleaf_status kvleaf_arena_over_dlpack(const kvleaf_geometry* geometry,
                                       struct DLManagedTensor* memory, kvleaf_arena** out) {
  return guarded([&] {
    require(out, "out");
    const Geometry& tiling = require(geometry, "geometry").geometry;
    // Looked at as what nobody has to give back.
    DLManagedTensor unowned = require(memory, "memory");
    unowned.deleter = nullptr;
    const Tensor tensor = from_dlpack(&unowned);
    const Arena arena = arena_in(tiling, tensor);
    const auto release = [](void* given) {
      auto* tensor = static_cast<DLManagedTensor*>(given);
      if (tensor->deleter != nullptr) tensor->deleter(tensor);
    };
    adopt(tiling, arena.device(), arena.bytes().data(), arena.bytes().size(), release, memory, out);
  });
}

kvleaf_status kvleaf_arena_bytes(const kvleaf_arena* arena, void** out_data, uint64_t* out_bytes) {
  return guarded([&] {
    const std::span<std::byte> bytes = require(arena, "arena").arena.bytes();
    require(out_data, "out_data");
    require(out_bytes, "out_bytes");
    *out_data = bytes.data();
    *out_bytes = bytes.size();
  });
}

kvleaf_status kvleaf_arena_page(const kvleaf_arena* arena, uint32_t leaf, uint32_t block,
                                void** out_data) {
  return guarded([&] {
    require(out_data, "out_data");
    *out_data = require(arena, "arena").arena.page(LeafId(leaf), BlockId(block)).data();
  });
}

kvleaf_status kvleaf_arena_view(const kvleaf_arena* arena, uint32_t leaf, kvleaf_dtype dtype,
                                const int64_t* page_shape, size_t rank, uint64_t page_offset,
                                struct DLManagedTensor** out) {
  return guarded([&] {
    require(out, "out");
    const Arena& core = require(arena, "arena").arena;
    *out = to_dlpack(leaf_pages(core, LeafId(leaf), dtype_of("dtype", dtype, DType::uint8),
                                span_of(page_shape, rank, "page_shape"), page_offset));
  });
}

kvleaf_status kvleaf_arena_unmap(const kvleaf_arena* arena, const kvleaf_byte_range* ranges,
                                 size_t count, uint64_t* out_bytes) {
  return change(arena, ranges, count, out_bytes, &Arena::unmap);
}

kvleaf_status kvleaf_arena_map(const kvleaf_arena* arena, const kvleaf_byte_range* ranges,
                               size_t count, uint64_t* out_bytes) {
  return change(arena, ranges, count, out_bytes, &Arena::map);
}
