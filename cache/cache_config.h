// KVCacheConfig: the numbers that a KVCache is made of.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "kvleaf/group/request_options.h"
#include "kvleaf/leaf/dtype.h"

namespace kvleaf {

enum class KVCacheMode : std::uint8_t { slotted, paged };
/// "slotted", "paged".
std::string_view name_of(KVCacheMode mode) noexcept;
/// Throws InvalidArgument.
KVCacheMode require_mode(std::string_view name);

struct KVCacheConfig {
  std::uint32_t num_layers = 0;
  std::uint32_t max_seqs = 0;  // slots
  std::uint32_t max_len = 0;   // tokens of one slot
  KVCacheMode mode = KVCacheMode::paged;
  std::uint32_t page_tokens = 16;  // paged: prefixes are reused at multiples of it
  /// Paged: of the pool. None: what lets every slot reach max_len.
  std::optional<std::uint64_t> budget_bytes = {};
  DType dtype = DType::bfloat16;  // of keys, values and latents
  std::string device = "cpu";
  std::uint32_t max_encoder_len = 0;  // encoder tokens of one slot; needed for cross attention
  bool enable_prefix_caching = true;
  /// Most tokens of one step, of all rows together. 0: max_seqs · max_len, at most the larger of
  /// max_len and 32,768.
  std::uint32_t max_step_tokens = 0;
  Retention retention = Retention::tail();
  /// Paged: finds writers to pages that were returned (PoolOptions::guarded). None: in builds of
  /// the library with debug information or sanitizers.
  std::optional<bool> guard_pages = {};
};

}  // namespace kvleaf
