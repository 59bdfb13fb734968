#include "kvleaf/cache/kv_cache.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "kvleaf/cache/index_tensors.h"
#include "kvleaf/cache/kv_cache_impl.h"

namespace kvleaf {
namespace {

#ifdef KVLEAF_GUARD_PAGES
constexpr bool guards_pages = true;
#else
constexpr bool guards_pages = false;
#endif

}  // namespace

KVCache::Impl::Impl(std::shared_ptr<const CacheLayout> layout, const Tensor& memory)
    : layout_(std::move(layout)), given_(memory) {
  build();
}

void KVCache::Impl::reset() {
  // Views of before look at bytes that stay theirs, or, in a caller's memory, say that they are
  // stale. Everything else is made anew, so nothing of before can be met.
  const std::shared_ptr<CacheMemory> old = memory_;
  for (const auto& data : {previous_, current_, draft_}) data->make_stale();
  build();
  old->make_stale();
}

void KVCache::Impl::build() {
  const CacheLayout& layout = *layout_;
  const KVCacheConfig& config = layout.config;
  auto memory = std::make_shared<CacheMemory>(layout_, given_);
  slots_.assign(config.max_seqs, {});
  sequences_.assign(config.max_seqs, {});
  cross_layers_.clear();
  std::uint64_t encoder_blocks = 0;
  for (std::uint32_t layer = 0; layer < layout.layers.size(); ++layer) {
    for (const EntryPlace& place : layout.layers[layer].entries) {
      if (!place.encoder) continue;
      cross_layers_.push_back(layer);
      if (layout.paged())
        encoder_blocks = std::max(encoder_blocks, layout.geometry->leaf(LeafId{place.leaf}).blocks);
    }
  }
  for (Sequence& sequence : sequences_) sequence.filled.assign(cross_layers_.size(), false);
  if (layout.paged()) {
    ManagerOptions options;
    options.page_tokens = config.page_tokens;
    options.max_len = config.max_len;
    options.max_step_tokens = layout.row_step_tokens();
    options.geometry = layout.geometry;
    options.enable_prefix_caching = config.enable_prefix_caching;
    options.retention = config.retention;
    if (config.guard_pages.value_or(guards_pages)) options.guarded = memory->arena_bytes();
    states_.reset();
    tables_.reset();
    planner_.reset();
    manager_ = std::make_unique<BlockManager>(layout.leaves, options);
    planner_ = std::make_unique<StepPlanner>(
        *manager_, PlannerOptions{.max_batch = config.max_seqs,
                                  .max_step_tokens = config.max_step_tokens,
                                  .max_encoder_tokens = std::max(config.max_encoder_len, 1u)});
    tables_ = std::make_unique<SlotTables>(layout, *memory, *manager_);
    states_ = std::make_unique<StateSlabs>(layout, *memory, *manager_, slots_);
    encoders_ = std::make_unique<EncoderLengths>(encoder_blocks + config.max_seqs);
  } else {
    for (Slot& slot : slots_) slot.most = config.max_len;
  }
  for (auto* data : {&previous_, &current_, &draft_}) *data = std::make_shared<Data>(layout_);
  batch_.reserve(config.max_seqs);
  rejecting_.clear();
  rejecting_.reserve(config.max_seqs);
  step_.reset();
  reserved_ = false;
  rows_known_ = false;
  memory_ = std::move(memory);
}

KVCache::KVCache(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
KVCache::KVCache(KVCache&&) noexcept = default;
KVCache& KVCache::operator=(KVCache&&) noexcept = default;
KVCache::~KVCache() = default;

KVCache KVCache::make(const KVCacheConfig& config, std::span<const KVLayerSpec> layer_specs,
                      const Tensor& memory) {
  return KVCache(
      std::make_unique<Impl>(std::make_shared<const CacheLayout>(config, layer_specs), memory));
}

std::uint64_t KVCache::memory_bytes(const KVCacheConfig& config,
                                    std::span<const KVLayerSpec> layer_specs) {
  return CacheLayout(config, layer_specs).total_bytes;
}

namespace {

KVCacheConfig completed(KVCacheConfig config, const ModelConfig& model) {
  if (config.num_layers == 0) config.num_layers = static_cast<std::uint32_t>(model.layers.size());
  if (config.max_encoder_len == 0) config.max_encoder_len = model.encoder_tokens.value_or(0);
  if (config.max_len == 0) {
    if (!model.max_len)
      throw InvalidArgument(fmt::format(
          "max_len is 0, and {} does not say how long its sequences are; expected a max_len",
          model.source));
    config.max_len = *model.max_len;
  }
  config.dtype = model.dtype;
  return config;
}

}  // namespace

KVCache KVCache::from_config(const std::filesystem::path& file, KVCacheConfig config,
                             std::optional<DType> dtype) {
  const ModelConfig model = read_model_config(file, {.dtype = dtype});
  return make(completed(std::move(config), model), model.layers);
}
KVCache KVCache::from_json(std::string_view json, KVCacheConfig config, std::optional<DType> dtype,
                           std::string_view source) {
  const ModelConfig model = parse_model_config(json, {.dtype = dtype}, source);
  return make(completed(std::move(config), model), model.layers);
}

KVCacheMode KVCache::mode() const noexcept { return impl_->layout_->config.mode; }
const KVCacheConfig& KVCache::config() const noexcept { return impl_->layout_->config; }
const std::vector<KVLayerSpec>& KVCache::layer_specs() const noexcept {
  return impl_->layout_->specs;
}
std::uint32_t KVCache::longest_request() const noexcept {
  return impl_->manager_ ? impl_->manager_->longest_request() : impl_->layout_->config.max_len;
}

std::uint32_t KVCache::admit(std::int32_t batch_idx, const Tensor& prompt_ids,
                             std::int32_t addressable_len, const AdmitExtras& extras) {
  return impl_->admit(batch_idx, prompt_ids, addressable_len, extras);
}

Tensor KVCache::reserve(const Tensor& slot_ids, std::span<const std::uint32_t> n_new_per_seq) {
  impl_->require_paged("reserve");
  const std::vector<std::int32_t>& slots = impl_->ids_;
  read_ids(slot_ids, "slot_ids", impl_->ids_);
  if (n_new_per_seq.size() != slots.size())
    throw PlanShapeError(
        fmt::format("{} slot_ids and {} entries of n_new_per_seq; expected as many", slots.size(),
                    n_new_per_seq.size()));
  std::vector<std::int32_t>& counts = impl_->counts_;
  std::vector<std::int32_t>& past = impl_->past_;
  counts.assign(1, 0);
  past.clear();
  std::uint64_t sum = 0;
  for (std::size_t i = 0; i < slots.size(); ++i) {
    sum += n_new_per_seq[i];
    if (sum > static_cast<std::uint64_t>(std::numeric_limits<std::int32_t>::max()))
      throw PlanShapeError(fmt::format("{} tokens in one step; expected at most max_step_tokens {}",
                                       sum, impl_->layout_->config.max_step_tokens));
    counts.push_back(static_cast<std::int32_t>(sum));
    past.push_back(impl_->memory_->seq_lens[impl_->slot_of(slots[i])]);
  }
  const auto& data = impl_->begin(counts, past, slots);
  impl_->reserved_ = true;
  return view(data, data->past.data(), {static_cast<std::int64_t>(data->past.size())});
}

StepIndices KVCache::prepare_step(std::span<const std::int32_t> cu_seqlens_q,
                                  std::span<const std::int32_t> past_len,
                                  std::span<const std::int32_t> slot_ids) {
  StepIndices step;
  const auto& current = impl_->current_;
  if (impl_->reserved_ && std::ranges::equal(current->slots, slot_ids) &&
      std::ranges::equal(current->past, past_len) &&
      std::ranges::equal(current->cu_q, cu_seqlens_q)) {
    impl_->reserved_ = false;
    step.data_ = current;
    return step;
  }
  step.data_ = impl_->begin(cu_seqlens_q, past_len, slot_ids);
  return step;
}

void KVCache::abandon_step() { impl_->abandon_step(); }
void KVCache::retire(std::int32_t batch_idx, const Tensor& full_token_ids,
                     std::int32_t addressable_len) {
  impl_->retire(batch_idx, full_token_ids, addressable_len);
}
void KVCache::evict_batch(std::int32_t batch_idx) { impl_->evict(batch_idx); }
void KVCache::fill(std::int32_t layer, std::int32_t batch_idx, const Tensor& k, const Tensor& v) {
  impl_->fill(layer, batch_idx, k, v);
}
void KVCache::update_position(std::int32_t batch_idx, std::int32_t new_pos) {
  impl_->update_position(batch_idx, new_pos);
}
void KVCache::reset() { impl_->reset(); }

std::optional<std::uint32_t> KVCache::next_stop(std::int32_t batch_idx) const {
  return impl_->next_stop(batch_idx);
}
bool KVCache::encoder_filled(std::int32_t batch_idx) const {
  return impl_->sequences_[impl_->running(batch_idx)].all_filled();
}

// ---- tensors
// ---------------------------------------------------------------------------------------

Tensor KVCache::keys(std::int32_t layer, KVPart part) const {
  const EntryPlace* place = impl_->layout_->find(layer, part);
  if (place == nullptr) return {};
  return CacheMemory::entries(impl_->memory_, *place, CacheMemory::Half::keys);
}

Tensor KVCache::values(std::int32_t layer, KVPart part) const {
  const EntryPlace* place = impl_->layout_->find(layer, part);
  if (place == nullptr || place->value_dim == 0) return {};
  return CacheMemory::entries(impl_->memory_, *place, CacheMemory::Half::values);
}

Tensor KVCache::keys_values(std::int32_t layer, KVPart part) const {
  const EntryPlace* place = impl_->layout_->find(layer, part);
  if (place == nullptr || place->value_dim != place->key_dim) return {};
  return CacheMemory::entries(impl_->memory_, *place, CacheMemory::Half::both);
}

Tensor KVCache::conv_state(std::int32_t layer, std::int32_t index) const {
  const CacheLayout& layout = *impl_->layout_;
  std::int32_t windows = 0;
  for (const std::uint32_t i : layout.layer(layer).slabs) {
    if (!layout.slabs[i].conv) continue;
    if (windows++ == index) return CacheMemory::states(impl_->memory_, layout.slabs[i]);
  }
  if (windows > 0 || index < 0)
    throw InvalidArgument(fmt::format("layer {} has {} convolution windows; there is no index {}",
                                      layer, windows, index));
  return {};
}

Tensor KVCache::recurrent_state(std::int32_t layer) const {
  const CacheLayout& layout = *impl_->layout_;
  for (const std::uint32_t i : layout.layer(layer).slabs)
    if (!layout.slabs[i].conv) return CacheMemory::states(impl_->memory_, layout.slabs[i]);
  return {};
}

Tensor KVCache::paged_block_table(std::optional<std::int32_t> layer, KVPart part) const {
  const CacheLayout& layout = *impl_->layout_;
  if (layer) (void)layout.layer(*layer);
  if (!layout.paged()) return {};
  const EntryPlace* place = layout.find(layer, part);
  if (place == nullptr) return {};
  const std::vector<std::int32_t>& table = impl_->memory_->tables[place->leaf];
  const std::int64_t seqs = layout.config.max_seqs;
  return view(impl_->memory_, table.data(), {seqs, static_cast<std::int64_t>(table.size()) / seqs});
}

Tensor KVCache::seq_lens() const {
  return view(impl_->memory_, impl_->memory_->seq_lens.data(), {impl_->layout_->config.max_seqs});
}
Tensor KVCache::encoder_lens() const {
  return view(impl_->memory_, impl_->memory_->encoder_lens.data(),
              {impl_->layout_->config.max_seqs});
}

const BlockManager& KVCache::manager() const {
  if (!impl_->manager_)
    throw InvalidArgument("a slotted cache has no block manager; expected a paged one");
  return *impl_->manager_;
}
void KVCache::audit() const {
  if (impl_->manager_) impl_->manager_->audit();
}

}  // namespace kvleaf
