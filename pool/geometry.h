// Geometry: how one arena of bytes is tiled so that pages of different sizes share it.
//
//   Arena = [null region][huge block 0][huge block 1]…
//
// A huge block serves one page class at a time and holds `ratio` of its blocks. Leaf i's view
// starts at null_bytes - stride_i, so its block 0 is the null block (readable zeros), real ids
// start at 1, and block b lies in huge block (b - 1) / ratio_i. The null block costs one page, not
// a huge block. Leaves of equal ratio have equal strides and equal views: a page class. Immutable,
// a value.
#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "kvleaf/leaf/errors.h"
#include "kvleaf/leaf/ids.h"

namespace kvleaf {

class KVLeafRegion;

/// What the pool must know of a leaf: sizes, no tokens.
struct PageSpec {
  std::string name;
  std::uint64_t bytes_per_page = 0;
  std::optional<std::uint64_t> stride_alignment;  // none: packed, the stride is bytes_per_page
  double weight = 1.0;                   // expected share of data bytes; divided by the sum
  std::uint64_t floor = 0;               // live blocks that are always kept obtainable
  std::optional<std::uint64_t> ceiling;  // live blocks never exceeded
  bool one_per_request = false;          // a state: may be split into equal leaves

  /// Throws InvalidArgument for a leaf that is addressed by row and whose page is no whole number
  /// of rows (its alignment).
  static PageSpec of(const KVLeafRegion& leaf);
  bool operator==(const PageSpec&) const = default;
};

struct ByteRange {
  std::uint64_t begin = 0;
  std::uint64_t end = 0;
  bool operator==(const ByteRange&) const = default;
};

/// One leaf's view of the arena.
struct LeafGeometry {
  std::string name;
  std::uint64_t bytes_per_page = 0;  // data
  std::uint64_t page_stride = 0;     // huge_bytes / ratio, >= bytes_per_page
  std::uint64_t ratio = 0;           // blocks per huge block
  std::uint64_t base_offset = 0;     // of block 0: null_bytes - page_stride
  std::uint64_t blocks = 0;          // huge_blocks * ratio: real ids are 1 … blocks
  std::uint64_t floor = 0;
  std::optional<std::uint64_t> ceiling;
  PageClassId page_class{0};
  bool operator==(const LeafGeometry&) const = default;
};

struct GeometryOptions {
  /// Largest huge block to consider. None: 128 MiB, or the least huge block that holds the largest
  /// page and that packed leaves and alignments allow, if that is more.
  std::optional<std::uint64_t> max_huge_bytes;
  std::uint64_t alignment = 256;  // the null region is a multiple of it
};

struct ByHand {
  std::uint64_t huge_bytes = 0;
  std::uint64_t huge_blocks = 0;
  std::vector<std::uint64_t> ratios;  // one per page
  std::uint64_t alignment = 1;
};

class Geometry {
 public:
  /// A geometry that the caller chose. Throws GeometryError, naming the leaf, where a ratio does
  /// not divide huge_bytes into strides that hold the page and meet its alignment (packed: that are
  /// the page); InvalidArgument for pages that plan_geometry would not take either, zero or unequal
  /// counts, an arena past 2^64 bytes, ids past 2^31 - 1 (the tables are int32).
  static Geometry by_hand(std::span<const PageSpec> pages, ByHand choice);

  std::uint64_t budget_bytes() const noexcept { return budget_bytes_; }
  std::uint64_t arena_bytes() const noexcept { return null_bytes_ + huge_bytes_ * huge_blocks_; }
  std::uint64_t null_bytes() const noexcept { return null_bytes_; }
  std::uint64_t huge_bytes() const noexcept { return huge_bytes_; }
  std::uint64_t huge_blocks() const noexcept { return huge_blocks_; }
  /// padding + bytes that serve nobody + half-used huge blocks, as a share of the budget; what
  /// plan_geometry minimises. For a geometry by hand, the same formula with the arena as budget.
  double cost() const noexcept { return cost_; }
  struct CostTerms {
    double padding = 0;    // Σ w_i (stride_i / bytes_i - 1), the w_i of sum 1
    double unused = 0;     // (null + remainder) / budget
    double half_used = 0;  // Σ_classes (huge - stride) / (2 budget)
    bool operator==(const CostTerms&) const = default;
  };
  CostTerms cost_terms() const noexcept { return terms_; }

  std::span<const LeafGeometry> leaves() const noexcept { return leaves_; }
  /// Throws InvalidArgument past the last leaf.
  const LeafGeometry& leaf(LeafId leaf) const {
    if (leaf.value() >= leaves_.size()) throw_no_leaf(leaf);
    return leaves_[leaf.value()];
  }
  /// Throws InvalidArgument that lists the names there are.
  LeafId find(std::string_view name) const;

  std::uint32_t page_classes() const noexcept {
    return static_cast<std::uint32_t>(class_ratios_.size());
  }
  std::uint64_t class_ratio(PageClassId page_class) const {
    return class_ratios_.at(page_class.value());
  }

  /// Bytes of one block's data in the arena: end = begin + bytes_per_page. Throws BlockError for a
  /// block past the leaf's last.
  ByteRange byte_range(LeafId leaf, BlockId block) const;
  /// The same throws for the null block too: it lies in no huge block.
  HugeBlockId huge_block_of(LeafId leaf, BlockId block) const;

  /// The same tiling with another number of huge blocks; its arena is its budget. Throws
  /// InvalidArgument for none, for an arena past 2^64 bytes and for ids past 2^31 - 1.
  Geometry resized(std::uint64_t huge_blocks) const;

  bool operator==(const Geometry&) const = default;

 private:
  friend Geometry plan_geometry(std::uint64_t, std::span<const PageSpec>, GeometryOptions);
  Geometry() = default;

  /// From ratios known to tile. No budget: the arena's bytes.
  struct Layout {
    std::optional<std::uint64_t> budget_bytes;
    std::uint64_t null_bytes = 0;
    std::uint64_t huge_bytes = 0;
    std::uint64_t huge_blocks = 0;
    std::span<const std::uint64_t> ratios;  // one per page
  };
  static Geometry from_layout(std::span<const PageSpec> pages, const Layout& layout);
  /// Sets what depends on the number of huge blocks. Throws InvalidArgument as `resized` does.
  void set_huge_blocks(std::uint64_t huge_blocks, std::optional<std::uint64_t> budget_bytes);
  [[noreturn]] void throw_no_leaf(LeafId leaf) const;

  std::uint64_t budget_bytes_ = 0;
  std::uint64_t null_bytes_ = 0;
  std::uint64_t huge_bytes_ = 0;
  std::uint64_t huge_blocks_ = 0;
  double cost_ = 0;
  CostTerms terms_;
  std::vector<LeafGeometry> leaves_;
  std::vector<std::uint64_t> class_ratios_;  // class c's ratio; classes in order of first leaf
};

/// The cheapest geometry for these pages in this budget: the exact minimum of cost() over every
/// admissible huge block up to the cap (ties: the smaller huge block). Admissible is what gives
/// every leaf a block. Throws GeometryError, with each page's size, the least budget that would
/// start and the leaf to blame, when none fits; InvalidArgument for no page, an empty or repeated
/// name, zero bytes, alignment or weight, a floor above its ceiling, and for a leaf whose ids would
/// pass 2^31 - 1. Source: design document, "Geometry".
Geometry plan_geometry(std::uint64_t budget_bytes, std::span<const PageSpec> pages,
                       GeometryOptions options = {});

}  // namespace kvleaf
