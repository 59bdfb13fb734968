// AccessPattern: which tokens' entries must still be held to compute the next token.
//
// With n tokens computed, the entries needed to compute token n are
//
//     [0, head)  ∪  [tail_begin(n), n)          head constant, tail_begin never decreasing
//
// and the same set answers three questions: what a prefix hit at n needs, what may be freed once n
// has settled, and how many blocks to reserve. A slot that falls out of reach never comes back.
// A value type; thread-safe but for a custom function, which is called by whoever asks.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace kvleaf {

/// Slots [0, head_end) ∪ [tail_begin, end), in blocks; head_end <= tail_begin <= end.
struct SlotReach {
  std::uint32_t head_end = 0;
  std::uint32_t tail_begin = 0;
  std::uint32_t end = 0;

  bool contains(std::uint32_t slot) const noexcept {
    return slot < head_end || (slot >= tail_begin && slot < end);
  }
  std::uint32_t count() const noexcept { return head_end + (end - tail_begin); }
  bool operator==(const SlotReach&) const = default;
};

class AccessPattern {
 public:
  /// What the entries are entries of.
  enum class Domain : std::uint8_t {
    text,     // the request's own tokens
    encoder,  // the encoder's tokens: all of them, whatever n is
    nothing,  // no tokens at all: scratch
  };

  /// tail_begin(n): the first token of [tail_begin, n) that computing token n still needs.
  using TailBegin = std::function<std::uint32_t(std::uint32_t n)>;
  struct Custom {
    std::uint32_t head = 0;
    TailBegin tail_begin = {};
    std::uint32_t ahead = 0;  // 1: entry i is computed from token i + 1 as well
  };

  static AccessPattern full();
  /// The last `tokens` tokens, the query counted, and the first `sinks`. Throws InvalidArgument for
  /// 0.
  static AccessPattern window(std::uint32_t tokens, std::uint32_t sinks = 0);
  /// From the last multiple of `tokens`. Throws InvalidArgument for 0.
  static AccessPattern chunk(std::uint32_t tokens);
  /// A state: what ends at n, and valid only there.
  static AccessPattern point();
  static AccessPattern encoder();
  static AccessPattern none();
  /// Throws InvalidArgument without a function, or if ahead > 1.
  static AccessPattern custom(Custom reach);

  Domain domain() const noexcept { return domain_; }
  std::uint32_t head() const noexcept { return head_; }
  std::uint32_t ahead() const noexcept { return ahead_; }

  /// First token of the tail with n tokens computed, in [0, n]. Of an encoder or of nothing: n.
  std::uint32_t tail_begin(std::uint32_t n) const;

  /// The least n whose tail begins at `token` or behind it: the reverse of tail_begin. 2^32 - 1
  /// where there is none. A custom pattern must be tabulated; one that is not says `token`, before
  /// which no tail can begin there.
  std::uint32_t tail_reaches(std::uint32_t token) const;

  /// The slots of `tokens_per_page` tokens that intersect the reach at n, the partly filled one
  /// that token n goes into included. Encoder: all pages of `encoder_tokens`. Nothing: empty.
  /// Throws InvalidArgument for pages of 0 tokens, here and below.
  SlotReach slots(std::uint32_t n, std::uint32_t tokens_per_page,
                  std::uint32_t encoder_tokens = 0) const;

  /// The same as a sorted list.
  std::vector<std::uint32_t> reach(std::uint32_t n, std::uint32_t tokens_per_page,
                                   std::uint32_t encoder_tokens = 0) const;

  /// The most slots held at once while `num_slots` slots are filled with at most `step_tokens`
  /// tokens planned and not yet settled. Exact, and attained by some start.
  ///   window:  min(num_slots, ⌈sinks/P⌉ + ⌈(W + c - 2)/P⌉ + 1)
  /// Closed, but for a chunk (a loop over P / gcd(C, P) offsets at most) and a custom function (a
  /// call or two per distinct slot of its tail).
  std::uint32_t most_slots(std::uint32_t tokens_per_page, std::uint32_t num_slots,
                           std::uint32_t step_tokens) const;

  /// The same pattern with a custom function evaluated once for every n in [0, max_len], so that it
  /// is not called again: beyond max_len the tail stands still. Throws InvalidArgument, naming n,
  /// where it decreases or passes n. Other patterns are returned as they are.
  AccessPattern tabulated(std::uint32_t max_len) const;

  /// "full", "window(1024, sinks=4)", …
  std::string to_string() const;

  /// Equal declarations; two custom patterns are equal only if they share one function object.
  bool operator==(const AccessPattern& other) const noexcept;

 private:
  enum class Kind : std::uint8_t { full, window, chunk, point, whole, none, custom };
  AccessPattern() = default;
  std::uint64_t most_custom_slots(std::uint64_t page, std::uint64_t num_slots,
                                  std::uint64_t step_tokens) const;

  Kind kind_ = Kind::full;  // nobody outside this class can ask for it
  Domain domain_ = Domain::text;
  std::uint32_t head_ = 0;
  std::uint32_t span_ = 0;  // window or chunk, in tokens
  std::uint32_t ahead_ = 0;
  std::shared_ptr<const TailBegin> function_;                // custom only
  std::shared_ptr<const std::vector<std::uint32_t>> table_;  // custom, tabulated: tail_begin(0…max)
};

}  // namespace kvleaf
