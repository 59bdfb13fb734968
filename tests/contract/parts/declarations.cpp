// The rules of what a leaf declares: memory, reach, reserve, cacheable, bound rows and copies.
#include <fmt/format.h>

#include <map>
#include <numeric>

#include "kvleaf/leaf/errors.h"
#include "kvleaf/pool/geometry.h"
#include "kvleaf/testing/parts/kit.h"

namespace kvleaf::testing::contract {
namespace {

/// Strides that a pool may choose for the leaf.
std::vector<std::uint64_t> strides_of(const Facts& facts) {
  const std::uint64_t least = facts.least_stride();
  if (!facts.alignment) return {least};
  const std::uint64_t step = *facts.alignment;
  return {least, least + step, least + 3 * step};
}

/// Where the rows of blocks lie must agree with where their bytes lie.
void check_row_bytes(Kit& kit, const KVLeafRegion& leaf, std::uint64_t stride) {
  const Facts& facts = kit.facts();
  const std::vector<BoundRows> first = leaf.bound_row_span(BlockId(1));
  for (std::size_t i = 0; i < first.size(); ++i) {
    const BoundRows& span = first[i];
    if (span.end <= span.begin) return;  // the rule of rows says so
    const std::uint64_t rows = span.end - span.begin;
    if (facts.bytes % rows != 0) {
      return kit.found(
          Rule::memory,
          fmt::format("a block is {} rows of '{}', but a page of {} bytes is {:.2f} bytes a row",
                      rows, span.key, facts.bytes,
                      static_cast<double>(facts.bytes) / static_cast<double>(rows)),
          {fmt::format("bind({})", stride),
           fmt::format("bound_row_span(1) = rows {} to {}", span.begin, span.end)});
    }
    const std::uint64_t row = facts.bytes / rows;
    for (const std::uint32_t block : {1u, 2u, 3u, 5u}) {
      const std::vector<BoundRows> spans = leaf.bound_row_span(BlockId(block));
      if (i >= spans.size() || spans[i].end <= spans[i].begin) return;
      const std::uint64_t by_row = spans[i].begin * row;
      const std::uint64_t by_stride = block * stride;
      if (by_row != by_stride) {
        return kit.found(
            Rule::memory,
            fmt::format(
                "rows of {} bytes shear at a stride of {}, which alignment {} admits: block {} "
                "begins at byte {} by its rows and at byte {} by the stride",
                row, stride, facts.alignment ? std::to_string(*facts.alignment) : "none", block,
                by_row, by_stride),
            {fmt::format("bind({})", stride), fmt::format("bound_row_span({}) = rows {} to {}",
                                                          block, spans[i].begin, spans[i].end)});
      }
    }
  }
}

}  // namespace

void check_memory(Kit& kit) {
  const Facts& facts = kit.facts();
  const std::uint32_t slots = kit.fresh()->slots_per_page(facts.page);
  if (facts.of_text() && (slots == 0 || slots > facts.page || facts.page % slots != 0)) {
    kit.found(Rule::memory, fmt::format("slots_per_page({}) is {}, which does not divide {} tokens",
                                        facts.page, slots, facts.page));
  }
  // As it is: a leaf that was never bound has pages without padding.
  for (const std::uint64_t stride : strides_of(facts)) {
    const Leaf leaf = kit.fresh();
    try {
      leaf->bind(stride);
    } catch (const std::exception& error) {
      return kit.found(
          Rule::memory,
          fmt::format("it refuses a stride of {} bytes, which holds its page of {} and which "
                      "its alignment of {} admits: {}",
                      stride, facts.bytes,
                      facts.alignment ? std::to_string(*facts.alignment) : "none", error.what()),
          {fmt::format("bind({})", stride)});
    }
    check_row_bytes(kit, *leaf, stride);
    if (kit.broken(Rule::memory)) return;
  }
  // In an arena of its own, as a pool would lay it out.
  const Leaf leaf = kit.fresh();
  const std::vector<PageSpec> pages = {PageSpec::of(*leaf)};
  const Geometry geometry = plan_geometry(facts.least_stride() * 64, pages);
  const LeafGeometry& tiled = geometry.leaf(LeafId(0));
  leaf->bind(tiled.page_stride);
  check_row_bytes(kit, *leaf, tiled.page_stride);
}

void check_reach(Kit& kit) {
  const Facts& facts = kit.facts();
  const std::vector<std::uint32_t>& tail = facts.tail;
  for (std::uint32_t n = 1; n < tail.size(); ++n) {
    if (tail[n] >= tail[n - 1]) continue;
    return kit.found(
        Rule::reach,
        fmt::format(
            "tail_begin({}) is {}, but tail_begin({}) was {}: tokens {} to {} were let go and "
            "come back",
            n, tail[n], n - 1, tail[n - 1], tail[n], tail[n - 1] - 1),
        {fmt::format("tail_begin({}) = {}", n - 1, tail[n - 1]),
         fmt::format("tail_begin({}) = {}", n, tail[n])});
  }
  // Asked again from the end, of a new leaf: a function of n gives what it gave.
  const Leaf again = kit.fresh();
  std::optional<std::uint32_t> other;
  for (std::uint32_t n = static_cast<std::uint32_t>(tail.size()); n-- > 0;) {
    if (again->group_id().pattern.tail_begin(n) != tail[n]) other = n;
  }
  if (other) {
    const std::uint32_t now = again->group_id().pattern.tail_begin(*other);
    return kit.found(
        Rule::reach,
        fmt::format("tail_begin({}) was {} and is {}: it is no function of n", *other, tail[*other],
                    now),
        {fmt::format("tail_begin({}) = {}, asked in ascending order", *other, tail[*other]),
         fmt::format("tail_begin({}) = {}, asked once more", *other, now)});
  }
  if (tail.empty()) return;
  // A pattern hides a tail that begins behind its end; what a manager does first does not.
  try {
    (void)facts.pattern.tabulated(facts.max_len);
  } catch (const InvalidArgument& error) {
    kit.found(Rule::reach, error.what());
  }
}

void check_reserve(Kit& kit) {
  const Facts& facts = kit.facts();
  const Leaf leaf = kit.bound();
  const std::uint32_t page = facts.page;
  std::vector<std::uint32_t> lengths;  // slots
  for (std::uint32_t slots = 1; slots <= pages_of(facts.max_len, page);
       slots += slots < 16 ? 1 : slots / 3)
    lengths.push_back(slots);
  std::uint32_t most_slack = 0;
  std::string slack;
  for (const std::uint32_t slots : lengths) {
    for (const std::uint32_t step : {1u, std::max(page, 2u) - 1, page, page + 1, 3 * page + 1}) {
      const ReserveOptions options{.enable_prefix_caching = false, .step_tokens = step};
      const std::uint32_t figure = leaf->blocks_to_reserve(slots, page, options);
      const std::string call = fmt::format("blocks_to_reserve({}, step_tokens={})", slots, step);
      std::uint32_t most = 0;
      std::string held;
      switch (facts.writing) {
        case Writing::append:
          for (std::uint32_t n = 0;
               n <= std::min<std::uint64_t>(std::uint64_t{slots} * page, facts.max_len); ++n) {
            const SlotReach reach = facts.reach(n);
            const std::uint32_t end = std::min(pages_of(std::uint64_t{n} + step, page), slots);
            const std::uint32_t holds = reach.head_end + (end - std::min(end, reach.tail_begin));
            if (holds <= most) continue;
            most = holds;
            held = fmt::format("with {} tokens computed and {} planned", n, step);
          }
          break;
        case Writing::in_place:
          most = 1 + facts.rollback;
          held = fmt::format("for the live state and {} for rollback", facts.rollback);
          break;
        case Writing::write_once:
          most = slots;
          held = "by the encoder's tokens";
          break;
        case Writing::exclusive:
          most = 1;
          held = "from the first step to release";
          break;
      }
      if (figure < most) {
        return kit.found(
            Rule::reserve,
            fmt::format("{} is {}, but {} blocks are held {}", call, figure, most, held),
            {fmt::format("{} = {}", call, figure),
             fmt::format("{} blocks are held {}, in pages of {} tokens", most, held, page)});
      }
      if (const std::uint32_t again = leaf->blocks_to_reserve(slots, page, options);
          again != figure) {
        return kit.found(
            Rule::reserve, fmt::format("{} was {} and is {}", call, figure, again),
            {fmt::format("{} = {}", call, figure), fmt::format("{} = {}", call, again)});
      }
      const std::uint32_t caching = leaf->blocks_to_reserve(
          slots, page, {.enable_prefix_caching = true, .step_tokens = step});
      const std::uint32_t checkpoint = facts.is_state() ? 1 : 0;
      if (caching < figure || caching < most + checkpoint) {
        return kit.found(
            Rule::reserve,
            fmt::format("with prefix caching {} is {}; without it is {}{}", call, caching, figure,
                        checkpoint != 0 ? ", and a checkpoint is one more" : ""),
            {fmt::format("{} = {}", call, figure),
             fmt::format("the same with enable_prefix_caching = {}", caching)});
      }
      if (figure - most > most_slack) {
        most_slack = figure - most;
        slack = fmt::format("{} is {}, and no request holds more than {} blocks: {} lie idle", call,
                            figure, most, most_slack);
      }
    }
  }
  if (most_slack > 0) kit.note("reserve: " + slack);
}

void check_cacheable(Kit& kit) {
  const bool cacheable = kit.fresh()->cacheable();
  const bool follows = kit.facts().writing != Writing::exclusive;
  if (cacheable == follows) return;
  kit.found(Rule::cacheable,
            fmt::format("cacheable is {}, but what is written '{}' is {}", cacheable,
                        name_of(kit.facts().writing), follows ? "cached" : "never cached"));
}

void check_rows(Kit& kit) {
  for (const std::uint64_t stride : strides_of(kit.facts())) {
    const Leaf leaf = kit.fresh();
    leaf->bind(stride);
    struct Owned {
      std::uint32_t block;
      BoundRows rows;
    };
    std::vector<Owned> owned;
    const std::size_t inputs = leaf->bound_row_span(BlockId(1)).size();
    for (std::uint32_t block = 0; block < 9; ++block) {
      const std::vector<BoundRows> spans = leaf->bound_row_span(BlockId(block));
      if (spans.size() != inputs) {
        return kit.found(Rule::rows,
                         fmt::format("block {} has rows of {} inputs, block 1 of {}", block,
                                     spans.size(), inputs),
                         {fmt::format("bind({})", stride)});
      }
      for (const BoundRows& rows : spans) {
        if (rows.end <= rows.begin) {
          return kit.found(Rule::rows,
                           fmt::format("block {} has rows {} to {} of '{}': none", block,
                                       rows.begin, rows.end, rows.key),
                           {fmt::format("bind({})", stride)});
        }
        for (const Owned& other : owned) {
          if (other.rows.key != rows.key || other.rows.end <= rows.begin ||
              rows.end <= other.rows.begin)
            continue;
          return kit.found(
              Rule::rows,
              fmt::format("blocks {} and {} share row {} of '{}'", other.block, block,
                          std::max(other.rows.begin, rows.begin), rows.key),
              {fmt::format("bind({})", stride),
               fmt::format("bound_row_span({}) = rows {} to {}", other.block, other.rows.begin,
                           other.rows.end),
               fmt::format("bound_row_span({}) = rows {} to {}", block, rows.begin, rows.end)});
        }
        owned.push_back({block, rows});
      }
    }
  }
}

void check_copies(Kit& kit) {
  const Leaf leaf = kit.bound();
  for (const auto& [from, to] : {std::pair{1u, 2u}, {2u, 1u}, {1u, 3u}, {4u, 2u}}) {
    const std::vector<BoundRows> source = leaf->bound_row_span(BlockId(from));
    const std::vector<BoundRows> target = leaf->bound_row_span(BlockId(to));
    const auto copies = leaf->bound_row_copies(BlockId(from), BlockId(to));
    const std::string call = fmt::format("bound_row_copies({}, {})", from, to);
    std::vector<std::string> lines = {fmt::format("bind({})", kit.facts().least_stride())};
    for (const auto& [src, dst] : copies) {
      lines.push_back(fmt::format("{} pairs rows {} to {} of '{}' with {} to {} of '{}'", call,
                                  src.begin, src.end, src.key, dst.begin, dst.end, dst.key));
    }
    const auto within = [](const BoundRows& rows, const std::vector<BoundRows>& spans) {
      return std::ranges::any_of(spans, [&](const BoundRows& span) {
        return span.key == rows.key && span.begin <= rows.begin && rows.end <= span.end;
      });
    };
    std::map<std::string, std::uint64_t> moved;
    for (std::size_t i = 0; i < copies.size(); ++i) {
      const auto& [src, dst] = copies[i];
      if (src.key != dst.key || src.end - src.begin != dst.end - dst.begin) {
        return kit.found(Rule::copies,
                         fmt::format("{} copies {} rows of '{}' to {} rows of '{}'", call,
                                     src.end - src.begin, src.key, dst.end - dst.begin, dst.key),
                         lines);
      }
      if (src.begin >= src.end || !within(src, source) || !within(dst, target)) {
        return kit.found(Rule::copies,
                         fmt::format("{} moves rows {} to {} to {} to {}, which are not all of "
                                     "these blocks",
                                     call, src.begin, src.end, dst.begin, dst.end),
                         lines);
      }
      for (std::size_t j = 0; j < i; ++j) {
        const BoundRows& other = copies[j].second;
        if (other.key == dst.key && other.begin < dst.end && dst.begin < other.end) {
          return kit.found(Rule::copies,
                           fmt::format("{} writes row {} of '{}' twice", call,
                                       std::max(other.begin, dst.begin), dst.key),
                           lines);
        }
      }
      moved[src.key] += src.end - src.begin;
    }
    for (const BoundRows& span : source) {
      if (moved[span.key] == span.end - span.begin) continue;
      return kit.found(Rule::copies,
                       fmt::format("{} copies {} of the {} rows of '{}'", call, moved[span.key],
                                   span.end - span.begin, span.key),
                       lines);
    }
  }
}

}  // namespace kvleaf::testing::contract
