#include "kvleaf/cache/kv_cache.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <list>
#include <unordered_map>
#include <utility>

#include "kvleaf/cache/cache_layout.h"
#include "kvleaf/group/step_planner.h"
#include "kvleaf/pool/arena.h"

namespace kvleaf {
namespace {

constexpr std::size_t alignment = 256;
constexpr std::string_view table_key = "block_table";
/// What requests without an encoder's input share, and what nobody else can be told by.
constexpr std::string_view no_encoder = "\1none";

std::uint32_t ceil_div(std::uint32_t a, std::uint32_t b) { return a / b + (a % b != 0 ? 1 : 0); }

/// Zeroed host memory, backed by the system where it is first touched.
std::shared_ptr<std::byte> zeroed(std::uint64_t bytes) {
  void* raw = std::calloc(bytes + alignment, 1);
  if (raw == nullptr) throw KVError(fmt::format("{} B of host memory are not to be had", bytes));
  std::shared_ptr<std::byte> whole(static_cast<std::byte*>(raw),
                                   [](std::byte* begin) { std::free(begin); });
  const auto address = reinterpret_cast<std::uintptr_t>(raw);
  std::byte* begin = whole.get() + (alignment - address % alignment) % alignment;
  return std::shared_ptr<std::byte>(std::move(whole), begin);
}

/// The bytes that a cache lies in, and the arrays it keeps up to date in place. Views on any of
/// them keep all of them.
struct CacheMemory : TensorOwner {
  CacheMemory(const CacheLayout& layout, const Tensor& memory) : given(memory) {
    if (given.defined()) {
      if (given.dtype() != DType::uint8 || given.rank() != 1 || !given.contiguous() ||
          given.device().kind != Device::Kind::cpu)
        throw InvalidArgument(
            fmt::format("the memory given is {}; expected contiguous uint8 [{}] on cpu",
                        given.to_string(), layout.total_bytes));
      if (static_cast<std::uint64_t>(given.size()) < layout.total_bytes)
        throw InvalidArgument(fmt::format("the memory given has {} B; the cache takes {} B",
                                          given.size(), layout.total_bytes));
      if (reinterpret_cast<std::uintptr_t>(given.data()) % alignment != 0)
        throw InvalidArgument(
            fmt::format("the memory given begins at no multiple of {} B; expected one", alignment));
      arena_base = given.data();
      slab_base = given.data() + layout.arena_bytes;
      std::memset(given.data(), 0, layout.total_bytes);
    } else {
      if (layout.geometry) {
        arena = Arena::host(*layout.geometry);
        arena_base = arena->bytes().data();
      }
      slabs = zeroed(layout.total_bytes - layout.arena_bytes);
      slab_base = slabs.get();
    }
    arena_bytes = layout.arena_bytes;
    seq_lens.assign(layout.config.max_seqs, 0);
    encoder_lens.assign(layout.config.max_seqs, 0);
  }

  std::byte* at(std::uint64_t offset) const noexcept {
    return offset < arena_bytes ? arena_base + offset : slab_base + (offset - arena_bytes);
  }

  Tensor given;  // by the caller; else arena and slabs
  std::optional<Arena> arena;
  std::shared_ptr<std::byte> slabs;
  std::byte* arena_base = nullptr;
  std::byte* slab_base = nullptr;
  std::uint64_t arena_bytes = 0;
  std::vector<std::int32_t> seq_lens;
  std::vector<std::int32_t> encoder_lens;
  std::vector<std::vector<std::int32_t>> tables;  // per leaf: [max_seqs, columns]; empty: no pages
};

Tensor view(const std::shared_ptr<TensorOwner>& owner, const std::int32_t* data,
            std::initializer_list<std::int64_t> shape) {
  return Tensor(reinterpret_cast<std::byte*>(const_cast<std::int32_t*>(data)),
                std::span(shape.begin(), shape.size()), {}, DType::int32, {}, owner);
}
Tensor view(const std::shared_ptr<TensorOwner>& owner, std::span<const std::int64_t> values) {
  const std::int64_t shape[] = {static_cast<std::int64_t>(values.size())};
  return Tensor(reinterpret_cast<std::byte*>(const_cast<std::int64_t*>(values.data())), shape, {},
                DType::int64, {}, owner);
}

/// Whole numbers of a 1-D host tensor.
void read_ids(const Tensor& tensor, const char* name, std::vector<std::int32_t>& out) {
  const auto refuse = [&](const char* wanted) {
    throw PlanShapeError(fmt::format("{} is {}; expected {}", name, tensor.to_string(), wanted));
  };
  if (!tensor.defined() || tensor.rank() != 1) refuse("one dimension");
  if (tensor.device().kind != Device::Kind::cpu) refuse("a tensor on the host");
  const std::int64_t count = tensor.shape()[0];
  const std::int64_t stride = tensor.strides()[0];
  out.resize(static_cast<std::size_t>(count));
  if (tensor.dtype() == DType::int32) {
    const auto* ids = tensor.data_as<std::int32_t>();
    for (std::int64_t i = 0; i < count; ++i) out[static_cast<std::size_t>(i)] = ids[i * stride];
  } else if (tensor.dtype() == DType::int64) {
    const auto* ids = tensor.data_as<std::int64_t>();
    for (std::int64_t i = 0; i < count; ++i) {
      const std::int64_t id = ids[i * stride];
      if (id != static_cast<std::int32_t>(id))
        throw InvalidArgument(
            fmt::format("{}: entry {} is {}; expected a number of 32 bits", name, i, id));
      out[static_cast<std::size_t>(i)] = static_cast<std::int32_t>(id);
    }
  } else {
    refuse("int32 or int64");
  }
}

}  // namespace

std::string_view name_of(KVCacheMode mode) noexcept {
  return mode == KVCacheMode::slotted ? "slotted" : "paged";
}
KVCacheMode require_mode(std::string_view name) {
  if (name == "slotted") return KVCacheMode::slotted;
  if (name == "paged") return KVCacheMode::paged;
  throw InvalidArgument(fmt::format("mode '{}'; expected slotted or paged", name));
}
std::string_view name_of(KVPart part) noexcept {
  switch (part) {
    case KVPart::own: return "own";
    case KVPart::compressed: return "compressed";
    case KVPart::indexer: return "indexer";
    case KVPart::cross: return "cross";
  }
  return "";
}
KVPart require_part(std::string_view name) {
  for (const KVPart part : {KVPart::own, KVPart::compressed, KVPart::indexer, KVPart::cross})
    if (name_of(part) == name) return part;
  throw InvalidArgument(fmt::format("part '{}'; expected own, compressed, indexer or cross", name));
}

// ---- one step's indices
// ----------------------------------------------------------------------------

struct StepIndices::Data : TensorOwner {
  std::shared_ptr<const CacheLayout> layout;
  StepPlan plan;  // paged
  std::uint32_t tokens = 0;
  std::uint32_t max_q = 0;
  std::uint32_t max_k = 0;
  std::vector<std::int32_t> slots;
  std::vector<std::int32_t> past;
  std::vector<std::int32_t> seq_lens;
  std::vector<std::int32_t> encoder_lens;
  std::vector<std::int32_t> cu_q;
  // Made when asked for.
  std::vector<std::int32_t> cu_k;
  std::vector<std::int64_t> positions;
  struct Mapping {
    std::uint32_t entries = 0;
    std::uint32_t tokens_per_entry = 0;
    std::vector<std::int64_t> slots;
  };
  std::list<Mapping> mappings;  // slotted
  struct Rows {
    std::uint32_t leaf = 0;
    std::vector<std::int32_t> indptr, indices, last;
  };
  std::list<Rows> csr;

  /// The entries that a layer names; without one, those of all layers, where they share a table.
  /// Null: it has none.
  const EntryPlace* entries(std::optional<std::uint32_t> layer, KVPart part) const {
    if (layer) return layout->find(*layer, part);
    const EntryPlace* only = nullptr;
    for (std::uint32_t l = 0; l < layout->layers.size(); ++l) {
      for (const EntryPlace& place : layout->layers[l].entries) {
        const bool asked = place.part == part;
        if (!asked) continue;
        if (only != nullptr && (only->leaf != place.leaf || only->entries != place.entries ||
                                only->tokens_per_entry != place.tokens_per_entry)) {
          throw InvalidArgument(
              fmt::format("layers of this cache have several tables; name a layer of 0 to {}",
                          layout->layers.size() - 1));
        }
        only = &place;
      }
    }
    return only;
  }
};

std::uint32_t StepIndices::batch() const noexcept {
  return static_cast<std::uint32_t>(data_->slots.size());
}
std::uint32_t StepIndices::num_tokens() const noexcept { return data_->tokens; }
std::uint32_t StepIndices::max_seqlen_q() const noexcept { return data_->max_q; }
std::uint32_t StepIndices::max_seqlen_k() const noexcept { return data_->max_k; }
Tensor StepIndices::slot_ids() const { return view(data_, data_->slots.data(), {batch()}); }
Tensor StepIndices::cu_seqlens_q() const {
  return view(data_, data_->cu_q.data(), {std::int64_t{batch()} + 1});
}
Tensor StepIndices::past_lens() const { return view(data_, data_->past.data(), {batch()}); }
Tensor StepIndices::seq_lens() const { return view(data_, data_->seq_lens.data(), {batch()}); }
Tensor StepIndices::encoder_lens() const {
  return view(data_, data_->encoder_lens.data(), {batch()});
}

Tensor StepIndices::cu_seqlens_k() const {
  Data& data = *data_;
  if (data.cu_k.empty()) {
    std::int64_t sum = 0;
    data.cu_k.push_back(0);
    for (const std::int32_t length : data.seq_lens) {
      sum += length;
      if (sum > std::numeric_limits<std::int32_t>::max()) {
        data.cu_k.clear();
        throw PlanShapeError(
            "the sequences of this step hold more than 2^31 - 1 tokens together, and cu_seqlens_k "
            "is int32; use seq_lens");
      }
      data.cu_k.push_back(static_cast<std::int32_t>(sum));
    }
  }
  return view(data_, data.cu_k.data(), {std::int64_t{batch()} + 1});
}

Tensor StepIndices::positions() const {
  Data& data = *data_;
  if (data.positions.empty()) {
    data.positions.reserve(data.tokens);
    for (std::size_t row = 0; row < data.slots.size(); ++row)
      for (std::int32_t t = data.past[row]; t < data.seq_lens[row]; ++t)
        data.positions.push_back(t);
  }
  return view(data_, std::span<const std::int64_t>(data.positions));
}

Tensor StepIndices::slot_mapping(std::optional<std::uint32_t> layer, KVPart part) const {
  Data& data = *data_;
  const EntryPlace* place = data.entries(layer, part);
  if (place == nullptr || place->encoder) return {};
  if (data.layout->paged()) return view(data_, data.plan.slot_mapping(LeafId{place->leaf}));
  for (const Data::Mapping& made : data.mappings)
    if (made.entries == place->entries && made.tokens_per_entry == place->tokens_per_entry)
      return view(data_, std::span<const std::int64_t>(made.slots));
  Data::Mapping& mapping = data.mappings.emplace_back();
  mapping.entries = place->entries;
  mapping.tokens_per_entry = place->tokens_per_entry;
  mapping.slots.reserve(data.tokens);
  for (std::size_t row = 0; row < data.slots.size(); ++row) {
    const std::int64_t first = std::int64_t{data.slots[row]} * place->entries;
    for (std::int32_t t = data.past[row]; t < data.seq_lens[row]; ++t)
      mapping.slots.push_back(first + t / static_cast<std::int32_t>(place->tokens_per_entry));
  }
  return view(data_, std::span<const std::int64_t>(mapping.slots));
}

Tensor StepIndices::block_table(std::optional<std::uint32_t> layer, KVPart part) const {
  const EntryPlace* place = data_->entries(layer, part);
  if (place == nullptr || !data_->layout->paged()) return {};
  const StagedArray& table = data_->plan.array(LeafId{place->leaf}, table_key);
  return Tensor(table.data, std::span(table.shape.data(), table.shape.size()),
                std::span(table.strides.data(), table.strides.size()), table.dtype, {}, data_);
}

StepIndices::Csr StepIndices::csr(std::optional<std::uint32_t> layer, KVPart part) const {
  Data& data = *data_;
  const EntryPlace* place = data.entries(layer, part);
  if (place == nullptr || !data.layout->paged()) return {};
  auto rows = std::ranges::find(data.csr, place->leaf, &Data::Rows::leaf);
  if (rows == data.csr.end()) {
    Data::Rows made;
    made.leaf = place->leaf;
    made.indptr.push_back(0);
    const StagedArray& table = data.plan.array(LeafId{place->leaf}, table_key);
    for (std::size_t row = 0; row < data.slots.size(); ++row) {
      const auto* blocks = table.row<std::int32_t>(static_cast<std::int64_t>(row));
      const auto tokens =
          static_cast<std::uint32_t>((place->encoder ? data.encoder_lens : data.seq_lens)[row]);
      const std::uint32_t count = ceil_div(tokens, place->tokens_per_entry);
      const std::uint32_t pages = ceil_div(count, place->entries);
      made.indices.insert(made.indices.end(), blocks, blocks + pages);
      made.indptr.push_back(static_cast<std::int32_t>(made.indices.size()));
      made.last.push_back(
          pages == 0 ? 0 : static_cast<std::int32_t>(count - (pages - 1) * place->entries));
    }
    rows = data.csr.insert(data.csr.end(), std::move(made));
  }
  return {view(data_, rows->indptr.data(), {std::int64_t{batch()} + 1}),
          view(data_, rows->indices.data(), {static_cast<std::int64_t>(rows->indices.size())}),
          view(data_, rows->last.data(), {batch()})};
}

// ---- the cache
// -------------------------------------------------------------------------------------

class KVCache::Impl {
 public:
  Impl(std::shared_ptr<const CacheLayout> layout, const Tensor& given);

  std::uint32_t admit(std::int32_t slot, const Tensor& ids, std::int32_t addressable,
                      const AdmitExtras& extras);
  const std::shared_ptr<StepIndices::Data>& begin(std::span<const std::int32_t> slots,
                                                  std::span<const std::int32_t> past,
                                                  bool check_past);
  void retire(std::int32_t slot, const Tensor& ids, std::int32_t addressable);
  void evict(std::int32_t slot);
  void fill(std::int32_t layer, std::int32_t slot, const Tensor& k, const Tensor& v);
  void update_position(std::int32_t slot, std::int32_t position);
  void abandon_step();
  void reset();

  void require_paged(const char* what) const {
    if (!layout_->paged())
      throw RequestError(fmt::format("{} is for paged caches; this one is slotted", what));
  }
  std::size_t slot_of(std::int64_t slot) const {
    if (slot < 0 || slot >= static_cast<std::int64_t>(slots_.size()))
      throw InvalidArgument(
          fmt::format("slot {}; the cache has slots 0 to {}", slot, slots_.size() - 1));
    return static_cast<std::size_t>(slot);
  }
  /// Of a slot that an admitted sequence is in.
  std::size_t running(std::int64_t slot) const {
    const std::size_t s = slot_of(slot);
    if (!slots_[s].used)
      throw RequestError(fmt::format("slot {} is free; admit a prompt to it first", slot));
    return s;
  }

  std::shared_ptr<const CacheLayout> layout_;
  std::shared_ptr<CacheMemory> memory_;
  std::unique_ptr<BlockManager> manager_;  // paged
  std::unique_ptr<StepPlanner> planner_;   // paged

  struct Slot {
    bool used = false;  // paged: a sequence was admitted
    RequestId request{0};
    std::vector<Token> prompt;     // ids that the manager knows
    std::uint32_t prompt_len = 0;  // at admission
    bool state_moved = false;      // its states lie elsewhere than in the slabs
    std::uint64_t restored = 0;    // scratch: state leaves that this step has brought back
    // Cross attention.
    std::string digest;
    bool shared_encoder = false;  // the digest is the caller's
    std::uint32_t encoder_reserved = 0;
    std::vector<bool> filled;  // per layer of cross attention
    bool encoder_cached = false;
  };
  std::vector<Slot> slots_;
  std::vector<std::uint32_t> cross_layers_;

  std::vector<std::int32_t> ids_;     // scratch: tokens, or slots of reserve
  std::vector<std::int32_t> counts_;  // scratch: cu_seqlens of reserve
  bool reserved_ = false;             // the step under way was begun by reserve, not described yet
  std::shared_ptr<StepIndices::Data> current_;  // the step prepared last

  const Slot& at(std::size_t slot) const { return slots_[slot]; }

 private:
  struct StateLeaf {
    LeafId leaf{0};
    std::uint32_t tokens_per_page = 0;
    std::vector<std::uint32_t> slabs;  // indices into the layout's
  };
  struct TableLeaf {
    LeafId leaf{0};
    std::uint32_t tokens_per_page = 0;
    std::uint32_t columns = 0;
    bool encoder = false;
    std::vector<std::uint32_t> filled;  // per slot: columns that may be nonzero
  };
  struct Row {
    std::size_t slot = 0;
    RequestId request{0};
    std::uint32_t begin = 0;
    std::uint32_t count = 0;
    std::uint32_t kept = 0;
  };

  void build();
  void settle();
  Row* row_of(std::size_t slot);
  std::byte* page(LeafId leaf, BlockId block) const {
    const LeafGeometry& geometry = layout_->geometry->leaf(leaf);
    return memory_->arena_base + geometry.base_offset + block.value() * geometry.page_stride;
  }
  std::uint64_t page_bytes(LeafId leaf) const {
    return layout_->geometry->leaf(leaf).bytes_per_page;
  }
  void save(const StateLeaf& leaf, std::size_t slot, BlockId block) const;
  void restore(const StateLeaf& leaf, std::size_t slot, const std::byte* page) const;
  void clear_states(std::size_t slot) const;
  void run_copies(const StepPlan& plan);
  void sync_tables(const StepPlan& plan);
  void sync_rows(std::size_t slot);
  void clear_rows(std::size_t slot);
  void free_slot(std::size_t slot);
  StepIndices::Data& next_data();
  std::uint32_t known_encoder(const std::string& digest);
  void remember_encoder(const std::string& digest, std::uint32_t tokens);

  Tensor given_;
  std::uint64_t serials_ = 0;
  std::vector<StateLeaf> state_leaves_;
  std::vector<TableLeaf> table_leaves_;
  std::vector<std::uint32_t> state_index_;  // per leaf: in state_leaves_, or none
  static constexpr std::uint32_t none = ~0u;

  std::optional<StepId> step_;  // under way
  std::vector<Row> rows_;       // of it
  std::vector<StepRequest> batch_;
  std::vector<RequestId> previous_;   // rows of the plan before
  std::vector<std::uint64_t> marks_;  // per slot: the call that last met it
  std::uint64_t mark_ = 0;
  std::vector<Kept> kept_;
  std::vector<std::pair<std::uint32_t, std::uint32_t>> live_;  // scratch: block, slot; sorted
  std::array<std::shared_ptr<StepIndices::Data>, 2> data_;
  std::uint64_t steps_ = 0;

  // Tokens of encoder inputs that were filled, by digest, the most recently used last. As many as
  // the pool could hold.
  std::list<std::pair<std::string, std::uint32_t>> encoders_;
  std::unordered_map<std::string, std::list<std::pair<std::string, std::uint32_t>>::iterator>
      encoder_of_;
  std::size_t most_encoders_ = 0;
};

KVCache::Impl::Impl(std::shared_ptr<const CacheLayout> layout, const Tensor& given)
    : layout_(std::move(layout)), given_(given) {
  build();
}

void KVCache::Impl::build() {
  const CacheLayout& layout = *layout_;
  const KVCacheConfig& config = layout.config;
  auto memory = std::make_shared<CacheMemory>(layout, given_);
  slots_.assign(config.max_seqs, {});
  marks_.assign(config.max_seqs, 0);
  rows_.reserve(config.max_seqs);
  rows_.clear();
  batch_.reserve(config.max_seqs);
  kept_.reserve(config.max_seqs);
  live_.reserve(config.max_seqs);
  previous_.reserve(config.max_seqs);
  previous_.clear();
  step_.reset();
  reserved_ = false;
  cross_layers_.clear();
  for (std::uint32_t layer = 0; layer < layout.layers.size(); ++layer)
    for (const EntryPlace& place : layout.layers[layer].entries)
      if (place.encoder) cross_layers_.push_back(layer);
  for (Slot& slot : slots_) slot.filled.assign(cross_layers_.size(), false);
  state_leaves_.clear();
  table_leaves_.clear();
  if (layout.paged()) {
    ManagerOptions options;
    options.page_tokens = config.page_tokens;
    options.max_len = config.max_len;
    options.max_step_tokens = layout.row_step_tokens();
    options.geometry = layout.geometry;
    options.enable_prefix_caching = config.enable_prefix_caching;
    options.retention = config.retention;
    planner_.reset();
    manager_ = std::make_unique<BlockManager>(layout.leaves, options);
    planner_ = std::make_unique<StepPlanner>(
        *manager_, PlannerOptions{.max_batch = config.max_seqs,
                                  .max_step_tokens = config.max_step_tokens,
                                  .max_encoder_tokens = std::max(config.max_encoder_len, 1u)});
    state_index_.assign(layout.leaves.size(), none);
    memory->tables.resize(layout.leaves.size());
    std::vector<std::uint32_t> shown(layout.leaves.size(), 0);
    for (const LayerPlaces& layer : layout.layers) {
      for (const EntryPlace& place : layer.entries) {
        if (std::exchange(shown[place.leaf], 1) != 0) continue;
        TableLeaf table;
        table.leaf = LeafId{place.leaf};
        table.tokens_per_page = manager_->tokens_per_page(table.leaf);
        table.encoder = place.encoder;
        table.columns = ceil_div(place.encoder ? config.max_encoder_len : config.max_len,
                                 table.tokens_per_page);
        table.filled.assign(config.max_seqs, 0);
        memory->tables[place.leaf].assign(std::size_t{config.max_seqs} * table.columns, 0);
        if (place.encoder)
          most_encoders_ = std::max<std::size_t>(
              most_encoders_, layout.geometry->leaf(table.leaf).blocks + config.max_seqs);
        table_leaves_.push_back(std::move(table));
      }
    }
    for (std::uint32_t i = 0; i < layout.slabs.size(); ++i) {
      std::uint32_t& index = state_index_[layout.slabs[i].leaf];
      if (index == none) {
        index = static_cast<std::uint32_t>(state_leaves_.size());
        const LeafId leaf{layout.slabs[i].leaf};
        state_leaves_.push_back({leaf, manager_->tokens_per_page(leaf), {}});
      }
      state_leaves_[index].slabs.push_back(i);
    }
    if (state_leaves_.size() > 64)
      throw InvalidArgument(
          fmt::format("{} kinds of recurrent state; expected at most 64", state_leaves_.size()));
  }
  for (auto& data : data_) {
    data = std::make_shared<StepIndices::Data>();
    data->layout = layout_;
    data->slots.reserve(config.max_seqs);
    data->past.reserve(config.max_seqs);
    data->seq_lens.reserve(config.max_seqs);
    data->encoder_lens.reserve(config.max_seqs);
    data->cu_q.reserve(std::size_t{config.max_seqs} + 1);
  }
  current_.reset();
  encoders_.clear();
  encoder_of_.clear();
  memory_ = std::move(memory);
}

void KVCache::Impl::reset() {
  // Views of before look at bytes that stay theirs, or, in a caller's memory, say that they are
  // stale. Everything else is made anew, so nothing of before can be met.
  const std::shared_ptr<CacheMemory> old = memory_;
  for (auto& data : data_) data->make_stale();
  build();
  old->make_stale();
}

// ---- states: slabs and pages
// -----------------------------------------------------------------------

void KVCache::Impl::save(const StateLeaf& leaf, std::size_t slot, BlockId block) const {
  std::byte* target = page(leaf.leaf, block);
  for (const std::uint32_t i : leaf.slabs) {
    const SlabPlace& slab = layout_->slabs[i];
    std::memcpy(target + slab.page_offset, memory_->at(slab.offset + slot * slab.bytes),
                slab.bytes);
  }
}

void KVCache::Impl::restore(const StateLeaf& leaf, std::size_t slot, const std::byte* page) const {
  for (const std::uint32_t i : leaf.slabs) {
    const SlabPlace& slab = layout_->slabs[i];
    std::memcpy(memory_->at(slab.offset + slot * slab.bytes), page + slab.page_offset, slab.bytes);
  }
}

void KVCache::Impl::clear_states(std::size_t slot) const {
  for (const SlabPlace& slab : layout_->slabs)
    std::memset(memory_->at(slab.offset + slot * slab.bytes), 0, slab.bytes);
}

void KVCache::Impl::run_copies(const StepPlan& plan) {
  const auto is_state = [&](LeafId leaf) { return state_index_[leaf.value()] != none; };
  // The manager speaks of a live state's block; its bytes are the slab of the slot that lives
  // there.
  LeafId looked_up{none};
  const auto slot_of_live = [&](LeafId leaf, BlockId block) -> std::optional<std::size_t> {
    if (looked_up != leaf) {
      live_.clear();
      for (std::size_t slot = 0; slot < slots_.size(); ++slot) {
        if (!slots_[slot].used) continue;
        if (const auto live = manager_->live_block(slots_[slot].request, leaf))
          live_.emplace_back(live->value(), static_cast<std::uint32_t>(slot));
      }
      std::sort(live_.begin(), live_.end());
      looked_up = leaf;
    }
    const auto at = std::lower_bound(live_.begin(), live_.end(), std::pair(block.value(), 0u));
    if (at == live_.end() || at->first != block.value()) return {};
    return at->second;
  };
  for (const Row& row : rows_) slots_[row.slot].restored = 0;

  for (const BlockCopy& copy : plan.copies()) {
    if (!is_state(copy.leaf)) {
      std::memcpy(page(copy.leaf, copy.dst), page(copy.leaf, copy.src), page_bytes(copy.leaf));
      continue;
    }
    const std::uint32_t index = state_index_[copy.leaf.value()];
    const StateLeaf& leaf = state_leaves_[index];
    const auto to = slot_of_live(copy.leaf, copy.dst);
    const auto from = slot_of_live(copy.leaf, copy.src);
    if (to) {
      if (from) {
        for (const std::uint32_t i : leaf.slabs) {
          const SlabPlace& slab = layout_->slabs[i];
          std::memcpy(memory_->at(slab.offset + *to * slab.bytes),
                      memory_->at(slab.offset + *from * slab.bytes), slab.bytes);
        }
      } else {
        restore(leaf, *to, page(copy.leaf, copy.src));
      }
      slots_[*to].restored |= std::uint64_t{1} << index;
    } else if (from) {
      save(leaf, *from, copy.dst);
    } else {
      std::memcpy(page(copy.leaf, copy.dst), page(copy.leaf, copy.src), page_bytes(copy.leaf));
    }
  }
  for (const ZeroFill& fill : plan.zero_fills()) {
    const auto to = is_state(fill.leaf) ? slot_of_live(fill.leaf, fill.block) : std::nullopt;
    if (!to) {
      std::memset(page(fill.leaf, fill.block), 0, page_bytes(fill.leaf));
      continue;
    }
    const std::uint32_t index = state_index_[fill.leaf.value()];
    for (const std::uint32_t i : state_leaves_[index].slabs) {
      const SlabPlace& slab = layout_->slabs[i];
      std::memset(memory_->at(slab.offset + *to * slab.bytes), 0, slab.bytes);
    }
    slots_[*to].restored |= std::uint64_t{1} << index;
  }
  // A checkpoint that nobody shares may have become the live state itself: no copy is listed, and
  // its page holds the state.
  for (const Row& row : rows_) {
    Slot& slot = slots_[row.slot];
    if (!slot.state_moved) continue;
    slot.state_moved = false;
    for (std::uint32_t index = 0; index < state_leaves_.size(); ++index) {
      if ((slot.restored >> index & 1) != 0) continue;
      const StateLeaf& leaf = state_leaves_[index];
      restore(leaf, row.slot, page(leaf.leaf, *manager_->live_block(slot.request, leaf.leaf)));
    }
  }
}

// ---- tables by slot
// --------------------------------------------------------------------------------

void KVCache::Impl::sync_rows(std::size_t slot) {
  for (TableLeaf& table : table_leaves_) {
    const std::span<const BlockId> blocks = manager_->blocks(slots_[slot].request, table.leaf);
    std::int32_t* row =
        memory_->tables[table.leaf.value()].data() + slot * std::size_t{table.columns};
    const auto held = static_cast<std::uint32_t>(blocks.size());
    if (held > 0) std::memcpy(row, blocks.data(), held * sizeof(std::int32_t));
    std::fill(row + held, row + std::max(held, table.filled[slot]), 0);
    table.filled[slot] = held;
  }
}

void KVCache::Impl::clear_rows(std::size_t slot) {
  for (TableLeaf& table : table_leaves_) {
    std::int32_t* row =
        memory_->tables[table.leaf.value()].data() + slot * std::size_t{table.columns};
    std::fill(row, row + table.filled[slot], 0);
    table.filled[slot] = 0;
  }
}

void KVCache::Impl::sync_tables(const StepPlan& plan) {
  for (TableLeaf& table : table_leaves_) {
    if (table.encoder) continue;  // an encoder's pages stay what they were at admission
    std::int32_t* rows = memory_->tables[table.leaf.value()].data();
    const StagedArray& staged = plan.array(table.leaf, table_key);
    const auto* from = reinterpret_cast<const std::int32_t*>(staged.data);
    const auto stride = static_cast<std::uint64_t>(staged.strides[0]);
    const auto same_owner = [&](std::size_t i) {
      return i < previous_.size() && previous_[i] == rows_[i].request;
    };
    // Rows that go on: what the planner says has changed. A range may span rows.
    for (const ByteRange& range : plan.dirty(table.leaf, table_key)) {
      std::uint64_t element = range.begin / sizeof(std::int32_t);
      const std::uint64_t end = range.end / sizeof(std::int32_t);
      while (element < end) {
        const std::uint64_t i = element / stride;
        const std::uint64_t column = element % stride;
        const std::uint64_t stop = std::min(end, (i + 1) * stride);
        if (i < rows_.size() && same_owner(i) && column < table.columns) {
          const std::uint64_t count = std::min(stop - element, table.columns - column);
          std::memcpy(rows + rows_[i].slot * std::size_t{table.columns} + column, from + element,
                      count * sizeof(std::int32_t));
        }
        element = stop;
      }
    }
    for (std::size_t i = 0; i < rows_.size(); ++i) {
      const std::size_t slot = rows_[i].slot;
      const std::uint32_t end = rows_[i].begin + rows_[i].count;
      // Most rows go on in their last page: told without a division.
      const std::uint64_t room = std::uint64_t{table.filled[slot]} * table.tokens_per_page;
      if (end <= room && room - end < table.tokens_per_page && same_owner(i)) continue;
      const std::uint32_t held = ceil_div(end, table.tokens_per_page);
      std::int32_t* row = rows + slot * std::size_t{table.columns};
      // Of a row that goes on, what was behind its end may have lain in the planner's array before.
      const std::uint32_t known = same_owner(i) ? std::min(held, table.filled[slot]) : 0;
      if (known < held)
        std::memcpy(row + known, from + i * stride + known, (held - known) * sizeof(std::int32_t));
      if (held < table.filled[slot]) std::fill(row + held, row + table.filled[slot], 0);
      table.filled[slot] = held;
    }
  }
  previous_.resize(rows_.size(), RequestId{0});
  for (std::size_t i = 0; i < rows_.size(); ++i) previous_[i] = rows_[i].request;
}

// ---- a slot's life
// ---------------------------------------------------------------------------------

std::uint32_t KVCache::Impl::known_encoder(const std::string& digest) {
  const auto at = encoder_of_.find(digest);
  if (at == encoder_of_.end()) return 0;
  encoders_.splice(encoders_.end(), encoders_, at->second);
  return at->second->second;
}

void KVCache::Impl::remember_encoder(const std::string& digest, std::uint32_t tokens) {
  const auto at = encoder_of_.find(digest);
  if (at != encoder_of_.end()) {
    at->second->second = tokens;
    encoders_.splice(encoders_.end(), encoders_, at->second);
    return;
  }
  encoders_.emplace_back(digest, tokens);
  encoder_of_.emplace(digest, std::prev(encoders_.end()));
  if (encoders_.size() > most_encoders_) {
    encoder_of_.erase(encoders_.front().first);
    encoders_.pop_front();
  }
}

std::uint32_t KVCache::Impl::admit(std::int32_t batch_idx, const Tensor& ids,
                                   std::int32_t addressable, const AdmitExtras& extras) {
  require_paged("admit");
  const std::size_t s = slot_of(batch_idx);
  Slot& slot = slots_[s];
  if (slot.used)
    throw RequestError(
        fmt::format("slot {} is in use, with {} tokens; retire or evict_batch it first", s,
                    memory_->seq_lens[s]));
  if (addressable < -1)
    throw InvalidArgument(fmt::format(
        "addressable_len is {}; expected a number of tokens, or -1 for all", addressable));
  read_ids(ids, "prompt_ids", ids_);
  const KVCacheConfig& config = layout_->config;
  if (ids_.empty()) throw RequestError("prompt_ids is empty; expected at least one token");
  if (ids_.size() > config.max_len)
    throw RequestError(fmt::format("slot {}: a prompt of {} tokens passes max_len {}", s,
                                   ids_.size(), config.max_len));
  AdmitOptions options;
  options.salt = extras.salt;
  options.adapter = extras.adapter;
  if (addressable >= 0) options.addressable = static_cast<std::uint32_t>(addressable);
  const std::uint64_t serial = serials_ + 1;
  std::string digest;
  std::uint32_t reserved = 0;
  const bool cross = !cross_layers_.empty();
  const bool text_only = cross && extras.encoder_len == 0u;
  if (cross) {
    reserved = extras.encoder_len.value_or(config.max_encoder_len);
    if (reserved > config.max_encoder_len)
      throw RequestError(
          fmt::format("slot {}: an encoder input of {} tokens passes "
                      "max_encoder_len {}",
                      s, reserved, config.max_encoder_len));
    digest = text_only               ? std::string(no_encoder)
             : extras.encoder_digest ? "d" + *extras.encoder_digest
                                     : fmt::format("\1{}", serial);
    options.encoder = EncoderInput{.digest = digest, .tokens = std::max(reserved, 1u), .at = 0};
  } else if (extras.encoder_digest || extras.encoder_len) {
    throw InvalidArgument("no layer of this cache has cross attention; expected no encoder input");
  }

  settle();
  const RequestId request{serial};
  const Admission admission = manager_->admit(request, ids_, options);
  serials_ = serial;
  slot.used = true;
  slot.request = request;
  slot.prompt = ids_;
  slot.prompt_len = static_cast<std::uint32_t>(ids_.size());
  slot.state_moved = !state_leaves_.empty();
  slot.digest = digest;
  slot.shared_encoder = cross && (text_only || extras.encoder_digest);
  slot.encoder_reserved = reserved;
  slot.encoder_cached = false;
  slot.filled.assign(cross_layers_.size(), false);
  memory_->encoder_lens[s] = 0;
  if (text_only) {
    slot.filled.assign(cross_layers_.size(), true);
    manager_->encoder_filled(request);
  } else if (admission.encoder_cached) {
    // Cached, and how many of the reserved tokens there are is known; else it is filled again.
    if (const std::uint32_t tokens = known_encoder(digest); tokens > 0) {
      slot.encoder_cached = true;
      slot.filled.assign(cross_layers_.size(), true);
      memory_->encoder_lens[s] = static_cast<std::int32_t>(tokens);
    }
  }
  memory_->seq_lens[s] = static_cast<std::int32_t>(admission.hit_tokens);
  sync_rows(s);
  return admission.hit_tokens;
}

void KVCache::Impl::free_slot(std::size_t s) {
  Slot& slot = slots_[s];
  slot.used = false;
  slot.prompt.clear();
  slot.state_moved = false;
  slot.filled.assign(cross_layers_.size(), false);
  slot.encoder_cached = false;
  memory_->seq_lens[s] = 0;
  memory_->encoder_lens[s] = 0;
  clear_rows(s);
}

void KVCache::Impl::retire(std::int32_t batch_idx, const Tensor& ids, std::int32_t addressable) {
  require_paged("retire");
  const std::size_t s = running(batch_idx);
  Slot& slot = slots_[s];
  if (addressable < -1)
    throw InvalidArgument(fmt::format(
        "addressable_len is {}; expected a number of tokens, or -1 for all", addressable));
  read_ids(ids, "full_token_ids", ids_);
  const std::uint32_t max_len = layout_->config.max_len;
  const std::size_t common = std::min(ids_.size(), slot.prompt.size());
  const auto differ = std::mismatch(
      ids_.begin(), ids_.begin() + static_cast<std::ptrdiff_t>(common), slot.prompt.begin());
  if (differ.second != slot.prompt.begin() + static_cast<std::ptrdiff_t>(common))
    throw RequestError(
        fmt::format("slot {}: full_token_ids has {} at position {}, and its prompt {}", s,
                    *differ.first, differ.first - ids_.begin(), *differ.second));
  if (ids_.size() > std::size_t{max_len} + 1)
    throw RequestError(fmt::format("slot {}: {} ids pass max_len {}", s, ids_.size(), max_len));

  settle();
  const std::uint32_t computed = manager_->computed(slot.request);
  const std::uint32_t known = manager_->length(slot.request);
  const auto count = static_cast<std::uint32_t>(ids_.size());
  // One more than was computed: an entry may be computed from the token behind it.
  const std::uint32_t wanted = std::min({count, computed + 1, max_len});
  if (wanted > known) {
    manager_->append(slot.request, std::span(ids_).subspan(known, wanted - known));
    slot.prompt.assign(ids_.begin(), ids_.begin() + wanted);
  }
  std::optional<std::uint32_t> limit;
  if (addressable >= 0) limit = static_cast<std::uint32_t>(addressable);
  if (count < computed) limit = std::min(limit.value_or(count), count);
  const bool keep =
      layout_->config.enable_prefix_caching && (cross_layers_.empty() || slot.shared_encoder);
  // At a boundary the live state's block becomes the checkpoint: it must hold the state.
  if (keep && !slot.state_moved)
    for (const StateLeaf& leaf : state_leaves_)
      if (computed > 0 && computed % leaf.tokens_per_page == 0)
        if (const auto live = manager_->live_block(slot.request, leaf.leaf)) save(leaf, s, *live);
  manager_->release(slot.request, keep ? Prefix::keep : Prefix::drop, limit);
  free_slot(s);
}

void KVCache::Impl::evict(std::int32_t batch_idx) {
  const std::size_t s = slot_of(batch_idx);
  if (layout_->paged()) {
    if (!slots_[s].used) return;
    settle();
    manager_->release(slots_[s].request, Prefix::drop);
  }
  free_slot(s);
}

// ---- steps
// -----------------------------------------------------------------------------------------

KVCache::Impl::Row* KVCache::Impl::row_of(std::size_t slot) {
  if (!step_) return nullptr;
  for (Row& row : rows_)
    if (row.slot == slot && slots_[slot].used && slots_[slot].request == row.request) return &row;
  return nullptr;
}

void KVCache::Impl::settle() {
  if (!step_) return;
  kept_.clear();
  for (const Row& row : rows_)
    if (row.kept < row.count) kept_.push_back({row.request, row.kept});
  planner_->settle(*step_, kept_);
  step_.reset();
  reserved_ = false;
  // A live state may have been filed as the checkpoint of the boundary that it stands at: its block
  // must hold it from now on.
  if (state_leaves_.empty()) return;
  const BlockPool& pool = std::as_const(*manager_).pool();
  for (const Row& row : rows_) {
    const std::uint32_t length = row.begin + row.kept;
    for (const StateLeaf& leaf : state_leaves_) {
      if (length % leaf.tokens_per_page != 0) continue;
      const auto live = manager_->live_block(row.request, leaf.leaf);
      if (live && *live != null_block && pool.committed(leaf.leaf, *live))
        save(leaf, row.slot, *live);
    }
  }
}

StepIndices::Data& KVCache::Impl::next_data() {
  auto& data = data_[steps_ % data_.size()];
  if (data.use_count() > 1 && data != current_) {
    // Somebody still holds the step before last: it is told, and left its own arrays of lengths.
    data->make_stale();
    auto next = std::make_shared<StepIndices::Data>();
    next->layout = layout_;
    data = std::move(next);
  }
  data->cu_k.clear();
  data->positions.clear();
  data->mappings.clear();
  data->csr.clear();
  return *data;
}

const std::shared_ptr<StepIndices::Data>& KVCache::Impl::begin(
    std::span<const std::int32_t> cu_seqlens, std::span<const std::int32_t> past_or_slots,
    bool check_past) {
  // reserve gives no past lengths: then the second list is not looked at, and ids_ holds the slots.
  const std::span<const std::int32_t> slots = ids_;
  const std::span<const std::int32_t> past = past_or_slots;
  const KVCacheConfig& config = layout_->config;
  const std::size_t n = slots.size();
  if (n == 0) throw PlanShapeError("a step without sequences; expected at least one");
  if (n > config.max_seqs)
    throw PlanShapeError(
        fmt::format("a step of {} sequences; the cache has {} slots", n, config.max_seqs));
  if (cu_seqlens.size() != n + 1 || (check_past && past.size() != n))
    throw PlanShapeError(
        fmt::format("cu_seqlens_q has {} entries and past_len {} for {} slots; expected {} and {}",
                    cu_seqlens.size(), past.size(), n, n + 1, n));
  if (cu_seqlens[0] != 0)
    throw PlanShapeError(fmt::format("cu_seqlens_q begins with {}; expected 0", cu_seqlens[0]));
  ++mark_;
  for (std::size_t i = 0; i < n; ++i) {
    const std::size_t s = layout_->paged() ? running(slots[i]) : slot_of(slots[i]);
    if (marks_[s] == mark_)
      throw RequestError(fmt::format("row {}: slot {} is in the step twice", i, s));
    marks_[s] = mark_;
    if (cu_seqlens[i + 1] <= cu_seqlens[i])
      throw PlanShapeError(
          fmt::format("row {}: cu_seqlens_q goes from {} to {}; expected at least one new token", i,
                      cu_seqlens[i], cu_seqlens[i + 1]));
    if (static_cast<std::uint32_t>(cu_seqlens[i + 1]) > config.max_step_tokens)
      throw PlanShapeError(fmt::format(
          "rows 0 to {} have {} tokens; expected at most max_step_tokens {} in one step", i,
          cu_seqlens[i + 1], config.max_step_tokens));
    const std::int64_t held = memory_->seq_lens[s];
    if (check_past && past[i] != held)
      throw RequestError(fmt::format(
          "row {}: past_len is {}, and slot {} holds {} tokens; update_position changes that", i,
          past[i], s, held));
    const std::int64_t end = held + cu_seqlens[i + 1] - cu_seqlens[i];
    if (end > config.max_len)
      throw RequestError(fmt::format("row {}: slot {} at {} tokens, {} more pass max_len {}", i, s,
                                     held, cu_seqlens[i + 1] - cu_seqlens[i], config.max_len));
    if (!cross_layers_.empty() && layout_->paged() &&
        end > static_cast<std::int64_t>(slots_[s].prompt_len) &&
        !std::ranges::all_of(slots_[s].filled, [](bool filled) { return filled; }))
      throw RequestError(fmt::format(
          "row {}: slot {}: not every layer of cross attention is filled; fill them first", i, s));
  }

  const StepPlan* plan = nullptr;
  if (layout_->paged()) {
    settle();
    batch_.clear();
    for (std::size_t i = 0; i < n; ++i)
      batch_.push_back({slots_[static_cast<std::size_t>(slots[i])].request,
                        static_cast<std::uint32_t>(cu_seqlens[i + 1] - cu_seqlens[i])});
    plan = &planner_->plan(batch_);
    if (!plan->refused().empty()) {
      const Refusal& first = plan->refused().front();
      std::string why = fmt::format(
          "{} of {} sequences of the step do not fit, and so none was "
          "served; {}",
          plan->refused().size(), n, first.why);
      planner_->withdraw(plan->step());
      previous_.clear();  // the planner's arrays went on, the tables by slot did not
      (void)next_data();
      ++steps_;
      throw PoolExhausted(why);
    }
  }
  rows_.clear();
  for (std::size_t i = 0; i < n; ++i) {
    const auto s = static_cast<std::size_t>(slots[i]);
    const auto count = static_cast<std::uint32_t>(cu_seqlens[i + 1] - cu_seqlens[i]);
    rows_.push_back(
        {s, slots_[s].request, static_cast<std::uint32_t>(memory_->seq_lens[s]), count, count});
  }
  if (plan != nullptr) {
    step_ = plan->step();
    run_copies(*plan);
    sync_tables(*plan);
  } else if (!layout_->slabs.empty()) {
    for (const Row& row : rows_)
      if (row.begin == 0) clear_states(row.slot);
  }

  current_.reset();
  StepIndices::Data& data = next_data();
  if (plan != nullptr) data.plan = *plan;
  data.tokens = static_cast<std::uint32_t>(cu_seqlens[n]);
  data.max_q = data.max_k = 0;
  data.slots.assign(slots.begin(), slots.end());
  data.cu_q.assign(cu_seqlens.begin(), cu_seqlens.end());
  data.past.resize(n);
  data.seq_lens.resize(n);
  data.encoder_lens.assign(n, 0);
  for (std::size_t i = 0; i < n; ++i) {
    const Row& row = rows_[i];
    const std::uint32_t end = row.begin + row.count;
    data.max_q = std::max(data.max_q, row.count);
    data.max_k = std::max(data.max_k, end);
    data.past[i] = static_cast<std::int32_t>(row.begin);
    data.seq_lens[i] = static_cast<std::int32_t>(end);
    if (!cross_layers_.empty()) data.encoder_lens[i] = memory_->encoder_lens[row.slot];
    memory_->seq_lens[row.slot] = static_cast<std::int32_t>(end);
  }
  current_ = data_[steps_++ % data_.size()];
  return current_;
}

void KVCache::Impl::update_position(std::int32_t batch_idx, std::int32_t position) {
  const std::size_t s = layout_->paged() ? running(batch_idx) : slot_of(batch_idx);
  const std::uint32_t max_len = layout_->config.max_len;
  if (position < 0 || static_cast<std::uint32_t>(position) > max_len)
    throw RequestError(
        fmt::format("slot {}: new_pos is {}; expected 0 to max_len {}", s, position, max_len));
  if (!layout_->paged()) {
    memory_->seq_lens[s] = position;
    return;
  }
  const auto length = static_cast<std::uint32_t>(position);
  Slot& slot = slots_[s];
  const auto shorten_prompt = [&] {
    if (slot.prompt.size() > manager_->length(slot.request))
      slot.prompt.resize(manager_->length(slot.request));
  };
  Row* row = row_of(s);
  const std::uint32_t most =
      row != nullptr ? row->begin + row->count : static_cast<std::uint32_t>(memory_->seq_lens[s]);
  if (length > most)
    throw RequestError(
        fmt::format("slot {}: new_pos is {}, and {} tokens were reserved; expected 0 to {}", s,
                    length, most, most));
  if (row != nullptr && length >= row->begin) {
    // Of the step under way: what stands of it is told when it settles. States cannot go back, so
    // with them it settles now, and refuses.
    const std::uint32_t before = std::exchange(row->kept, length - row->begin);
    if (!state_leaves_.empty() && row->kept < row->count) {
      try {
        settle();
      } catch (...) {
        row->kept = before;
        throw;
      }
      shorten_prompt();
    }
  } else {
    settle();
    if (length < manager_->computed(slot.request)) {
      manager_->rewind(slot.request, length);
      slot.state_moved = !state_leaves_.empty();
      shorten_prompt();
      sync_rows(s);
    }
  }
  memory_->seq_lens[s] = position;
}

void KVCache::Impl::abandon_step() {
  if (!step_) return;
  const auto lengths = planner_->abandon(*step_);
  step_.reset();
  reserved_ = false;
  previous_.clear();
  for (const auto& [request, length] : lengths) {
    const auto at = std::ranges::find_if(
        slots_, [&](const Slot& slot) { return slot.used && slot.request == request; });
    if (at == slots_.end()) continue;
    const auto s = static_cast<std::size_t>(at - slots_.begin());
    at->state_moved = !state_leaves_.empty();
    memory_->seq_lens[s] = static_cast<std::int32_t>(length);
    sync_rows(s);
  }
}

// ---- cross attention
// -------------------------------------------------------------------------------

namespace {

/// Entries [first, first + count) of a [tokens, heads, dim] tensor, packed at `target`.
void pack(const Tensor& from, std::int64_t first, std::int64_t count, std::byte* target) {
  const std::int64_t heads = from.shape()[1];
  const std::int64_t dim = from.shape()[2];
  const std::int64_t element = size_of(from.dtype());
  const auto strides = from.strides();
  const std::byte* source = from.data();
  const bool head_packed = dim <= 1 || strides[2] == 1;
  const bool row_packed = head_packed && (heads <= 1 || strides[1] == dim);
  if (row_packed && (count <= 1 || strides[0] == heads * dim)) {
    std::memcpy(target, source + first * strides[0] * element,
                static_cast<std::size_t>(count * heads * dim * element));
    return;
  }
  for (std::int64_t t = first; t < first + count; ++t) {
    for (std::int64_t h = 0; h < heads; ++h) {
      const std::byte* row = source + (t * strides[0] + h * strides[1]) * element;
      if (head_packed) {
        std::memcpy(target, row, static_cast<std::size_t>(dim * element));
        target += dim * element;
        continue;
      }
      for (std::int64_t d = 0; d < dim; ++d, target += element)
        std::memcpy(target, row + d * strides[2] * element, static_cast<std::size_t>(element));
    }
  }
}

}  // namespace

void KVCache::Impl::fill(std::int32_t layer, std::int32_t batch_idx, const Tensor& k,
                         const Tensor& v) {
  const EntryPlace* place = layout_->find(layer, KVPart::cross);
  const auto cross =
      std::ranges::find(cross_layers_, static_cast<std::uint32_t>(std::max(layer, 0)));
  if (place == nullptr || cross == cross_layers_.end())
    throw InvalidArgument(fmt::format("layer {} has no cross attention of its own: it is '{}'",
                                      layer,
                                      to_string(layout_->specs[static_cast<std::size_t>(layer)])));
  const std::size_t s = layout_->paged() ? running(batch_idx) : slot_of(batch_idx);
  Slot& slot = slots_[s];
  const DType dtype = layout_->config.dtype;
  const auto check = [&](const Tensor& given, const char* name) {
    if (!given.defined() || given.rank() != 3 || given.shape()[1] != place->kv_heads ||
        given.shape()[2] != place->key_dim || given.dtype() != dtype ||
        given.device().kind != Device::Kind::cpu)
      throw PlanShapeError(fmt::format("layer {}: {} is {}; expected {} [t_enc, {}, {}] on cpu",
                                       layer, name, given.to_string(), kvleaf::name_of(dtype),
                                       place->kv_heads, place->key_dim));
  };
  check(k, "k");
  check(v, "v");
  const std::int64_t tokens = k.shape()[0];
  if (v.shape()[0] != tokens)
    throw PlanShapeError(
        fmt::format("layer {}: k has {} encoder tokens and v {}", layer, tokens, v.shape()[0]));
  const std::uint32_t most =
      layout_->paged() ? slot.encoder_reserved : layout_->config.max_encoder_len;
  if (tokens < 1 || tokens > most)
    throw RequestError(fmt::format(
        "slot {}: {} encoder tokens; expected 1 to {}, what was reserved", s, tokens, most));
  (void)k.data();  // a stale one is refused before anything is written
  (void)v.data();
  const auto index = static_cast<std::size_t>(cross - cross_layers_.begin());
  bool others = false;
  for (std::size_t i = 0; i < slot.filled.size(); ++i)
    others = others || (i != index && slot.filled[i]);
  if (others && memory_->encoder_lens[s] != tokens)
    throw RequestError(
        fmt::format("slot {}: layer {} is filled with {} encoder tokens, and other layers with {}",
                    s, layer, tokens, memory_->encoder_lens[s]));
  const auto head_bytes = std::uint64_t{layout_->element_bytes} * place->kv_heads * place->key_dim;
  if (!layout_->paged()) {
    const std::uint64_t at = s * place->entries * head_bytes;
    pack(k, 0, tokens, memory_->at(place->key_offset) + at);
    pack(v, 0, tokens, memory_->at(place->value_offset) + at);
  } else if (!slot.encoder_cached) {  // else its pages are there, and others read them
    const LeafId leaf{place->leaf};
    const std::span<const BlockId> blocks = manager_->blocks(slot.request, leaf);
    for (std::int64_t first = 0, b = 0; first < tokens; first += place->entries, ++b) {
      std::byte* target = page(leaf, blocks[static_cast<std::size_t>(b)]);
      const std::int64_t count = std::min<std::int64_t>(place->entries, tokens - first);
      pack(k, first, count, target + place->key_offset);
      pack(v, first, count, target + place->value_offset);
    }
  }
  slot.filled[index] = true;
  memory_->encoder_lens[s] = static_cast<std::int32_t>(tokens);
  if (layout_->paged() && std::ranges::all_of(slot.filled, [](bool filled) { return filled; })) {
    manager_->encoder_filled(slot.request);
    if (slot.shared_encoder) remember_encoder(slot.digest, static_cast<std::uint32_t>(tokens));
  }
}

// ---- the public face
// -------------------------------------------------------------------------------

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
  read_ids(slot_ids, "slot_ids", impl_->ids_);
  if (n_new_per_seq.size() != impl_->ids_.size())
    throw PlanShapeError(
        fmt::format("{} slot_ids and {} entries of n_new_per_seq; expected as many",
                    impl_->ids_.size(), n_new_per_seq.size()));
  std::vector<std::int32_t>& counts = impl_->counts_;
  counts.assign(1, 0);
  std::uint64_t sum = 0;
  for (const std::uint32_t count : n_new_per_seq) {
    sum += count;
    if (sum > static_cast<std::uint64_t>(std::numeric_limits<std::int32_t>::max()))
      throw PlanShapeError(fmt::format("{} tokens in one step; expected at most max_step_tokens {}",
                                       sum, impl_->layout_->config.max_step_tokens));
    counts.push_back(static_cast<std::int32_t>(sum));
  }
  const auto& data = impl_->begin(counts, {}, false);
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
  impl_->ids_.assign(slot_ids.begin(), slot_ids.end());
  step.data_ = impl_->begin(cu_seqlens_q, past_len, true);
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
  if (!impl_->layout_->paged()) {
    (void)impl_->slot_of(batch_idx);
    return {};
  }
  return impl_->manager_->next_stop(impl_->at(impl_->running(batch_idx)).request);
}

bool KVCache::encoder_filled(std::int32_t batch_idx) const {
  const std::size_t s =
      impl_->layout_->paged() ? impl_->running(batch_idx) : impl_->slot_of(batch_idx);
  return std::ranges::all_of(impl_->at(s).filled, [](bool filled) { return filled; });
}

// ---- tensors
// ---------------------------------------------------------------------------------------

namespace {

/// A view of one layer's entries: `halves` 1 (keys, or values at `offset`) or 2 (both).
Tensor entries_view(const CacheLayout& layout, const std::shared_ptr<CacheMemory>& memory,
                    const EntryPlace& place, std::uint64_t offset, std::uint32_t dim, bool both) {
  const std::int64_t heads = place.kv_heads;
  const std::int64_t entries = place.entries;
  const std::int64_t row = heads * dim;
  std::byte* base = nullptr;
  std::int64_t outer = 0;
  std::int64_t outer_stride = 0;
  if (layout.paged()) {
    const LeafGeometry& geometry = layout.geometry->leaf(LeafId{place.leaf});
    base = memory->arena_base + geometry.base_offset + offset;
    outer = static_cast<std::int64_t>(geometry.blocks) + 1;
    outer_stride = static_cast<std::int64_t>(geometry.page_stride / layout.element_bytes);
  } else {
    base = memory->at(offset);
    outer = layout.config.max_seqs;
    outer_stride = entries * row;
  }
  if (!both) {
    const std::int64_t shape[] = {outer, entries, heads, dim};
    const std::int64_t strides[] = {outer_stride, row, dim, 1};
    return Tensor(base, shape, strides, layout.config.dtype, {}, memory);
  }
  const auto half =
      static_cast<std::int64_t>((place.value_offset - place.key_offset) / layout.element_bytes);
  const std::int64_t shape[] = {outer, 2, entries, heads, dim};
  const std::int64_t strides[] = {outer_stride, half, row, dim, 1};
  return Tensor(base, shape, strides, layout.config.dtype, {}, memory);
}

}  // namespace

Tensor KVCache::keys(std::int32_t layer, KVPart part) const {
  const EntryPlace* place = impl_->layout_->find(layer, part);
  if (place == nullptr) return {};
  return entries_view(*impl_->layout_, impl_->memory_, *place, place->key_offset, place->key_dim,
                      false);
}

Tensor KVCache::values(std::int32_t layer, KVPart part) const {
  const EntryPlace* place = impl_->layout_->find(layer, part);
  if (place == nullptr || place->value_dim == 0) return {};
  return entries_view(*impl_->layout_, impl_->memory_, *place, place->value_offset,
                      place->value_dim, false);
}

Tensor KVCache::keys_values(std::int32_t layer, KVPart part) const {
  const EntryPlace* place = impl_->layout_->find(layer, part);
  if (place == nullptr || place->value_dim != place->key_dim) return {};
  return entries_view(*impl_->layout_, impl_->memory_, *place, place->key_offset, place->key_dim,
                      true);
}

namespace {

Tensor slab_view(const CacheLayout& layout, const std::shared_ptr<CacheMemory>& memory,
                 const SlabPlace& place) {
  Extents shape;
  shape.push_back(layout.config.max_seqs);
  for (const std::uint32_t extent : place.slab.shape) shape.push_back(extent);
  return Tensor(memory->at(place.offset), std::span(shape.data(), shape.size()), {},
                place.slab.dtype, {}, memory);
}

}  // namespace

Tensor KVCache::conv_state(std::int32_t layer, std::int32_t index) const {
  const CacheLayout& layout = *impl_->layout_;
  (void)layout.find(layer, KVPart::own);  // throws past the last layer
  std::int32_t windows = 0;
  for (const std::uint32_t i : layout.layers[static_cast<std::size_t>(layer)].slabs) {
    if (!layout.slabs[i].conv) continue;
    if (windows++ == index) return slab_view(layout, impl_->memory_, layout.slabs[i]);
  }
  if (windows > 0 || index < 0)
    throw InvalidArgument(fmt::format("layer {} has {} convolution windows; there is no index {}",
                                      layer, windows, index));
  return {};
}

Tensor KVCache::recurrent_state(std::int32_t layer) const {
  const CacheLayout& layout = *impl_->layout_;
  (void)layout.find(layer, KVPart::own);
  for (const std::uint32_t i : layout.layers[static_cast<std::size_t>(layer)].slabs)
    if (!layout.slabs[i].conv) return slab_view(layout, impl_->memory_, layout.slabs[i]);
  return {};
}

Tensor KVCache::paged_block_table(std::optional<std::int32_t> layer, KVPart part) const {
  const CacheLayout& layout = *impl_->layout_;
  const EntryPlace* place = nullptr;
  if (layer) {
    place = layout.find(*layer, part);
  } else {
    for (const LayerPlaces& places : layout.layers) {
      for (const EntryPlace& entries : places.entries) {
        if (entries.part != part) continue;
        if (place != nullptr && place->leaf != entries.leaf && layout.paged())
          throw InvalidArgument(
              fmt::format("layers of this cache have several tables; name a layer of 0 to {}",
                          layout.layers.size() - 1));
        place = &entries;
      }
    }
  }
  if (place == nullptr || !layout.paged()) return {};
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
