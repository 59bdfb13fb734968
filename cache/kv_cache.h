// KVCache: the whole cache of one model, in slots. An attention implementation appends to and
// attends through the tensors it hands out, and never sees a block being drawn or freed.
//
//   KVCache cache = KVCache::make({.num_layers = 2, .max_seqs = 8, .max_len = 4096}, specs);
//   auto hit = cache.admit(0, prompt);                          // tokens that need no computing
//   StepIndices step = cache.prepare_step({0, n - hit}, {hit}, {0});
//   ... the forward: appends through step.slot_mapping(), attends through step.block_table() ...
//   cache.retire(0, all_token_ids);                             // findable for the next prompt
//
// Two modes. slotted: each slot owns max_len entries of every layer; no table, no reuse. paged:
// entries lie in pages of one pool that all layers share, found through tables, and prefixes that
// were computed before are reused. In both, recurrent states lie in slabs [max_seqs, ...], one row
// per slot; in a paged cache, copies of them at page boundaries (checkpoints) lie in the pool, and
// prepare_step runs the copies between the two.
//
// One step at a time: prepare_step begins one, and the next call that changes the cache
// (prepare_step, reserve, admit, retire, evict_batch, update_position) takes its forward for done.
// Where a forward failed, call abandon_step instead; which drafts were rejected, update_position
// must be told before anything else.
//
// What throws has changed nothing, but that a step of before may have settled and that pages nobody
// uses may have been evicted. One thread owns a cache.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <initializer_list>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "kvleaf/cache/cache_config.h"
#include "kvleaf/cache/kv_part.h"
#include "kvleaf/cache/layer_spec.h"
#include "kvleaf/cache/model_config.h"
#include "kvleaf/cache/step_indices.h"
#include "kvleaf/cache/tensor.h"
#include "kvleaf/group/block_manager.h"

namespace kvleaf {

struct AdmitExtras {
  /// Identity of the encoder's input. None: a cache with cross attention reuses nothing.
  std::optional<std::string> encoder_digest = {};
  /// Its tokens. None: max_encoder_len are reserved, and fill says how many there are.
  std::optional<std::uint32_t> encoder_len = {};
  std::string salt = {};     // nothing is shared across salts
  std::string adapter = {};  // name and version together; nothing is shared across adapters
};

class KVCache {
 public:
  /// One spec per layer. memory: what to lay the cache in, uint8 [memory_bytes] aligned to 256, and
  /// kept alive; undefined: host memory of its own, which the system backs where it is first
  /// touched.
  /// Throws InvalidArgument (another number of specs, zero bounds, a layer shared with one that is
  /// not before it, cross attention without max_encoder_len, a device that there is not),
  /// GeometryError (a budget in which not every kind of page has a place).
  static KVCache make(const KVCacheConfig& config, std::span<const KVLayerSpec> layer_specs,
                      const Tensor& memory = {});
  static KVCache make(const KVCacheConfig& config, std::initializer_list<KVLayerSpec> layer_specs) {
    return make(config, std::span(layer_specs.begin(), layer_specs.size()));
  }
  /// From a published config.json: num_layers, max_encoder_len and max_len are the model's where
  /// they are 0, the dtype too unless `dtype` is given. Throws as read_model_config and make.
  static KVCache from_config(const std::filesystem::path& file, KVCacheConfig config,
                             std::optional<DType> dtype = {});
  static KVCache from_json(std::string_view json, KVCacheConfig config,
                           std::optional<DType> dtype = {}, std::string_view source = "config");
  /// Bytes that make would lay the cache in.
  static std::uint64_t memory_bytes(const KVCacheConfig& config,
                                    std::span<const KVLayerSpec> layer_specs);

  KVCache(KVCache&&) noexcept;
  KVCache& operator=(KVCache&&) noexcept;
  ~KVCache();

  KVCacheMode mode() const noexcept;
  const KVCacheConfig& config() const noexcept;  // as given, with what was left out filled in
  const std::vector<KVLayerSpec>& layer_specs() const noexcept;
  /// Tokens of the longest sequence that the empty cache serves: max_len, or less where the budget
  /// is small.
  std::uint32_t longest_request() const noexcept;

  // ---- a slot's life (paged)
  // -----------------------------------------------------------------------
  /// Binds the longest cached prefix into a fresh slot; returns the leading tokens whose entries
  /// are there, always less than all.
  ///   prompt_ids       [n] int32 or int64, contiguous, on the host
  ///   addressable_len  leading tokens that may be matched, now and by later prompts; -1: all
  /// Throws InvalidArgument (no such slot, addressable_len below -1), PlanShapeError (shape or
  /// element type), RequestError (slotted, slot in use, no token, past max_len), PoolExhausted.
  std::uint32_t admit(std::int32_t batch_idx, const Tensor& prompt_ids,
                      std::int32_t addressable_len = -1, const AdmitExtras& extras = {});
  /// Begins a step: reserves these new tokens. Returns the write offset of each sequence, its
  /// length before them, [n] int32. prepare_step of the very same rows then only describes it.
  /// Throws as prepare_step.
  Tensor reserve(const Tensor& slot_ids, std::span<const std::uint32_t> n_new_per_seq);
  /// Ends a finished session; what it computed stays findable for later prompts.
  ///   full_token_ids   [n]: prompt and generated, as many as were computed or one more. Of fewer
  ///                    tokens only those stay findable
  /// Throws as admit, RequestError for a free slot or ids that differ from its prompt.
  void retire(std::int32_t batch_idx, const Tensor& full_token_ids,
              std::int32_t addressable_len = -1);
  /// Where a step should end so that a state can be resumed there, in tokens; none: anywhere.
  std::optional<std::uint32_t> next_stop(std::int32_t batch_idx) const;
  /// Whether the layers of cross attention still have to be filled for this slot.
  bool encoder_filled(std::int32_t batch_idx) const;

  // ---- steps
  // ---------------------------------------------------------------------------------------
  /// Turns one step's description into the index tensors of a variable-length forward; a paged
  /// cache also reserves its pages and runs the copies between slabs and checkpoints.
  ///   cu_seqlens_q  [n + 1], from 0, strictly ascending: new tokens of each row
  ///   past_len      [n]: tokens before; what seq_lens says of the slot
  ///   slot_ids      [n], each once
  /// Throws PlanShapeError (lengths that do not fit each other, more than max_step_tokens),
  /// InvalidArgument (no such slot), RequestError (free slot, twice, another past, past max_len,
  /// cross attention not filled), PoolExhausted (then no row was served).
  StepIndices prepare_step(std::span<const std::int32_t> cu_seqlens_q,
                           std::span<const std::int32_t> past_len,
                           std::span<const std::int32_t> slot_ids);
  StepIndices prepare_step(std::initializer_list<std::int32_t> cu_seqlens_q,
                           std::initializer_list<std::int32_t> past_len,
                           std::initializer_list<std::int32_t> slot_ids) {
    const auto view = [](std::initializer_list<std::int32_t> list) {
      return std::span(list.begin(), list.size());
    };
    return prepare_step(view(cu_seqlens_q), view(past_len), view(slot_ids));
  }
  /// The forward of the step prepared last failed: its slots go back to the deepest length at which
  /// everything is held, 0 at the worst. Does nothing where no step is under way.
  void abandon_step();

  /// Frees a slot; nothing of it stays findable beyond what others share. Its seq_lens is 0.
  /// Does nothing to a free slot. Throws InvalidArgument for no such slot.
  void evict_batch(std::int32_t batch_idx);
  /// Fills a cross-attention layer for one slot.
  ///   k, v   [t_enc, kv_heads, head_dim], of the cache's element type; any strides
  /// Throws InvalidArgument (no such layer or slot; no cross attention), PlanShapeError,
  /// RequestError (free slot, t_enc past what was reserved or unlike other layers').
  void fill(std::int32_t layer, std::int32_t batch_idx, const Tensor& k, const Tensor& v);
  /// Sets a slot's effective length. Shorter: what lies behind it is forgotten (rejected drafts).
  /// Longer: slotted only, where the entries were written by other means.
  /// Throws InvalidArgument, RequestError (free slot; past max_len; what was never computed; a
  /// length for which a window or a state is no longer held, naming one that works).
  void update_position(std::int32_t batch_idx, std::int32_t new_pos);
  /// As new: every slot free, nothing findable. Views handed out before are stale; host memory that
  /// they still look at is left to them.
  void reset();

  // ---- tensors
  // -------------------------------------------------------------------------------------
  /// A layer's storage; of a shared layer, that of the layer it reads. Undefined where it has none.
  ///   paged     [pages + 1, entries, kv_heads, head_dim]: page 0 is the null page, zeros
  ///   slotted   [max_seqs, entries, kv_heads, head_dim]; cross attention: max_encoder_len entries
  /// Pages hold keys and then values of one layer after another, so strides[0] is more than the
  /// shape says. Latents: one head, and no values. Throws InvalidArgument for no such layer.
  Tensor keys(std::int32_t layer, KVPart part = KVPart::own) const;
  Tensor values(std::int32_t layer, KVPart part = KVPart::own) const;
  /// Both, where keys are as wide as values: [pages + 1, 2, entries, kv_heads, head_dim], or
  /// [max_seqs, 2, ...].
  Tensor keys_values(std::int32_t layer, KVPart part = KVPart::own) const;
  /// [max_seqs, dim, width], the state layer's index-th convolution window. Undefined where it has
  /// none. Throws InvalidArgument for no such layer or index.
  Tensor conv_state(std::int32_t layer, std::int32_t index = 0) const;
  /// [max_seqs, heads, k_dim, v_dim], or of the state's own shape. Undefined where it has none.
  Tensor recurrent_state(std::int32_t layer) const;
  /// [max_seqs, max_blocks_per_seq] int32, one row per slot, kept up to date in place; 0 where no
  /// page is reached. Undefined for a cache, or a layer, without pages. `layer`: may be left out
  /// where all layers share one table; throws InvalidArgument else.
  Tensor paged_block_table(std::optional<std::int32_t> layer = {}, KVPart part = KVPart::own) const;
  /// [max_seqs] int32: tokens that each slot holds, the step under way included.
  Tensor seq_lens() const;
  /// [max_seqs] int32: encoder tokens that each slot holds.
  Tensor encoder_lens() const;

  // ---- beneath (paged)
  // ------------------------------------------------------------------------------
  /// Throws InvalidArgument in a slotted cache. What is called on it must leave the cache's own
  /// requests alone.
  const BlockManager& manager() const;
  /// Recounts everything; throws InvariantError that names the first broken equation.
  void audit() const;

 private:
  class Impl;
  explicit KVCache(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace kvleaf
