// Geometry and pool: page sizes, no tokens. Leaves are named here, and blocks are plain numbers.
#include <nanobind/operators.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include <fmt/format.h>

#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "bind.h"
#include "convert.h"
#include "kvleaf/leaf/leaf.h"
#include "python_pool.h"

namespace kvleaf::python {

using namespace nb::literals;
using OptionalWhole = std::optional<Whole>;

NamedPoolStats NamedPoolStats::of(PoolStats stats, const Geometry& geometry) {
  NamedPoolStats named{std::move(stats), nb::dict()};
  for (std::size_t i = 0; i < named.stats.leaves.size(); ++i) {
    named.leaves[geometry.leaves()[i].name.c_str()] = named.stats.leaves[i];
  }
  return named;
}

std::vector<PageSpec> pages_of(nb::handle source) {
  std::vector<PageSpec> pages;
  for (const nb::handle page : nb::iter(source)) {
    if (const auto* spec = instance_of<PageSpec>(page)) {
      pages.push_back(*spec);
    } else if (const auto* leaf = instance_of<KVLeafRegion>(page)) {
      pages.push_back(PageSpec::of(*leaf));
    } else {
      throw InvalidArgument(
          fmt::format("pages[{}] is of type {}; accepted: PageSpec or KVLeafRegion", pages.size(),
                      Py_TYPE(page.ptr())->tp_name));
    }
  }
  return pages;
}

namespace {

std::optional<std::uint64_t> u64(const OptionalWhole& number, const char* name) {
  return number ? std::optional(number->u64(name)) : std::nullopt;
}

// ---- geometry
// ---------------------------------------------------------------------------------------

void bind_geometry(nb::module_& m) {
  nb::class_<PageSpec> page(
      m, "PageSpec",
      "What the pool must know of a leaf; a KVLeafRegion serves as one. stride_alignment: None: "
      "packed, the\n"
      "stride is bytes_per_page; 1: any padding. weight: expected share of data bytes, divided by "
      "the sum.\n"
      "floor, ceiling: live blocks that are always kept obtainable, and never exceeded.");
  page.def(
          "__init__",
          [](PageSpec* self, std::string name, Whole bytes_per_page,
             const OptionalWhole& stride_alignment, double weight, Whole floor,
             const OptionalWhole& ceiling, bool one_per_request) {
            new (self) PageSpec{.name = std::move(name),
                                .bytes_per_page = bytes_per_page.u64("bytes_per_page"),
                                .stride_alignment = u64(stride_alignment, "stride_alignment"),
                                .weight = weight,
                                .floor = floor.u64("floor"),
                                .ceiling = u64(ceiling, "ceiling"),
                                .one_per_request = one_per_request};
          },
          "name"_a, "bytes_per_page"_a, "stride_alignment"_a = nb::none(), "weight"_a = 1.0,
          "floor"_a = 0, "ceiling"_a = nb::none(), nb::kw_only(), "one_per_request"_a = false)
      .def_ro("name", &PageSpec::name)
      .def_ro("bytes_per_page", &PageSpec::bytes_per_page)
      .def_ro("stride_alignment", &PageSpec::stride_alignment)
      .def_ro("weight", &PageSpec::weight)
      .def_ro("floor", &PageSpec::floor)
      .def_ro("ceiling", &PageSpec::ceiling)
      .def_ro("one_per_request", &PageSpec::one_per_request)
      .def(nb::self == nb::self, equal)
      .def(nb::self != nb::self, unequal)
      .def("__hash__", [](const PageSpec& self) { return std::hash<std::string>()(self.name); })
      .def("__repr__", [](const PageSpec& self) {
        return fmt::format("PageSpec('{}', {})", self.name, self.bytes_per_page);
      });
  refuse_pickle(page, "recreate it from its arguments");

  nb::class_<LeafGeometry>(m, "LeafGeometry",
                           "One leaf's view of the arena: block b lies at\n"
                           "base_offset + b * page_stride; real blocks are 1 to blocks.")
      .def_ro("name", &LeafGeometry::name)
      .def_ro("bytes_per_page", &LeafGeometry::bytes_per_page, "Bytes of data.")
      .def_ro("page_stride", &LeafGeometry::page_stride, "Bytes from a block to the next.")
      .def_ro("ratio", &LeafGeometry::ratio, "Blocks in one huge block.")
      .def_ro("base_offset", &LeafGeometry::base_offset, "Byte of the arena where block 0 begins.")
      .def_ro("blocks", &LeafGeometry::blocks)
      .def_ro("floor", &LeafGeometry::floor)
      .def_ro("ceiling", &LeafGeometry::ceiling)
      .def_prop_ro(
          "page_class", [](const LeafGeometry& self) { return self.page_class.value(); },
          "Leaves of one number share huge blocks.")
      .def(nb::self == nb::self, equal)
      .def("__hash__", [](const LeafGeometry& self) { return std::hash<std::string>()(self.name); })
      .def("__repr__", [](const LeafGeometry& self) {
        return fmt::format("LeafGeometry('{}', {} bytes in {}, {} per huge block, {} blocks)",
                           self.name, self.bytes_per_page, self.page_stride, self.ratio,
                           self.blocks);
      });

  nb::class_<Geometry> geometry(
      m, "Geometry",
      "How one arena of bytes is tiled: a null region, huge block 0, huge block 1 and so on. A "
      "huge block\n"
      "serves one page class at a time and holds `ratio` of its blocks. Immutable, a value.");
  geometry
      .def_static(
          "by_hand",
          [](nb::handle pages, Whole huge_bytes, Whole huge_blocks,
             const std::vector<Whole>& ratios, Whole alignment) {
            ByHand choice{.huge_bytes = huge_bytes.u64("huge_bytes"),
                          .huge_blocks = huge_blocks.u64("huge_blocks"),
                          .ratios = {},
                          .alignment = alignment.u64("alignment")};
            for (const Whole& ratio : ratios) choice.ratios.push_back(ratio.u64("ratios"));
            return Geometry::by_hand(pages_of(pages), std::move(choice));
          },
          "pages"_a, nb::kw_only(), "huge_bytes"_a, "huge_blocks"_a, "ratios"_a, "alignment"_a = 1,
          nb::sig("def by_hand(pages: collections.abc.Iterable[PageSpec | KVLeafRegion], *, "
                  "huge_bytes: int, "
                  "huge_blocks: int, ratios: collections.abc.Sequence[int], alignment: int = 1) -> "
                  "Geometry"),
          "A geometry of your choice; ratios: blocks per huge block, one per page. Raises "
          "GeometryError where a\n"
          "ratio does not divide huge_bytes into strides that hold the page and meet its "
          "alignment.")
      .def_prop_ro("budget_bytes", &Geometry::budget_bytes)
      .def_prop_ro("arena_bytes", &Geometry::arena_bytes, "Null region and huge blocks.")
      .def_prop_ro("null_bytes", &Geometry::null_bytes, "The null region: readable zeros.")
      .def_prop_ro("huge_bytes", &Geometry::huge_bytes)
      .def_prop_ro("huge_blocks", &Geometry::huge_blocks)
      .def_prop_ro("cost", &Geometry::cost,
                   "Share of the budget that padding, remainders and half-used huge\n"
                   "blocks take: what plan_geometry minimises.")
      .def_prop_ro("leaves",
                   [](const Geometry& self) {
                     return std::vector<LeafGeometry>(self.leaves().begin(), self.leaves().end());
                   })
      .def(
          "byte_range",
          [](const Geometry& self, std::string_view leaf, Whole block) {
            const ByteRange range = self.byte_range(self.find(leaf), block.block());
            return std::pair(range.begin, range.end);
          },
          "leaf"_a, "block"_a,
          "(begin, end) of one block's data in the arena, end = begin + bytes_per_page.")
      .def(
          "huge_block_of",
          [](const Geometry& self, std::string_view leaf, Whole block) {
            return self.huge_block_of(self.find(leaf), block.block()).value();
          },
          "leaf"_a, "block"_a, "Index of the huge block that a block lies in.")
      .def(
          "resized",
          [](const Geometry& self, Whole huge_blocks) {
            return self.resized(huge_blocks.u64("huge_blocks"));
          },
          "huge_blocks"_a, "The same tiling with another number of huge blocks.")
      .def(nb::self == nb::self, equal)
      .def(nb::self != nb::self, unequal)
      .def("__hash__",
           [](const Geometry& self) { return std::hash<std::uint64_t>()(self.arena_bytes()); })
      .def("__repr__", [](const Geometry& self) {
        return fmt::format("Geometry({} huge blocks of {} bytes, {} leaves)", self.huge_blocks(),
                           self.huge_bytes(), self.leaves().size());
      });
  refuse_pickle(geometry, "recreate it with plan_geometry or Geometry.by_hand");

  m.def(
      "plan_geometry",
      [](Whole budget_bytes, nb::handle pages, const OptionalWhole& max_huge_bytes,
         Whole alignment) {
        const std::vector<PageSpec> specs = pages_of(pages);
        const std::uint64_t budget = budget_bytes.u64("budget_bytes");
        const GeometryOptions options{.max_huge_bytes = u64(max_huge_bytes, "max_huge_bytes"),
                                      .alignment = alignment.u64("alignment")};
        const nb::gil_scoped_release release;
        return plan_geometry(budget, specs, options);
      },
      "budget_bytes"_a, "pages"_a, nb::kw_only(), "max_huge_bytes"_a = nb::none(),
      "alignment"_a = 256,
      nb::sig("def plan_geometry(budget_bytes: int, pages: collections.abc.Iterable[PageSpec | "
              "KVLeafRegion], *, "
              "max_huge_bytes: int | None = None, alignment: int = 256) -> Geometry"),
      "The cheapest geometry for these pages in this budget: the exact minimum of its cost over "
      "every huge block\n"
      "up to max_huge_bytes (None: 128 MiB, the largest page, or the least that packed leaves "
      "force, whichever is\n"
      "most). alignment: of the null region, in bytes. Raises GeometryError, with the least budget "
      "and the leaf\n"
      "to blame, when none fits.");
}

// ---- the pool
// ---------------------------------------------------------------------------------------

Fate fate_of(std::string_view name) {
  if (name == "cache") return Fate::cache;
  if (name == "request") return Fate::request;
  throw InvalidArgument(fmt::format("fate is '{}'; accepted: cache, request", name));
}

PageKey key_of(nb::bytes key) {
  if (key.size() != 16)
    throw InvalidArgument(fmt::format("a key has 16 bytes, not {}", key.size()));
  PageKey page;
  for (std::size_t i = 0; i < 16; ++i) {
    std::uint64_t& half = i < 8 ? page.high : page.low;
    half = half << 8 | static_cast<std::uint8_t>(key.c_str()[i]);
  }
  return page;
}

nb::bytes bytes_of(PageKey key) {
  char text[16];
  for (std::size_t i = 0; i < 16; ++i) {
    text[i] = static_cast<char>((i < 8 ? key.high : key.low) >> (56 - 8 * (i % 8)));
  }
  return nb::bytes(text, sizeof text);
}

/// A hint is ignored when useless, and so is one that is no huge block at all.
std::optional<HugeBlockId> hint_of(const OptionalWhole& hint) {
  if (!hint) return std::nullopt;
  try {
    return HugeBlockId(hint->u32("hint"));
  } catch (const InvalidArgument&) {
    return std::nullopt;
  }
}

/// Wanted blocks per leaf of a {name: number}.
std::vector<std::uint64_t> demand_of(const Pool& pool, const nb::dict& wanted) {
  std::vector<std::uint64_t> blocks(pool.core().leaves());
  for (const auto [name, number] : wanted) {
    if (!PyUnicode_Check(name.ptr())) throw InvalidArgument("a demand names leaves by str");
    Whole whole;
    if (!Whole::read(number, whole)) {
      throw InvalidArgument(fmt::format("the demand of leaf '{}' is {}; accepted: an int",
                                        nb::str(name).c_str(), nb::repr(number).c_str()));
    }
    blocks[pool.leaf(nb::str(name).c_str()).value()] = whole.saturated(nb::str(name).c_str());
  }
  return blocks;
}

nb::object allocate_many(const Pool& pool, std::string_view name, Whole n,
                         const OptionalWhole& hint, std::string_view fate) {
  const Exclusive::Use use(pool.exclusive(), "this pool");
  const LeafId leaf = pool.leaf(name);
  const std::uint64_t wanted = n.saturated("n");
  const Fate how = fate_of(fate);
  // Room for the answer is made only for a number of blocks that exists.
  if (wanted > pool.core().geometry().leaf(leaf).blocks) return nb::none();
  std::vector<BlockId> blocks(wanted, null_block);
  if (!pool.core().allocate_many(leaf, blocks, how, hint_of(hint))) return nb::none();
  return list_of(blocks);
}

nb::object allocate_all(const Pool& pool, const nb::dict& wanted, nb::handle fate) {
  const Exclusive::Use use(pool.exclusive(), "this pool");
  const std::vector<std::uint64_t> numbers = demand_of(pool, wanted);
  std::vector<Fate> fates(numbers.size(), Fate::cache);
  if (PyUnicode_Check(fate.ptr())) {
    fates.assign(fates.size(), fate_of(nb::str(fate).c_str()));
  } else if (PyDict_Check(fate.ptr())) {
    for (const auto [name, how] : nb::borrow<nb::dict>(fate)) {
      fates[pool.leaf(name_in(name, "fate: leaf")).value()] = fate_of(name_in(how, "fate"));
    }
  } else {
    throw InvalidArgument("fate: want 'cache', 'request' or {leaf: fate}");
  }
  if (!pool.core().can_allocate(numbers)) return nb::none();

  std::vector<BlockPool::Demand> demand;
  std::size_t total = 0;
  for (std::uint32_t i = 0; i < numbers.size(); ++i) {
    if (numbers[i] == 0) continue;
    demand.push_back({.leaf = LeafId(i), .blocks = numbers[i], .fate = fates[i], .hint = {}});
    total += numbers[i];
  }
  std::vector<BlockId> blocks(total, null_block);
  if (!pool.core().allocate_all(demand, blocks)) return nb::none();

  nb::dict answer;
  for (const auto [name, number] : wanted) answer[name] = nb::list();
  std::span<const BlockId> rest = blocks;
  for (const BlockPool::Demand& part : demand) {
    answer[pool.core().geometry().leaf(part.leaf).name.c_str()] = list_of(rest.first(part.blocks));
    rest = rest.subspan(part.blocks);
  }
  return answer;
}

int clear_callback(PyObject* self) {
  if (nb::inst_ready(self)) nb::inst_ptr<Pool>(self)->forget_callback();
  return 0;
}
PyType_Slot pool_slots[] = {{Py_tp_traverse, reinterpret_cast<void*>(traverse<Pool>)},
                            {Py_tp_clear, reinterpret_cast<void*>(clear_callback)},
                            {0, nullptr}};

void bind_block_pool(nb::module_& m) {
  nb::class_<LeafStats>(m, "LeafStats", "What a pool holds of one leaf.")
      .def_ro("live", &LeafStats::live, "Blocks with a reference.")
      .def_ro("cached", &LeafStats::cached, "Blocks without one that can still be found.")
      .def_ro("clean", &LeafStats::clean,
              "Blocks of its page class that hold nothing: the same figure for each\n"
              "leaf of the class.")
      .def_ro("padding_bytes", &LeafStats::padding_bytes,
              "Bytes between data and stride, live and cached blocks.")
      .def_ro("evicted", &LeafStats::evicted, "Blocks, since construction.")
      .def("__repr__", [](const LeafStats& self) {
        return fmt::format("LeafStats(live={}, cached={}, clean={}, padding_bytes={}, evicted={})",
                           self.live, self.cached, self.clean, self.padding_bytes, self.evicted);
      });

  nb::class_<NamedPoolStats>(m, "PoolStats", nb::type_slots(collected<NamedPoolStats>),
                             "What a pool holds: huge blocks, and blocks per leaf.")
      .def_prop_ro(
          "huge_blocks", [](const NamedPoolStats& self) { return self.stats.huge_blocks; },
          "Huge blocks in service: empty + claimed + idle.")
      .def_prop_ro(
          "empty", [](const NamedPoolStats& self) { return self.stats.empty; },
          "Huge blocks owned by nobody.")
      .def_prop_ro(
          "claimed", [](const NamedPoolStats& self) { return self.stats.claimed; },
          "Huge blocks with a live block.")
      .def_prop_ro(
          "idle", [](const NamedPoolStats& self) { return self.stats.idle; },
          "Owned huge blocks with cached blocks only.")
      .def_prop_ro(
          "retyped", [](const NamedPoolStats& self) { return self.stats.retyped; },
          "Huge blocks taken from one page class for another, since construction.")
      .def_ro("leaves", &NamedPoolStats::leaves,
              nb::sig("def leaves(self) -> dict[str, LeafStats]"))
      .def("__repr__", [](const NamedPoolStats& self) {
        return fmt::format("PoolStats(empty={}, claimed={}, idle={}, leaves={})", self.stats.empty,
                           self.stats.claimed, self.stats.idle, nb::repr(self.leaves).c_str());
      });

  nb::class_<Pool> pool(
      m, "BlockPool", nb::type_slots(pool_slots), nb::is_weak_referenceable(),
      "Blocks of every leaf out of one arena of huge blocks. It moves no bytes and knows no "
      "tokens. Every block\n"
      "of an owned huge block is live (referenced), cached (unreferenced but committed: it can be "
      "found, and is\n"
      "evicted when memory is short) or clean. Leaves go by name. One thread owns a pool.");
  pool.def(
          "__init__",
          [](Pool* self, const Geometry& geometry, const OptionalWhole& max_huge_blocks) {
            new (self) Pool(
                geometry,
                {.max_huge_blocks = max_huge_blocks ? max_huge_blocks->u64("max_huge_blocks") : 0});
          },
          "geometry"_a, nb::kw_only(), "max_huge_blocks"_a = nb::none(),
          "max_huge_blocks: how far resize may grow it; None: not beyond the geometry.")
      .def_prop_ro("geometry", [](const Pool& self) { return self.core().geometry(); })
      .def(
          "allocate",
          [](const Pool& self, std::string_view leaf, const OptionalWhole& hint,
             std::string_view fate) -> std::optional<std::uint32_t> {
            const Exclusive::Use use(self.exclusive(), "this pool");
            const auto block = self.core().allocate(self.leaf(leaf), fate_of(fate), hint_of(hint));
            return block ? std::optional(block->value()) : std::nullopt;
          },
          "leaf"_a, "hint"_a = nb::none(), "fate"_a = "cache",
          "One block, live with one reference; None when the joint rule refuses it. hint: the huge "
          "block that this\n"
          "request last took from, ignored when useless. fate: 'cache' for what is meant to stay "
          "findable,\n"
          "'request' for what is gone with its request.")
      .def("allocate_many", &allocate_many, "leaf"_a, "n"_a, "hint"_a = nb::none(),
           "fate"_a = "cache",
           nb::sig("def allocate_many(self, leaf: str, n: int, hint: int | None = None, fate: str "
                   "= 'cache') -> "
                   "list[int] | None"),
           "n blocks, or None and nothing taken.")
      .def("allocate_all", &allocate_all, "demand"_a, "fate"_a = "cache",
           nb::sig("def allocate_all(self, demand: dict[str, int], fate: str | dict[str, str] = "
                   "'cache') -> "
                   "dict[str, list[int]] | None"),
           "Blocks of several leaves: all, or None and nothing changed. fate: one for all, or per "
           "leaf.")
      .def(
          "can_allocate",
          [](const Pool& self, const nb::dict& demand) {
            self.exclusive().require_readable("this pool");
            return self.core().can_allocate(demand_of(self, demand));
          },
          "demand"_a, nb::sig("def can_allocate(self, demand: dict[str, int]) -> bool"),
          "What allocate_all would answer; no side effect.")
      .def(
          "free",
          [](const Pool& self, std::string_view leaf, Whole block) {
            const Exclusive::Use use(self.exclusive(), "this pool");
            self.core().free(self.leaf(leaf), block.block());
          },
          "leaf"_a, "block"_a,
          "Returns one reference. The last makes the block cached if committed, else clean.")
      .def(
          "free_many",
          [](const Pool& self, std::string_view leaf, nb::handle blocks) {
            const Exclusive::Use use(self.exclusive(), "this pool");
            self.core().free_many(self.leaf(leaf), blocks_of(blocks));
          },
          "leaf"_a, "blocks"_a,
          nb::sig("def free_many(self, leaf: str, blocks: collections.abc.Iterable[int]) -> None"),
          "One reference of each.")
      .def(
          "touch",
          [](const Pool& self, std::string_view leaf, Whole block, const OptionalWhole& value) {
            const Exclusive::Use use(self.exclusive(), "this pool");
            self.core().touch(self.leaf(leaf), block.block(), u64(value, "value"));
          },
          "leaf"_a, "block"_a, "value"_a = nb::none(),
          "One more reference; makes a cached block live. A clean block cannot be touched.")
      .def(
          "touch_many",
          [](const Pool& self, std::string_view leaf, nb::handle blocks,
             const OptionalWhole& value) {
            const Exclusive::Use use(self.exclusive(), "this pool");
            self.core().touch_many(self.leaf(leaf), blocks_of(blocks), u64(value, "value"));
          },
          "leaf"_a, "blocks"_a, "value"_a = nb::none(),
          nb::sig("def touch_many(self, leaf: str, blocks: collections.abc.Iterable[int], value: "
                  "int | None = "
                  "None) -> None"),
          "One more reference of each.")
      .def(
          "references",
          [](const Pool& self, std::string_view leaf, Whole block) {
            self.exclusive().require_readable("this pool");
            return self.core().references(self.leaf(leaf), block.block());
          },
          "leaf"_a, "block"_a)
      .def(
          "commit",
          [](const Pool& self, std::string_view leaf, Whole block, nb::bytes key,
             const OptionalWhole& value) {
            const Exclusive::Use use(self.exclusive(), "this pool");
            self.core().commit(self.leaf(leaf), block.block(), key_of(key), u64(value, "value"));
          },
          "leaf"_a, "block"_a, "key"_a, "value"_a = nb::none(),
          "Makes a live block findable under a key of 16 bytes. value: its place in the order of "
          "eviction, least\n"
          "first; None: the time of the call.")
      .def(
          "commit_many",
          [](const Pool& self, std::string_view leaf, nb::handle blocks,
             const std::vector<nb::bytes>& keys) {
            const Exclusive::Use use(self.exclusive(), "this pool");
            std::vector<PageKey> page_keys;
            for (const nb::bytes& key : keys) page_keys.push_back(key_of(key));
            const std::vector<BlockId> ids = blocks_of(blocks);
            if (ids.size() != page_keys.size()) {
              throw InvalidArgument(
                  fmt::format("{} blocks, but {} keys", ids.size(), page_keys.size()));
            }
            self.core().commit_many(self.leaf(leaf), ids, page_keys);
          },
          "leaf"_a, "blocks"_a, "keys"_a,
          nb::sig("def commit_many(self, leaf: str, blocks: collections.abc.Iterable[int], keys: "
                  "collections.abc.Sequence[bytes]) -> None"),
          "The same of several, one key each.")
      .def(
          "revalue",
          [](const Pool& self, std::string_view leaf, Whole block, Whole value) {
            self.exclusive().require_readable("this pool");
            self.core().revalue(self.leaf(leaf), block.block(), value.u64("value"));
          },
          "leaf"_a, "block"_a, "value"_a,
          "Another place in the order of eviction for a committed block.")
      .def(
          "uncommit",
          [](const Pool& self, std::string_view leaf, Whole block) {
            self.exclusive().require_readable("this pool");
            self.core().uncommit(self.leaf(leaf), block.block());
          },
          "leaf"_a, "block"_a,
          "No longer findable: a cached block becomes clean, a live one stays live.")
      .def(
          "committed",
          [](const Pool& self, std::string_view leaf, Whole block) {
            self.exclusive().require_readable("this pool");
            return self.core().committed(self.leaf(leaf), block.block());
          },
          "leaf"_a, "block"_a)
      .def(
          "find",
          [](const Pool& self, std::string_view leaf,
             nb::bytes key) -> std::optional<std::uint32_t> {
            self.exclusive().require_readable("this pool");
            const auto block = self.core().find(self.leaf(leaf), key_of(key));
            return block ? std::optional(block->value()) : std::nullopt;
          },
          "leaf"_a, "key"_a, "The block committed under this key, if any; no reference is taken.")
      .def("on_evict", &Pool::on_evict, "callback"_a.none(),
           nb::sig("def on_evict(self, callback: collections.abc.Callable[[str, int, bytes], "
                   "object] | None) -> None"),
           "callback(leaf, block, key) is called once per evicted block, after it ceased to be "
           "findable. It may\n"
           "call uncommit, revalue and what only asks. What it raises reaches the caller of the "
           "allocation, which\n"
           "then has taken nothing. None: no callback.")
      .def(
          "plan_compaction",
          [](const Pool& self, std::string_view leaf, Whole max_bytes) {
            self.exclusive().require_readable("this pool");
            nb::list moves;
            for (const BlockMove& move :
                 self.core().plan_compaction(self.leaf(leaf), max_bytes.u64("max_bytes"))) {
              moves.append(nb::make_tuple(self.core().geometry().leaf(move.leaf).name,
                                          move.src.value(), move.dst.value()));
            }
            return moves;
          },
          "leaf"_a, "max_bytes"_a,
          nb::sig(
              "def plan_compaction(self, leaf: str, max_bytes: int) -> list[tuple[str, int, int]]"),
          "Copies (leaf, src, dst), of at most max_bytes, that would empty a huge block of the "
          "leaf's page class;\n"
          "changes nothing.")
      .def(
          "move",
          [](const Pool& self, std::string_view leaf, Whole src, Whole dst) {
            const Exclusive::Use use(self.exclusive(), "this pool");
            self.core().move(self.leaf(leaf), src.block(), dst.block());
          },
          "leaf"_a, "src"_a, "dst"_a,
          "All that is known of src belongs to dst. Call it after the bytes were copied.")
      .def(
          "resize",
          [](const Pool& self, Whole huge_blocks) {
            const Exclusive::Use use(self.exclusive(), "this pool");
            std::vector<std::pair<std::uint64_t, std::uint64_t>> ranges;
            for (const ByteRange& range : self.core().resize(huge_blocks.u64("huge_blocks"))) {
              ranges.emplace_back(range.begin, range.end);
            }
            return ranges;
          },
          "huge_blocks"_a,
          "Another number of huge blocks. Gives byte ranges that may be unmapped (shrinking) or "
          "must be mapped\n"
          "(growing). Raises PoolExhausted where live blocks are in the way.")
      .def("stats",
           [](const Pool& self) {
             self.exclusive().require_readable("this pool");
             return NamedPoolStats::of(self.core().stats(), self.core().geometry());
           })
      .def(
          "audit",
          [](const Pool& self) {
            self.exclusive().require_readable("this pool");
            self.core().audit();
          },
          "Recounts everything from scratch. Raises InvariantError naming the first broken "
          "equation; from then on\n"
          "the pool refuses all work.")
      .def_prop_ro(
          "metadata_bytes", [](const Pool& self) { return self.core().metadata_bytes(); },
          "Bytes of the pool's own records.");
  refuse_pickle(pool, "it holds the state of one arena; make another from the geometry");
}

}  // namespace

void Pool::on_evict(nb::object callback) {
  if (is_managers()) {
    throw InvalidArgument(
        "this pool belongs to a BlockManager, which is told of evictions: see take_events");
  }
  const Exclusive::Use use(exclusive(), "this pool");
  if (callback.is_none()) {
    core().on_evict({});
  } else if (PyCallable_Check(callback.ptr()) == 0) {
    throw InvalidArgument("on_evict: want a function of (leaf, block, key)");
  } else {
    core().on_evict([this](LeafId leaf, BlockId block, PageKey key) {
      const nb::gil_scoped_acquire gil;
      if (!callback_.is_valid()) return;  // taken away by the garbage collector
      const nb::object call = callback_;  // it may be replaced while it runs
      call(core().geometry().leaf(leaf).name, block.value(), bytes_of(key));
    });
  }
  callback_ = callback.is_none() ? nb::object() : std::move(callback);
}

void bind_pool(nb::module_& module) {
  bind_geometry(module);
  bind_block_pool(module);
}

}  // namespace kvleaf::python
