// KVLeafRegion: one addressable region of the cache pool, and the one class to derive from for a
// kind of memory that nobody here thought of. Four declarations make a leaf:
//
//   memory    bytes_per_page, stride_alignment, tokens_per_page
//   reach     the pattern of its group
//   writing   how entries come into being, also of its group; `cacheable` follows
//   inputs    which arrays a forward needs, and how a row's blocks are written into them
//
// The library never asks which subclass it holds. A leaf knows no pool and no request.
// Immutable after construction (but for bind); may be read from any thread.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "kvleaf/leaf/group_id.h"
#include "kvleaf/leaf/ids.h"
#include "kvleaf/leaf/staged.h"

namespace kvleaf {

struct ReserveOptions {
  bool enable_prefix_caching = false;
  std::uint32_t step_tokens = 1;  // most tokens planned and not yet settled
};

/// How a kernel takes a state.
enum class StateKernel : std::uint8_t {
  in_place,  // reads and writes one block: resuming and publishing are batched copies
  in_out,    // reads one row and writes another: resuming and publishing move no bytes
};

/// Rows [begin, end) of the bound input `key`.
struct BoundRows {
  std::string key;
  std::uint64_t begin = 0;
  std::uint64_t end = 0;
  bool operator==(const BoundRows&) const = default;
};

class KVLeafRegion {
 public:
  struct Options {
    std::optional<std::uint64_t> stride_alignment = {};  // none: packed, no padding at all
    std::optional<std::uint32_t> tokens_per_page = {};   // none: the cache's page_tokens
  };

  /// Throws InvalidArgument, naming the leaf, for an empty id or for zero bytes, alignment or
  /// tokens.
  KVLeafRegion(std::string leaf_id, KVCacheGroupId group, std::uint64_t bytes_per_page,
               Options options);
  KVLeafRegion(std::string leaf_id, KVCacheGroupId group, std::uint64_t bytes_per_page)
      : KVLeafRegion(std::move(leaf_id), std::move(group), bytes_per_page, Options{}) {}
  virtual ~KVLeafRegion() = default;
  KVLeafRegion(const KVLeafRegion&) = delete;
  KVLeafRegion& operator=(const KVLeafRegion&) = delete;

  const std::string& leaf_id() const noexcept { return leaf_id_; }
  const KVCacheGroupId& group_id() const noexcept { return group_; }
  std::uint64_t bytes_per_page() const noexcept { return bytes_per_page_; }
  std::optional<std::uint64_t> stride_alignment() const noexcept { return stride_alignment_; }
  std::optional<std::uint32_t> tokens_per_page() const noexcept { return tokens_per_page_; }

  /// Whether blocks are addressed by content: true unless the writing is exclusive.
  virtual bool cacheable() const;

  /// Entries that a page stores; fewer than its tokens for compressed attention. A slot mapping
  /// entry is block · slots_per_page + slot in the page. `tokens_per_page`: the resolved one.
  virtual std::uint32_t slots_per_page(std::uint32_t tokens_per_page) const;

  /// Most blocks one request holds while it fills `num_blocks` slots; never one too few.
  ///   append      pattern.most_slots
  ///   in_place    1 + rollback, and one more (a checkpoint) with prefix caching
  ///   write_once  num_blocks, the encoder's
  ///   exclusive   1
  virtual std::uint32_t blocks_to_reserve(std::uint32_t num_blocks, std::uint32_t tokens_per_page,
                                          ReserveOptions options) const;

  /// States only. Blocks of live state that one request keeps beside the first, for draft tokens.
  virtual std::uint32_t rollback() const { return 0; }
  virtual StateKernel state_kernel() const { return StateKernel::in_place; }
  /// States only. Whether the kernel emits its state at page boundaries inside a step, into
  /// RowDelta::boundary_blocks, so that chunks need not be split there. The planner then passes the
  /// most boundary blocks of one row as num_blocks.
  virtual bool emits_in_chunk() const { return false; }

  /// Name, shape and type of each array a forward stages. Shapes must not shrink as `batch` or
  /// `num_blocks` grow. Called once at the widest bounds, and per forward with those of the batch.
  ///   num_blocks   slots that the deepest row of the batch reaches; see stages_live_span()
  /// The base class stages one int32 "block_table" of [batch, num_blocks].
  virtual StagedInputs staged_input_shapes(std::uint32_t batch, std::uint32_t num_blocks) const;
  /// Whether its columns are the slots that hold a block in the step, not those reached from slot
  /// 0: then the planner passes as num_blocks the most such slots of one row, which
  /// blocks_to_reserve bounds, and columns do not grow with the text.
  virtual bool stages_live_span() const { return false; }

  /// Writes every entry of `into` for one forward.
  ///   plans   per batch row, the blocks in slot order; 0, the null block, where nothing is reached
  /// Throws PlanShapeError, nothing written, for arrays that do not fit the plans.
  virtual void write_staged_inputs(std::span<const std::span<const BlockId>> plans,
                                   StagedArrays into) const;

  /// Writes what changed since `into` was last written by this leaf, for all rows of the batch, and
  /// keeps what did not change. Overridden by a leaf that can do better than a full rewrite, which
  /// says so in `can_write_delta`; else the planner calls write_staged_inputs with all rows. The
  /// base class writes a dense block_table by deltas. It and the leaves shipped say true of
  /// themselves, but not of a class derived from them, which may write other arrays: one that keeps
  /// theirs says so by itself. Throws PlanShapeError, nothing written, for arrays that do not fit
  /// the rows.
  virtual bool can_write_delta() const;
  virtual void write_staged_delta(std::span<const RowDelta> rows, StagedArrays into) const;

  /// For a leaf whose page is addressed by row through an input bound once: the rows that one block
  /// occupies. Empty for a leaf that is reached through a table.
  virtual std::vector<BoundRows> bound_row_span(BlockId block) const;
  virtual std::vector<std::pair<BoundRows, BoundRows>> bound_row_copies(BlockId src,
                                                                        BlockId dst) const;

  /// Told the page stride once a geometry is chosen; a leaf addressed by row needs it. Such a leaf
  /// throws InvalidArgument when it is bound to a second, different stride.
  virtual void bind(std::uint64_t page_stride) { (void)page_stride; }

  /// Layers of the model this leaf serves, for reports; 0 when it does not say.
  virtual std::uint32_t layers() const { return 0; }

 private:
  std::string leaf_id_;
  KVCacheGroupId group_;
  std::uint64_t bytes_per_page_;
  std::optional<std::uint64_t> stride_alignment_;
  std::optional<std::uint32_t> tokens_per_page_;
};

using Leaf = std::shared_ptr<KVLeafRegion>;
using Leaves = std::vector<Leaf>;

}  // namespace kvleaf
