// Geometry: a value behind a handle.
#include <memory>

#include "border.h"

namespace kvleaf::c {

std::vector<PageSpec> pages_of(const kvleaf_page_spec* pages, std::size_t count) {
  std::vector<PageSpec> read;
  if (span_of(pages, count, "pages").empty()) return read;
  // The caller's elements may be shorter or longer than ours.
  const std::size_t stride = size_of_struct(pages, "pages");
  for (std::size_t i = 0; i < count; ++i) {
    const auto* at = reinterpret_cast<const kvleaf_page_spec*>(
        reinterpret_cast<const unsigned char*>(pages) + i * stride);
    const kvleaf_page_spec page = read_struct(at, "pages");
    if (page.struct_size != stride) throw_bad_size("pages", page.struct_size, stride);
    read.push_back({.name = &require(page.name, "name of a page"),
                    .bytes_per_page = page.bytes_per_page,
                    .stride_alignment = page.stride_alignment == 0
                                            ? std::nullopt
                                            : std::optional(page.stride_alignment),
                    .weight = page.weight == 0 ? 1.0 : page.weight,
                    .floor = page.floor,
                    .ceiling = flag("has_ceiling", page.has_ceiling) ? std::optional(page.ceiling)
                                                                     : std::nullopt,
                    .one_per_request = flag("one_per_request", page.one_per_request)});
  }
  return read;
}

namespace {

kvleaf_page_spec shown(const PageSpec& page, const char* name) {
  return {.struct_size = 0,
          .name = name,
          .bytes_per_page = page.bytes_per_page,
          .stride_alignment = page.stride_alignment.value_or(0),
          .weight = page.weight,
          .floor = page.floor,
          .ceiling = page.ceiling.value_or(0),
          .has_ceiling = page.ceiling.has_value(),
          .one_per_request = page.one_per_request};
}

template <class F>
kvleaf_status make(kvleaf_geometry** out, F&& geometry_of) {
  return guarded([&] {
    require(out, "out");
    *out = std::make_unique<kvleaf_geometry>(kvleaf_geometry{geometry_of()}).release();
  });
}

}  // namespace
}  // namespace kvleaf::c

using namespace kvleaf;
using namespace kvleaf::c;

kvleaf_status kvleaf_page_spec_of(const kvleaf_leaf* leaf, kvleaf_page_spec* out) {
  return guarded([&] {
    const KVLeafRegion& region = *require(leaf, "leaf").leaf;
    const Output into(out, "out");
    into.write(shown(PageSpec::of(region), region.leaf_id().c_str()));
  });
}

kvleaf_status kvleaf_page_specs(kvleaf_leaf* const* leaves, size_t count, uint32_t page_tokens,
                                uint32_t expected_tokens, kvleaf_page_spec* into) {
  return guarded([&] {
    Leaves regions;
    for (kvleaf_leaf* leaf : span_of(leaves, count, "leaves")) {
      regions.push_back(require(leaf, "leaf").leaf);
    }
    std::vector<Output<kvleaf_page_spec>> outputs;
    const std::size_t stride = count == 0 ? 0 : size_of_struct(into, "into");
    for (std::size_t i = 0; i < count; ++i) {
      auto* at =
          reinterpret_cast<kvleaf_page_spec*>(reinterpret_cast<unsigned char*>(into) + i * stride);
      outputs.emplace_back(at, "into");
      if (at->struct_size != stride) throw_bad_size("into", at->struct_size, stride);
    }
    const std::vector<PageSpec> pages =
        page_specs(regions, page_tokens == 0 ? ManagerOptions{}.page_tokens : page_tokens,
                   expected_tokens == 0 ? ManagerOptions{}.expected_tokens : expected_tokens);
    for (std::size_t i = 0; i < count; ++i) {
      outputs[i].write(shown(pages[i], regions[i]->leaf_id().c_str()));
    }
  });
}

void kvleaf_geometry_destroy(kvleaf_geometry* geometry) { delete geometry; }

kvleaf_status kvleaf_plan_geometry(uint64_t budget_bytes, const kvleaf_page_spec* pages,
                                   size_t count, uint64_t max_huge_bytes, uint64_t alignment,
                                   kvleaf_geometry** out) {
  return make(out, [&] {
    GeometryOptions options;
    if (max_huge_bytes != 0) options.max_huge_bytes = max_huge_bytes;
    if (alignment != 0) options.alignment = alignment;
    return plan_geometry(budget_bytes, pages_of(pages, count), options);
  });
}

kvleaf_status kvleaf_geometry_by_hand(const kvleaf_page_spec* pages, size_t count,
                                      uint64_t huge_bytes, uint64_t huge_blocks,
                                      const uint64_t* ratios, uint64_t alignment,
                                      kvleaf_geometry** out) {
  return make(out, [&] {
    const auto given = span_of(ratios, count, "ratios");
    return Geometry::by_hand(pages_of(pages, count), {.huge_bytes = huge_bytes,
                                                      .huge_blocks = huge_blocks,
                                                      .ratios = {given.begin(), given.end()},
                                                      .alignment = alignment == 0 ? 1 : alignment});
  });
}

kvleaf_status kvleaf_geometry_resized(const kvleaf_geometry* geometry, uint64_t huge_blocks,
                                      kvleaf_geometry** out) {
  return make(out, [&] { return require(geometry, "geometry").geometry.resized(huge_blocks); });
}

kvleaf_status kvleaf_geometry_describe(const kvleaf_geometry* geometry, kvleaf_geometry_info* out) {
  return guarded([&] {
    const Geometry& tiling = require(geometry, "geometry").geometry;
    Output(out, "out")
        .write({.struct_size = 0,
                .budget_bytes = tiling.budget_bytes(),
                .arena_bytes = tiling.arena_bytes(),
                .null_bytes = tiling.null_bytes(),
                .huge_bytes = tiling.huge_bytes(),
                .huge_blocks = tiling.huge_blocks(),
                .cost = tiling.cost(),
                .leaves = static_cast<std::uint32_t>(tiling.leaves().size()),
                .page_classes = tiling.page_classes()});
  });
}

kvleaf_status kvleaf_geometry_leaf(const kvleaf_geometry* geometry, uint32_t leaf,
                                   kvleaf_leaf_geometry* out) {
  return guarded([&] {
    const LeafGeometry& view = require(geometry, "geometry").geometry.leaf(LeafId(leaf));
    Output(out, "out")
        .write({.struct_size = 0,
                .name = view.name.c_str(),
                .bytes_per_page = view.bytes_per_page,
                .page_stride = view.page_stride,
                .ratio = view.ratio,
                .base_offset = view.base_offset,
                .blocks = view.blocks,
                .floor = view.floor,
                .ceiling = view.ceiling.value_or(0),
                .has_ceiling = view.ceiling.has_value(),
                .page_class = view.page_class.value()});
  });
}

kvleaf_status kvleaf_geometry_find(const kvleaf_geometry* geometry, const char* name,
                                   uint32_t* out_leaf) {
  return guarded([&] {
    require(out_leaf, "out_leaf");
    require(name, "name");
    *out_leaf = require(geometry, "geometry").geometry.find(name).value();
  });
}

kvleaf_status kvleaf_geometry_byte_range(const kvleaf_geometry* geometry, uint32_t leaf,
                                         uint32_t block, kvleaf_byte_range* out) {
  return guarded([&] {
    require(out, "out");
    const ByteRange range =
        require(geometry, "geometry").geometry.byte_range(LeafId(leaf), BlockId(block));
    *out = {range.begin, range.end};
  });
}

kvleaf_status kvleaf_geometry_huge_block_of(const kvleaf_geometry* geometry, uint32_t leaf,
                                            uint32_t block, uint32_t* out) {
  return guarded([&] {
    require(out, "out");
    *out =
        require(geometry, "geometry").geometry.huge_block_of(LeafId(leaf), BlockId(block)).value();
  });
}
