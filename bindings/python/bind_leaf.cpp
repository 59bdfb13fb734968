// Leaves: access patterns, groups, the region that users derive from, and the kinds that ship.
#include <nanobind/operators.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include <fmt/format.h>

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "bind.h"
#include "convert.h"
#include "kvleaf/leaf/leaf.h"
#include "python_leaf.h"

namespace kvleaf::python {
namespace {

using namespace nb::literals;
using OptionalWhole = std::optional<Whole>;

std::optional<std::uint32_t> u32(const OptionalWhole& number, const char* name) {
  return number ? std::optional(number->u32(name)) : std::nullopt;
}
std::optional<std::uint64_t> u64(const OptionalWhole& number, const char* name) {
  return number ? std::optional(number->u64(name)) : std::nullopt;
}

const char* const recreate = "recreate it from its arguments";

// ---- patterns and groups
// ----------------------------------------------------------------------------

/// Python's function as the library's. The library copies and drops it without the GIL.
AccessPattern::TailBegin tail_begin_of(const nb::object& function) {
  const std::shared_ptr<PyObject> held(function.inc_ref().ptr(), [](PyObject* object) {
    if (!nb::is_alive()) return;
    const nb::gil_scoped_acquire gil;
    Py_DECREF(object);
  });
  return [held](std::uint32_t n) {
    const nb::gil_scoped_acquire gil;
    const nb::object begin = nb::borrow(held.get())(n);
    Whole whole;
    if (!Whole::read(begin, whole)) {
      throw InvalidArgument(
          fmt::format("tail_begin({}) gave {}; accepted: an int", n, nb::repr(begin).c_str()));
    }
    return whole.u32("tail_begin");
  };
}

void bind_patterns(nb::module_& m) {
  nb::class_<AccessPattern> pattern(
      m, "AccessPattern",
      "Which tokens' entries must still be held to compute token n, with n tokens computed:\n"
      "[0, head) and [tail_begin(n), n). A value.");
  pattern.def_static("full", &AccessPattern::full, "All earlier tokens.")
      .def_static(
          "window",
          [](Whole tokens, Whole sinks) {
            return AccessPattern::window(tokens.u32("tokens"), sinks.u32("sinks"));
          },
          "tokens"_a, "sinks"_a = 0,
          "The last `tokens` tokens, the query counted, and the first `sinks`.")
      .def_static(
          "chunk", [](Whole tokens) { return AccessPattern::chunk(tokens.u32("tokens")); },
          "tokens"_a, "From the last multiple of `tokens`.")
      .def_static("point", &AccessPattern::point, "A state: what ends at n, and valid only there.")
      .def_static("encoder", &AccessPattern::encoder, "All of the encoder's tokens, whatever n is.")
      .def_static("none", &AccessPattern::none, "No tokens: scratch.")
      .def_static(
          "custom",
          [](Whole head, const std::optional<nb::callable>& tail_begin, Whole ahead) {
            return AccessPattern::custom(
                {.head = head.u32("head"),
                 .tail_begin = tail_begin ? tail_begin_of(*tail_begin) : AccessPattern::TailBegin(),
                 .ahead = ahead.u32("ahead")});
          },
          "head"_a = 0, "tail_begin"_a = nb::none(), "ahead"_a = 0,
          nb::sig("def custom(head: int = 0, tail_begin: collections.abc.Callable[[int], int] | "
                  "None = None, "
                  "ahead: int = 0) -> AccessPattern"),
          "tail_begin(n) gives the first token of [tail_begin, n) that computing token n still "
          "needs; it\n"
          "never decreases. ahead=1: entry i is computed from token i + 1 as well. The function is "
          "called\n"
          "once for each n when a BlockManager is made, and is kept as long as the pattern is.")
      .def(
          "reach",
          [](const AccessPattern& self, Whole n, Whole tokens_per_page, Whole encoder_tokens) {
            return self.reach(n.u32("n"), tokens_per_page.u32("tokens_per_page"),
                              encoder_tokens.u32("encoder_tokens"));
          },
          "n"_a, "tokens_per_page"_a, "encoder_tokens"_a = 0,
          "Sorted slots that are still needed to compute token n, the partly filled one included.")
      .def(
          "most_slots",
          [](const AccessPattern& self, Whole tokens_per_page, Whole num_slots, Whole step_tokens) {
            return self.most_slots(tokens_per_page.u32("tokens_per_page"),
                                   num_slots.u32("num_slots"), step_tokens.u32("step_tokens"));
          },
          "tokens_per_page"_a, "num_slots"_a, "step_tokens"_a = 1,
          "The most slots held at once while num_slots slots are filled, at most step_tokens "
          "tokens planned\n"
          "and not yet settled.")
      .def(
          "tail_begin",
          [](const AccessPattern& self, Whole n) { return self.tail_begin(n.u32("n")); }, "n"_a,
          "First token of the tail with n tokens computed.")
      .def_prop_ro("head", &AccessPattern::head, "Leading tokens that are always needed.")
      .def_prop_ro("ahead", &AccessPattern::ahead,
                   "Tokens after its own that an entry is computed from.")
      .def(nb::self == nb::self, equal)
      .def(nb::self != nb::self, unequal)
      .def("__hash__",
           [](const AccessPattern& self) { return std::hash<std::string>()(self.to_string()); })
      .def("__repr__",
           [](const AccessPattern& self) { return "AccessPattern." + self.to_string(); });
  refuse_pickle(pattern, recreate);

  nb::class_<KVCacheGroupId> group(
      m, "KVCacheGroupId",
      "Leaves with the same access pattern and the same way of writing: reused, advanced and "
      "evicted\n"
      "together. writing: 'append', 'in_place', 'write_once' or 'private'.");
  group
      .def(
          "__init__",
          [](KVCacheGroupId* self, std::string name, const AccessPattern& pattern,
             std::string_view writing) {
            new (self) KVCacheGroupId(std::move(name), pattern, require_writing(writing));
          },
          "name"_a, "pattern"_a, "writing"_a)
      .def_static("full", &KVCacheGroupId::full)
      .def_static(
          "sliding_window",
          [](Whole window, Whole sinks) {
            return KVCacheGroupId::sliding_window(window.u32("window"), sinks.u32("sinks"));
          },
          "window"_a, "sinks"_a = 0)
      .def_static(
          "chunked", [](Whole chunk) { return KVCacheGroupId::chunked(chunk.u32("chunk")); },
          "chunk"_a)
      .def_static("state", &KVCacheGroupId::state, "name"_a = "state")
      .def_static("encoder", &KVCacheGroupId::encoder, "name"_a = "encoder")
      .def_static("scratch", &KVCacheGroupId::scratch, "name"_a = "scratch")
      .def_ro("name", &KVCacheGroupId::name)
      .def_prop_ro("pattern", [](const KVCacheGroupId& self) { return self.pattern; })
      .def_prop_ro("writing", [](const KVCacheGroupId& self) { return name_of(self.writing); })
      .def(nb::self == nb::self, equal)
      .def(nb::self != nb::self, unequal)
      .def("__hash__",
           [](const KVCacheGroupId& self) { return std::hash<std::string>()(self.name); })
      .def("__repr__", [](const KVCacheGroupId& self) {
        return fmt::format("KVCacheGroupId('{}', AccessPattern.{}, '{}')", self.name,
                           self.pattern.to_string(), name_of(self.writing));
      });
  refuse_pickle(group, recreate);
}

// ---- the region
// -------------------------------------------------------------------------------------

PythonLeaf* subclassed(KVLeafRegion& leaf) { return dynamic_cast<PythonLeaf*>(&leaf); }
const PythonLeaf* subclassed(const KVLeafRegion& leaf) {
  return dynamic_cast<const PythonLeaf*>(&leaf);
}

std::uint32_t page_of(const KVLeafRegion& leaf, const OptionalWhole& given) {
  std::uint32_t tokens = 16;
  if (given) {
    tokens = given->u32("tokens_per_page");
  } else if (leaf.tokens_per_page()) {
    tokens = *leaf.tokens_per_page();
  } else if (const PythonLeaf* python = subclassed(leaf)) {
    tokens = python->page_tokens;
  }
  if (tokens == 0) {
    throw InvalidArgument(fmt::format("leaf '{}': tokens_per_page is 0", leaf.leaf_id()));
  }
  return tokens;
}

/// The rows of a batch as the library takes them.
class Plans {
 public:
  explicit Plans(nb::handle source) {
    for (const nb::handle row : nb::iter(source)) blocks_.push_back(blocks_of(row));
    spans_.assign(blocks_.begin(), blocks_.end());
  }
  std::span<const std::span<const BlockId>> view() const noexcept { return spans_; }

 private:
  std::vector<std::vector<BlockId>> blocks_;
  std::vector<std::span<const BlockId>> spans_;
};

/// The caller's arrays as a leaf takes them.
class Into {
 public:
  explicit Into(nb::handle source) {
    for (const nb::handle key : nb::iter(source)) {
      if (arrays_.size() == max_staged_inputs) {
        throw InvalidArgument(fmt::format("into: more than {} arrays", max_staged_inputs));
      }
      const nb::object array = nb::borrow(source)[key];
      arrays_.push_back(staged_of(name_in(key, "into: key"), array, keep_));
    }
  }
  StagedArrays view() noexcept { return StagedArrays(arrays_); }

 private:
  std::vector<nb::ndarray<>> keep_;
  std::vector<StagedArray> arrays_;
};

/// RowDelta as Python sees it: it owns its blocks.
struct PythonRowDelta {
  RowDelta row;
  std::vector<BlockId> blocks;
  std::vector<BlockId> boundary_blocks;
};

/// From a RowDelta, or anything with its attributes.
PythonRowDelta row_delta_of(nb::handle source, std::size_t index) {
  const auto number = [&](const char* name) {
    Whole whole;
    if (!Whole::read(source.attr(name), whole)) {
      throw InvalidArgument(fmt::format("rows[{}].{} is no int", index, name));
    }
    return whole;
  };
  PythonRowDelta delta;
  delta.row.new_owner = truth_of(source.attr("new_owner"));
  delta.row.padding = truth_of(source.attr("padding"));
  delta.row.first_changed_slot = number("first_changed_slot").u32("first_changed_slot");
  delta.row.computed = number("computed").u32("computed");
  delta.row.new_tokens = number("new_tokens").u32("new_tokens");
  delta.row.read_block = number("read_block").block();
  delta.row.write_block = number("write_block").block();
  delta.blocks = blocks_of(source.attr("blocks"));
  delta.boundary_blocks = blocks_of(nb::getattr(source, "boundary_blocks", nb::tuple()));
  return delta;
}

nb::object range_of(const BoundRows& rows) {
  return nb::borrow(reinterpret_cast<PyObject*>(&PyRange_Type))(rows.begin, rows.end);
}

nb::dict staged_input_shapes(const KVLeafRegion& leaf, Whole batch_size, Whole num_blocks) {
  const std::uint32_t batch = batch_size.u32("batch_size");
  const std::uint32_t blocks = num_blocks.u32("num_blocks");
  const PythonLeaf* python = subclassed(leaf);
  nb::dict shapes;
  for (const StagedInput& input : python ? python->base_staged_input_shapes(batch, blocks)
                                         : leaf.staged_input_shapes(batch, blocks)) {
    nb::list extents;
    for (const std::int64_t extent : input.shape) extents.append(extent);
    shapes[nb::str(input.key.data(), input.key.size())] =
        nb::make_tuple(nb::tuple(extents), numpy_dtype(input.dtype));
  }
  return shapes;
}

void write_staged_inputs(const KVLeafRegion& leaf, nb::handle plans, nb::handle into) {
  const Plans rows(plans);
  Into arrays(into);
  const PythonLeaf* python = subclassed(leaf);
  python ? python->base_write_staged_inputs(rows.view(), arrays.view())
         : leaf.write_staged_inputs(rows.view(), arrays.view());
}

void write_staged_delta(const KVLeafRegion& leaf, nb::handle rows, nb::handle into) {
  std::vector<PythonRowDelta> owned;
  for (const nb::handle row : nb::iter(rows)) owned.push_back(row_delta_of(row, owned.size()));
  std::vector<RowDelta> deltas;
  for (PythonRowDelta& row : owned) {
    row.row.blocks = row.blocks;
    row.row.boundary_blocks = row.boundary_blocks;
    deltas.push_back(row.row);
  }
  Into arrays(into);
  const PythonLeaf* python = subclassed(leaf);
  python ? python->base_write_staged_delta(deltas, arrays.view())
         : leaf.write_staged_delta(deltas, arrays.view());
}

void bind_region(nb::module_& m) {
  nb::class_<PythonRowDelta>(
      m, "RowDelta", "What became of one batch row since its leaf's arrays were last written.")
      .def(
          "__init__",
          [](PythonRowDelta* self, bool new_owner, bool padding, Whole first_changed_slot,
             nb::handle blocks, Whole computed, Whole new_tokens, Whole read_block,
             Whole write_block, nb::handle boundary_blocks) {
            PythonRowDelta delta;
            delta.row.new_owner = new_owner;
            delta.row.padding = padding;
            delta.row.first_changed_slot = first_changed_slot.u32("first_changed_slot");
            delta.row.computed = computed.u32("computed");
            delta.row.new_tokens = new_tokens.u32("new_tokens");
            delta.row.read_block = read_block.block();
            delta.row.write_block = write_block.block();
            delta.blocks = blocks_of(blocks);
            delta.boundary_blocks = blocks_of(boundary_blocks);
            new (self) PythonRowDelta(std::move(delta));
          },
          nb::kw_only(), "new_owner"_a = false, "padding"_a = false, "first_changed_slot"_a = 0,
          "blocks"_a = nb::tuple(), "computed"_a = 0, "new_tokens"_a = 0, "read_block"_a = 0,
          "write_block"_a = 0, "boundary_blocks"_a = nb::tuple(),
          nb::sig(
              "def __init__(self, *, new_owner: bool = False, padding: bool = False, "
              "first_changed_slot: int = 0, blocks: collections.abc.Sequence[int] = (), "
              "computed: int = 0, new_tokens: int = 0, read_block: int = 0, write_block: int = 0, "
              "boundary_blocks: collections.abc.Sequence[int] = ()) -> None"))
      .def_prop_ro(
          "new_owner", [](const PythonRowDelta& self) { return self.row.new_owner; },
          "Another request than before, or none was there: write the whole row.")
      .def_prop_ro(
          "padding", [](const PythonRowDelta& self) { return self.row.padding; },
          "A dummy row: null everywhere, length 1, writes nowhere.")
      .def_prop_ro(
          "first_changed_slot",
          [](const PythonRowDelta& self) { return self.row.first_changed_slot; },
          "Slots before it hold what they held.")
      .def_prop_ro(
          "blocks", [](const PythonRowDelta& self) { return list_of(self.blocks); },
          nb::sig("def blocks(self) -> list[int]"),
          "Blocks of the slots from first_changed_slot to the end of the row; 0 where null.")
      .def_prop_ro(
          "computed", [](const PythonRowDelta& self) { return self.row.computed; },
          "Tokens computed before this step.")
      .def_prop_ro(
          "new_tokens", [](const PythonRowDelta& self) { return self.row.new_tokens; },
          "Tokens this step computes.")
      .def_prop_ro(
          "read_block", [](const PythonRowDelta& self) { return self.row.read_block.value(); },
          "States: the block this step reads its state from.")
      .def_prop_ro(
          "write_block", [](const PythonRowDelta& self) { return self.row.write_block.value(); },
          "States: the block it writes to; equal when in place.")
      .def_prop_ro(
          "boundary_blocks",
          [](const PythonRowDelta& self) { return list_of(self.boundary_blocks); },
          nb::sig("def boundary_blocks(self) -> list[int]"),
          "States emitted inside a step: the blocks that receive the state at each page boundary "
          "that\n"
          "the step reaches before its end; 0 where none is wanted.");

  nb::class_<KVLeafRegion, Subclassed<KVLeafRegion>> region(
      m, "KVLeafRegion", nb::is_weak_referenceable(),
      "One addressable region of the cache pool, and the one class to derive from for a kind of "
      "memory that\n"
      "is not here. Four declarations make a leaf: its memory (bytes_per_page, stride_alignment,\n"
      "tokens_per_page), its reach and its way of writing (both of group_id), and its inputs (the "
      "methods\n"
      "below, all of which a subclass may override). leaf_id is unique in a cache.\n"
      "stride_alignment: bytes that a padded page stride must be a multiple of; None: packed "
      "pages.\n"
      "tokens_per_page: None: the page_tokens of its cache.");
  region
      .def(
          "__init__",
          [](nb::pointer_and_handle<KVLeafRegion> self, std::string leaf_id,
             const KVCacheGroupId& group_id, Whole bytes_per_page,
             const OptionalWhole& stride_alignment, const OptionalWhole& tokens_per_page) {
            construct(self, std::move(leaf_id), group_id, bytes_per_page.u64("bytes_per_page"),
                      KVLeafRegion::Options{u64(stride_alignment, "stride_alignment"),
                                            u32(tokens_per_page, "tokens_per_page")});
          },
          "leaf_id"_a, "group_id"_a, "bytes_per_page"_a, nb::kw_only(),
          "stride_alignment"_a = nb::none(), "tokens_per_page"_a = nb::none())
      .def_prop_ro("leaf_id", &KVLeafRegion::leaf_id)
      .def_prop_ro("group_id", [](const KVLeafRegion& self) { return self.group_id(); })
      .def_prop_ro("bytes_per_page", &KVLeafRegion::bytes_per_page, "Bytes of data in one page.")
      .def_prop_ro("stride_alignment", &KVLeafRegion::stride_alignment,
                   "Bytes that a padded page stride is a multiple of; None: packed pages.")
      .def_prop_ro("tokens_per_page", &KVLeafRegion::tokens_per_page,
                   "Tokens that one page covers; None: the page_tokens of its cache.")
      .def_prop_ro(
          "cacheable",
          [](const KVLeafRegion& self) {
            const PythonLeaf* python = subclassed(self);
            return python ? python->base_cacheable() : self.cacheable();
          },
          "Whether blocks are addressed by content. False makes the leaf invisible to all that is "
          "keyed on a\n"
          "hash; it still draws from the pool and counts against admission.")
      .def_prop_ro(
          "layers",
          [](const KVLeafRegion& self) {
            const PythonLeaf* python = subclassed(self);
            return python ? python->base_layers() : self.layers();
          },
          "Layers of the model that this leaf serves, for reports; 0 when it does not say.")
      .def_prop_ro(
          "rollback",
          [](const KVLeafRegion& self) {
            const PythonLeaf* python = subclassed(self);
            return python ? python->base_rollback() : self.rollback();
          },
          "States only: live states that one request keeps beside the first, for draft tokens.")
      .def_prop_ro(
          "state_kernel",
          [](const KVLeafRegion& self) {
            const PythonLeaf* python = subclassed(self);
            return (python ? python->base_state_kernel() : self.state_kernel()) ==
                           StateKernel::in_out
                       ? "in_out"
                       : "in_place";
          },
          "States only: 'in_place' (one block is read and written) or 'in_out' (a read row and a "
          "write row).")
      .def_prop_ro(
          "emits_in_chunk",
          [](const KVLeafRegion& self) {
            const PythonLeaf* python = subclassed(self);
            return python ? python->base_emits_in_chunk() : self.emits_in_chunk();
          },
          "States only: whether the kernel emits its state at page boundaries inside a step.")
      .def_prop_ro(
          "stages_live_span",
          [](const KVLeafRegion& self) {
            const PythonLeaf* python = subclassed(self);
            return python ? python->base_stages_live_span() : self.stages_live_span();
          },
          "Whether num_blocks counts the slots that hold a block, not those from slot 0: a compact "
          "table.")
      .def(
          "slots_per_page",
          [](const KVLeafRegion& self, const OptionalWhole& tokens_per_page) {
            const std::uint32_t page = page_of(self, tokens_per_page);
            const PythonLeaf* python = subclassed(self);
            return python ? python->base_slots_per_page(page) : self.slots_per_page(page);
          },
          "tokens_per_page"_a = nb::none(),
          "Entries that a page stores: fewer than its tokens for compressed attention.")
      .def(
          "blocks_to_reserve",
          [](const KVLeafRegion& self, Whole num_blocks, bool enable_prefix_caching,
             Whole step_tokens, const OptionalWhole& tokens_per_page) {
            const std::uint32_t page = page_of(self, tokens_per_page);
            const ReserveOptions options{.enable_prefix_caching = enable_prefix_caching,
                                         .step_tokens = step_tokens.u32("step_tokens")};
            const std::uint32_t blocks = num_blocks.u32("num_blocks");
            const PythonLeaf* python = subclassed(self);
            return python ? python->base_blocks_to_reserve(blocks, page, options)
                          : self.blocks_to_reserve(blocks, page, options);
          },
          "num_blocks"_a, nb::kw_only(), "enable_prefix_caching"_a, "step_tokens"_a = 1,
          "tokens_per_page"_a = nb::none(),
          "Most blocks that one request holds while it fills num_blocks slots, at most step_tokens "
          "tokens\n"
          "planned and not yet settled; never one too few. Without prefix caching it is what a "
          "request cannot\n"
          "do without; with it, what caching holds at best effort is added.\n"
          "tokens_per_page: None: the leaf's own, else that of the cache that asked last, else 16.")
      .def("staged_input_shapes", &staged_input_shapes, "batch_size"_a, "num_blocks"_a,
           nb::sig("def staged_input_shapes(self, batch_size: int, num_blocks: int) -> dict[str, "
                   "tuple[tuple[int, ...], numpy.dtype[typing.Any]]]"),
           "Shape and dtype of each input that a forward stages. Called once at the widest bounds "
           "and per\n"
           "forward with those of the batch; shapes do not shrink as either grows.\n"
           "num_blocks: slots that the deepest row of the batch reaches.")
      .def(
          "write_staged_inputs", &write_staged_inputs, "plans"_a, "into"_a,
          nb::sig("def write_staged_inputs(self, plans: "
                  "collections.abc.Sequence[collections.abc.Sequence[int]],"
                  " into: collections.abc.Mapping[str, numpy.typing.NDArray[typing.Any]]) -> None"),
          "Writes every entry of the arrays for one forward. plans: per batch row, the blocks in "
          "slot order;\n"
          "0, the null block, where nothing is reached. Raises PlanShapeError for an array that is "
          "missing or\n"
          "too small.")
      .def("write_staged_delta", &write_staged_delta, "rows"_a, "into"_a,
           nb::sig("def write_staged_delta(self, rows: collections.abc.Sequence[RowDelta], into: "
                   "collections.abc.Mapping[str, numpy.typing.NDArray[typing.Any]]) -> None"),
           "Writes what changed since the arrays were last written by this leaf. A subclass that "
           "overrides\n"
           "write_staged_inputs and not this one is asked for a full rewrite each time.")
      .def(
          "bound_row_span",
          [](const KVLeafRegion& self, Whole block) {
            const PythonLeaf* python = subclassed(self);
            nb::dict spans;
            for (const BoundRows& rows : python ? python->base_bound_row_span(block.block())
                                                : self.bound_row_span(block.block())) {
              spans[rows.key.c_str()] = range_of(rows);
            }
            return spans;
          },
          "block"_a, nb::sig("def bound_row_span(self, block: int) -> dict[str, range]"),
          "The rows that one block occupies, per bound input; empty for a leaf reached through a "
          "table.")
      .def(
          "bound_row_copies",
          [](const KVLeafRegion& self, Whole src, Whole dst) {
            const PythonLeaf* python = subclassed(self);
            nb::dict copies;
            for (const auto& [from, to] :
                 python ? python->base_bound_row_copies(src.block(), dst.block())
                        : self.bound_row_copies(src.block(), dst.block())) {
              copies[from.key.c_str()] = nb::make_tuple(range_of(from), range_of(to));
            }
            return copies;
          },
          "src"_a, "dst"_a,
          nb::sig(
              "def bound_row_copies(self, src: int, dst: int) -> dict[str, tuple[range, range]]"),
          "The rows to copy between, per bound input; empty for the same leaves.")
      .def(
          "bind",
          [](KVLeafRegion& self, Whole page_stride) {
            PythonLeaf* python = subclassed(self);
            const std::uint64_t stride = page_stride.u64("page_stride");
            python ? python->base_bind(stride) : self.bind(stride);
          },
          "page_stride"_a, "Told the page stride in bytes once a geometry is chosen.")
      .def("__repr__", [](nb::pointer_and_handle<KVLeafRegion> self) {
        return fmt::format("{}('{}', group '{}', {} bytes a page)", class_name(self.h),
                           self.p->leaf_id(), self.p->group_id().name, self.p->bytes_per_page());
      });
  refuse_pickle(region, recreate);
}

// ---- the kinds that ship
// ----------------------------------------------------------------------------

AttentionOptions attention_options(Whole layers, Whole kv_heads, Whole head_dim,
                                   const OptionalWhole& value_head_dim, nb::handle dtype,
                                   Whole tokens_per_page, const OptionalWhole& slots_per_page,
                                   std::string_view table) {
  return {.layers = layers.u32("layers"),
          .kv_heads = kv_heads.u32("kv_heads"),
          .head_dim = head_dim.u32("head_dim"),
          .value_head_dim = u32(value_head_dim, "value_head_dim"),
          .dtype = dtype_of_python(dtype),
          .tokens_per_page = tokens_per_page.u32("tokens_per_page"),
          .slots_per_page = u32(slots_per_page, "slots_per_page"),
          .table = require_table_format(table)};
}

void bind_attention(nb::module_& m) {
  nb::class_<AttentionLeaf, KVLeafRegion, Subclassed<AttentionLeaf>>(
      m, "AttentionLeaf",
      "What the attention leaves share: a page holds, per layer, its keys [slots, kv_heads, "
      "head_dim] and then\n"
      "its values [slots, kv_heads, value_head_dim]. The stride alignment is one token's row. "
      "Derive from it\n"
      "for a new kind of text attention. table: 'dense' (block_table int32 [batch, columns]) or "
      "'csr' (indptr,\n"
      "indices, last_page_len).")
      .def(
          "__init__",
          [](nb::pointer_and_handle<AttentionLeaf> self, std::string leaf_id,
             const KVCacheGroupId& group_id, Whole layers, Whole kv_heads, Whole head_dim,
             const OptionalWhole& value_head_dim, nb::handle dtype, Whole tokens_per_page,
             const OptionalWhole& slots_per_page, std::string_view table) {
            construct(self, std::move(leaf_id), group_id,
                      attention_options(layers, kv_heads, head_dim, value_head_dim, dtype,
                                        tokens_per_page, slots_per_page, table));
          },
          "leaf_id"_a, "group_id"_a, nb::kw_only(), "layers"_a, "kv_heads"_a, "head_dim"_a,
          "value_head_dim"_a = nb::none(), "dtype"_a, "tokens_per_page"_a,
          "slots_per_page"_a = nb::none(), "table"_a = "dense")
      .def_prop_ro("kv_heads", [](const AttentionLeaf& self) { return self.options().kv_heads; })
      .def_prop_ro("head_dim", [](const AttentionLeaf& self) { return self.options().head_dim; })
      .def_prop_ro("value_head_dim",
                   [](const AttentionLeaf& self) {
                     return self.options().value_head_dim.value_or(self.options().head_dim);
                   })
      .def_prop_ro(
          "dtype", [](const AttentionLeaf& self) { return name_of(self.options().dtype); },
          "Name of the element type, 'bfloat16'.")
      .def_prop_ro("table", [](const AttentionLeaf& self) {
        return self.options().table == TableFormat::csr ? "csr" : "dense";
      });

  nb::class_<FullAttentionLeaf, AttentionLeaf, Subclassed<FullAttentionLeaf>>(
      m, "FullAttentionLeaf",
      "Attends to all earlier tokens. Holds one block per page of the text.")
      .def(
          "__init__",
          [](nb::pointer_and_handle<FullAttentionLeaf> self, std::string leaf_id, Whole layers,
             Whole kv_heads, Whole head_dim, const OptionalWhole& value_head_dim, nb::handle dtype,
             Whole tokens_per_page, const OptionalWhole& slots_per_page, std::string_view table) {
            construct(self, std::move(leaf_id),
                      attention_options(layers, kv_heads, head_dim, value_head_dim, dtype,
                                        tokens_per_page, slots_per_page, table));
          },
          "leaf_id"_a, nb::kw_only(), "layers"_a, "kv_heads"_a, "head_dim"_a,
          "value_head_dim"_a = nb::none(), "dtype"_a, "tokens_per_page"_a,
          "slots_per_page"_a = nb::none(), "table"_a = "dense");

  nb::class_<LatentAttentionLeaf, AttentionLeaf, Subclassed<LatentAttentionLeaf>>(
      m, "LatentAttentionLeaf",
      "One entry of `width` elements per token and layer, shared by all heads (MLA); also indexer "
      "keys. Full\n"
      "reach.")
      .def(
          "__init__",
          [](nb::pointer_and_handle<LatentAttentionLeaf> self, std::string leaf_id, Whole layers,
             Whole width, nb::handle dtype, Whole tokens_per_page,
             const OptionalWhole& slots_per_page, std::string_view table) {
            construct(self, std::move(leaf_id),
                      LatentOptions{.layers = layers.u32("layers"),
                                    .width = width.u32("width"),
                                    .dtype = dtype_of_python(dtype),
                                    .tokens_per_page = tokens_per_page.u32("tokens_per_page"),
                                    .slots_per_page = u32(slots_per_page, "slots_per_page"),
                                    .table = require_table_format(table)});
          },
          "leaf_id"_a, nb::kw_only(), "layers"_a, "width"_a, "dtype"_a, "tokens_per_page"_a,
          "slots_per_page"_a = nb::none(), "table"_a = "dense");

  nb::class_<SlidingWindowLeaf, AttentionLeaf, Subclassed<SlidingWindowLeaf>>(
      m, "SlidingWindowLeaf",
      "Attends to the last `window` tokens, the query counted, and to the first `sinks`. Blocks "
      "come back from\n"
      "the front while the request runs. compact: stage only the sinks and the live span, with "
      "first_slot\n"
      "int32 [batch].")
      .def(
          "__init__",
          [](nb::pointer_and_handle<SlidingWindowLeaf> self, std::string leaf_id, Whole window,
             Whole sinks, bool compact, Whole layers, Whole kv_heads, Whole head_dim,
             const OptionalWhole& value_head_dim, nb::handle dtype, Whole tokens_per_page,
             const OptionalWhole& slots_per_page, std::string_view table) {
            construct(self, std::move(leaf_id),
                      WindowOptions{.window = window.u32("window"),
                                    .sinks = sinks.u32("sinks"),
                                    .compact = compact},
                      attention_options(layers, kv_heads, head_dim, value_head_dim, dtype,
                                        tokens_per_page, slots_per_page, table));
          },
          "leaf_id"_a, nb::kw_only(), "window"_a, "sinks"_a = 0, "compact"_a = false, "layers"_a,
          "kv_heads"_a, "head_dim"_a, "value_head_dim"_a = nb::none(), "dtype"_a,
          "tokens_per_page"_a, "slots_per_page"_a = nb::none(), "table"_a = "dense")
      .def_prop_ro("window", [](const SlidingWindowLeaf& self) { return self.window().window; })
      .def_prop_ro("sinks", [](const SlidingWindowLeaf& self) { return self.window().sinks; })
      .def_prop_ro("compact", [](const SlidingWindowLeaf& self) { return self.window().compact; });

  nb::class_<ChunkedAttentionLeaf, AttentionLeaf, Subclassed<ChunkedAttentionLeaf>>(
      m, "ChunkedAttentionLeaf",
      "Attends to its own chunk: from the last multiple of `chunk` tokens.")
      .def(
          "__init__",
          [](nb::pointer_and_handle<ChunkedAttentionLeaf> self, std::string leaf_id, Whole chunk,
             Whole layers, Whole kv_heads, Whole head_dim, const OptionalWhole& value_head_dim,
             nb::handle dtype, Whole tokens_per_page, const OptionalWhole& slots_per_page,
             std::string_view table) {
            construct(self, std::move(leaf_id), chunk.u32("chunk"),
                      attention_options(layers, kv_heads, head_dim, value_head_dim, dtype,
                                        tokens_per_page, slots_per_page, table));
          },
          "leaf_id"_a, nb::kw_only(), "chunk"_a, "layers"_a, "kv_heads"_a, "head_dim"_a,
          "value_head_dim"_a = nb::none(), "dtype"_a, "tokens_per_page"_a,
          "slots_per_page"_a = nb::none(), "table"_a = "dense");

  nb::class_<CrossAttentionLeaf, AttentionLeaf, Subclassed<CrossAttentionLeaf>>(
      m, "CrossAttentionLeaf",
      "Keys and values of an encoder's output: written whole before the first decode, identified "
      "by the encoder\n"
      "input's digest and length, shared by all requests with the same input, and whole or absent.")
      .def(
          "__init__",
          [](nb::pointer_and_handle<CrossAttentionLeaf> self, std::string leaf_id, Whole layers,
             Whole kv_heads, Whole head_dim, const OptionalWhole& value_head_dim, nb::handle dtype,
             Whole tokens_per_page, std::string_view table, std::string group) {
            construct(self, std::move(leaf_id),
                      attention_options(layers, kv_heads, head_dim, value_head_dim, dtype,
                                        tokens_per_page, std::nullopt, table),
                      std::move(group));
          },
          "leaf_id"_a, nb::kw_only(), "layers"_a, "kv_heads"_a, "head_dim"_a,
          "value_head_dim"_a = nb::none(), "dtype"_a, "tokens_per_page"_a, "table"_a = "dense",
          "group"_a = "encoder");

  nb::class_<ScalesLeaf, AttentionLeaf, Subclassed<ScalesLeaf>>(
      m, "ScalesLeaf",
      "The scales of a quantised leaf, one for `granularity` values, in pages of their own but of "
      "the same\n"
      "group: a slot whose values or scales are missing is a hit for neither. Its id is that of "
      "the values'\n"
      "leaf with '.scales'.")
      .def(
          "__init__",
          [](nb::pointer_and_handle<ScalesLeaf> self, const AttentionLeaf& values_leaf,
             Whole granularity, nb::handle dtype) {
            construct(self, values_leaf,
                      ScalesOptions{.granularity = granularity.u32("granularity"),
                                    .dtype = dtype_of_python(dtype)});
          },
          "values_leaf"_a, nb::kw_only(), "granularity"_a, "dtype"_a);
}

Slab slab_of(nb::handle source) {
  if (const Slab* slab = instance_of<Slab>(source)) return *slab;
  if (!PyTuple_Check(source.ptr()) || nb::len(source) != 3) {
    throw InvalidArgument("slabs: want Slab(name, shape, dtype) or a tuple of these three");
  }
  return {name_in(source[0], "slabs: name"), u32s_of(source[1], "shape"),
          dtype_of_python(source[2])};
}

void bind_states(nb::module_& m) {
  nb::class_<Slab> slab(m, "Slab",
                        "One array of a state: its name, its shape in one layer, its dtype.");
  slab.def(
          "__init__",
          [](Slab* self, std::string name, nb::handle shape, nb::handle dtype) {
            new (self) Slab{std::move(name), u32s_of(shape, "shape"), dtype_of_python(dtype)};
          },
          "name"_a, "shape"_a, "dtype"_a,
          nb::sig("def __init__(self, name: str, shape: collections.abc.Sequence[int], dtype: "
                  "object) -> None"))
      .def_ro("name", &Slab::name)
      .def_prop_ro(
          "shape", [](const Slab& self) { return nb::tuple(nb::cast(self.shape)); },
          nb::sig("def shape(self) -> tuple[int, ...]"))
      .def_prop_ro("dtype", [](const Slab& self) { return name_of(self.dtype); })
      .def_prop_ro("bytes", &Slab::bytes, "Bytes of one layer.")
      .def("__repr__", [](const Slab& self) {
        return fmt::format("Slab('{}', {}, '{}')", self.name,
                           nb::repr(nb::tuple(nb::cast(self.shape))).c_str(), name_of(self.dtype));
      });
  refuse_pickle(slab, recreate);

  nb::class_<RecurrentStateLeaf, KVLeafRegion, Subclassed<RecurrentStateLeaf>>(
      m, "RecurrentStateLeaf",
      "Layers whose memory of the past is one state of fixed size, overwritten by every step. A "
      "page holds the\n"
      "slabs one after another, each with all its layers. kernel: 'in_place' or 'in_out'; "
      "rollback: live states\n"
      "kept for draft tokens; table: 'blocks' (int32 [batch]) or 'rows' (int32 [layers, batch], "
      "one slab only);\n"
      "tokens_per_page: the distance of boundaries, None: the page_tokens of its cache.")
      .def(
          "__init__",
          [](nb::pointer_and_handle<RecurrentStateLeaf> self, std::string leaf_id, Whole layers,
             nb::handle slabs, std::string_view kernel, Whole rollback, bool in_chunk,
             std::string_view table, const OptionalWhole& tokens_per_page, std::string group) {
            StateOptions options{.layers = layers.u32("layers"),
                                 .slabs = {},
                                 .kernel = require_state_kernel(kernel),
                                 .rollback = rollback.u32("rollback"),
                                 .in_chunk = in_chunk,
                                 .table = require_state_table(table),
                                 .tokens_per_page = u32(tokens_per_page, "tokens_per_page"),
                                 .group = std::move(group)};
            for (const nb::handle slab : nb::iter(slabs)) options.slabs.push_back(slab_of(slab));
            construct(self, std::move(leaf_id), std::move(options));
          },
          "leaf_id"_a, nb::kw_only(), "layers"_a, "slabs"_a, "kernel"_a = "in_place",
          "rollback"_a = 0, "in_chunk"_a = false, "table"_a = "blocks",
          "tokens_per_page"_a = nb::none(), "group"_a = "state",
          nb::sig("def __init__(self, leaf_id: str, *, layers: int, slabs: "
                  "collections.abc.Sequence[Slab], "
                  "kernel: str = 'in_place', rollback: int = 0, in_chunk: bool = False, "
                  "table: str = 'blocks', tokens_per_page: int | None = None, group: str = "
                  "'state') -> None"))
      .def_prop_ro("slabs", [](const RecurrentStateLeaf& self) { return self.options().slabs; })
      .def_prop_ro("in_chunk",
                   [](const RecurrentStateLeaf& self) { return self.options().in_chunk; })
      .def_prop_ro("table", [](const RecurrentStateLeaf& self) {
        return self.options().table == StateTable::rows ? "rows" : "blocks";
      });

  nb::class_<ScratchLeaf, KVLeafRegion, Subclassed<ScratchLeaf>>(
      m, "ScratchLeaf",
      "Memory of one request that no other ever reads: one block from the first step to release. "
      "Never cached.")
      .def(
          "__init__",
          [](nb::pointer_and_handle<ScratchLeaf> self, std::string leaf_id, Whole bytes_per_page,
             const OptionalWhole& stride_alignment, std::string group) {
            construct(self, std::move(leaf_id), bytes_per_page.u64("bytes_per_page"),
                      u64(stride_alignment, "stride_alignment"), std::move(group));
          },
          "leaf_id"_a, nb::kw_only(), "bytes_per_page"_a, "stride_alignment"_a = 1,
          "group"_a = "scratch");
}

}  // namespace

void bind_leaf(nb::module_& module) {
  bind_patterns(module);
  bind_region(module);
  bind_attention(module);
  bind_states(module);
}

}  // namespace kvleaf::python
