// A slot's life: admitted to, corrected, retired or evicted.
#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "kvleaf/cache/index_tensors.h"
#include "kvleaf/cache/kv_cache_impl.h"

namespace kvleaf {
namespace {

/// What requests without an encoder's input share, and what nobody else can be told by.
constexpr std::string_view no_encoder = "\1none";

}  // namespace

void KVCache::Impl::require_paged(const char* what) const {
  if (!layout_->paged())
    throw RequestError(fmt::format("{} is for paged caches; this one is slotted", what));
}

std::size_t KVCache::Impl::slot_of(std::int64_t slot) const {
  if (slot < 0 || slot >= static_cast<std::int64_t>(slots_.size()))
    throw InvalidArgument(
        fmt::format("slot {}; the cache has slots 0 to {}", slot, slots_.size() - 1));
  return static_cast<std::size_t>(slot);
}

std::size_t KVCache::Impl::running(std::int64_t slot) const {
  const std::size_t s = slot_of(slot);
  if (layout_->paged() && !slots_[s].used)
    throw RequestError(fmt::format("slot {} is free; admit a prompt to it first", slot));
  return s;
}

std::uint32_t KVCache::Impl::most_tokens(const Sequence& sequence) const noexcept {
  // What is generated attends to the encoder's input: all of it must be there.
  return sequence.all_filled() ? layout_->config.max_len
                               : std::min(sequence.prompt_len, layout_->config.max_len);
}

std::uint32_t KVCache::Impl::admit(std::int32_t batch_idx, const Tensor& ids,
                                   std::int32_t addressable, const AdmitExtras& extras) {
  require_paged("admit");
  const std::size_t s = slot_of(batch_idx);
  Slot& slot = slots_[s];
  Sequence& sequence = sequences_[s];
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
  sequence.prompt = ids_;
  sequence.prompt_len = static_cast<std::uint32_t>(ids_.size());
  sequence.digest = digest;
  sequence.shared_encoder = cross && (text_only || extras.encoder_digest);
  sequence.encoder_reserved = reserved;
  sequence.encoder_cached = false;
  sequence.filled.assign(cross_layers_.size(), false);
  memory_->encoder_lens[s] = 0;
  if (text_only) {
    sequence.filled.assign(cross_layers_.size(), true);
    manager_->encoder_filled(request);
  } else if (admission.encoder_cached) {
    // Cached, and how many of the reserved tokens there are is known; else it is filled again.
    if (const std::uint32_t tokens = encoders_->find(digest); tokens > 0) {
      sequence.encoder_cached = true;
      sequence.filled.assign(cross_layers_.size(), true);
      memory_->encoder_lens[s] = static_cast<std::int32_t>(tokens);
    }
  }
  slot.most = most_tokens(sequence);
  memory_->seq_lens[s] = static_cast<std::int32_t>(admission.hit_tokens);
  states_->moved(s);
  tables_->rewrite(s, request);
  return admission.hit_tokens;
}

void KVCache::Impl::free_slot(std::size_t s) {
  Slot& slot = slots_[s];
  Sequence& sequence = sequences_[s];
  slot.used = false;
  if (layout_->paged()) slot.most = 0;
  sequence.prompt.clear();
  sequence.filled.assign(cross_layers_.size(), false);
  sequence.encoder_cached = false;
  memory_->seq_lens[s] = 0;
  memory_->encoder_lens[s] = 0;
  if (tables_ != nullptr) tables_->clear(s);
}

void KVCache::Impl::retire(std::int32_t batch_idx, const Tensor& ids, std::int32_t addressable) {
  require_paged("retire");
  const std::size_t s = running(batch_idx);
  const RequestId request = slots_[s].request;
  Sequence& sequence = sequences_[s];
  if (addressable < -1)
    throw InvalidArgument(fmt::format(
        "addressable_len is {}; expected a number of tokens, or -1 for all", addressable));
  read_ids(ids, "full_token_ids", ids_);
  const std::uint32_t max_len = layout_->config.max_len;
  const std::size_t common = std::min(ids_.size(), sequence.prompt.size());
  const auto differ = std::mismatch(
      ids_.begin(), ids_.begin() + static_cast<std::ptrdiff_t>(common), sequence.prompt.begin());
  if (differ.second != sequence.prompt.begin() + static_cast<std::ptrdiff_t>(common))
    throw RequestError(
        fmt::format("slot {}: full_token_ids has {} at position {}, and its prompt {}", s,
                    *differ.first, differ.first - ids_.begin(), *differ.second));
  if (ids_.size() > std::size_t{max_len} + 1)
    throw RequestError(fmt::format("slot {}: {} ids pass max_len {}", s, ids_.size(), max_len));

  settle();
  const std::uint32_t computed = manager_->computed(request);
  const std::uint32_t known = manager_->length(request);
  const auto count = static_cast<std::uint32_t>(ids_.size());
  // One more than was computed: an entry may be computed from the token behind it.
  const std::uint32_t wanted = std::min({count, computed + 1, max_len});
  if (wanted > known) {
    manager_->append(request, std::span(ids_).subspan(known, wanted - known));
    sequence.prompt.assign(ids_.begin(), ids_.begin() + wanted);
  }
  std::optional<std::uint32_t> limit;
  if (addressable >= 0) limit = static_cast<std::uint32_t>(addressable);
  if (count < computed) limit = std::min(limit.value_or(count), count);
  const bool keep =
      layout_->config.enable_prefix_caching && (cross_layers_.empty() || sequence.shared_encoder);
  if (keep) states_->ending(s, computed);
  manager_->release(request, keep ? Prefix::keep : Prefix::drop, limit);
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

std::optional<std::uint32_t> KVCache::Impl::next_stop(std::int32_t batch_idx) const {
  const std::size_t s = running(batch_idx);
  if (!layout_->paged()) return {};
  return manager_->next_stop(slots_[s].request);
}

void KVCache::Impl::update_position(std::int32_t batch_idx, std::int32_t position) {
  const std::size_t s = running(batch_idx);
  const std::uint32_t max_len = layout_->config.max_len;
  if (position < 0 || static_cast<std::uint32_t>(position) > max_len)
    throw RequestError(
        fmt::format("slot {}: new_pos is {}; expected 0 to max_len {}", s, position, max_len));
  if (!layout_->paged()) {
    memory_->seq_lens[s] = position;
    return;
  }
  const auto length = static_cast<std::uint32_t>(position);
  const RequestId request = slots_[s].request;
  const auto shorten_prompt = [&] {
    std::vector<Token>& prompt = sequences_[s].prompt;
    if (prompt.size() > manager_->length(request)) prompt.resize(manager_->length(request));
  };
  const std::optional<std::size_t> row = row_of(s);
  const auto reserved =
      static_cast<std::uint32_t>(row ? current_->seq_lens[*row] : memory_->seq_lens[s]);
  if (length > reserved)
    throw RequestError(
        fmt::format("slot {}: new_pos is {}, and {} tokens were reserved; expected 0 to {}", s,
                    length, reserved, reserved));
  const std::uint32_t begin = row ? static_cast<std::uint32_t>(current_->past[*row]) : 0;
  if (row && length >= begin) {
    // Of the step under way: what stands of it is told when it settles. States cannot go back, so
    // with them it settles now, and refuses.
    std::erase_if(rejecting_, [&](const Kept& kept) { return kept.request == request; });
    if (length < reserved) {
      rejecting_.push_back({request, length - begin});
      tables_->shorten(s);
      if (!states_->empty()) {
        try {
          settle();
        } catch (...) {
          rejecting_.pop_back();
          throw;
        }
        shorten_prompt();
      }
    }
  } else {
    settle();
    if (length < manager_->computed(request)) {
      manager_->rewind(request, length);
      states_->moved(s);
      tables_->rewrite(s, request);
      shorten_prompt();
    }
  }
  memory_->seq_lens[s] = position;
}

}  // namespace kvleaf
