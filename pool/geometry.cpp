#include "kvleaf/pool/geometry.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <set>
#include <tuple>

#include "kvleaf/leaf/region.h"
#include "kvleaf/pool/geometry_search.h"

namespace kvleaf {
namespace {

__extension__ using u128 = unsigned __int128;
using u64 = std::uint64_t;

constexpr u64 kDefaultCap = u64{128} << 20;
constexpr u64 kMostBytes = std::numeric_limits<u64>::max();
constexpr u64 kMostBlocks = (u64{1} << 31) - 1;  // per leaf: block tables are int32

/// "36 MiB": in the largest unit that gives a whole number.
std::string in_units(u64 bytes) {
  for (const auto& [shift, unit] : {std::pair{30, "GiB"}, {20, "MiB"}, {10, "KiB"}}) {
    if (bytes != 0 && bytes % (u64{1} << shift) == 0) {
      return fmt::format("{} {}", bytes >> shift, unit);
    }
  }
  return fmt::format("{} B", bytes);
}

/// "attn 3145728 B (aligned to 512), state 4096 B (packed)"
std::string list_of(std::span<const PageSpec> pages) {
  std::vector<std::string> listed;
  for (const PageSpec& page : pages) {
    listed.push_back(page.stride_alignment
                         ? fmt::format("{} {} B (aligned to {})", page.name, page.bytes_per_page,
                                       *page.stride_alignment)
                         : fmt::format("{} {} B (packed)", page.name, page.bytes_per_page));
  }
  return fmt::format("{}", fmt::join(listed, ", "));
}

/// Throws InvalidArgument for pages of which no geometry can be made.
void check_pages(std::span<const PageSpec> pages) {
  if (pages.empty()) throw InvalidArgument("a geometry needs at least one page; none was given");
  std::set<std::string_view> names;
  double sum = 0;
  for (const PageSpec& page : pages) {
    if (page.name.empty()) throw InvalidArgument("a page has an empty name");
    if (!names.insert(page.name).second) {
      throw InvalidArgument(fmt::format("two pages are named '{}'", page.name));
    }
    if (page.bytes_per_page == 0) {
      throw InvalidArgument(fmt::format("page '{}' has 0 bytes; at least 1 is needed", page.name));
    }
    if (page.stride_alignment == u64{0}) {
      throw InvalidArgument(fmt::format(
          "page '{}' has a stride alignment of 0; 1 allows any padding, none means packed",
          page.name));
    }
    if (!(page.weight > 0) || !std::isfinite(page.weight)) {
      throw InvalidArgument(fmt::format("page '{}' has weight {}; it must be finite and above 0",
                                        page.name, page.weight));
    }
    if (page.ceiling && page.floor > *page.ceiling) {
      throw InvalidArgument(
          fmt::format("page '{}' has a floor of {} live blocks above its ceiling of {}", page.name,
                      page.floor, *page.ceiling));
    }
    sum += page.weight;
  }
  if (!std::isfinite(sum)) throw InvalidArgument("the weights of the pages have no finite sum");
}

double sum_of_weights(std::span<const PageSpec> pages) {
  double sum = 0;
  for (const PageSpec& page : pages) sum += page.weight;
  return sum;
}

/// The pages' shapes, and the shape of each page.
struct Shapes {
  explicit Shapes(std::span<const PageSpec> pages) {
    const double sum = sum_of_weights(pages);
    std::map<std::pair<u64, std::optional<u64>>, std::size_t> known;
    for (std::size_t i = 0; i < pages.size(); ++i) {
      const PageSpec& page = pages[i];
      const auto [it, is_new] =
          known.try_emplace({page.bytes_per_page, page.stride_alignment}, shapes.size());
      if (is_new) {
        shapes.push_back({page.bytes_per_page, page.stride_alignment.value_or(page.bytes_per_page),
                          !page.stride_alignment, 0, 0});
        first_page.push_back(i);
      }
      shape_of.push_back(it->second);
      shapes[it->second].leaves += 1;
      shapes[it->second].weight += page.weight / sum;
    }
  }

  std::vector<PageShape> shapes;
  std::vector<std::size_t> first_page;  // of each shape
  std::vector<std::size_t> shape_of;    // each page
};

/// The page that keeps huge blocks large: the one without which the unit forced on them would be
/// least, where it is this unit that makes them larger than any page; else the largest page.
const PageSpec& page_to_blame(std::span<const PageSpec> pages, const Shapes& known,
                              std::optional<u64> unit) {
  const std::vector<PageShape>& shapes = known.shapes;
  std::size_t worst = 0;
  for (std::size_t i = 1; i < shapes.size(); ++i) {
    if (shapes[i].bytes > shapes[worst].bytes) worst = i;
  }
  if (!unit || *unit > shapes[worst].bytes) {
    u64 least = kMostBytes;
    for (std::size_t i = 0; i < shapes.size(); ++i) {
      std::vector<PageShape> others = shapes;
      others.erase(others.begin() + static_cast<std::ptrdiff_t>(i));
      const u64 without = forced_unit(others).value_or(kMostBytes);
      if (without < least) {
        least = without;
        worst = i;
      }
    }
  }
  return pages[known.first_page[worst]];
}

/// The end of every refusal: whom to blame, and all pages.
std::string blame(std::span<const PageSpec> pages, const PageSpec& blamed) {
  return fmt::format("blame leaf '{}' with pages of {} ({} B); pages: {}", blamed.name,
                     in_units(blamed.bytes_per_page), blamed.bytes_per_page, list_of(pages));
}

/// No huge block up to the cap, or below 2^63 bytes, holds a page of every leaf.
[[noreturn]] void refuse_cap(std::span<const PageSpec> pages, const Shapes& known,
                             std::optional<u64> unit, std::optional<u64> least_huge,
                             std::optional<u64> cap) {
  const PageSpec& blamed = page_to_blame(pages, known, unit);
  const std::string why =
      least_huge ? fmt::format(
                       "huge blocks are capped at {} ({} B), but the least that holds a page of "
                       "every leaf is {} ({} B)",
                       in_units(*cap), *cap, in_units(*least_huge), *least_huge)
                 : std::string(
                       "the huge block that these packed pages and alignments force passes 2^63 "
                       "bytes");
  throw GeometryError(fmt::format("{}; {}", why, blame(pages, blamed)), 0, blamed.name);
}

[[noreturn]] void refuse_budget(u64 budget, std::span<const PageSpec> pages, const Shapes& known,
                                const TilingProblem& problem) {
  const PageSpec& blamed = page_to_blame(pages, known, problem.unit);
  const std::optional<Tiling> smallest = smallest_tiling(problem);
  if (!smallest) {
    throw GeometryError(
        fmt::format("a budget of {} B is too small, and what would do passes 2^64 B; {}", budget,
                    blame(pages, blamed)),
        0, blamed.name);
  }
  const u64 least = smallest->null_bytes + smallest->huge_blocks * smallest->huge_bytes;
  throw GeometryError(
      fmt::format(
          "a budget of {} B does not give every leaf a block: that takes at least {} (least "
          "budget {} B), a null region of {} B and {} huge blocks of {} B; {}",
          budget, in_units(least), least, smallest->null_bytes, smallest->huge_blocks,
          smallest->huge_bytes, blame(pages, blamed)),
      least, blamed.name);
}

[[noreturn]] void throw_too_many_blocks(const LeafGeometry& leaf, u64 huge_blocks) {
  throw InvalidArgument(
      fmt::format("leaf '{}' would have {} huge blocks of {} blocks; block tables are int32, so a "
                  "leaf has at most "
                  "{} blocks: give it larger pages or the pool fewer bytes",
                  leaf.name, huge_blocks, leaf.ratio, kMostBlocks));
}

}  // namespace

PageSpec PageSpec::of(const KVLeafRegion& leaf) {
  const u64 bytes = leaf.bytes_per_page();
  const std::optional<u64> align = leaf.stride_alignment();
  // Rows of such a page would shear at its end. Only a leaf addressed by row has rows to speak of.
  if (align && *align != 0 && bytes % *align != 0 && !leaf.bound_row_span(BlockId(1)).empty()) {
    throw InvalidArgument(fmt::format(
        "leaf '{}' is addressed by rows of {} B, but its page of {} B is {:.1f} rows",
        leaf.leaf_id(), *align, bytes, static_cast<double>(bytes) / static_cast<double>(*align)));
  }
  PageSpec spec;
  spec.name = leaf.leaf_id();
  spec.bytes_per_page = bytes;
  spec.stride_alignment = align;
  spec.one_per_request = leaf.group_id().writing == Writing::in_place;
  return spec;
}

Geometry Geometry::by_hand(std::span<const PageSpec> pages, ByHand choice) {
  check_pages(pages);
  if (choice.ratios.size() != pages.size()) {
    throw InvalidArgument(fmt::format("a geometry by hand has {} ratios for {} pages",
                                      choice.ratios.size(), pages.size()));
  }
  if (choice.huge_bytes == 0 || choice.huge_blocks == 0 || choice.alignment == 0) {
    throw InvalidArgument(fmt::format(
        "a geometry by hand has {} huge blocks of {} B and an alignment of {}; each is at least 1",
        choice.huge_blocks, choice.huge_bytes, choice.alignment));
  }
  u64 widest = 0;
  for (std::size_t i = 0; i < pages.size(); ++i) {
    const PageSpec& page = pages[i];
    const u64 ratio = choice.ratios[i];
    if (ratio == 0) throw InvalidArgument(fmt::format("page '{}' has a ratio of 0", page.name));
    const auto refuse = [&](const std::string& why) {
      throw GeometryError(
          fmt::format("page '{}' has {} blocks in a huge block of {} B: {}; pages: {}", page.name,
                      ratio, choice.huge_bytes, why, list_of(pages)),
          0, page.name);
    };
    if (choice.huge_bytes % ratio != 0) refuse("the stride would not be a whole number of bytes");
    const u64 stride = choice.huge_bytes / ratio;
    if (stride < page.bytes_per_page) {
      refuse(fmt::format("a stride of {} B is less than the page of {} B", stride,
                         page.bytes_per_page));
    }
    if (!page.stride_alignment && stride != page.bytes_per_page) {
      refuse(fmt::format("its pages are packed, and a stride of {} B is more than the page of {} B",
                         stride, page.bytes_per_page));
    }
    if (page.stride_alignment && stride % *page.stride_alignment != 0) {
      refuse(fmt::format("a stride of {} B is {:.1f} times its alignment of {} B", stride,
                         static_cast<double>(stride) / static_cast<double>(*page.stride_alignment),
                         *page.stride_alignment));
    }
    widest = std::max(widest, stride);
  }
  const u128 null_bytes =
      (u128(widest) + (choice.alignment - 1)) / choice.alignment * choice.alignment;
  if (null_bytes > kMostBytes) {
    throw InvalidArgument(fmt::format("a stride of {} B aligned to {} B passes 2^64 bytes", widest,
                                      choice.alignment));
  }
  return from_layout(pages, {.budget_bytes = {},
                             .null_bytes = static_cast<u64>(null_bytes),
                             .huge_bytes = choice.huge_bytes,
                             .huge_blocks = choice.huge_blocks,
                             .ratios = choice.ratios});
}

Geometry Geometry::from_layout(std::span<const PageSpec> pages, const Layout& layout) {
  Geometry geometry;
  geometry.null_bytes_ = layout.null_bytes;
  geometry.huge_bytes_ = layout.huge_bytes;
  const double sum = sum_of_weights(pages);
  for (std::size_t i = 0; i < pages.size(); ++i) {
    const PageSpec& page = pages[i];
    LeafGeometry leaf;
    leaf.name = page.name;
    leaf.bytes_per_page = page.bytes_per_page;
    leaf.ratio = layout.ratios[i];
    leaf.page_stride = layout.huge_bytes / leaf.ratio;
    leaf.base_offset = layout.null_bytes - leaf.page_stride;
    leaf.floor = page.floor;
    leaf.ceiling = page.ceiling;
    auto& classes = geometry.class_ratios_;
    const auto known = std::find(classes.begin(), classes.end(), leaf.ratio);
    leaf.page_class = PageClassId(static_cast<std::uint32_t>(known - classes.begin()));
    if (known == classes.end()) classes.push_back(leaf.ratio);
    geometry.terms_.padding += page.weight / sum *
                               (static_cast<double>(leaf.page_stride - leaf.bytes_per_page) /
                                static_cast<double>(leaf.bytes_per_page));
    geometry.leaves_.push_back(std::move(leaf));
  }
  geometry.set_huge_blocks(layout.huge_blocks, layout.budget_bytes);
  return geometry;
}

void Geometry::set_huge_blocks(u64 huge_blocks, std::optional<u64> budget_bytes) {
  if (huge_blocks == 0) throw InvalidArgument("a geometry needs at least one huge block");
  if (huge_blocks > (kMostBytes - null_bytes_) / huge_bytes_) {
    throw InvalidArgument(
        fmt::format("{} huge blocks of {} B behind a null region of {} B pass 2^64 bytes",
                    huge_blocks, huge_bytes_, null_bytes_));
  }
  for (LeafGeometry& leaf : leaves_) {
    if (huge_blocks > kMostBlocks / leaf.ratio) throw_too_many_blocks(leaf, huge_blocks);
    leaf.blocks = huge_blocks * leaf.ratio;
  }
  huge_blocks_ = huge_blocks;
  budget_bytes_ = budget_bytes.value_or(arena_bytes());
  const double budget = static_cast<double>(budget_bytes_);
  u128 half_used = 0;
  for (const u64 ratio : class_ratios_) half_used += huge_bytes_ - huge_bytes_ / ratio;
  terms_.unused = static_cast<double>(budget_bytes_ - huge_blocks_ * huge_bytes_) / budget;
  terms_.half_used = static_cast<double>(half_used) / (2 * budget);
  cost_ = terms_.padding + terms_.unused + terms_.half_used;
}

Geometry Geometry::resized(u64 huge_blocks) const {
  Geometry other = *this;
  if (huge_blocks != huge_blocks_) other.set_huge_blocks(huge_blocks, {});
  return other;
}

LeafId Geometry::find(std::string_view name) const {
  std::vector<std::string_view> names;
  for (std::size_t i = 0; i < leaves_.size(); ++i) {
    if (leaves_[i].name == name) return LeafId(static_cast<std::uint32_t>(i));
    names.push_back(leaves_[i].name);
  }
  throw InvalidArgument(
      fmt::format("no leaf is named '{}'; there are {}", name, fmt::join(names, ", ")));
}

void Geometry::throw_no_leaf(LeafId leaf) const {
  throw InvalidArgument(
      fmt::format("no leaf has index {}; there are {} leaves", leaf.value(), leaves_.size()));
}

ByteRange Geometry::byte_range(LeafId leaf, BlockId block) const {
  const LeafGeometry& of = this->leaf(leaf);
  if (block.value() > of.blocks) {
    throw BlockError(
        fmt::format("block {} of leaf '{}': its last is {}", block.value(), of.name, of.blocks));
  }
  const u64 begin = of.base_offset + block.value() * of.page_stride;
  return {begin, begin + of.bytes_per_page};
}

HugeBlockId Geometry::huge_block_of(LeafId leaf, BlockId block) const {
  const LeafGeometry& of = this->leaf(leaf);
  if (block == null_block || block.value() > of.blocks) {
    throw BlockError(fmt::format("block {} of leaf '{}' lies in no huge block: they hold 1 to {}",
                                 block.value(), of.name, of.blocks));
  }
  return HugeBlockId(static_cast<std::uint32_t>((block.value() - 1) / of.ratio));
}

Geometry plan_geometry(u64 budget_bytes, std::span<const PageSpec> pages, GeometryOptions options) {
  check_pages(pages);
  if (options.alignment == 0) {
    throw InvalidArgument("the alignment of the null region is 0; it is at least 1");
  }
  const Shapes known(pages);
  const std::optional<u64> unit = forced_unit(known.shapes);
  TilingProblem problem;
  problem.shapes = known.shapes;
  problem.unit = unit.value_or(1);
  problem.null_alignment = options.alignment;
  const std::optional<u64> least_huge = unit ? problem.least_huge() : std::nullopt;
  if (!least_huge || options.max_huge_bytes.value_or(*least_huge) < *least_huge) {
    refuse_cap(pages, known, unit, least_huge, options.max_huge_bytes);
  }
  problem.cap = options.max_huge_bytes.value_or(std::max(kDefaultCap, *least_huge));

  const std::optional<Tiling> best = cheapest_tiling(problem, budget_bytes);
  if (!best) refuse_budget(budget_bytes, pages, known, problem);
  std::vector<u64> ratios;
  for (const std::size_t shape : known.shape_of) ratios.push_back(best->ratios[shape]);
  return Geometry::from_layout(pages, {.budget_bytes = budget_bytes,
                                       .null_bytes = best->null_bytes,
                                       .huge_bytes = best->huge_bytes,
                                       .huge_blocks = best->huge_blocks,
                                       .ratios = ratios});
}

}  // namespace kvleaf
