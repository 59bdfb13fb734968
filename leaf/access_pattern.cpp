#include "kvleaf/leaf/access_pattern.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <numeric>
#include <utility>

#include "kvleaf/leaf/errors.h"

namespace kvleaf {
namespace {

constexpr std::uint64_t max_tokens = std::numeric_limits<std::uint32_t>::max();

constexpr std::uint64_t ceil_div(std::uint64_t a, std::uint64_t b) noexcept {
  return a / b + (a % b != 0);
}

void require_page(std::uint32_t tokens_per_page) {
  if (tokens_per_page == 0) throw InvalidArgument("tokens_per_page is 0: a page covers a token");
}

// A window's span of `span` tokens meets the most pages where it starts on a page's last token. An
// empty span still holds the partly filled page, which exists only where pages have two tokens.
std::uint64_t most_window_slots(std::uint64_t window, std::uint64_t sinks, std::uint64_t page,
                                std::uint64_t step_tokens) noexcept {
  const std::uint64_t span = window + step_tokens - 1;
  const std::uint64_t tail = span == 0 ? (page > 1 ? 1 : 0) : ceil_div(span - 1, page) + 1;
  return ceil_div(sinks, page) + tail;
}

// Within a chunk the tail stands still, so its last token holds most. Chunks begin at the multiples
// of the chunk modulo the page, which repeat after page / gcd of them; later ones are only nearer
// to the end of the row.
std::uint64_t most_chunk_slots(std::uint64_t chunk, std::uint64_t page, std::uint64_t num_slots,
                               std::uint64_t step_tokens) noexcept {
  const std::uint64_t gcd = std::gcd(chunk, page);
  const std::uint64_t reach = chunk - 1 + step_tokens;  // tokens from a chunk's begin, at most
  const std::uint64_t bound = ceil_div(page - gcd + reach, page);
  const std::uint64_t chunks = std::min(page / gcd, num_slots * page / chunk + 1);
  std::uint64_t most = 0;
  for (std::uint64_t i = 0; i < chunks && most < bound; ++i) {
    const std::uint64_t begin = i * chunk / page;
    if (num_slots - begin <= most) break;
    most = std::max(most, std::min(ceil_div(i * chunk + reach, page), num_slots) - begin);
  }
  return most;
}

}  // namespace

AccessPattern AccessPattern::full() { return AccessPattern(); }

AccessPattern AccessPattern::window(std::uint32_t tokens, std::uint32_t sinks) {
  if (tokens == 0)
    throw InvalidArgument("a window of 0 tokens: the query counts, so 1 is the least");
  AccessPattern pattern;
  pattern.kind_ = Kind::window;
  pattern.span_ = tokens;
  pattern.head_ = sinks;
  return pattern;
}

AccessPattern AccessPattern::chunk(std::uint32_t tokens) {
  if (tokens == 0) throw InvalidArgument("a chunk of 0 tokens: 1 is the least");
  AccessPattern pattern;
  pattern.kind_ = Kind::chunk;
  pattern.span_ = tokens;
  return pattern;
}

AccessPattern AccessPattern::point() {
  AccessPattern pattern;
  pattern.kind_ = Kind::point;
  return pattern;
}

AccessPattern AccessPattern::encoder() {
  AccessPattern pattern;
  pattern.kind_ = Kind::whole;
  pattern.domain_ = Domain::encoder;
  return pattern;
}

AccessPattern AccessPattern::none() {
  AccessPattern pattern;
  pattern.kind_ = Kind::none;
  pattern.domain_ = Domain::nothing;
  return pattern;
}

AccessPattern AccessPattern::custom(Custom reach) {
  if (!reach.tail_begin) throw InvalidArgument("a custom pattern needs a function tail_begin(n)");
  if (reach.ahead > 1) {
    throw InvalidArgument(
        fmt::format("ahead is {}: an entry is computed from its own token (0) or "
                    "from the next one as well (1)",
                    reach.ahead));
  }
  AccessPattern pattern;
  pattern.kind_ = Kind::custom;
  pattern.head_ = reach.head;
  pattern.ahead_ = reach.ahead;
  pattern.function_ = std::make_shared<const TailBegin>(std::move(reach.tail_begin));
  return pattern;
}

std::uint32_t AccessPattern::tail_begin(std::uint32_t n) const {
  switch (kind_) {
    case Kind::full: return 0;
    case Kind::window: return n < span_ ? 0 : n - span_ + 1;
    case Kind::chunk: return n - n % span_;
    case Kind::point: return n == 0 ? 0 : n - 1;
    case Kind::whole:
    case Kind::none: return n;
    case Kind::custom:
      if (table_ == nullptr) return std::min((*function_)(n), n);
      return (*table_)[std::min<std::size_t>(n, table_->size() - 1)];
  }
  return 0;
}

std::uint32_t AccessPattern::tail_reaches(std::uint32_t token) const {
  const auto at_most = [](std::uint64_t n) {
    return static_cast<std::uint32_t>(std::min(n, max_tokens));
  };
  if (token == 0) return 0;
  switch (kind_) {
    case Kind::full: break;
    case Kind::window: return at_most(std::uint64_t{token} + span_ - 1);
    case Kind::chunk: return at_most(ceil_div(token, span_) * span_);
    case Kind::point: return at_most(std::uint64_t{token} + 1);
    case Kind::whole:
    case Kind::none: return token;
    case Kind::custom:
      if (table_ == nullptr) return token;
      const auto at = std::lower_bound(table_->begin(), table_->end(), token);
      if (at == table_->end()) break;  // beyond the table the tail stands still
      return static_cast<std::uint32_t>(at - table_->begin());
  }
  return static_cast<std::uint32_t>(max_tokens);
}

SlotReach AccessPattern::slots(std::uint32_t n, std::uint32_t tokens_per_page,
                               std::uint32_t encoder_tokens) const {
  require_page(tokens_per_page);
  const auto pages = [&](std::uint32_t tokens) {
    return static_cast<std::uint32_t>(ceil_div(tokens, tokens_per_page));
  };
  switch (domain_) {
    case Domain::nothing: return {};
    case Domain::encoder: return {.head_end = 0, .tail_begin = 0, .end = pages(encoder_tokens)};
    case Domain::text: break;
  }
  // Rounding the begin down and the end up takes in the partly filled page, even where the tail is
  // empty: after 5 tokens of pages of 4, [5, 5) is slot 1.
  const std::uint32_t begin = tail_begin(n) / tokens_per_page;
  return {
      .head_end = std::min(pages(std::min(head_, n)), begin), .tail_begin = begin, .end = pages(n)};
}

std::vector<std::uint32_t> AccessPattern::reach(std::uint32_t n, std::uint32_t tokens_per_page,
                                                std::uint32_t encoder_tokens) const {
  const SlotReach held = slots(n, tokens_per_page, encoder_tokens);
  std::vector<std::uint32_t> list(held.count());
  const auto tail = list.begin() + held.head_end;
  std::iota(list.begin(), tail, 0U);
  std::iota(tail, list.end(), held.tail_begin);
  return list;
}

std::uint32_t AccessPattern::most_slots(std::uint32_t tokens_per_page, std::uint32_t num_slots,
                                        std::uint32_t step_tokens) const {
  require_page(tokens_per_page);
  std::uint64_t most = num_slots;
  switch (kind_) {
    case Kind::full:
    case Kind::whole: break;
    case Kind::none: most = 0; break;
    case Kind::window: most = most_window_slots(span_, head_, tokens_per_page, step_tokens); break;
    case Kind::point: most = most_window_slots(2, 0, tokens_per_page, step_tokens); break;
    case Kind::chunk:
      most = most_chunk_slots(span_, tokens_per_page, num_slots, step_tokens);
      break;
    case Kind::custom: most = most_custom_slots(tokens_per_page, num_slots, step_tokens); break;
  }
  return static_cast<std::uint32_t>(std::min<std::uint64_t>(most, num_slots));
}

// Up to n = head everything is held, so n = head holds most of those. From there on n holds end(n)
// slots less those between the head and the tail, a number that never decreases: more than `most`
// is held only where the end has passed `most` and those missing now, so all n before can be
// skipped. The end moves on by a page at least with each look, and in doubling strides where the
// tail stands still.
std::uint64_t AccessPattern::most_custom_slots(std::uint64_t page, std::uint64_t num_slots,
                                               std::uint64_t step_tokens) const {
  const std::uint64_t last = std::min(num_slots * page, max_tokens);
  const std::uint64_t head_slots = ceil_div(head_, page);
  const auto slot_at = [&](std::uint64_t n) {
    return tail_begin(static_cast<std::uint32_t>(n)) / page;
  };
  std::uint64_t most = 0;
  std::optional<std::uint64_t> before;
  for (std::uint64_t n = std::min<std::uint64_t>(head_, last); n <= last;) {
    const std::uint64_t slot = slot_at(n);
    std::uint64_t stride = page;
    while (slot == before && n + stride <= last && slot_at(n + stride) == slot) {
      n += stride;
      stride *= 2;
    }
    before = slot;
    const std::uint64_t missing = slot > head_slots ? slot - head_slots : 0;
    const std::uint64_t end = std::min(ceil_div(n + step_tokens, page), num_slots);
    most = std::max(most, end - missing);
    if (most + missing >= num_slots) break;
    n = (most + missing) * page + 1 - step_tokens;
  }
  return most;
}

AccessPattern AccessPattern::tabulated(std::uint32_t max_len) const {
  if (kind_ != Kind::custom) return *this;
  auto table = std::make_shared<std::vector<std::uint32_t>>();
  table->reserve(std::size_t{max_len} + 1);
  std::uint32_t before = 0;
  for (std::uint64_t i = 0; i <= max_len; ++i) {
    const auto n = static_cast<std::uint32_t>(i);
    const std::uint32_t begin = (*function_)(n);
    if (begin > n) {
      throw InvalidArgument(
          fmt::format("tail_begin({}) is {}: a tail begins at or before {}, where "
                      "it ends",
                      n, begin, n));
    }
    if (begin < before) {
      throw InvalidArgument(
          fmt::format("tail_begin({}) is {}, but tail_begin({}) was {}: it may "
                      "never decrease, what was let go does not come back",
                      n, begin, n - 1, before));
    }
    table->push_back(begin);
    before = begin;
  }
  AccessPattern pattern = *this;
  pattern.table_ = std::move(table);
  return pattern;
}

std::string AccessPattern::to_string() const {
  switch (kind_) {
    case Kind::full: return "full";
    case Kind::window:
      return head_ == 0 ? fmt::format("window({})", span_)
                        : fmt::format("window({}, sinks={})", span_, head_);
    case Kind::chunk: return fmt::format("chunk({})", span_);
    case Kind::point: return "point";
    case Kind::whole: return "encoder";
    case Kind::none: return "none";
    case Kind::custom: return fmt::format("custom(head={}, ahead={})", head_, ahead_);
  }
  return "";
}

bool AccessPattern::operator==(const AccessPattern& other) const noexcept {
  // A table is what the function was found to say, not a declaration of its own.
  return kind_ == other.kind_ && head_ == other.head_ && span_ == other.span_ &&
         ahead_ == other.ahead_ && function_ == other.function_;
}

}  // namespace kvleaf
