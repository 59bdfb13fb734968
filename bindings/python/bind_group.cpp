// Requests: what a manager is told and what it answers.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include <fmt/format.h>

#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "bind.h"
#include "convert.h"
#include "python_manager.h"
#include "python_pool.h"

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

// ---- what callers say
// -------------------------------------------------------------------------------

Retention retention_of(nb::handle source) {
  Whole tokens;
  if (Whole::read(source, tokens)) return Retention::every(tokens.u32("retention"));
  if (PyUnicode_Check(source.ptr())) {
    const std::string name = nb::str(source).c_str();
    if (name == "tail") return Retention::tail();
    if (name == "dense") return Retention::dense();
    if (name == "spaced") return Retention::spaced();
  }
  throw InvalidArgument(
      fmt::format("retention is {}; accepted: 'tail', 'dense', 'spaced', or every how many "
                  "tokens",
                  nb::repr(source).c_str()));
}

EvictionOrder eviction_of(std::string_view name) {
  if (name == "value") return EvictionOrder::value;
  if (name == "lru") return EvictionOrder::lru;
  throw InvalidArgument(fmt::format("eviction is '{}'; accepted: value, lru", name));
}

KeyHash hash_of(std::string_view name) {
  if (name == "xxh3_128") return KeyHash::xxh3_128;
  if (name == "sha256") return KeyHash::sha256;
  throw InvalidArgument(fmt::format("hash is '{}'; accepted: xxh3_128, sha256", name));
}

/// The parts of a tuple, with as many as `most` and at least `least`.
nb::tuple parts_of(nb::handle source, std::size_t least, std::size_t most, const char* accepted) {
  if (!PyTuple_Check(source.ptr()) && !PyList_Check(source.ptr())) {
    throw InvalidArgument(fmt::format("{}; accepted: {}", nb::repr(source).c_str(), accepted));
  }
  nb::tuple parts(nb::borrow(source));
  if (parts.size() < least || parts.size() > most) {
    throw InvalidArgument(fmt::format("{}; accepted: {}", nb::repr(source).c_str(), accepted));
  }
  return parts;
}

std::uint32_t part_u32(const nb::tuple& parts, std::size_t index, const char* name) {
  Whole whole;
  if (!Whole::read(parts[index], whole)) {
    throw InvalidArgument(
        fmt::format("{} is {}; accepted: an int", name, nb::repr(parts[index]).c_str()));
  }
  return whole.u32(name);
}

AdmitOptions admit_options(nb::handle salt, std::string adapter, nb::handle encoder,
                           nb::handle media, Whole priority, const OptionalWhole& guarantee,
                           const OptionalWhole& addressable, bool partial) {
  AdmitOptions options;
  options.salt = text_of(salt, "salt");
  options.adapter = std::move(adapter);
  if (!encoder.is_none()) {
    const nb::tuple parts = parts_of(encoder, 2, 3, "encoder=(digest, tokens, at=0)");
    options.encoder = {.digest = text_of(parts[0], "encoder digest"),
                       .tokens = part_u32(parts, 1, "encoder tokens"),
                       .at = parts.size() == 3 ? part_u32(parts, 2, "encoder at") : 0};
  }
  for (const nb::handle item : nb::iter(media)) {
    const nb::tuple parts = parts_of(item, 3, 4, "media=[(offset, length, digest, whole=False)]");
    options.media.push_back({.offset = part_u32(parts, 0, "media offset"),
                             .length = part_u32(parts, 1, "media length"),
                             .digest = text_of(parts[2], "media digest"),
                             .whole = parts.size() == 4 && truth_of(parts[3])});
  }
  options.priority = priority.i32("priority");
  options.guarantee = u32(guarantee, "guarantee");
  options.addressable = u32(addressable, "addressable");
  options.partial = partial;
  return options;
}

// ---- what the manager answers
// -----------------------------------------------------------------------

/// A step that was begun, in names.
struct PythonStep {
  std::uint64_t id;
  nb::list served;
  nb::dict refused;
  nb::list copies;
  nb::list zero_fills;

  template <class F>
  void each_object(F f) const {
    f(served);
    f(refused);
    f(copies);
    f(zero_fills);
  }
};

struct NamedManagerStats {
  ManagerStats stats;
  nb::object pool;
  nb::dict groups;

  template <class F>
  void each_object(F f) const {
    f(pool);
    f(groups);
  }
};

nb::bytes bytes_of(const std::array<std::uint8_t, 16>& key) {
  return nb::bytes(key.data(), key.size());
}

std::string_view kind_of(Event::Kind kind) {
  switch (kind) {
    case Event::Kind::stored: return "stored";
    case Event::Kind::removed: return "removed";
    case Event::Kind::cleared: return "cleared";
  }
  return "";
}

void bind_answers(nb::module_& m) {
  nb::class_<Admission>(m, "Admission", "What a manager answers to a prompt.")
      .def_ro("hit_tokens", &Admission::hit_tokens, "Leading tokens that need not be computed.")
      .def_prop_ro(
          "lost",
          [](const Admission& self) {
            nb::dict lost;
            for (const GroupLoss& loss : self.lost) lost[loss.group.c_str()] = loss.tokens;
            return lost;
          },
          nb::sig("def lost(self) -> dict[str, int]"),
          "What each group cost: tokens by which the hit would be longer if it lacked nothing.")
      .def_ro("reason", &Admission::reason, "Why nothing hit, or what ended the hit.")
      .def_ro("next_stop", &Admission::next_stop, "Where the next chunk should end, in tokens.")
      .def_ro("encoder_cached", &Admission::encoder_cached,
              "The encoder's pages are there already: no encoder run is needed.")
      .def("__repr__", [](const Admission& self) {
        return fmt::format("Admission(hit_tokens={}, reason='{}')", self.hit_tokens, self.reason);
      });

  nb::class_<PythonStep>(m, "Step", nb::type_slots(collected<PythonStep>),
                         "A forward that was begun.")
      .def_ro("id", &PythonStep::id)
      .def_ro("served", &PythonStep::served, nb::sig("def served(self) -> list[typing.Any]"),
              "Requests, in the order given.")
      .def_ro("refused", &PythonStep::refused,
              nb::sig("def refused(self) -> dict[typing.Any, PoolExhausted]"),
              "Requests that did not fit, and why; these changed nothing.")
      .def_ro("copies", &PythonStep::copies,
              nb::sig("def copies(self) -> list[tuple[str, int, int]]"),
              "(leaf_id, src, dst), to run before the forward, in any order.")
      .def_ro("zero_fills", &PythonStep::zero_fills,
              nb::sig("def zero_fills(self) -> list[tuple[str, int]]"),
              "(leaf_id, block), to run before the forward.")
      .def("__repr__", [](const PythonStep& self) {
        return fmt::format("Step({}, {} served, {} refused)", self.id, self.served.size(),
                           self.refused.size());
      });

  nb::class_<Event>(m, "Event", "What became findable, or no longer is.")
      .def_prop_ro(
          "kind", [](const Event& self) { return kind_of(self.kind); },
          "'stored', 'removed' or 'cleared'.")
      .def_ro("group", &Event::group)
      .def_ro("leaf", &Event::leaf)
      .def_prop_ro(
          "key", [](const Event& self) { return bytes_of(self.key); },
          "Chained page key, 16 bytes.")
      .def_prop_ro(
          "parent_key", [](const Event& self) { return bytes_of(self.parent_key); },
          "Key of the page before it; zeros at the root.")
      .def_ro("tokens", &Event::tokens, "Tokens covered up to the page's end.")
      .def("__repr__", [](const Event& self) {
        return fmt::format("Event('{}', group='{}', leaf='{}', tokens={})", kind_of(self.kind),
                           self.group, self.leaf, self.tokens);
      });

  nb::class_<GroupStats>(m, "GroupStats", "What one group cost.")
      .def_ro("group", &GroupStats::group)
      .def_ro("lost_tokens", &GroupStats::lost_tokens,
              "By which it shortened joint hits, summed over admissions.");

  const auto figure = [](std::uint64_t ManagerStats::*member) {
    return [member](const NamedManagerStats& self) { return self.stats.*member; };
  };
  nb::class_<NamedManagerStats>(m, "ManagerStats", nb::type_slots(collected<NamedManagerStats>),
                                "What a manager holds, and what it did since construction.")
      .def_ro("pool", &NamedManagerStats::pool, nb::sig("def pool(self) -> PoolStats"))
      .def_ro("groups", &NamedManagerStats::groups,
              nb::sig("def groups(self) -> dict[str, GroupStats]"))
      .def_prop_ro("requests", figure(&ManagerStats::requests), "Live requests.")
      .def_prop_ro("admitted", figure(&ManagerStats::admitted), "Resumed ones not counted.")
      .def_prop_ro("resumed", figure(&ManagerStats::resumed), "Admissions of preempted requests.")
      .def_prop_ro("refused", figure(&ManagerStats::refused), "Admissions.")
      .def_prop_ro("prompt_tokens", figure(&ManagerStats::prompt_tokens),
                   "Of admitted requests, counted once.")
      .def_prop_ro("hit_tokens", figure(&ManagerStats::hit_tokens), "Of those, what hits gave.")
      .def_prop_ro("step_refusals", figure(&ManagerStats::step_refusals),
                   "Rows refused by begin_step.")
      .def_prop_ro("preemptions", figure(&ManagerStats::preemptions))
      .def_prop_ro("committed_pages", figure(&ManagerStats::committed_pages),
                   "Pages of the tree, now findable.")
      .def_prop_ro("segments", figure(&ManagerStats::segments), "Nodes of the prefix tree.")
      .def_prop_ro("twins", figure(&ManagerStats::twins),
                   "Blocks returned because their page was findable already.")
      .def_prop_ro("checkpoints", figure(&ManagerStats::checkpoints), "Published.")
      .def_prop_ro("checkpoints_skipped", figure(&ManagerStats::checkpoints_skipped),
                   "For want of room.")
      .def_prop_ro("quarantined", figure(&ManagerStats::quarantined),
                   "Blocks waiting for a step to settle, now.")
      .def_prop_ro("steps_in_flight", figure(&ManagerStats::steps_in_flight))
      .def_prop_ro("metadata_bytes", figure(&ManagerStats::metadata_bytes), "Pool, tree and rows.");
}

NamedManagerStats stats_of(const Manager& self) {
  NamedManagerStats named{self.ask([&] { return self.core().stats(); }), nb::object(), nb::dict()};
  named.pool = nb::cast(NamedPoolStats::of(named.stats.pool, self.core().geometry()));
  for (const GroupStats& group : named.stats.groups) named.groups[group.group.c_str()] = group;
  return named;
}

// ---- the manager
// ------------------------------------------------------------------------------------

#define KVLEAF_ADMIT_SIGNATURE                                                            \
  "salt: bytes | str = b'', adapter: str = '', encoder: tuple[bytes | str | int, int] | " \
  "tuple[bytes | str | int, int, int] | None = None, media: collections.abc.Sequence["    \
  "tuple[int, int, bytes | str | int] | tuple[int, int, bytes | str | int, bool]] = (), " \
  "priority: int = 0, guarantee: int | None = None, addressable: int | None = None, "     \
  "partial: bool = False) -> Admission"

void bind_manager(nb::module_& m) {
  nb::class_<Manager> manager(m, "BlockManager", nb::type_slots(collected<Manager>),
                              nb::is_weak_referenceable(),
                              "Requests, their rows of blocks in every leaf, and what they share. "
                              "A request id is any hashable.\n"
                              "Everything is a transaction: what raises or is refused has changed "
                              "nothing. Steps may overlap; they settle\n"
                              "in order. One thread owns a manager; it releases the GIL in long "
                              "calls, and a call from another thread\n"
                              "meanwhile raises KVError.");
  manager
      .def(
          "__init__",
          [](Manager* self, nb::handle leaves, const OptionalWhole& budget_bytes, Whole page_tokens,
             Whole max_len, Whole max_step_tokens, Whole max_steps_in_flight,
             const std::optional<Geometry>& geometry, Whole expected_tokens,
             bool enable_prefix_caching, nb::handle retention, std::string_view eviction,
             std::string_view hash, const OptionalWhole& seed, bool events) {
            if (!budget_bytes && !geometry)
              throw InvalidArgument("budget_bytes is None and no geometry is given");
            new (self) Manager(
                leaves, {.budget_bytes = budget_bytes ? budget_bytes->u64("budget_bytes") : 0,
                         .page_tokens = page_tokens.u32("page_tokens"),
                         .max_len = max_len.u32("max_len"),
                         .max_step_tokens = max_step_tokens.u32("max_step_tokens"),
                         .max_steps_in_flight = max_steps_in_flight.u32("max_steps_in_flight"),
                         .geometry = geometry,
                         .expected_tokens = expected_tokens.u32("expected_tokens"),
                         .enable_prefix_caching = enable_prefix_caching,
                         .retention = retention_of(retention),
                         .eviction = eviction_of(eviction),
                         .hash = hash_of(hash),
                         .seed = u64(seed, "seed"),
                         .events = events});
          },
          "leaves"_a, "budget_bytes"_a.none(), nb::kw_only(), "page_tokens"_a = 16, "max_len"_a,
          "max_step_tokens"_a = 8192, "max_steps_in_flight"_a = 2, "geometry"_a = nb::none(),
          "expected_tokens"_a = 2048, "enable_prefix_caching"_a = true, "retention"_a = "tail",
          "eviction"_a = "value", "hash"_a = "xxh3_128", "seed"_a = nb::none(), "events"_a = false,
          nb::sig("def __init__(self, leaves: collections.abc.Iterable[KVLeafRegion], "
                  "budget_bytes: int | None, *, "
                  "page_tokens: int = 16, max_len: int, max_step_tokens: int = 8192, "
                  "max_steps_in_flight: int = 2, geometry: Geometry | None = None, "
                  "expected_tokens: int = 2048, "
                  "enable_prefix_caching: bool = True, retention: str | int = 'tail', eviction: "
                  "str = 'value', "
                  "hash: str = 'xxh3_128', seed: int | None = None, events: bool = False) -> None"),
          "budget_bytes: of the arena; None where a geometry is given. page_tokens: boundaries are "
          "multiples of it,\n"
          "and so are the pages of all leaves. max_len: tokens of the longest request. "
          "max_step_tokens: most tokens\n"
          "that one request computes in one step. geometry: of pages named like the leaves; None: "
          "planned for\n"
          "requests of expected_tokens. retention: 'tail', 'dense', 'spaced' or every how many "
          "tokens a boundary is\n"
          "kept; eviction: 'value' or 'lru'; hash: 'xxh3_128' (a random seed unless given) or "
          "'sha256', of the keys\n"
          "in events; events: record them for take_events.")
      .def_prop_ro("leaves", &Manager::leaves, nb::sig("def leaves(self) -> list[KVLeafRegion]"))
      .def_prop_ro("geometry", [](const Manager& self) { return self.core().geometry(); })
      .def_prop_ro(
          "pool",
          [](nb::handle self) {
            const Manager& manager = *nb::inst_ptr<Manager>(self);
            return new Pool(manager.core().pool(), manager.exclusive(), nb::borrow(self));
          },
          nb::sig("def pool(self) -> BlockPool"), nb::rv_policy::take_ownership)
      .def_prop_ro("page_tokens",
                   [](const Manager& self) { return self.core().options().page_tokens; })
      .def_prop_ro("max_len", [](const Manager& self) { return self.core().options().max_len; })
      .def_prop_ro("max_step_tokens",
                   [](const Manager& self) { return self.core().options().max_step_tokens; })
      .def_prop_ro("max_steps_in_flight",
                   [](const Manager& self) { return self.core().options().max_steps_in_flight; })
      .def(
          "longest_request",
          [](const Manager& self) {
            return self.alone([&] { return self.core().longest_request(); });
          },
          "Tokens of the longest request that an empty pool serves, in chunks of max_step_tokens; "
          "at most max_len.")
      .def(
          "tokens_per_page",
          [](const Manager& self, std::string_view leaf_id) {
            return self.core().tokens_per_page(self.core().find_leaf(leaf_id));
          },
          "leaf_id"_a)

      // ---- a request's life
      .def(
          "admit",
          [](Manager& self, nb::handle request, nb::handle tokens, nb::handle salt,
             std::string adapter, nb::handle encoder, nb::handle media, Whole priority,
             const OptionalWhole& guarantee, const OptionalWhole& addressable, bool partial) {
            const Tokens ids(tokens);
            const AdmitOptions options = admit_options(salt, std::move(adapter), encoder, media,
                                                       priority, guarantee, addressable, partial);
            return self.introduce(request, [&](RequestId id) {
              return self.alone([&] { return self.core().admit(id, ids.view(), options); });
            });
          },
          "request"_a.none(), "tokens"_a, nb::kw_only(), "salt"_a = nb::bytes(""), "adapter"_a = "",
          "encoder"_a = nb::none(), "media"_a = nb::tuple(), "priority"_a = 0,
          "guarantee"_a = nb::none(), "addressable"_a = nb::none(), "partial"_a = false,
          nb::sig("def admit(self, request: collections.abc.Hashable, tokens: "
                  "collections.abc.Iterable[int] | "
                  "numpy.typing.NDArray[numpy.integer[typing.Any]], *, " KVLEAF_ADMIT_SIGNATURE),
          "Finds the longest prefix that every leaf can resume, claims it, and answers whether the "
          "rest of the\n"
          "prompt would fit; allocates nothing more than the blocks of an encoder that is not "
          "cached. tokens: ids\n"
          "as a list or an integer array. encoder=(digest, tokens, at=0): identity, length, and "
          "the text position\n"
          "from which the text depends on it. media=[(offset, length, digest, whole=False)]. An "
          "int digest counts\n"
          "as its decimal digits. guarantee: tokens that it may grow to, in steps of up to "
          "page_tokens, without ever\n"
          "being refused memory. addressable: leading tokens that may be matched or committed; "
          "None: all. partial:\n"
          "a hit may copy the common part of a page. Raises PoolExhausted when it cannot be "
          "admitted now.")
      .def(
          "probe",
          [](const Manager& self, nb::handle tokens, nb::handle salt, std::string adapter,
             nb::handle encoder, nb::handle media, Whole priority, const OptionalWhole& guarantee,
             const OptionalWhole& addressable, bool partial) {
            const Tokens ids(tokens);
            const AdmitOptions options = admit_options(salt, std::move(adapter), encoder, media,
                                                       priority, guarantee, addressable, partial);
            return self.alone([&] { return self.core().probe(ids.view(), options); });
          },
          "tokens"_a, nb::kw_only(), "salt"_a = nb::bytes(""), "adapter"_a = "",
          "encoder"_a = nb::none(), "media"_a = nb::tuple(), "priority"_a = 0,
          "guarantee"_a = nb::none(), "addressable"_a = nb::none(), "partial"_a = false,
          nb::sig("def probe(self, tokens: collections.abc.Iterable[int] | "
                  "numpy.typing.NDArray[numpy.integer[typing.Any]], *, " KVLEAF_ADMIT_SIGNATURE),
          "What admit would answer; claims nothing.")
      .def(
          "append",
          [](const Manager& self, nb::handle request, nb::handle tokens) {
            const Tokens ids(tokens);
            const RequestId id = self.id_of(request);
            self.briefly([&] { self.core().append(id, ids.view()); });
          },
          "request"_a.none(), "tokens"_a,
          nb::sig("def append(self, request: collections.abc.Hashable, tokens: "
                  "collections.abc.Iterable[int] | "
                  "numpy.typing.NDArray[numpy.integer[typing.Any]]) -> None"),
          "Ids that became known (sampled); they may come after their step was begun.")
      .def(
          "next_stop",
          [](const Manager& self, nb::handle request) {
            return self.ask([&] { return self.core().next_stop(self.id_of(request)); });
          },
          "request"_a.none(),
          nb::sig("def next_stop(self, request: collections.abc.Hashable) -> int | None"),
          "Where the next chunk should end, in tokens, so that what a kept boundary needs can be "
          "committed.")
      .def(
          "encoder_filled",
          [](const Manager& self, nb::handle request) {
            self.briefly([&, id = self.id_of(request)] { self.core().encoder_filled(id); });
          },
          "request"_a.none(),
          nb::sig("def encoder_filled(self, request: collections.abc.Hashable) -> None"),
          "The encoder's pages of this request are written; planning a decode before is an error.")
      .def(
          "release",
          [](Manager& self, nb::handle request, bool keep, const OptionalWhole& addressable) {
            self.briefly([&, id = self.id_of(request), most = u32(addressable, "addressable")] {
              self.core().release(id, keep ? Prefix::keep : Prefix::drop, most);
            });
            self.forget(request);
          },
          "request"_a.none(), "keep"_a = true, "addressable"_a = nb::none(),
          nb::sig("def release(self, request: collections.abc.Hashable, keep: bool = True, "
                  "addressable: int | None "
                  "= None) -> None"),
          "Ends a request. keep=False: nothing of it stays findable beyond what others share; "
          "addressable: nothing\n"
          "past it. In flight: its blocks come back when the steps that use them have settled.")
      .def(
          "preempt",
          [](const Manager& self, nb::handle request) {
            self.briefly([&, id = self.id_of(request)] { self.core().preempt(id); });
          },
          "request"_a.none(),
          nb::sig("def preempt(self, request: collections.abc.Hashable) -> None"),
          "Returns its blocks and keeps what is committed. Resumed by admit with the same id and "
          "all its tokens.")

      // ---- steps
      .def(
          "begin_step",
          [](Manager& self, nb::handle batch) {
            const Manager::Batch asked = self.batch_of(batch);
            const Step& step = *self.alone([&] { return &self.core().begin_step(asked.rows); });
            nb::dict refused = self.refusals_of(step.refused);
            return PythonStep{step.id.value(), self.began(step.id, step.served, asked),
                              std::move(refused), self.copies_of(step.copies),
                              self.fills_of(step.zero_fills)};
          },
          "batch"_a,
          nb::sig("def begin_step(self, batch: "
                  "collections.abc.Iterable[tuple[collections.abc.Hashable, int]]) -> "
                  "Step"),
          "Draws blocks for the next tokens of each (request, new_tokens), in order; a request "
          "that does not fit is\n"
          "refused alone and changes nothing. Raises RequestError, with nothing changed, for a "
          "request that is\n"
          "unknown or there twice, 0 tokens, past max_len, more than max_step_tokens, an end "
          "inside a `whole` item;\n"
          "StepError when max_steps_in_flight are in flight.")
      .def(
          "settle",
          [](Manager& self, nb::handle step, const nb::dict& kept) {
            self.settle(self.core(), step, kept);
          },
          "step"_a, "kept"_a = nb::dict(),
          nb::sig("def settle(self, step: int, kept: dict[typing.Any, int] = {}) -> None"),
          "The device is done with the oldest step: commits what is computed and known, frees what "
          "is out of reach.\n"
          "kept: {request: tokens of this step that stand} for rejected drafts.")
      .def(
          "abandon", [](Manager& self, nb::handle step) { return self.abandon(self.core(), step); },
          "step"_a, nb::sig("def abandon(self, step: int) -> dict[typing.Any, int]"),
          "The device work failed: nothing of this step or of steps begun after it is committed. "
          "Gives the length\n"
          "that each of their requests goes back to.")
      .def(
          "take_events",
          [](const Manager& self) { return self.ask([&] { return self.core().take_events(); }); },
          "Recorded since the last call, in order. Empty unless the manager was made with "
          "events=True.")

      // ---- sharing
      .def(
          "fork",
          [](Manager& self, nb::handle parent, nb::handle child) {
            const RequestId from = self.id_of(parent);
            self.introduce(
                child, [&](RequestId to) { self.briefly([&] { self.core().fork(from, to); }); });
          },
          "parent"_a.none(), "child"_a.none(),
          nb::sig("def fork(self, parent: collections.abc.Hashable, child: "
                  "collections.abc.Hashable) -> None"),
          "The child shares the parent's full pages and gets its own partly filled page, state and "
          "scratch, or\n"
          "PoolExhausted is raised.")
      .def(
          "rewind",
          [](const Manager& self, nb::handle request, Whole tokens) {
            self.briefly([&, id = self.id_of(request), n = tokens.u32("tokens")] {
              self.core().rewind(id, n);
            });
          },
          "request"_a.none(), "tokens"_a,
          nb::sig("def rewind(self, request: collections.abc.Hashable, tokens: int) -> None"),
          "Keeps the first tokens. Raises RequestError, naming the nearest shorter length that "
          "works, where reach\n"
          "or state is no longer held there.")
      .def(
          "reset_cache",
          [](const Manager& self) { self.alone([&] { self.core().reset_cache(); }); },
          "Drops every commit; running requests go on and publish nothing computed before.")

      // ---- what it holds
      .def(
          "blocks",
          [](const Manager& self, nb::handle request, std::string_view leaf_id) {
            return self.ask([&] {
              return list_of(
                  self.core().blocks(self.id_of(request), self.core().find_leaf(leaf_id)));
            });
          },
          "request"_a.none(), "leaf_id"_a,
          nb::sig("def blocks(self, request: collections.abc.Hashable, leaf_id: str) -> list[int]"),
          "Blocks in slot order, 0 where nothing is held.")
      .def(
          "live_block",
          [](const Manager& self, nb::handle request,
             std::string_view leaf_id) -> std::optional<std::uint32_t> {
            const auto block = self.ask([&] {
              return self.core().live_block(self.id_of(request), self.core().find_leaf(leaf_id));
            });
            return block ? std::optional(block->value()) : std::nullopt;
          },
          "request"_a.none(), "leaf_id"_a,
          nb::sig("def live_block(self, request: collections.abc.Hashable, leaf_id: str) -> int | "
                  "None"),
          "The block of a state or scratch; None before the first step.")
      .def(
          "length",
          [](const Manager& self, nb::handle request) {
            return self.ask([&] { return self.core().length(self.id_of(request)); });
          },
          "request"_a.none(), nb::sig("def length(self, request: collections.abc.Hashable) -> int"),
          "Tokens known.")
      .def(
          "computed",
          [](const Manager& self, nb::handle request) {
            return self.ask([&] { return self.core().computed(self.id_of(request)); });
          },
          "request"_a.none(),
          nb::sig("def computed(self, request: collections.abc.Hashable) -> int"),
          "Tokens of settled steps.")
      .def(
          "planned",
          [](const Manager& self, nb::handle request) {
            return self.ask([&] { return self.core().planned(self.id_of(request)); });
          },
          "request"_a.none(),
          nb::sig("def planned(self, request: collections.abc.Hashable) -> int"),
          "Tokens of settled steps and of those in flight.")
      .def(
          "__contains__",
          [](const Manager& self, nb::handle request) {
            return self.knows(request) &&
                   self.ask([&] { return self.core().contains(self.id_of(request)); });
          },
          "request"_a.none(),
          nb::sig("def __contains__(self, request: collections.abc.Hashable, /) -> bool"))
      .def("stats", &stats_of)
      .def(
          "audit", [](const Manager& self) { self.alone([&] { self.core().audit(); }); },
          "Recounts everything from scratch. Raises InvariantError naming the first broken "
          "equation.");
  refuse_pickle(manager, "it holds the state of running requests; make another from its arguments");
}

}  // namespace

void bind_group(nb::module_& module) {
  bind_answers(module);
  bind_manager(module);
}

}  // namespace kvleaf::python
