// The kernels that run on the host, on NumPy arrays and whatever else speaks DLPack. Nothing is
// copied on the way in, and the GIL is released while bytes move.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>

#include <fmt/format.h>

#include <cmath>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "bind.h"
#include "convert.h"
#include "kvleaf/kernels/kernels.h"
#include "kvleaf/pool/pool.h"

namespace kvleaf::python {
namespace {

using namespace nb::literals;
using OptionalWhole = std::optional<Whole>;
using kernels::Number;

/// Runs kernels without the GIL; what they refuse is this library's own error.
template <class Work>
void run(Work work) {
  try {
    const nb::gil_scoped_release release;
    work();
  } catch (const kernels::KernelError& error) {
    throw InvalidArgument(error.what());
  }
}

Number number_of(DType dtype, const char* name) {
  switch (dtype) {
    case DType::float32: return Number::float32;
    case DType::float16: return Number::float16;
    case DType::bfloat16: return Number::bfloat16;
    case DType::float8_e4m3: return Number::float8_e4m3;
    case DType::float8_e5m2: return Number::float8_e5m2;
    case DType::int8: return Number::int8;
    case DType::uint8:
    case DType::int32:
    case DType::int64: break;
  }
  throw InvalidArgument(fmt::format(
      "{} holds {}; accepted: float32, float16, bfloat16, float8_e4m3, float8_e5m2, int8", name,
      name_of(dtype)));
}

DType dtype_of(Number number) {
  switch (number) {
    case Number::float32: return DType::float32;
    case Number::float16: return DType::float16;
    case Number::bfloat16: return DType::bfloat16;
    case Number::float8_e4m3: return DType::float8_e4m3;
    case Number::float8_e5m2: return DType::float8_e5m2;
    case Number::int8: return DType::int8;
  }
  return DType::float32;
}

/// An array in host memory, whatever module made it.
class Array {
 public:
  /// Throws InvalidArgument, naming it, where it is no array in host memory or may not be written.
  Array(nb::handle source, const char* name, bool written) : name_(name) {
    nb::object raw = nb::borrow(source);
    if (!import(raw, written)) {
      // NumPy does not export the types of ml_dtypes: by width, and then seen as what they are.
      const nb::object dtype = nb::getattr(source, "dtype", nb::none());
      const nb::object view = nb::getattr(source, "view", nb::none());
      PyErr_Clear();
      bool found = false;
      if (!dtype.is_none() && !view.is_none()) {
        try {
          named_ = dtype_of_python(dtype);
          found = import(view(size_of(*named_) == 1 ? "uint8" : "uint16"), written);
        } catch (const InvalidArgument&) {
        }
      }
      if (!found) {
        throw InvalidArgument(fmt::format(
            "{} is a {}; accepted: {} array in host memory (NumPy, or anything with DLPack)", name,
            class_name(source), written ? "a writable" : "an"));
      }
    }
    if (array_.device_type() != nb::device::cpu::value) {
      throw InvalidArgument(fmt::format("{} is not in host memory", name));
    }
  }

  std::byte* data() const { return static_cast<std::byte*>(array_.data()); }
  std::size_t rank() const { return array_.ndim(); }
  std::int64_t extent(std::size_t d) const { return static_cast<std::int64_t>(array_.shape(d)); }
  std::int64_t stride(std::size_t d) const { return array_.stride(d); }  // elements
  std::size_t bytes() const { return array_.nbytes(); }
  std::uint32_t element_bytes() const { return array_.itemsize(); }

  void require_rank(std::size_t rank, const char* shape) const {
    if (array_.ndim() == rank) return;
    throw InvalidArgument(
        fmt::format("{} has {} dimensions; accepted: {}", name_, array_.ndim(), shape));
  }
  /// The dimensions from `first` on lie one behind the other, without gaps.
  void require_packed(std::size_t first) const {
    std::int64_t expected = 1;
    for (std::size_t d = array_.ndim(); d-- > first;) {
      if (array_.shape(d) > 1 && array_.stride(d) != expected) {
        throw InvalidArgument(fmt::format("{}: dimension {} has a stride of {} elements, not {}",
                                          name_, d, array_.stride(d), expected));
      }
      expected *= extent(d);
    }
    for (std::size_t d = 0; d < first; ++d) {
      if (array_.stride(d) < 0)
        throw InvalidArgument(fmt::format("{}: dimension {} runs backwards", name_, d));
    }
  }
  /// The element type. Unsigned integers of the width of `as` are taken for its bits: NumPy by
  /// itself has no bfloat16 and no float8.
  Number number(Number as) const {
    if (named_) return number_of(*named_, name_);
    const nb::dlpack::dtype type = array_.dtype();
    using Code = nb::dlpack::dtype_code;
    const auto is = [&](Code code, int bits) {
      return type.code == static_cast<std::uint8_t>(code) && type.bits == bits && type.lanes == 1;
    };
    if (is(Code::Float, 32)) return Number::float32;
    if (is(Code::Float, 16)) return Number::float16;
    if (is(Code::Bfloat, 16)) return Number::bfloat16;
    if (is(Code::Int, 8)) return Number::int8;
    const auto width = static_cast<int>(kernels::size_of(as) * 8);
    if (is(Code::UInt, width)) return as;
    throw InvalidArgument(fmt::format(
        "{} holds {} of {} bits; accepted: float32, float16, bfloat16, float8, int8, or {} of {} "
        "bits for {}",
        name_, type.code == static_cast<std::uint8_t>(Code::UInt) ? "unsigned integers" : "numbers",
        type.bits, "unsigned integers", width, kernels::name_of(as)));
  }
  /// Its elements as T, an integer type; one dimension.
  template <class T>
  std::span<T> list() const {
    require_rank(1, "one dimension");
    require_type<T>();
    require_packed(0);
    return {reinterpret_cast<T*>(data()), static_cast<std::size_t>(extent(0))};
  }
  template <class T>
  void require_type() const {
    if (array_.dtype() == nb::dtype<T>()) return;
    throw InvalidArgument(fmt::format("{}: want int{}", name_, sizeof(T) * 8));
  }

 private:
  bool import(nb::handle source, bool written) {
    if (written) return nb::try_cast<nb::ndarray<>>(source, array_);
    nb::ndarray<nb::ro> read;
    if (!nb::try_cast<nb::ndarray<nb::ro>>(source, read)) return false;
    array_ = nb::ndarray<>(read);
    return true;
  }

  const char* name_;
  nb::ndarray<> array_;
  std::optional<DType> named_;
};

std::uint32_t u32(const OptionalWhole& value, const char* name, std::uint32_t otherwise) {
  return value ? value->u32(name) : otherwise;
}

/// A leaf's attention pages, and the memory they lie in.
class Pages {
 public:
  Pages(Array memory, kernels::KVLayout layout, Number number, std::uint64_t page_stride)
      : memory_(std::move(memory)) {
    if (layout.page_bytes() == 0) throw InvalidArgument("a page of 0 bytes");
    if (page_stride < layout.page_bytes()) {
      throw InvalidArgument(fmt::format("pages of {} bytes do not fit a page_stride of {}",
                                        layout.page_bytes(), page_stride));
    }
    memory_.require_packed(0);
    const std::uint64_t bytes = memory_.bytes();
    if (bytes < layout.page_bytes()) {
      throw InvalidArgument(
          fmt::format("memory of {} bytes holds no page of {}: it begins with block 0", bytes,
                      layout.page_bytes()));
    }
    const std::uint64_t blocks = (bytes - layout.page_bytes()) / page_stride;
    pages_ = {memory_.data(), page_stride,
              static_cast<std::uint32_t>(std::min<std::uint64_t>(blocks, 0x7fffffffu)), layout,
              number};
  }
  /// [blocks, 2, slots, kv_heads, dim], or [blocks, layers, 2, slots, kv_heads, dim].
  explicit Pages(Array array) : memory_(std::move(array)) {
    if (memory_.rank() != 6)
      memory_.require_rank(
          5, "[blocks, 2, slots, kv_heads, dim], or the same with [layers] behind the blocks");
    memory_.require_packed(1);
    const std::size_t sides = memory_.rank() - 4;
    if (memory_.extent(sides) != 2) {
      throw InvalidArgument(fmt::format("pages: dimension {} is {}; accepted: 2, keys and values",
                                        sides, memory_.extent(sides)));
    }
    const auto extent = [&](std::size_t d) {
      return static_cast<std::uint32_t>(memory_.extent(d));
    };
    kernels::KVLayout layout{.layers = sides == 2 ? extent(1) : 1,
                             .slots = extent(sides + 1),
                             .kv_heads = extent(sides + 2),
                             .key_dim = extent(sides + 3),
                             .value_dim = extent(sides + 3),
                             .element_bytes = memory_.element_bytes()};
    if (memory_.extent(0) < 1 || layout.page_bytes() == 0)
      throw InvalidArgument("pages hold nothing: block 0 is the null block");
    const Number number =
        memory_.number(layout.element_bytes == 1 ? Number::float8_e4m3 : Number::bfloat16);
    pages_ = {memory_.data(), static_cast<std::uint64_t>(memory_.stride(0)) * layout.element_bytes,
              extent(0) - 1, layout, number};
  }

  const kernels::KVPages& core() const noexcept { return pages_; }

  static Pages of(nb::handle leaf, nb::handle geometry, nb::handle arena) {
    const auto* attention = instance_of<AttentionLeaf>(leaf);
    const auto* tiling = instance_of<Geometry>(geometry);
    if (attention == nullptr)
      throw InvalidArgument(
          fmt::format("leaf is a {}; accepted: an AttentionLeaf", class_name(leaf)));
    if (tiling == nullptr)
      throw InvalidArgument(
          fmt::format("geometry is a {}; accepted: a Geometry", class_name(geometry)));
    const AttentionOptions& options = attention->options();
    const LeafGeometry& view = tiling->leaf(tiling->find(attention->leaf_id()));
    Array memory(arena, "arena", true);
    memory.require_packed(0);
    if (memory.bytes() < tiling->arena_bytes()) {
      throw InvalidArgument(fmt::format("an arena of {} bytes; the geometry has {}", memory.bytes(),
                                        tiling->arena_bytes()));
    }
    const kernels::KVLayout layout{.layers = options.layers,
                                   .slots = *options.slots_per_page,
                                   .kv_heads = options.kv_heads,
                                   .key_dim = options.head_dim,
                                   .value_dim = *options.value_head_dim,
                                   .element_bytes = size_of(options.dtype)};
    if (layout.page_bytes() > view.page_stride) {
      throw InvalidArgument(
          fmt::format("leaf '{}' has pages of {} bytes; its geometry strides of {}",
                      attention->leaf_id(), layout.page_bytes(), view.page_stride));
    }
    return Pages(std::move(memory),
                 {nullptr, view.page_stride, static_cast<std::uint32_t>(view.blocks), layout,
                  number_of(options.dtype, "the leaf")},
                 view.base_offset);
  }

 private:
  Pages(Array memory, kernels::KVPages pages, std::uint64_t offset)
      : memory_(std::move(memory)), pages_(pages) {
    pages_.base = memory_.data() + offset;
  }

  Array memory_;
  kernels::KVPages pages_;
};

/// A KVPages, or an array that is shaped like pages.
class PagesArgument {
 public:
  explicit PagesArgument(nb::handle source) {
    given_ = instance_of<Pages>(source);
    if (given_ == nullptr) made_.emplace(Array(source, "pages", true));
  }
  const kernels::KVPages& core() const {
    return given_ != nullptr ? given_->core() : made_->core();
  }

 private:
  const Pages* given_ = nullptr;
  std::optional<Pages> made_;
};

/// Scales and their slots, as keyword arguments come.
class Scales {
 public:
  Scales(nb::handle pages, nb::handle slots, const kernels::KVPages& values) {
    if (pages.is_none() != slots.is_none()) {
      throw InvalidArgument("scales and scale_slot_mapping are given together, or neither");
    }
    if (pages.is_none()) return;
    const auto* given = instance_of<Pages>(pages);
    if (given == nullptr)
      throw InvalidArgument(fmt::format("scales is a {}; accepted: a KVPages", class_name(pages)));
    slots_.emplace(slots, "scale_slot_mapping", false);
    scales_ = {given->core(), granularity_of(values, given->core()), slots_->list<std::int64_t>()};
  }
  static std::uint32_t granularity_of(const kernels::KVPages& values,
                                      const kernels::KVPages& scales) {
    const std::uint32_t groups = scales.layout.key_dim;
    if (groups == 0 || values.layout.key_dim % groups != 0) {
      throw InvalidArgument(
          fmt::format("scales of {} to a key of {} elements: they do not divide it", groups,
                      values.layout.key_dim));
    }
    return values.layout.key_dim / groups;
  }
  const kernels::ScalePages* get() const { return slots_ ? &scales_ : nullptr; }

 private:
  std::optional<Array> slots_;
  kernels::ScalePages scales_;
};

/// [tokens, heads, dim], packed but for the tokens; bytes from a token to the next.
std::uint64_t token_stride(const Array& array, const char* name, std::int64_t tokens,
                           std::int64_t heads, std::int64_t dim) {
  array.require_rank(3, "[tokens, heads, dim]");
  array.require_packed(1);
  if (array.extent(0) != tokens || array.extent(1) != heads || array.extent(2) != dim) {
    throw InvalidArgument(fmt::format("{} is [{}, {}, {}]; accepted: [{}, {}, {}]", name,
                                      array.extent(0), array.extent(1), array.extent(2), tokens,
                                      heads, dim));
  }
  const std::int64_t stride = tokens > 1 ? array.stride(0) : heads * dim;
  if (stride <= 0)
    throw InvalidArgument(fmt::format("{}: dimension 0 has a stride of {}", name, stride));
  return static_cast<std::uint64_t>(stride) * array.element_bytes();
}

nb::object empty(std::initializer_list<std::int64_t> shape, Number number) {
  nb::list extents;
  for (const std::int64_t extent : shape) extents.append(extent);
  return nb::module_::import_("numpy").attr("empty")(nb::tuple(extents),
                                                     "dtype"_a = numpy_dtype(dtype_of(number)));
}

// ---- the calls
// -----------------------------------------------------------------------------------------

/// The arena and its leaves, as lists of copies and clears name them.
struct Tiled {
  Tiled(nb::handle arena, nb::handle geometry)
      : memory(arena, "arena", true), tiling(instance_of<Geometry>(geometry)) {
    if (tiling == nullptr)
      throw InvalidArgument(
          fmt::format("geometry is a {}; accepted: a Geometry", class_name(geometry)));
    memory.require_packed(0);
    if (memory.bytes() < tiling->arena_bytes()) {
      throw InvalidArgument(fmt::format("an arena of {} bytes; the geometry has {}", memory.bytes(),
                                        tiling->arena_bytes()));
    }
    for (const LeafGeometry& leaf : tiling->leaves()) {
      leaves.push_back({memory.data() + leaf.base_offset, leaf.page_stride, leaf.bytes_per_page,
                        static_cast<std::uint32_t>(leaf.blocks)});
    }
  }
  std::uint32_t leaf(nb::handle name) const {
    return tiling->find(name_in(name, "a leaf")).value();
  }

  Array memory;
  const Geometry* tiling;
  std::vector<kernels::Pages> leaves;
};

nb::tuple entry_of(nb::handle entry, std::size_t parts, const char* what) {
  nb::object sequence = nb::steal(PySequence_Tuple(entry.ptr()));
  if (!sequence.is_valid()) PyErr_Clear();
  if (!sequence.is_valid() || nb::len(sequence) != parts) {
    throw InvalidArgument(fmt::format("{} is {}; accepted: {}", what, nb::repr(entry).c_str(),
                                      parts == 3 ? "(leaf_id, src, dst)" : "(leaf_id, block)"));
  }
  return nb::tuple(sequence);
}

std::int32_t block_in(nb::handle source) {
  Whole whole;
  if (!Whole::read(source, whole))
    throw InvalidArgument(fmt::format("a block is a {}; accepted: an int", class_name(source)));
  return whole.i32("a block");
}

void copy_pages(nb::handle arena, nb::handle geometry, nb::iterable copies) {
  const Tiled tiled(arena, geometry);
  std::vector<kernels::BlockCopy> list;
  for (const nb::handle copy : copies) {
    const nb::tuple parts = entry_of(copy, 3, "a copy");
    list.push_back({tiled.leaf(parts[0]), block_in(parts[1]), block_in(parts[2])});
  }
  run([&] { kernels::copy_pages(tiled.leaves, list); });
}

void zero_pages(nb::handle arena, nb::handle geometry, nb::iterable fills) {
  const Tiled tiled(arena, geometry);
  std::vector<kernels::BlockClear> list;
  for (const nb::handle fill : fills) {
    const nb::tuple parts = entry_of(fill, 2, "a fill");
    list.push_back({tiled.leaf(parts[0]), block_in(parts[1])});
  }
  run([&] { kernels::zero_pages(tiled.leaves, list); });
}

void append_kv(nb::handle k, nb::handle v, nb::handle slot_mapping, nb::handle pages, Whole layer,
               nb::handle scales, nb::handle scale_slot_mapping) {
  const PagesArgument into(pages);
  const kernels::KVPages& to = into.core();
  const kernels::KVLayout& layout = to.layout;
  const Array mapping(slot_mapping, "slot_mapping", false);
  const std::span<const std::int64_t> slots = mapping.list<std::int64_t>();
  const auto tokens = static_cast<std::int64_t>(slots.size());
  const Array keys(k, "k", false);
  kernels::NewEntries entries;
  entries.number = keys.number(kernels::size_of(to.number) == 2 ? to.number : Number::bfloat16);
  entries.keys = keys.data();
  entries.key_stride = token_stride(keys, "k", tokens, layout.kv_heads, layout.key_dim);
  std::optional<Array> values;
  if (layout.value_dim == 0) {
    if (!v.is_none())
      throw InvalidArgument("v is given, but the pages store no values: None is accepted");
  } else {
    values.emplace(v, "v", false);
    if (values->number(entries.number) != entries.number) {
      throw InvalidArgument(fmt::format("k is {} and v {}; they must be alike",
                                        kernels::name_of(entries.number),
                                        kernels::name_of(values->number(entries.number))));
    }
    entries.values = values->data();
    entries.value_stride = token_stride(*values, "v", tokens, layout.kv_heads, layout.value_dim);
  }
  const Scales with(scales, scale_slot_mapping, to);
  const std::uint32_t at = layer.u32("layer");
  run([&] { kernels::append_kv(entries, slots, to, at, with.get()); });
}

nb::tuple gather_kv(nb::handle pages, nb::handle slot_mapping, Whole layer, nb::handle dtype,
                    nb::handle scales, nb::handle scale_slot_mapping) {
  const PagesArgument from(pages);
  const kernels::KVPages& core = from.core();
  const Array mapping(slot_mapping, "slot_mapping", false);
  const std::span<const std::int64_t> slots = mapping.list<std::int64_t>();
  const Scales with(scales, scale_slot_mapping, core);
  const Number number = !dtype.is_none()        ? number_of(dtype_of_python(dtype), "dtype")
                        : with.get() != nullptr ? Number::float32
                                                : core.number;
  const auto tokens = static_cast<std::int64_t>(slots.size());
  const bool has_values = core.layout.value_dim != 0;
  const nb::object k = empty({tokens, core.layout.kv_heads, core.layout.key_dim}, number);
  nb::object v = nb::none();
  if (has_values) v = empty({tokens, core.layout.kv_heads, core.layout.value_dim}, number);
  const Array keys(k, "k", true);
  std::optional<Array> values;
  if (has_values) values.emplace(v, "v", true);
  const kernels::GatheredEntries into{keys.data(), has_values ? values->data() : nullptr, number, 0,
                                      0};
  const std::uint32_t at = layer.u32("layer");
  run([&] { kernels::gather_kv(core, at, slots, into, with.get()); });
  return nb::make_tuple(k, v);
}

void scatter_table(nb::handle table, nb::handle rows, nb::handle columns, nb::handle values) {
  const Array target(table, "table", true);
  target.require_type<std::int32_t>();
  const Array row_list(rows, "rows", false), column_list(columns, "columns", false),
      value_list(values, "values", false);
  kernels::TableView view{reinterpret_cast<std::int32_t*>(target.data()), 1, 0, 0, 1};
  if (target.rank() == 1) {  // an array of one dimension is listed by row
    view = {view.data, target.extent(0), 1, target.stride(0), 1};
  } else {
    target.require_rank(2, "one or two dimensions");
    view = {view.data, target.extent(0), target.extent(1), target.stride(0), target.stride(1)};
  }
  const auto r = row_list.list<std::int32_t>();
  const auto c = column_list.list<std::int32_t>();
  const auto x = value_list.list<std::int32_t>();
  run([&] { kernels::scatter_table(view, r, c, x); });
}

/// An int32 table [rows, columns], rows strided.
kernels::BlockTable table_of(const Array& array, const char* name) {
  array.require_rank(2, "[rows, columns]");
  array.require_type<std::int32_t>();
  if (array.extent(1) > 1 && array.stride(1) != 1)
    throw InvalidArgument(fmt::format("{}: columns are strided", name));
  return {reinterpret_cast<const std::int32_t*>(array.data()), array.extent(1), array.stride(0),
          nullptr, 0};
}

nb::object paged_attention(nb::handle q, nb::handle pages, nb::handle block_table,
                           nb::handle seq_lens, nb::handle cu_seqlens_q, Whole layer,
                           std::optional<double> scale, const OptionalWhole& window, Whole sinks,
                           const OptionalWhole& chunk, nb::handle causal, nb::handle first_slot,
                           Whole sink_slots, const OptionalWhole& latent_width, nb::handle scales,
                           nb::handle scale_table) {
  const PagesArgument from(pages);
  const kernels::KVPages& core = from.core();
  kernels::PagedAttention attention;
  attention.pages = core;
  attention.layer = layer.u32("layer");
  attention.latent_width = u32(latent_width, "latent_width", 0);
  attention.reach = {.window = u32(window, "window", 0),
                     .sinks = sinks.u32("sinks"),
                     .chunk = u32(chunk, "chunk", 0),
                     .causal = truth_of(causal)};
  const Array queries(q, "q", false);
  queries.require_rank(3, "[tokens, query_heads, key_dim]");
  queries.require_packed(0);
  attention.number =
      queries.number(kernels::size_of(core.number) == 2 ? core.number : Number::bfloat16);
  if (queries.extent(2) != core.layout.key_dim) {
    throw InvalidArgument(fmt::format("q has heads of {} elements; the pages of {}",
                                      queries.extent(2), core.layout.key_dim));
  }
  attention.queries = queries.data();
  attention.query_heads = static_cast<std::uint32_t>(queries.extent(1));
  attention.scale = static_cast<float>(
      scale ? *scale : 1.0 / std::sqrt(static_cast<double>(core.layout.key_dim)));
  const Array lengths(seq_lens, "seq_lens", false), begins(cu_seqlens_q, "cu_seqlens_q", false),
      table(block_table, "block_table", false);
  attention.seq_lens = lengths.list<std::int32_t>();
  attention.cu_seqlens_q = begins.list<std::int32_t>();
  attention.table = table_of(table, "block_table");
  const auto require_rows = [&](std::int64_t rows, const char* name) {
    if (rows < static_cast<std::int64_t>(attention.seq_lens.size())) {
      throw InvalidArgument(
          fmt::format("{} has {} rows; seq_lens {}", name, rows, attention.seq_lens.size()));
    }
  };
  require_rows(table.extent(0), "block_table");
  std::optional<Array> firsts;
  if (!first_slot.is_none()) {
    firsts.emplace(first_slot, "first_slot", false);
    const auto list = firsts->list<std::int32_t>();
    require_rows(static_cast<std::int64_t>(list.size()), "first_slot");
    attention.table.first_slot = list.data();
    attention.table.sink_slots = sink_slots.u32("sink_slots");
  }
  if (attention.cu_seqlens_q.empty() || attention.cu_seqlens_q.back() != queries.extent(0)) {
    throw InvalidArgument(fmt::format(
        "cu_seqlens_q ends at {}; q has {} tokens",
        attention.cu_seqlens_q.empty() ? 0 : attention.cu_seqlens_q.back(), queries.extent(0)));
  }
  std::optional<Array> scale_blocks;
  kernels::ScaleTables with;
  if (scales.is_none() != scale_table.is_none())
    throw InvalidArgument("scales and scale_table are given together, or neither");
  if (!scales.is_none()) {
    const auto* given = instance_of<Pages>(scales);
    if (given == nullptr)
      throw InvalidArgument(fmt::format("scales is a {}; accepted: a KVPages", class_name(scales)));
    scale_blocks.emplace(scale_table, "scale_table", false);
    require_rows(scale_blocks->extent(0), "scale_table");
    with = {given->core(), Scales::granularity_of(core, given->core()),
            table_of(*scale_blocks, "scale_table")};
    attention.scales = &with;
  }
  const std::int64_t width =
      core.layout.value_dim != 0 ? core.layout.value_dim : attention.latent_width;
  const nb::object out = empty({queries.extent(0), queries.extent(1), width}, attention.number);
  const Array output(out, "output", true);
  attention.output = output.data();
  run([&] { kernels::paged_attention(attention); });
  return out;
}

}  // namespace

void bind_kernels(nb::module_& m) {
  nb::class_<Pages> pages(
      m, "KVPages",
      "All pages of one attention leaf, block 0 first: for each layer its keys [slots, kv_heads, "
      "key_dim] and then\n"
      "its values [slots, kv_heads, value_dim]. A view: it keeps the memory alive.");
  pages
      .def(
          "__init__",
          [](Pages* self, nb::handle memory, Whole layers, Whole slots, Whole kv_heads,
             Whole key_dim, const OptionalWhole& value_dim, nb::handle dtype,
             const OptionalWhole& page_stride) {
            const DType type = dtype_of_python(dtype);
            kernels::KVLayout layout{.layers = layers.u32("layers"),
                                     .slots = slots.u32("slots"),
                                     .kv_heads = kv_heads.u32("kv_heads"),
                                     .key_dim = key_dim.u32("key_dim"),
                                     .value_dim = 0,
                                     .element_bytes = size_of(type)};
            layout.value_dim = u32(value_dim, "value_dim", layout.key_dim);
            const std::uint64_t stride =
                page_stride ? page_stride->u64("page_stride") : layout.page_bytes();
            new (self)
                Pages(Array(memory, "memory", true), layout, number_of(type, "dtype"), stride);
          },
          "memory"_a, nb::kw_only(), "layers"_a, "slots"_a, "kv_heads"_a, "key_dim"_a,
          "value_dim"_a = nb::none(), "dtype"_a, "page_stride"_a = nb::none(),
          nb::sig("def __init__(self, memory: Any, *, layers: int, slots: int, kv_heads: int, "
                  "key_dim: int, "
                  "value_dim: int | None = None, dtype: object, page_stride: int | None = None) -> "
                  "None"),
          "memory: a writable array on the host that begins with block 0, the null block. slots: "
          "entries of a page.\n"
          "value_dim: None for that of keys, 0 where values are the first elements of keys. "
          "page_stride: bytes from\n"
          "a block to the next, None for packed pages. Raises InvalidArgument where no page fits.")
      .def_static("of", &Pages::of, "leaf"_a, "geometry"_a, "arena"_a,
                  nb::sig("def of(leaf: AttentionLeaf, geometry: Geometry, arena: Any) -> KVPages"),
                  "The pages of `leaf` in an arena that is tiled by `geometry`: arena_bytes of "
                  "memory on the host.")
      .def_prop_ro("layers", [](const Pages& self) { return self.core().layout.layers; })
      .def_prop_ro(
          "slots", [](const Pages& self) { return self.core().layout.slots; }, "Entries of a page.")
      .def_prop_ro("kv_heads", [](const Pages& self) { return self.core().layout.kv_heads; })
      .def_prop_ro("key_dim", [](const Pages& self) { return self.core().layout.key_dim; })
      .def_prop_ro(
          "value_dim", [](const Pages& self) { return self.core().layout.value_dim; },
          "0: values are part of keys.")
      .def_prop_ro(
          "page_stride", [](const Pages& self) { return self.core().page_stride; },
          "Bytes from a block to the next.")
      .def_prop_ro(
          "blocks", [](const Pages& self) { return self.core().blocks; }, "Real blocks: 1 to this.")
      .def_prop_ro(
          "dtype", [](const Pages& self) { return name_of(dtype_of(self.core().number)); },
          nb::sig("def dtype(self) -> str"))
      .def("__repr__", [](const Pages& self) {
        const kernels::KVLayout& layout = self.core().layout;
        return fmt::format("KVPages({} blocks of {} slots, {} layers, {} heads of {} and {}, {})",
                           self.core().blocks, layout.slots, layout.layers, layout.kv_heads,
                           layout.key_dim, layout.value_dim, kernels::name_of(self.core().number));
      });
  refuse_pickle(pages, "recreate it over the memory it should view");

  m.def("copy_pages", &copy_pages, "arena"_a, "geometry"_a, "copies"_a,
        nb::sig("def copy_pages(arena: Any, geometry: Geometry, copies: "
                "collections.abc.Iterable[tuple[str, int, int]]) -> None"),
        "Carries out plan.copies: (leaf_id, src, dst), in any order. arena: a writable array of "
        "geometry.arena_bytes on\n"
        "the host. Raises InvalidArgument, having written nothing, for a block that does not "
        "exist, the null block as\n"
        "destination, or a list whose order would matter.");
  m.def("zero_pages", &zero_pages, "arena"_a, "geometry"_a, "fills"_a,
        nb::sig("def zero_pages(arena: Any, geometry: Geometry, fills: "
                "collections.abc.Iterable[tuple[str, int]]) -> None"),
        "Carries out plan.zero_fills: (leaf_id, block). Raises as copy_pages.");
  m.def("append_kv", &append_kv, "k"_a, "v"_a.none(), "slot_mapping"_a, "pages"_a, nb::kw_only(),
        "layer"_a = 0, "scales"_a = nb::none(), "scale_slot_mapping"_a = nb::none(),
        nb::sig("def append_kv(k: Any, v: Any | None, slot_mapping: Any, pages: KVPages | Any, *, "
                "layer: int = 0, "
                "scales: KVPages | None = None, scale_slot_mapping: Any | None = None) -> None"),
        "Writes new entries of one layer by slot mapping; -1 is skipped.\n"
        "  k, v          [tokens, kv_heads, dim] float32, float16 or bfloat16, or the type of the "
        "pages; v is None where\n"
        "                pages store no values. uint16 is taken for the bits of bfloat16, or of "
        "the pages' own 16-bit type\n"
        "  slot_mapping  [tokens] int64, as plan.slot_mapping has it\n"
        "  pages         a KVPages, or an array [blocks, 2, slots, kv_heads, dim] or [blocks, "
        "layers, 2, slots, kv_heads, dim]\n"
        "  scales        of quantised pages, with the slot mapping of the scales leaf; without "
        "them values are rounded,\n"
        "                and int8 needs them\n"
        "Raises InvalidArgument, having written nothing, for shapes and types that do not fit, the "
        "null block, or a\n"
        "block beyond the last.");
  m.def(
      "gather_kv", &gather_kv, "pages"_a, "slot_mapping"_a, nb::kw_only(), "layer"_a = 0,
      "dtype"_a = nb::none(), "scales"_a = nb::none(), "scale_slot_mapping"_a = nb::none(),
      nb::sig(
          "def gather_kv(pages: KVPages | Any, slot_mapping: Any, *, layer: int = 0, dtype: object "
          "= None, scales: KVPages | "
          "None = None, scale_slot_mapping: Any | None = None) -> tuple[numpy.typing.NDArray[Any], "
          "numpy.typing.NDArray[Any] | None]"),
      "The reverse of append_kv: new arrays k and v, [tokens, kv_heads, dim]; zeros where the "
      "mapping is -1 or names\n"
      "the null block. dtype: None for that of the pages, float32 with scales. v is None where "
      "pages store no values.");
  m.def("scatter_table", &scatter_table, "table"_a, "rows"_a, "columns"_a, "values"_a,
        nb::sig("def scatter_table(table: numpy.typing.NDArray[numpy.int32], rows: Any, columns: "
                "Any, values: Any) -> None"),
        "table[rows[i], columns[i]] = values[i], as plan.changes lists them; all int32. An array "
        "of one dimension has one\n"
        "column. A row of -1 is skipped. Raises InvalidArgument, having written nothing, for a "
        "place outside the table.");
  m.def("paged_attention", &paged_attention, "q"_a, "pages"_a, "block_table"_a, "seq_lens"_a,
        "cu_seqlens_q"_a, nb::kw_only(), "layer"_a = 0, "scale"_a = nb::none(),
        "window"_a = nb::none(), "sinks"_a = 0, "chunk"_a = nb::none(), "causal"_a = true,
        "first_slot"_a = nb::none(), "sink_slots"_a = 0, "latent_width"_a = nb::none(),
        "scales"_a = nb::none(), "scale_table"_a = nb::none(),
        nb::sig("def paged_attention(q: Any, pages: KVPages | Any, block_table: Any, seq_lens: "
                "Any, cu_seqlens_q: Any, *, "
                "layer: int = 0, scale: float | None = None, window: int | None = None, sinks: int "
                "= 0, chunk: int | None = None, "
                "causal: bool = True, first_slot: Any | None = None, sink_slots: int = 0, "
                "latent_width: int | None = None, "
                "scales: KVPages | None = None, scale_table: Any | None = None) -> "
                "numpy.typing.NDArray[Any]"),
        "Plain attention through tables, the reference for kernels: [tokens, query_heads, value "
        "width], of the type of q.\n"
        "  q             [tokens, query_heads, key_dim]; query head h reads KV head h / "
        "(query_heads / kv_heads)\n"
        "  block_table   [rows, columns] int32; seq_lens [rows] and cu_seqlens_q [rows + 1] int32, "
        "as a plan has them\n"
        "  scale         of the products of query and key; None: 1 / sqrt(key_dim)\n"
        "  window, sinks, chunk, causal   which keys a query sees; not causal: all seq_lens of "
        "them (cross attention)\n"
        "  first_slot, sink_slots         of a compact table\n"
        "  latent_width  where pages store no values: how many elements of a key are its value\n"
        "Raises InvalidArgument for shapes that do not fit and for keys in reach that the table "
        "does not hold.");
}

}  // namespace kvleaf::python
