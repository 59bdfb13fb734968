// StepIndices: what the forward of one step reads, as tensors on the host. KVCache makes one with
// each step.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include "kvleaf/cache/kv_part.h"
#include "kvleaf/cache/tensor.h"

namespace kvleaf {

/// The index tensors of one step, on the host: views on the cache's memory, for a batch in the
/// order given. Valid until the step after next was prepared (one that did not fit counts); then
/// its tensors are stale.
class StepIndices {
 public:
  std::uint32_t batch() const noexcept;       // sequences
  std::uint32_t num_tokens() const noexcept;  // new ones, of all sequences
  std::uint32_t max_seqlen_q() const noexcept;
  std::uint32_t max_seqlen_k() const noexcept;

  Tensor slot_ids() const;      // [batch] int32
  Tensor cu_seqlens_q() const;  // [batch + 1] int32
  Tensor cu_seqlens_k() const;  // [batch + 1] int32, of seq_lens
  Tensor past_lens() const;     // [batch] int32: tokens before this step
  Tensor seq_lens() const;      // [batch] int32: with it
  Tensor encoder_lens() const;  // [batch] int32: encoder tokens; zeros without cross attention
  Tensor positions() const;     // [num_tokens] int64: of each new token in its sequence

  /// [num_tokens] int64: where a layer's entry of each new token goes. Paged: page ·
  /// entries per page + entry in the page; slotted: slot · entries per slot + entry. `layer`: as in
  /// block_table. Undefined for a layer whose entries are not written token by token.
  Tensor slot_mapping(std::optional<std::uint32_t> layer = {}, KVPart part = KVPart::own) const;
  /// [batch, columns] int32: the pages of each sequence; 0 where none is reached. `layer`: may be
  /// left out where all layers share one table. Undefined in a slotted cache.
  /// Throws InvalidArgument for a layer that there is not, or where it may not be left out.
  Tensor block_table(std::optional<std::uint32_t> layer = {}, KVPart part = KVPart::own) const;
  /// The same as CSR, as FlashInfer plans it: pages of sequence i are indices[indptr[i] …
  /// indptr[i + 1]). int32.
  struct Csr {
    Tensor indptr;         // [batch + 1]
    Tensor indices;        // [indptr[batch]]
    Tensor last_page_len;  // [batch]: entries of the last page, 1 … entries per page
  };
  Csr csr(std::optional<std::uint32_t> layer = {}, KVPart part = KVPart::own) const;

 private:
  friend class KVCache;
  struct Data;
  std::shared_ptr<Data> data_;
};

}  // namespace kvleaf
