// KVCache: the whole cache of one model, in slots.
#include <fmt/format.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <concepts>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bind.h"
#include "convert.h"
#include "exclusive.h"
#include "kvleaf/cache/kv_cache.h"
#include "tensor_convert.h"

namespace kvleaf::python {
namespace {

using namespace nb::literals;
using OptionalWhole = std::optional<Whole>;

/// One thread owns a cache: a second call while one is under way raises.
class Cache {
 public:
  explicit Cache(KVCache core) : core_(std::move(core)) {}

  const KVCache& core() const noexcept { return core_; }
  /// Calls f(cache) alone and without the GIL.
  template <class F>
  auto alone(F&& f) {
    const Exclusive::Use use(exclusive_, "this cache");
    const nb::gil_scoped_release release;
    return f(core_);
  }
  /// Calls f(cache), which is over soon, alone and with the GIL.
  template <class F>
  auto briefly(F&& f) {
    const Exclusive::Use use(exclusive_, "this cache");
    return f(core_);
  }
  template <class F>
  auto ask(F&& f) const {
    exclusive_.require_readable("this cache");
    return f(core_);
  }

 private:
  KVCache core_;
  Exclusive exclusive_;
};

Retention retention_in(nb::handle source) {
  Whole tokens;
  if (Whole::read(source, tokens)) return Retention::every(tokens.u32("retention"));
  const std::string name = name_in(source, "retention");
  if (name == "tail") return Retention::tail();
  if (name == "dense") return Retention::dense();
  if (name == "spaced") return Retention::spaced();
  throw InvalidArgument(fmt::format(
      "retention is '{}'; accepted: 'tail', 'dense', 'spaced', or every how many tokens", name));
}

KVCacheMode mode_in(nb::handle source) {
  KVCacheMode mode{};
  if (nb::try_cast<KVCacheMode>(source, mode)) return mode;
  return require_mode(name_in(source, "mode"));
}

std::uint32_t u32_or(const OptionalWhole& number, const char* name, std::uint32_t otherwise) {
  return number ? number->u32(name) : otherwise;
}

std::vector<std::int32_t> i32s_of(nb::handle source) {
  const Tokens numbers(source);
  return {numbers.view().begin(), numbers.view().end()};
}

std::vector<KVLayerSpec> specs_of(nb::handle source) {
  std::vector<KVLayerSpec> specs;
  for (nb::handle spec : nb::iter(source)) {
    const KVLayerSpec* given = instance_of<KVLayerSpec>(spec);
    if (given == nullptr)
      throw InvalidArgument(fmt::format("layer_specs[{}] is of type {}; expected a KVLayerSpec",
                                        specs.size(), Py_TYPE(spec.ptr())->tp_name));
    specs.push_back(*given);
  }
  return specs;
}

Tensor memory_of(nb::handle source) {
  return source.is_none() ? Tensor() : tensor_of(source, "memory", DType::uint8);
}

/// "Said at start": a cache whose slots cannot reach max_len is one that its user should know of.
Cache* told(KVCache core) {
  const std::uint32_t longest = core.longest_request();
  const std::uint32_t max_len = core.config().max_len;
  if (longest < max_len) {
    const std::string text =
        fmt::format("the budget of this cache serves sequences of at most {} tokens; max_len is {}",
                    longest, max_len);
    if (PyErr_WarnEx(PyExc_RuntimeWarning, text.c_str(), 1) != 0) throw nb::python_error();
  }
  return new Cache(std::move(core));
}

void bind_config(nb::module_& m) {
  nb::enum_<KVCacheMode>(m, "KVCacheMode", "How a KVCache keeps its entries.")
      .value("slotted", KVCacheMode::slotted,
             "Each slot owns max_len entries of every layer; no table, no reuse.")
      .value("paged", KVCacheMode::paged,
             "Entries lie in pages of one pool, found through tables; prefixes are reused.");

  nb::class_<KVCacheConfig> config(m, "KVCacheConfig", "What a KVCache is made for.");
  config
      .def(
          "__init__",
          [](KVCacheConfig* self, Whole num_layers, Whole max_seqs, Whole max_len, nb::handle mode,
             Whole page_tokens, const OptionalWhole& budget_bytes, nb::handle dtype,
             nb::handle device, Whole max_encoder_len, bool enable_prefix_caching,
             const OptionalWhole& max_step_tokens, nb::handle retention) {
            KVCacheConfig made;
            made.num_layers = num_layers.u32("num_layers");
            made.max_seqs = max_seqs.u32("max_seqs");
            made.max_len = max_len.u32("max_len");
            made.mode = mode_in(mode);
            made.page_tokens = page_tokens.u32("page_tokens");
            if (budget_bytes) made.budget_bytes = budget_bytes->u64("budget_bytes");
            made.dtype = dtype_of_python(dtype);
            made.device = name_in(device, "device");
            made.max_encoder_len = max_encoder_len.u32("max_encoder_len");
            made.enable_prefix_caching = enable_prefix_caching;
            made.max_step_tokens = u32_or(max_step_tokens, "max_step_tokens", 0);
            made.retention = retention_in(retention);
            new (self) KVCacheConfig(std::move(made));
          },
          "num_layers"_a, "max_seqs"_a, "max_len"_a, "mode"_a = KVCacheMode::paged,
          "page_tokens"_a = 16, "budget_bytes"_a = nb::none(), "dtype"_a = "bfloat16",
          "device"_a = "cpu", "max_encoder_len"_a = 0, "enable_prefix_caching"_a = true,
          nb::kw_only(), "max_step_tokens"_a = nb::none(), "retention"_a = "tail",
          nb::sig(
              "def __init__(self, num_layers: int, max_seqs: int, max_len: int, mode: "
              "KVCacheMode | str = KVCacheMode['paged'], page_tokens: int = 16, budget_bytes: int "
              "| None = None, dtype: object = 'bfloat16', device: str = 'cpu', "
              "max_encoder_len: int = 0, enable_prefix_caching: bool = True, *, "
              "max_step_tokens: int | None = None, retention: str | int = 'tail') -> None"),
          "max_seqs: slots; max_len: tokens of one. page_tokens: prefixes are reused at multiples "
          "of it.\n"
          "budget_bytes: of the pool; None: what lets every slot reach max_len. dtype: of keys, "
          "values and latents.\n"
          "max_encoder_len: encoder tokens of one slot, needed for cross attention. "
          "max_step_tokens: of all rows of\n"
          "one step together; None: max_seqs * max_len, at most the larger of max_len and 32,768.")
      .def_ro("num_layers", &KVCacheConfig::num_layers)
      .def_ro("max_seqs", &KVCacheConfig::max_seqs)
      .def_ro("max_len", &KVCacheConfig::max_len)
      .def_ro("mode", &KVCacheConfig::mode)
      .def_ro("page_tokens", &KVCacheConfig::page_tokens)
      .def_ro("budget_bytes", &KVCacheConfig::budget_bytes)
      .def_prop_ro("dtype", [](const KVCacheConfig& self) { return name_of(self.dtype); })
      .def_ro("device", &KVCacheConfig::device)
      .def_ro("max_encoder_len", &KVCacheConfig::max_encoder_len)
      .def_ro("enable_prefix_caching", &KVCacheConfig::enable_prefix_caching)
      .def_ro("max_step_tokens", &KVCacheConfig::max_step_tokens, "0: not given.")
      .def("__repr__", [](const KVCacheConfig& self) {
        return fmt::format(
            "KVCacheConfig({} layers, {} slots of {} tokens, {}, pages of {} tokens, {})",
            self.num_layers, self.max_seqs, self.max_len, name_of(self.mode), self.page_tokens,
            name_of(self.dtype));
      });
  refuse_pickle(config, "make it anew from its numbers");
}

void bind_spec(nb::module_& m) {
  nb::class_<KVLayerSpec> spec(m, "KVLayerSpec",
                               "What one layer of a model keeps between tokens, in the numbers of "
                               "one rank.");
  spec.def_static(
          "attention",
          [](Whole kv_heads, Whole head_dim, const OptionalWhole& window, Whole sinks,
             const OptionalWhole& chunk, const OptionalWhole& value_head_dim) {
            AttentionCache cache;
            cache.kv_heads = kv_heads.u32("kv_heads");
            cache.head_dim = head_dim.u32("head_dim");
            if (window) cache.window = window->u32("window");
            cache.sinks = sinks.u32("sinks");
            if (chunk) cache.chunk = chunk->u32("chunk");
            if (value_head_dim) cache.value_head_dim = value_head_dim->u32("value_head_dim");
            if (window && chunk)
              throw InvalidArgument("attention: a window and a chunk; expected one of them");
            return KVLayerSpec::attention(cache);
          },
          "kv_heads"_a, "head_dim"_a, "window"_a = nb::none(), "sinks"_a = 0,
          "chunk"_a = nb::none(), nb::kw_only(), "value_head_dim"_a = nb::none(),
          nb::sig("def attention(kv_heads: int, head_dim: int, window: int | None = None, sinks: "
                  "int = 0, chunk: int | None = None, *, value_head_dim: int | None = None) -> "
                  "KVLayerSpec"),
          "Keys and values of the text: of all tokens, of the last `window` (the query counted) "
          "and "
          "the first `sinks`,\n"
          "or of the query's own chunk.")
      .def_static(
          "latent", [](Whole width) { return KVLayerSpec::latent(width.u32("width")); }, "width"_a,
          nb::sig("def latent(width: int) -> KVLayerSpec"),
          "One entry of `width` elements per token, for all heads, keys and values (MLA).")
      .def_static(
          "shared", [](Whole layer) { return KVLayerSpec::shared(layer.u32("layer")); }, "layer"_a,
          nb::sig("def shared(layer: int) -> KVLayerSpec"),
          "Keeps nothing: reads what an earlier layer keeps.")
      .def_static(
          "state",
          [](nb::handle conv, Whole heads, Whole k_dim, Whole v_dim, nb::handle dtype,
             nb::handle conv_dtype) {
            LayerState state;
            for (nb::handle window : nb::iter(conv)) {
              const std::vector<std::uint32_t> shape = u32s_of(window, "conv");
              if (shape.size() != 2)
                throw InvalidArgument(fmt::format("conv[{}] has {} numbers; expected (dim, width)",
                                                  state.conv.size(), shape.size()));
              state.conv.push_back({shape[0], shape[1]});
            }
            state.heads = heads.u32("heads");
            state.k_dim = k_dim.u32("k_dim");
            state.v_dim = v_dim.u32("v_dim");
            state.dtype = dtype_of_python(dtype);
            state.conv_dtype = dtype_named(conv_dtype);
            return KVLayerSpec::state(state);
          },
          "conv"_a = nb::tuple(), "heads"_a = 0, "k_dim"_a = 0, "v_dim"_a = 0,
          "dtype"_a = "float32", nb::kw_only(), "conv_dtype"_a = nb::none(),
          nb::sig("def state(conv: collections.abc.Iterable[tuple[int, int]] = (), heads: int = 0, "
                  "k_dim: int = 0, v_dim: int = 0, dtype: object = 'float32', *, conv_dtype: "
                  "object = None) -> KVLayerSpec"),
          "A state of fixed size: convolution windows (dim, inputs kept) and a recurrent slab "
          "[heads, k_dim, v_dim].\n"
          "conv_dtype: of the windows; None: dtype.")
      .def_static(
          "cross_attention",
          [](Whole kv_heads, Whole head_dim) {
            return KVLayerSpec::cross_attention(kv_heads.u32("kv_heads"), head_dim.u32("head_dim"));
          },
          "kv_heads"_a, "head_dim"_a,
          nb::sig("def cross_attention(kv_heads: int, head_dim: int) -> KVLayerSpec"),
          "Keys and values of an encoder's tokens.")
      .def_static("none", &KVLayerSpec::none, "Keeps nothing.")
      .def(
          "__add__",
          [](const KVLayerSpec& self, const KVLayerSpec& other) {
            KVLayerSpec both = self;
            both.caches.insert(both.caches.end(), other.caches.begin(), other.caches.end());
            return both;
          },
          "other"_a, nb::is_operator(),
          nb::sig("def __add__(self, other: KVLayerSpec) -> KVLayerSpec"),
          "A layer that keeps both.")
      .def(
          "__eq__",
          [](const KVLayerSpec& self, nb::handle other) {
            const KVLayerSpec* given = instance_of<KVLayerSpec>(other);
            return given != nullptr && self == *given;
          },
          equal)
      .def("__hash__",
           [](const KVLayerSpec& self) { return std::hash<std::string>{}(to_string(self)); })
      .def("__repr__",
           [](const KVLayerSpec& self) { return fmt::format("KVLayerSpec({})", to_string(self)); });
  refuse_pickle(spec, "make it anew from its numbers");
}

void bind_indices(nb::module_& m) {
  const auto part_in = [](std::string_view part) { return require_part(part); };
  const auto layer_in = [](const OptionalWhole& layer) {
    return layer ? std::optional(layer->u32("layer")) : std::nullopt;
  };
  nb::class_<StepIndices> indices(
      m, "StepIndices",
      "The index tensors of one step, on the host: views on the cache's memory, for a batch in the "
      "order given. Valid\n"
      "until the step after next was prepared; then its tensors are stale.");
  indices.def_prop_ro("batch", &StepIndices::batch, "Sequences.")
      .def_prop_ro("num_tokens", &StepIndices::num_tokens, "New tokens of all sequences.")
      .def_prop_ro("max_seqlen_q", &StepIndices::max_seqlen_q)
      .def_prop_ro("max_seqlen_k", &StepIndices::max_seqlen_k)
      .def_prop_ro("slot_ids", &StepIndices::slot_ids, "[batch] int32")
      .def_prop_ro("cu_seqlens_q", &StepIndices::cu_seqlens_q, "[batch + 1] int32")
      .def_prop_ro("cu_seqlens_k", &StepIndices::cu_seqlens_k, "[batch + 1] int32, of seq_lens")
      .def_prop_ro("past_lens", &StepIndices::past_lens, "[batch] int32: tokens before this step")
      .def_prop_ro("seq_lens", &StepIndices::seq_lens, "[batch] int32: with it")
      .def_prop_ro("encoder_lens", &StepIndices::encoder_lens,
                   "[batch] int32: encoder tokens; zeros without cross attention")
      .def_prop_ro("positions", &StepIndices::positions,
                   "[num_tokens] int64: of each new token in its sequence")
      .def(
          "slot_mapping",
          [=](const StepIndices& self, const OptionalWhole& layer, std::string_view part) {
            return object_of(self.slot_mapping(layer_in(layer), part_in(part)));
          },
          "layer"_a = nb::none(), nb::kw_only(), "part"_a = "own",
          nb::sig("def slot_mapping(self, layer: int | None = None, *, part: str = 'own') -> "
                  "Tensor | None"),
          "[num_tokens] int64: where a layer's entry of each new token goes. Paged: page * entries "
          "per page + entry in\n"
          "the page; slotted: slot * entries per slot + entry. None for a layer that is not "
          "written "
          "token by token.")
      .def(
          "block_table",
          [=](const StepIndices& self, const OptionalWhole& layer, std::string_view part) {
            return object_of(self.block_table(layer_in(layer), part_in(part)));
          },
          "layer"_a = nb::none(), nb::kw_only(), "part"_a = "own",
          nb::sig("def block_table(self, layer: int | None = None, *, part: str = 'own') -> Tensor "
                  "| None"),
          "[batch, columns] int32: the pages of each sequence, 0 where none is reached. layer may "
          "be "
          "left out where all\n"
          "layers share one table. None in a slotted cache.")
      .def(
          "csr",
          [=](const StepIndices& self, const OptionalWhole& layer,
              std::string_view part) -> nb::object {
            StepIndices::Csr csr = self.csr(layer_in(layer), part_in(part));
            if (!csr.indptr.defined()) return nb::none();
            return nb::make_tuple(object_of(csr.indptr), object_of(csr.indices),
                                  object_of(csr.last_page_len));
          },
          "layer"_a = nb::none(), nb::kw_only(), "part"_a = "own",
          nb::sig("def csr(self, layer: int | None = None, *, part: str = 'own') -> tuple[Tensor, "
                  "Tensor, Tensor] | None"),
          "The same as (indptr [batch + 1], indices [indptr[batch]], last_page_len [batch]), "
          "int32.")
      .def("__repr__", [](const StepIndices& self) {
        return fmt::format("StepIndices({} sequences, {} tokens)", self.batch(), self.num_tokens());
      });
  refuse_pickle(indices, "its arrays are one process's memory; numpy().copy() of them can be");
}

#define KVLEAF_CONFIG_SIG                                                                       \
  "max_seqs: int, max_len: int | None = None, mode: KVCacheMode | str = KVCacheMode['paged'], " \
  "page_tokens: int = 16, budget_bytes: int | None = None, dtype: object = None, device: str "  \
  "= 'cpu', max_encoder_len: int | None = None, enable_prefix_caching: bool = True, "           \
  "max_step_tokens: int | None = None, retention: str | int = 'tail'"

void bind_kv_cache_class(nb::module_& m) {
  nb::class_<Cache> cache(
      m, "KVCache", nb::is_weak_referenceable(),
      "The whole cache of one model, in slots. An attention implementation appends to and attends "
      "through the tensors\n"
      "it hands out. One step at a time: prepare_step begins one, and the next call that changes "
      "the cache takes its\n"
      "forward for done; where it failed, call abandon_step. What raises has changed nothing. One "
      "thread owns a cache.");
  const auto layer_in = [](const Whole& layer) { return layer.i32("layer"); };
  cache
      .def_static(
          "make",
          [](nb::handle config, nb::handle layer_specs, nb::handle memory) {
            const KVCacheConfig* given = instance_of<KVCacheConfig>(config);
            if (given == nullptr)
              throw InvalidArgument(fmt::format("config is of type {}; expected a KVCacheConfig",
                                                Py_TYPE(config.ptr())->tp_name));
            const std::vector<KVLayerSpec> specs = specs_of(layer_specs);
            const Tensor where = memory_of(memory);
            const KVCacheConfig copy = *given;
            return told([&] {
              const nb::gil_scoped_release release;
              return KVCache::make(copy, specs, where);
            }());
          },
          "config"_a.none(), "layer_specs"_a, nb::kw_only(), "memory"_a = nb::none(),
          nb::sig("def make(config: KVCacheConfig, layer_specs: "
                  "collections.abc.Iterable[KVLayerSpec], *, memory: object = None) -> KVCache"),
          nb::rv_policy::take_ownership,
          "One spec per layer. memory: what to lay the cache in, uint8 [memory_bytes] on a "
          "multiple "
          "of 256 bytes; None:\n"
          "its own. Warns where the budget does not let a sequence reach max_len.")
      .def_static(
          "from_config",
          [](nb::handle json, Whole max_seqs, const OptionalWhole& max_len, nb::handle mode,
             Whole page_tokens, const OptionalWhole& budget_bytes, nb::handle dtype,
             nb::handle device, const OptionalWhole& max_encoder_len, bool enable_prefix_caching,
             const OptionalWhole& max_step_tokens, nb::handle retention) {
            KVCacheConfig config;
            config.max_seqs = max_seqs.u32("max_seqs");
            config.max_len = u32_or(max_len, "max_len", 0);
            config.mode = mode_in(mode);
            config.page_tokens = page_tokens.u32("page_tokens");
            if (budget_bytes) config.budget_bytes = budget_bytes->u64("budget_bytes");
            config.device = name_in(device, "device");
            config.max_encoder_len = u32_or(max_encoder_len, "max_encoder_len", 0);
            config.enable_prefix_caching = enable_prefix_caching;
            config.max_step_tokens = u32_or(max_step_tokens, "max_step_tokens", 0);
            config.retention = retention_in(retention);
            const std::optional<DType> type = dtype_named(dtype);
            std::string text;
            const bool is_dict = PyDict_Check(json.ptr()) != 0;
            if (is_dict) {
              text = nb::cast<std::string>(nb::module_::import_("json").attr("dumps")(json));
            } else {
              text = nb::cast<std::string>(nb::module_::import_("os").attr("fsdecode")(json));
            }
            return told([&] {
              const nb::gil_scoped_release release;
              // A JSON text begins with a brace; no path of a config.json does.
              const std::size_t first = text.find_first_not_of(" \t\r\n");
              if (is_dict || (first != std::string::npos && text[first] == '{'))
                return KVCache::from_json(text, config, type);
              return KVCache::from_config(text, config, type);
            }());
          },
          "json"_a, nb::kw_only(), "max_seqs"_a, "max_len"_a = nb::none(),
          "mode"_a = KVCacheMode::paged, "page_tokens"_a = 16, "budget_bytes"_a = nb::none(),
          "dtype"_a = nb::none(), "device"_a = "cpu", "max_encoder_len"_a = nb::none(),
          "enable_prefix_caching"_a = true, "max_step_tokens"_a = nb::none(),
          "retention"_a = "tail",
          nb::sig("def from_config(json: str | os.PathLike[str] | dict[str, typing.Any], "
                  "*, " KVLEAF_CONFIG_SIG ") -> KVCache"),
          nb::rv_policy::take_ownership,
          "From a published config.json: its path, its text or a dict of it. max_len, "
          "max_encoder_len and dtype are the\n"
          "model's where they are None. Raises ConfigError that names the key and what is "
          "accepted.")
      .def_static(
          "memory_bytes",
          [](nb::handle config, nb::handle layer_specs) {
            const KVCacheConfig* given = instance_of<KVCacheConfig>(config);
            if (given == nullptr) throw InvalidArgument("config: expected a KVCacheConfig");
            return KVCache::memory_bytes(*given, specs_of(layer_specs));
          },
          "config"_a, "layer_specs"_a,
          nb::sig("def memory_bytes(config: KVCacheConfig, layer_specs: "
                  "collections.abc.Iterable[KVLayerSpec]) -> int"),
          "Bytes that make would lay the cache in.")
      .def(
          "mode", [](const Cache& self) { return self.core().mode(); },
          "The serving mode it was built with.")
      .def_prop_ro(
          "config", [](const Cache& self) { return self.core().config(); },
          "As given, with what was left out filled in.")
      .def_prop_ro(
          "layer_specs", [](const Cache& self) { return self.core().layer_specs(); },
          nb::sig("def layer_specs(self) -> list[KVLayerSpec]"))
      .def(
          "longest_request",
          [](const Cache& self) {
            return self.ask([](const KVCache& core) { return core.longest_request(); });
          },
          "Tokens of the longest sequence that the empty cache serves.")
      .def(
          "admit",
          [](Cache& self, Whole batch_idx, nb::handle prompt_ids, Whole addressable_len,
             nb::handle encoder_digest, const OptionalWhole& encoder_len, nb::handle salt,
             std::string adapter) {
            const Tokens ids(prompt_ids);
            AdmitExtras extras;
            if (!encoder_digest.is_none())
              extras.encoder_digest = text_of(encoder_digest, "encoder_digest");
            if (encoder_len) extras.encoder_len = encoder_len->u32("encoder_len");
            extras.salt = text_of(salt, "salt");
            extras.adapter = std::move(adapter);
            const std::int32_t slot = batch_idx.i32("batch_idx");
            const std::int32_t limit = addressable_len.i32("addressable_len");
            return self.alone([&](KVCache& core) {
              return core.admit(slot, Tensor::of(ids.view()), limit, extras);
            });
          },
          "batch_idx"_a, "prompt_ids"_a, "addressable_len"_a = -1, nb::kw_only(),
          "encoder_digest"_a = nb::none(), "encoder_len"_a = nb::none(), "salt"_a = nb::bytes(""),
          "adapter"_a = "",
          nb::sig("def admit(self, batch_idx: int, prompt_ids: object, addressable_len: int = -1, "
                  "*, encoder_digest: str | bytes | int | None = None, encoder_len: int | None = "
                  "None, salt: str | bytes = b'', adapter: str = '') -> int"),
          "Paged only: binds the longest cached prefix into a fresh slot; returns the number of "
          "leading tokens whose\n"
          "entries are there, always less than all. addressable_len: leading tokens that may be "
          "matched; -1: all.\n"
          "encoder_digest: identity of the encoder's input; without one a cache with cross "
          "attention reuses nothing.\n"
          "encoder_len: its tokens; None: max_encoder_len are reserved, and fill says how many "
          "there are; 0: none.")
      .def(
          "reserve",
          [](Cache& self, nb::handle slot_ids, nb::handle n_new_per_seq) {
            const std::vector<std::int32_t> slots = i32s_of(slot_ids);
            const std::vector<std::uint32_t> counts = u32s_of(n_new_per_seq, "n_new_per_seq");
            return self.alone([&](KVCache& core) {
              return core.reserve(Tensor::of(std::span<const std::int32_t>(slots)), counts);
            });
          },
          "slot_ids"_a, "n_new_per_seq"_a,
          nb::sig("def reserve(self, slot_ids: object, n_new_per_seq: "
                  "collections.abc.Sequence[int]) -> Tensor"),
          "Paged only: reserves this step's new tokens per slot; returns the write offset of each "
          "sequence before the\n"
          "advance, [n] int32. prepare_step of the very same rows then only describes that step.")
      .def(
          "prepare_step",
          [](Cache& self, nb::handle cu_seqlens_q, nb::handle past_len, nb::handle slot_ids) {
            const std::vector<std::int32_t> cu = i32s_of(cu_seqlens_q);
            const std::vector<std::int32_t> past = i32s_of(past_len);
            const std::vector<std::int32_t> slots = i32s_of(slot_ids);
            return self.alone([&](KVCache& core) { return core.prepare_step(cu, past, slots); });
          },
          "cu_seqlens_q"_a, "past_len"_a, "slot_ids"_a,
          nb::sig("def prepare_step(self, cu_seqlens_q: collections.abc.Sequence[int], past_len: "
                  "collections.abc.Sequence[int], slot_ids: collections.abc.Sequence[int]) -> "
                  "StepIndices"),
          "Turns one step's host-side description into the index tensors of a variable-length "
          "forward; a paged cache\n"
          "also reserves the step's pages. cu_seqlens_q: [n + 1] from 0; past_len: what seq_lens "
          "says of each slot.\n"
          "Raises PoolExhausted where not all rows fit; none was served then.")
      .def(
          "retire",
          [](Cache& self, Whole batch_idx, nb::handle full_token_ids, Whole addressable_len) {
            const Tokens ids(full_token_ids);
            const std::int32_t slot = batch_idx.i32("batch_idx");
            const std::int32_t limit = addressable_len.i32("addressable_len");
            self.alone([&](KVCache& core) { core.retire(slot, Tensor::of(ids.view()), limit); });
          },
          "batch_idx"_a, "full_token_ids"_a, "addressable_len"_a = -1,
          nb::sig("def retire(self, batch_idx: int, full_token_ids: object, addressable_len: int = "
                  "-1) -> None"),
          "Paged only: ends a finished session and keeps its pages addressable for later admits; "
          "evict_batch is for the\n"
          "cancel or error path. full_token_ids: prompt and generated.")
      .def(
          "evict_batch",
          [](Cache& self, Whole batch_idx) {
            const std::int32_t slot = batch_idx.i32("batch_idx");
            self.alone([&](KVCache& core) { core.evict_batch(slot); });
          },
          "batch_idx"_a, nb::sig("def evict_batch(self, batch_idx: int) -> None"),
          "Frees a slot's stored entries; its seq_lens entry returns to 0.")
      .def(
          "fill",
          [](Cache& self, Whole layer, Whole batch_idx, nb::handle k, nb::handle v) {
            const DType dtype = self.core().config().dtype;
            const Tensor keys = tensor_of(k, "k", dtype);
            const Tensor values = tensor_of(v, "v", dtype);
            const std::int32_t which = layer.i32("layer");
            const std::int32_t slot = batch_idx.i32("batch_idx");
            self.alone([&](KVCache& core) { core.fill(which, slot, keys, values); });
          },
          "layer"_a, "batch_idx"_a, "k"_a, "v"_a,
          nb::sig("def fill(self, layer: int, batch_idx: int, k: object, v: object) -> None"),
          "Fills a cross-attention layer's keys and values for one slot in one call, [t_enc, "
          "kv_heads, head_dim] each:\n"
          "Tensors, NumPy arrays (of bfloat16: ml_dtypes', or its bits as uint16), or what speaks "
          "DLPack.")
      .def(
          "keys",
          [=](const Cache& self, Whole layer, std::string_view part) {
            return object_of(self.core().keys(layer_in(layer), require_part(part)));
          },
          "layer"_a, nb::kw_only(), "part"_a = "own",
          nb::sig("def keys(self, layer: int, *, part: str = 'own') -> Tensor"),
          "The layer's storage: paged [pages + 1, entries, kv_heads, head_dim], page 0 the null "
          "page; slotted [max_seqs,\n"
          "entries, kv_heads, head_dim]. None where it has none. part: 'own', or of a layer that "
          "keeps several things\n"
          "'compressed', 'indexer', 'cross'.")
      .def(
          "values",
          [=](const Cache& self, Whole layer, std::string_view part) {
            return object_of(self.core().values(layer_in(layer), require_part(part)));
          },
          "layer"_a, nb::kw_only(), "part"_a = "own",
          nb::sig("def values(self, layer: int, *, part: str = 'own') -> Tensor"),
          "As keys. None of latents.")
      .def(
          "keys_values",
          [=](const Cache& self, Whole layer, std::string_view part) {
            return object_of(self.core().keys_values(layer_in(layer), require_part(part)));
          },
          "layer"_a, nb::kw_only(), "part"_a = "own",
          nb::sig("def keys_values(self, layer: int, *, part: str = 'own') -> Tensor"),
          "Both, [pages + 1, 2, entries, kv_heads, head_dim]; None where they differ in width.")
      .def(
          "conv_state",
          [=](const Cache& self, Whole layer, Whole index) {
            return object_of(self.core().conv_state(layer_in(layer), index.i32("index")));
          },
          "layer"_a, "index"_a = 0,
          nb::sig("def conv_state(self, layer: int, index: int = 0) -> Tensor"),
          "The state layer's index-th convolution window, [max_seqs, dim, width]; None where it "
          "has "
          "none.")
      .def(
          "recurrent_state",
          [=](const Cache& self, Whole layer) {
            return object_of(self.core().recurrent_state(layer_in(layer)));
          },
          "layer"_a, nb::sig("def recurrent_state(self, layer: int) -> Tensor"),
          "The state layer's recurrent slab, [max_seqs, heads, k_dim, v_dim]; None where it has "
          "none.")
      .def(
          "paged_block_table",
          [](const Cache& self, const OptionalWhole& layer, std::string_view part) {
            const auto which = layer ? std::optional(layer->i32("layer")) : std::nullopt;
            return object_of(self.core().paged_block_table(which, require_part(part)));
          },
          "layer"_a = nb::none(), nb::kw_only(), "part"_a = "own",
          nb::sig("def paged_block_table(self, layer: int | None = None, *, part: str = 'own') -> "
                  "Tensor | None"),
          "[max_seqs, max_blocks_per_seq] int32, a row per slot, kept up to date in place. layer "
          "may be left out where\n"
          "all layers share one table. None for a cache, or a layer, without pages.")
      .def(
          "seq_lens", [](const Cache& self) { return self.core().seq_lens(); },
          "[max_seqs] int32: tokens that each slot holds, the step under way included.")
      .def(
          "encoder_lens", [](const Cache& self) { return self.core().encoder_lens(); },
          "[max_seqs] int32: encoder tokens that each slot holds.")
      .def(
          "update_position",
          [](Cache& self, Whole batch_idx, Whole new_pos) {
            const std::int32_t slot = batch_idx.i32("batch_idx");
            const std::int32_t position = new_pos.i32("new_pos");
            self.alone([&](KVCache& core) { core.update_position(slot, position); });
          },
          "batch_idx"_a, "new_pos"_a,
          nb::sig("def update_position(self, batch_idx: int, new_pos: int) -> None"),
          "Sets a slot's effective length: shorter for rejected drafts, before any other call; "
          "longer in a slotted cache\n"
          "only. Raises RequestError, naming a length that works, where a window or a state of "
          "then is not held.")
      .def(
          "reset", [](Cache& self) { self.alone([](KVCache& core) { core.reset(); }); },
          "Drops all stored entries of every slot and layer. Tensors handed out before are stale; "
          "arrays made of them\n"
          "keep the bytes of before, which the cache uses no more.")
      .def(
          "next_stop",
          [](const Cache& self, Whole batch_idx) {
            return self.ask(
                [&](const KVCache& core) { return core.next_stop(batch_idx.i32("batch_idx")); });
          },
          "batch_idx"_a, nb::sig("def next_stop(self, batch_idx: int) -> int | None"),
          "Where a step should end so that a state can be resumed there, in tokens; None: "
          "anywhere.")
      .def(
          "encoder_filled",
          [](const Cache& self, Whole batch_idx) {
            return self.ask([&](const KVCache& core) {
              return core.encoder_filled(batch_idx.i32("batch_idx"));
            });
          },
          "batch_idx"_a, nb::sig("def encoder_filled(self, batch_idx: int) -> bool"),
          "False: the layers of cross attention still have to be filled for this slot.")
      .def(
          "abandon_step",
          [](Cache& self) { self.alone([](KVCache& core) { core.abandon_step(); }); },
          "The forward of the step prepared last failed: its slots go back to the deepest length "
          "at "
          "which everything is\n"
          "held. seq_lens says which.")
      .def(
          "audit", [](const Cache& self) { self.ask([](const KVCache& core) { core.audit(); }); },
          "Recounts everything; raises InvariantError that names the first broken equation.")
      .def("__repr__", [](const Cache& self) {
        const KVCacheConfig& config = self.core().config();
        return fmt::format("KVCache({}, {} layers, {} slots of {} tokens)", name_of(config.mode),
                           config.num_layers, config.max_seqs, config.max_len);
      });
  refuse_pickle(cache, "its memory is one process's; make another from its config");
}

}  // namespace

void bind_kv_cache(nb::module_& m) {
  bind_config(m);
  bind_spec(m);
  bind_indices(m);
  bind_kv_cache_class(m);
}

}  // namespace kvleaf::python
