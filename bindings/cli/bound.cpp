#include "bound.h"

#include <algorithm>
#include <queue>
#include <unordered_map>
#include <utility>
#include <vector>

#include "numbers.h"

namespace kvleaf::cli {
namespace {

constexpr std::uint32_t none = UINT32_MAX;

/// The full pages of each prompt, numbered so that two prompts share a number where they share all
/// tokens up to that page's end.
class Pages {
 public:
  Pages(const Trace& trace, std::uint32_t page_tokens) : trace_(trace), page_tokens_(page_tokens) {
    std::unordered_map<std::uint64_t, std::uint32_t> numbers;
    for (const TraceRow& row : trace.rows) {
      first_.push_back(pages_.size());
      const std::span<const std::uint32_t> ids = trace.ids_of(row);
      const std::uint32_t hashed = trace.hashed_tokens(row);
      for (std::uint32_t page = 0; page < row.input_length / page_tokens; ++page) {
        const std::uint32_t last = (page + 1) * page_tokens - 1;  // token
        if (last >= hashed) {
          pages_.push_back(count_++);  // its own
          continue;
        }
        // An id stands for its block and all before it, so it and the place in it are the page.
        const std::uint64_t key = std::uint64_t{ids[last / trace.block_tokens]} << 32 | page;
        const auto [it, is_new] = numbers.try_emplace(key, count_);
        count_ += is_new ? 1 : 0;
        pages_.push_back(it->second);
      }
    }
    first_.push_back(pages_.size());
  }

  std::uint32_t count() const { return count_; }
  std::size_t rows() const { return first_.size() - 1; }
  std::span<const std::uint32_t> of(std::size_t row) const {
    return std::span(pages_).subspan(first_[row], first_[row + 1] - first_[row]);
  }
  std::size_t first(std::size_t row) const { return first_[row]; }
  std::size_t total() const { return pages_.size(); }
  /// Leading pages of a prompt that may be hit: its last token is computed.
  std::size_t most_hit(std::size_t row) const {
    return (trace_.rows[row].input_length - 1) / page_tokens_;
  }

 private:
  const Trace& trace_;
  std::uint32_t page_tokens_;
  std::uint32_t count_ = 0;
  std::vector<std::uint32_t> pages_;  // of all rows, one after another
  std::vector<std::size_t> first_;
};

template <class Held>
std::uint64_t leading(const Pages& pages, std::size_t row, Held held) {
  const auto asked = pages.of(row).first(std::min(pages.most_hit(row), pages.of(row).size()));
  return static_cast<std::uint64_t>(std::ranges::find_if_not(asked, held) - asked.begin());
}

/// Pages hit.
std::uint64_t lru(const Pages& pages, std::uint64_t most) {
  struct Node {
    std::uint32_t older = none;
    std::uint32_t newer = none;
    bool held = false;
  };
  std::vector<Node> nodes(std::size_t{pages.count()} + 1);
  const std::uint32_t ends = pages.count();  // the ring's: its newer is the oldest
  nodes[ends] = {ends, ends, false};
  const auto unlink = [&](std::uint32_t page) {
    nodes[nodes[page].older].newer = nodes[page].newer;
    nodes[nodes[page].newer].older = nodes[page].older;
  };
  std::uint64_t hit = 0;
  std::uint64_t size = 0;
  for (std::size_t row = 0; row < pages.rows(); ++row) {
    const auto asked = pages.of(row);
    hit += leading(pages, row, [&](std::uint32_t page) { return nodes[page].held; });
    for (auto page = asked.rbegin(); page != asked.rend(); ++page) {
      Node& node = nodes[*page];
      if (node.held) {
        unlink(*page);
      } else {
        ++size;
      }
      node = {nodes[ends].older, ends, true};
      nodes[node.older].newer = nodes[ends].older = *page;
    }
    for (; size > most; --size) {
      const std::uint32_t oldest = nodes[ends].newer;
      unlink(oldest);
      nodes[oldest].held = false;
    }
  }
  return hit;
}

/// Pages hit.
std::uint64_t optimum(const Pages& pages, std::uint64_t most) {
  // The row that asks for a page next, by where it stands in this one.
  std::vector<std::uint32_t> next(pages.total());
  std::vector<std::uint32_t> seen(pages.count(), none);
  for (std::size_t row = pages.rows(); row-- > 0;) {
    const auto asked = pages.of(row);
    for (std::size_t i = 0; i < asked.size(); ++i) {
      next[pages.first(row) + i] = seen[asked[i]];
      seen[asked[i]] = static_cast<std::uint32_t>(row);
    }
  }
  struct Kept {
    std::uint32_t next;
    std::uint32_t depth;
    std::uint32_t page;
    bool operator<(const Kept& other) const {
      return std::pair(next, depth) < std::pair(other.next, other.depth);
    }
  };
  std::priority_queue<Kept> order;  // the top is asked for last; entries that were overtaken stay
  std::vector<std::uint32_t>& held = seen;  // none, or the row that asks for it next
  std::ranges::fill(held, none);
  std::uint64_t hit = 0;
  std::uint64_t size = 0;
  for (std::size_t row = 0; row < pages.rows(); ++row) {
    const auto asked = pages.of(row);
    hit += leading(pages, row, [&](std::uint32_t page) { return held[page] != none; });
    for (std::uint32_t i = 0; i < asked.size(); ++i) {
      const std::uint32_t again = next[pages.first(row) + i];
      size += (again != none ? 1 : 0) - (held[asked[i]] != none ? 1 : 0);
      held[asked[i]] = again;
      if (again != none) order.push({again, i, asked[i]});
    }
    while (size > most) {
      const Kept last = order.top();
      order.pop();
      if (held[last.page] != last.next) continue;
      held[last.page] = none;
      --size;
    }
  }
  return hit;
}

}  // namespace

double Bound::lru_pct() const { return per_cent(lru_hit_tokens, prompt_tokens); }
double Bound::optimum_pct() const { return per_cent(optimum_hit_tokens, prompt_tokens); }

Bound bound(const Trace& trace, std::uint32_t page_tokens, std::optional<std::uint64_t> pages) {
  if (page_tokens == 0) throw InvalidArgument("pages of 0 tokens; at least 1 would be accepted");
  const Pages of_trace(trace, page_tokens);
  const std::uint64_t most = pages.value_or(UINT64_MAX);
  return {.pages = pages,
          .page_tokens = page_tokens,
          .prompt_tokens = trace.prompt_tokens(),
          .lru_hit_tokens = lru(of_trace, most) * page_tokens,
          .optimum_hit_tokens = optimum(of_trace, most) * page_tokens};
}

std::optional<std::uint64_t> prefix_pages(const BlockManager& manager) {
  const Geometry& geometry = manager.geometry();
  const std::uint32_t max_len = manager.options().max_len;
  const std::uint32_t page_tokens = manager.options().page_tokens;
  double bytes = 0;  // of a page of page_tokens
  for (std::uint32_t i = 0; i < manager.leaves().size(); ++i) {
    const KVLeafRegion& leaf = *manager.leaves()[i];
    const KVCacheGroupId& group = leaf.group_id();
    const std::uint32_t tokens = manager.tokens_per_page(LeafId{i});
    if (group.writing != Writing::append || group.pattern.tail_begin(max_len) > 0) continue;
    bytes += static_cast<double>(geometry.leaf(LeafId{i}).page_stride) * page_tokens / tokens;
  }
  if (bytes == 0) return {};
  const double memory =
      static_cast<double>(geometry.huge_bytes()) * static_cast<double>(geometry.huge_blocks());
  return static_cast<std::uint64_t>(memory / bytes);
}

}  // namespace kvleaf::cli
