// A warp for each row, or for each group of values that share a scale; keys and values of a layer
// in one launch (blockIdx.y 0 and 1).
#include "kvleaf/kernels/check.h"
#include "kvleaf/kernels/cuda.h"
#include "kvleaf/kernels/cuda/device.cuh"

namespace kvleaf::kernels::cuda {

namespace {

// Keys or values of a layer, outside of pages and inside.
struct Side {
  std::byte* entries;  // not written by an append
  std::uint64_t entry_stride;
  RowPages rows;
  RowPages scales;  // of quantised pages
};

// What a launch is given.
struct Work {
  Side sides[2];
  unsigned count;  // of sides: latent pages store no values
  Number number;   // of the entries outside of pages, where they are converted: a wide one
  Number scale_number;
  std::uint32_t granularity;  // values that share a scale
  std::uint64_t tokens;
  const std::int64_t* slots;
  const std::int64_t* scale_slots;  // null: no scales
};

__device__ __forceinline__ unsigned lane() { return threadIdx.x % warp; }

__global__ void append_rows_kernel(const __grid_constant__ Work work) {
  const Side& side = work.sides[blockIdx.y];
  for (std::uint64_t token = this_warp(); token < work.tokens; token += all_warps()) {
    const std::int64_t entry = work.slots[token];
    if (!writable(entry, side.rows.slots, side.rows.blocks)) continue;
    copy_bytes(side.rows.base + side.rows.row_offset(entry),
               side.entries + token * side.entry_stride, side.rows.row_bytes, lane(), warp);
  }
}

__global__ void gather_rows_kernel(const __grid_constant__ Work work) {
  const Side& side = work.sides[blockIdx.y];
  for (std::uint64_t token = this_warp(); token < work.tokens; token += all_warps()) {
    const std::int64_t entry = work.slots[token];
    std::byte* to = side.entries + token * side.entry_stride;
    if (readable(entry, side.rows.slots, side.rows.blocks)) {
      copy_bytes(to, side.rows.base + side.rows.row_offset(entry), side.rows.row_bytes, lane(),
                 warp);
    } else {
      clear_bytes(to, side.rows.row_bytes, lane(), warp);
    }
  }
}

// The i-th of wide numbers at `at`. Their type is the same for a whole launch: a branch that all
// lanes take costs less than three times as many kernels.
__device__ __forceinline__ float load(Number number, const std::byte* at, std::uint64_t i) {
  if (number == Number::float16) return to_float(reinterpret_cast<const F16*>(at)[i]);
  if (number == Number::bfloat16) return to_float(reinterpret_cast<const BF16*>(at)[i]);
  return reinterpret_cast<const float*>(at)[i];
}
__device__ __forceinline__ void store(Number number, std::byte* at, std::uint64_t i, float value) {
  if (number == Number::float16) {
    reinterpret_cast<F16*>(at)[i] = from_float<F16>(value);
  } else if (number == Number::bfloat16) {
    reinterpret_cast<BF16*>(at)[i] = from_float<BF16>(value);
  } else {
    reinterpret_cast<float*>(at)[i] = value;
  }
}

template <class To>
__global__ void append_converted_kernel(const __grid_constant__ Work work) {
  const Side& side = work.sides[blockIdx.y];
  const std::uint64_t elements = side.rows.row_bytes / sizeof(To);
  for (std::uint64_t token = this_warp(); token < work.tokens; token += all_warps()) {
    const std::int64_t entry = work.slots[token];
    if (!writable(entry, side.rows.slots, side.rows.blocks)) continue;
    const std::byte* from = side.entries + token * side.entry_stride;
    auto* to = reinterpret_cast<To*>(side.rows.base + side.rows.row_offset(entry));
    for (std::uint64_t i = lane(); i < elements; i += warp) {
      to[i] = from_float<To>(load(work.number, from, i));
    }
  }
}

// The largest of a warp's numbers, in every lane.
__device__ __forceinline__ float largest_of_warp(float largest) {
  for (unsigned distance = warp / 2; distance > 0; distance /= 2) {
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, distance));
  }
  return largest;
}

// As it is stored in `number`.
__device__ __forceinline__ float scale_of(Number number, float largest, float range) {
  if (number == Number::float16) return to_float(scale_for<F16>(largest, range));
  if (number == Number::bfloat16) return to_float(scale_for<BF16>(largest, range));
  return scale_for<float>(largest, range);
}

template <class To>
__global__ void append_quantised_kernel(const __grid_constant__ Work work) {
  const Side& side = work.sides[blockIdx.y];
  const std::uint64_t groups = side.scales.row_bytes / size_of(work.scale_number);
  for (std::uint64_t i = this_warp(); i < work.tokens * groups; i += all_warps()) {
    const std::uint64_t token = i / groups, group = i % groups;
    const std::int64_t entry = work.slots[token], scale_entry = work.scale_slots[token];
    if (!writable(entry, side.rows.slots, side.rows.blocks) ||
        !writable(scale_entry, side.scales.slots, side.scales.blocks)) {
      continue;
    }
    const std::byte* from = side.entries + token * side.entry_stride;
    auto* to = reinterpret_cast<To*>(side.rows.base + side.rows.row_offset(entry));
    const std::uint64_t begin = group * work.granularity, end = begin + work.granularity;

    float largest = 0;
    for (std::uint64_t at = begin + lane(); at < end; at += warp) {
      const float magnitude = fabsf(load(work.number, from, at));
      if (magnitude < INFINITY) largest = fmaxf(largest, magnitude);  // neither infinity nor NaN
    }
    const float scale =
        scale_of(work.scale_number, largest_of_warp(largest), NumberTraits<To>::largest);
    if (lane() == 0) {
      store(work.scale_number, side.scales.base + side.scales.row_offset(scale_entry), group,
            scale);
    }
    const float factor = 1.0f / scale;
    for (std::uint64_t at = begin + lane(); at < end; at += warp) {
      to[at] = from_float<To>(load(work.number, from, at) * factor);
    }
  }
}

template <class From>
__global__ void gather_converted_kernel(const __grid_constant__ Work work) {
  const Side& side = work.sides[blockIdx.y];
  const std::uint64_t elements = side.rows.row_bytes / sizeof(From);
  for (std::uint64_t token = this_warp(); token < work.tokens; token += all_warps()) {
    const std::int64_t entry = work.slots[token];
    std::byte* to = side.entries + token * side.entry_stride;
    bool there = readable(entry, side.rows.slots, side.rows.blocks);
    const std::byte* scales = nullptr;
    if (work.scale_slots != nullptr) {
      const std::int64_t scale_entry = work.scale_slots[token];
      there = there && readable(scale_entry, side.scales.slots, side.scales.blocks);
      if (there) scales = side.scales.base + side.scales.row_offset(scale_entry);
    }
    if (!there) {
      clear_bytes(to, elements * size_of(work.number), lane(), warp);
      continue;
    }
    const auto* from = reinterpret_cast<const From*>(side.rows.base + side.rows.row_offset(entry));
    for (std::uint64_t i = lane(); i < elements; i += warp) {
      const float scale =
          scales == nullptr ? 1.0f : load(work.scale_number, scales, i / work.granularity);
      store(work.number, to, i, to_float(from[i]) * scale);
    }
  }
}

// Work on rows of bytes.
Work work_on(const void* entries, std::uint64_t stride, std::span<const std::int64_t> slots,
             const RowPages& pages) {
  check_rows(pages);
  Work work{};
  work.sides[0] = {static_cast<std::byte*>(const_cast<void*>(entries)), stride, pages, {}};
  work.count = 1;
  work.tokens = slots.size();
  work.slots = slots.data();
  return work;
}

// Work on a layer. Checks shapes alone: the slots are on the device. Entries: new or gathered ones.
template <class Entries>
Work work_on(const Entries& entries, std::span<const std::int64_t> slots, const KVPages& pages,
             std::uint32_t layer, const ScalePages* scales) {
  check_pages(pages);
  check_layer(pages, layer);
  check_numbers(entries.number, pages.number, scales != nullptr);
  Work work{};
  work.count = pages.layout.value_dim == 0 ? 1 : 2;
  work.number = entries.number;
  work.tokens = slots.size();
  work.slots = slots.data();
  if (scales != nullptr) {
    check_scales(pages, scales->pages, scales->granularity);
    if (scales->slots.size() != slots.size()) {
      throw KernelError("slot mappings of values and scales have unequal lengths");
    }
    work.scale_number = scales->pages.number;
    work.granularity = scales->granularity;
    work.scale_slots = scales->slots.data();
    work.sides[0].scales = scales->pages.keys(layer);
    work.sides[1].scales = scales->pages.values(layer);
  }
  const auto fill = [&](Side& side, const void* data, std::uint64_t stride, const RowPages& rows) {
    check_rows(rows);
    side.entries = static_cast<std::byte*>(const_cast<void*>(data));
    side.entry_stride =
        stride != 0 ? stride : rows.row_bytes / size_of(pages.number) * size_of(entries.number);
    side.rows = rows;
  };
  fill(work.sides[0], entries.keys, entries.key_stride, pages.keys(layer));
  fill(work.sides[1], entries.values, entries.value_stride, pages.values(layer));
  return work;
}

using Kernel = void (*)(Work);

void launch(Kernel kernel, const Work& work, std::uint64_t warps, Stream stream) {
  if (warps == 0) return;
  kernel<<<dim3(grid_for(warps, block_warps), work.count), block_threads, 0, stream>>>(work);
  check_launch();
}

Kernel append_kernel(const NewEntries& entries, const KVPages& pages, bool scaled) {
  if (!scaled && entries.number == pages.number) return append_rows_kernel;
  switch (pages.number) {
    case Number::float16: return append_converted_kernel<F16>;
    case Number::bfloat16: return append_converted_kernel<BF16>;
    case Number::float8_e4m3:
      return scaled ? append_quantised_kernel<E4M3> : append_converted_kernel<E4M3>;
    case Number::float8_e5m2:
      return scaled ? append_quantised_kernel<E5M2> : append_converted_kernel<E5M2>;
    case Number::int8: return append_quantised_kernel<std::int8_t>;
    case Number::float32: break;
  }
  return append_converted_kernel<float>;
}

}  // namespace

void append_rows(const std::byte* rows, std::uint64_t source_stride,
                 std::span<const std::int64_t> slots, const RowPages& pages, Stream stream) {
  launch(append_rows_kernel, work_on(rows, source_stride, slots, pages), slots.size(), stream);
}

void gather_rows(const RowPages& pages, std::span<const std::int64_t> slots, std::byte* rows,
                 std::uint64_t row_stride, Stream stream) {
  launch(gather_rows_kernel, work_on(rows, row_stride, slots, pages), slots.size(), stream);
}

void append_kv(const NewEntries& entries, std::span<const std::int64_t> slots, const KVPages& pages,
               std::uint32_t layer, const ScalePages* scales, Stream stream) {
  const Work work = work_on(entries, slots, pages, layer, scales);
  const std::uint64_t groups =
      scales == nullptr ? 1 : work.sides[0].scales.row_bytes / size_of(work.scale_number);
  launch(append_kernel(entries, pages, scales != nullptr), work, work.tokens * groups, stream);
}

void gather_kv(const KVPages& pages, std::uint32_t layer, std::span<const std::int64_t> slots,
               const GatheredEntries& into, const ScalePages* scales, Stream stream) {
  const Work work = work_on(into, slots, pages, layer, scales);
  Kernel kernel = gather_rows_kernel;
  if (scales != nullptr || into.number != pages.number) {
    kernel = with_number(pages.number, [](auto tag) -> Kernel {
      return gather_converted_kernel<typename decltype(tag)::type>;
    });
  }
  launch(kernel, work, work.tokens, stream);
}

}  // namespace kvleaf::kernels::cuda
