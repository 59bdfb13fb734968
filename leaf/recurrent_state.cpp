#include "kvleaf/leaf/recurrent_state.h"

#include <fmt/format.h>

#include <optional>
#include <typeinfo>
#include <utility>

#include "kvleaf/leaf/errors.h"
#include "kvleaf/leaf/index_array.h"
#include "kvleaf/leaf/saturate.h"

namespace kvleaf {
namespace {

void check(const std::string& leaf, const StateOptions& options) {
  if (options.layers == 0) throw InvalidArgument(fmt::format("leaf '{}': layers is 0", leaf));
  if (options.slabs.empty()) throw InvalidArgument(fmt::format("leaf '{}': no slab", leaf));
  if (options.table == StateTable::rows && options.slabs.size() > 1) {
    throw InvalidArgument(
        fmt::format("leaf '{}': {} slabs addressed by row; a stride is whole rows of one slab "
                    "only, several are "
                    "addressed by block",
                    leaf, options.slabs.size()));
  }
  for (std::size_t i = 0; i < options.slabs.size(); ++i) {
    const Slab& slab = options.slabs[i];
    if (slab.name.empty()) {
      throw InvalidArgument(fmt::format("leaf '{}': slab {} has no name", leaf, i));
    }
    for (std::size_t j = 0; j < i; ++j) {
      if (options.slabs[j].name == slab.name) {
        throw InvalidArgument(fmt::format("leaf '{}': two slabs '{}'", leaf, slab.name));
      }
    }
    if (slab.bytes() == 0) {
      throw InvalidArgument(
          fmt::format("leaf '{}': slab '{}' has an empty shape", leaf, slab.name));
    }
  }
}

std::uint64_t page_bytes(const std::string& leaf, const StateOptions& options) {
  check(leaf, options);
  std::uint64_t bytes = 0;
  for (const Slab& slab : options.slabs) {
    bytes = saturated_sum(bytes, saturated_product({options.layers, slab.bytes()}));
  }
  if (bytes == saturated) {
    throw InvalidArgument(fmt::format("leaf '{}': a page does not fit 2^64 bytes", leaf));
  }
  return bytes;
}

std::uint64_t alignment(const std::string& leaf, const StateOptions& options) {
  check(leaf, options);
  return options.table == StateTable::rows ? options.slabs.front().bytes() : 256;
}

// What one batch row does to states.
struct StateRow {
  bool padding = false;
  BlockId read = null_block;  // in_out only
  BlockId write = null_block;
  std::span<const BlockId> boundaries = {};
};

enum class Memory : std::uint8_t {
  unknown,  // every entry is written
  ours,     // zeroed or written by this leaf: only entries that differ are written, and reported
};

// One staged array: an entry per batch row (and boundary), or one per layer of them.
class StateArray {
 public:
  StateArray(const std::string& leaf, const StateOptions& options, const StagedArrays& into,
             std::string_view key, std::size_t batch, std::size_t inner_dimensions)
      : layers_(options.table == StateTable::rows ? options.layers : 1),
        outer_(options.table == StateTable::rows ? 1 : 0),
        array_(leaf, into, key, outer_ + inner_dimensions) {
    if (outer_ == 1) array_.require_extent(0, layers_);
    array_.require_extent(outer_, static_cast<std::int64_t>(batch));
  }

  std::size_t columns() const { return static_cast<std::size_t>(array_.extent(outer_ + 1)); }

  /// `first`: the block, or the row of layer 0; -1 where there is none.
  void set(std::size_t row, std::size_t column, std::int64_t first, Memory memory) {
    const std::int64_t at =
        static_cast<std::int64_t>(row) * array_.stride(outer_) + static_cast<std::int64_t>(column);
    const std::int64_t layer_stride = outer_ == 1 ? array_.stride(0) : 0;
    const auto entry = [&](std::int64_t layer) {
      return static_cast<std::int32_t>(first < 0 ? -1 : first + layer);
    };
    // Whoever wrote the last layer wrote them all, and zeroes are a row of no layer but the first:
    // a batch row that has not changed costs one look.
    const std::int64_t last = layers_ - 1;
    if (memory == Memory::ours && array_.get(at + last * layer_stride) == entry(last)) return;
    for (std::int64_t layer = 0; layer < layers_; ++layer) {
      if (memory == Memory::ours) {
        array_.put_change(at + layer * layer_stride, entry(layer));
      } else {
        array_.fill(at + layer * layer_stride, 1, entry(layer));
      }
    }
  }

 private:
  std::int64_t layers_;
  std::size_t outer_;  // dimensions before the batch: the layers
  IndexArray array_;
};

// All staged arrays of a state leaf. check() every row before the first write().
class StateWriter {
 public:
  StateWriter(const std::string& leaf, const StateOptions& options, std::uint64_t rows_per_block,
              const StagedArrays& into, std::size_t batch, Memory memory)
      : leaf_(leaf), rows_per_block_(rows_per_block), memory_(memory) {
    const bool by_row = options.table == StateTable::rows;
    const std::uint64_t layers = by_row ? options.layers : 1;
    constexpr std::uint64_t rows = std::uint64_t{1} << 31;  // that an int32 entry can name
    last_block_ = layers > rows ? 0 : (rows - layers) / rows_per_block;
    const bool in_out = options.kernel == StateKernel::in_out;
    write_.emplace(leaf, options, into, in_out ? "state_write_rows" : "state_rows", batch, 1);
    if (in_out) read_.emplace(leaf, options, into, "state_read_rows", batch, 1);
    if (options.in_chunk) boundary_.emplace(leaf, options, into, "state_boundary_rows", batch, 2);
  }

  void check(std::size_t row, const StateRow& state) const {
    if (state.padding) return;
    require_addressable(state.read);
    require_addressable(state.write);
    for (const BlockId block : state.boundaries) require_addressable(block);
    if (boundary_ && state.boundaries.size() > boundary_->columns()) {
      throw PlanShapeError(
          fmt::format("leaf '{}': row {} emits states at {} boundaries, its table has {} columns",
                      leaf_, row, state.boundaries.size(), boundary_->columns()));
    }
  }

  void write(std::size_t row, const StateRow& state) {
    write_->set(row, 0, state.padding ? -1 : first_row(state.write), memory_);
    if (read_) read_->set(row, 0, state.padding ? -1 : first_row(state.read), memory_);
    if (!boundary_) return;
    for (std::size_t i = 0; i < boundary_->columns(); ++i) {
      const bool given = !state.padding && i < state.boundaries.size();
      const BlockId block = given ? state.boundaries[i] : null_block;
      boundary_->set(row, i, block == null_block ? -1 : first_row(block), memory_);
    }
  }

 private:
  std::int64_t first_row(BlockId block) const noexcept {
    return static_cast<std::int64_t>(block.value() * rows_per_block_);
  }
  void require_addressable(BlockId block) const {
    if (block.value() > last_block_) {
      throw PlanShapeError(fmt::format(
          "leaf '{}': block {} cannot be named in an int32 table; the last one that can is {}",
          leaf_, block.value(), last_block_));
    }
  }

  const std::string& leaf_;
  std::uint64_t rows_per_block_;
  std::uint64_t last_block_ = 0;
  Memory memory_;
  std::optional<StateArray> read_;
  std::optional<StateArray> write_;
  std::optional<StateArray> boundary_;
};

}  // namespace

std::uint64_t Slab::bytes() const noexcept {
  if (shape.empty()) return 0;
  std::uint64_t bytes = size_of(dtype);
  for (const std::uint32_t extent : shape) bytes = saturated_product({bytes, extent});
  return bytes;
}

StateTable require_state_table(std::string_view name) {
  if (name == "blocks") return StateTable::blocks;
  if (name == "rows") return StateTable::rows;
  throw InvalidArgument(fmt::format("unknown state table '{}'; accepted: blocks, rows", name));
}

StateKernel require_state_kernel(std::string_view name) {
  if (name == "in_place") return StateKernel::in_place;
  if (name == "in_out") return StateKernel::in_out;
  throw InvalidArgument(fmt::format("unknown state kernel '{}'; accepted: in_place, in_out", name));
}

RecurrentStateLeaf::RecurrentStateLeaf(std::string leaf_id, StateOptions options)
    : KVLeafRegion(leaf_id, KVCacheGroupId::state(options.group), page_bytes(leaf_id, options),
                   {.stride_alignment = alignment(leaf_id, options),
                    .tokens_per_page = options.tokens_per_page}),
      options_(std::move(options)),
      rows_per_block_(options_.table == StateTable::rows ? options_.layers : 1) {}

StagedInputs RecurrentStateLeaf::staged_input_shapes(std::uint32_t batch,
                                                     std::uint32_t num_blocks) const {
  StagedInput rows{"state_rows", {}, DType::int32};
  if (options_.table == StateTable::rows) rows.shape.push_back(options_.layers);
  rows.shape.push_back(batch);

  StagedInputs inputs;
  if (options_.kernel == StateKernel::in_place) {
    inputs.push_back(rows);
  } else {
    for (const std::string_view key : {"state_read_rows", "state_write_rows"}) {
      rows.key = key;
      inputs.push_back(rows);
    }
  }
  if (options_.in_chunk) {
    rows.key = "state_boundary_rows";
    rows.shape.push_back(num_blocks);
    inputs.push_back(rows);
  }
  return inputs;
}

bool RecurrentStateLeaf::can_write_delta() const {
  return typeid(*this) == typeid(RecurrentStateLeaf);
}

void RecurrentStateLeaf::write_staged_inputs(std::span<const std::span<const BlockId>> plans,
                                             StagedArrays into) const {
  const std::size_t states = options_.kernel == StateKernel::in_out ? 2 : 1;
  const auto row_at = [&](std::size_t i) {
    if (plans[i].empty()) return StateRow{.padding = true};
    return StateRow{.read = plans[i].front(),
                    .write = plans[i][states - 1],
                    .boundaries = plans[i].subspan(states)};
  };
  StateWriter writer(leaf_id(), options_, rows_per_block_, into, plans.size(), Memory::unknown);
  for (std::size_t i = 0; i < plans.size(); ++i) {
    const std::size_t blocks = plans[i].size();
    if (blocks != 0 && blocks != states && !(options_.in_chunk && blocks > states)) {
      throw PlanShapeError(
          fmt::format("leaf '{}': row {} has {} blocks; a state of this kernel takes {}", leaf_id(),
                      i, blocks, states));
    }
    writer.check(i, row_at(i));
  }
  for (std::size_t i = 0; i < plans.size(); ++i) writer.write(i, row_at(i));
}

void RecurrentStateLeaf::write_staged_delta(std::span<const RowDelta> rows,
                                            StagedArrays into) const {
  const auto row_at = [&](std::size_t i) {
    const RowDelta& row = rows[i];
    return StateRow{.padding = row.padding,
                    .read = row.read_block,
                    .write = row.write_block,
                    .boundaries = row.boundary_blocks};
  };
  StateWriter writer(leaf_id(), options_, rows_per_block_, into, rows.size(), Memory::ours);
  for (std::size_t i = 0; i < rows.size(); ++i) writer.check(i, row_at(i));
  into.reports_changes();
  for (std::size_t i = 0; i < rows.size(); ++i) writer.write(i, row_at(i));
}

std::vector<BoundRows> RecurrentStateLeaf::bound_row_span(BlockId block) const {
  if (options_.table == StateTable::blocks) return {};
  const std::uint64_t begin = block.value() * rows_per_block_;
  return {BoundRows{options_.slabs.front().name, begin, begin + options_.layers}};
}

std::vector<std::pair<BoundRows, BoundRows>> RecurrentStateLeaf::bound_row_copies(
    BlockId src, BlockId dst) const {
  if (options_.table == StateTable::blocks) return {};
  return {{bound_row_span(src).front(), bound_row_span(dst).front()}};
}

void RecurrentStateLeaf::bind(std::uint64_t page_stride) {
  if (options_.table == StateTable::blocks) return;
  const std::uint64_t row = options_.slabs.front().bytes();
  if (page_stride % row != 0 || page_stride / row < options_.layers) {
    throw InvalidArgument(
        fmt::format("leaf '{}' is addressed by rows of {} bytes: a page stride of {} is {:.1f} "
                    "rows, not a whole "
                    "number of at least {}",
                    leaf_id(), row, page_stride,
                    static_cast<double>(page_stride) / static_cast<double>(row), options_.layers));
  }
  if (bound_ && page_stride / row != rows_per_block_) {
    throw InvalidArgument(
        fmt::format("leaf '{}' is bound to a page stride of {} bytes, so not to {}", leaf_id(),
                    rows_per_block_ * row, page_stride));
  }
  rows_per_block_ = page_stride / row;
  bound_ = true;
}

}  // namespace kvleaf
