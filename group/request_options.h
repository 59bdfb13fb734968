// What a caller says of a request, and what the manager answers: plain data.
#pragma once

#include <array>
#include <cstdint>
#include <optional>

#include <string>
#include <utility>

#include <vector>

#include "kvleaf/leaf/ids.h"

namespace kvleaf {

/// A media item whose placeholder tokens stand at [offset, offset + length) of the prompt.
struct MediaItem {
  std::uint32_t offset = 0;  // tokens
  std::uint32_t length = 0;  // tokens
  std::string digest;        // identity of its content
  bool whole = false;        // its tokens attend to each other both ways: nothing ends inside it
};

/// The encoder's input: what a CrossAttentionLeaf holds.
struct EncoderInput {
  std::string digest;        // identity of its content
  std::uint32_t tokens = 0;  // encoder tokens
  std::uint32_t at = 0;      // text position from which the text depends on it
};

struct AdmitOptions {
  std::string salt;     // nothing is shared across salts
  std::string adapter;  // name and version together, "a@2"; nothing is shared across adapters
  std::optional<EncoderInput> encoder = {};
  std::vector<MediaItem> media;  // ascending, not overlapping
  std::int32_t priority =
      0;  // of its cached pages: higher ones stay longer; clamped to [-128, 127]
  std::optional<std::uint32_t>
      guarantee;  // tokens it may grow to without ever being refused memory
  std::optional<std::uint32_t> addressable = {};  // leading tokens that may be matched or committed
  bool partial = false;  // a hit may copy the common part of a page (attention leaves only)
};

/// What one group alone cost: how much longer the hit would be if that group lacked nothing.
struct GroupLoss {
  std::string group;
  std::uint32_t tokens = 0;
  bool operator==(const GroupLoss&) const = default;
};

struct Admission {
  std::uint32_t hit_tokens = 0;  // leading tokens that need not be computed
  std::vector<GroupLoss> lost;   // only groups that lost something
  std::string reason;            // why nothing hit, or what ended the hit; "" when nothing was lost
  std::optional<std::uint32_t> next_stop = {};  // where the next chunk should end, in tokens
  bool encoder_cached = false;  // the encoder's pages are there already: no encoder run is needed
};

/// One row of a step: `new_tokens` more tokens of `request`.
struct StepRequest {
  RequestId request{0};
  std::uint32_t new_tokens = 0;
};

struct BlockCopy {
  LeafId leaf{0};
  BlockId src{0};
  BlockId dst{0};
  bool operator==(const BlockCopy&) const = default;
};
struct ZeroFill {
  LeafId leaf{0};
  BlockId block{0};
  bool operator==(const ZeroFill&) const = default;
};
struct Refusal {
  RequestId request{0};
  std::string why;  // the message of a PoolExhausted
};

/// A forward that was begun. Valid until max_steps_in_flight further steps were begun.
struct Step {
  StepId id{0};
  std::vector<RequestId> served;  // in the order given
  std::vector<Refusal> refused;   // these changed nothing
  std::vector<BlockCopy>
      copies;  // to run before the forward, in any order: sources are read as they
               // were before the step, no block is both copied to and cleared
  std::vector<ZeroFill> zero_fills;  // to run before the forward
};

/// Tokens of a step that stand, for a request whose drafts were rejected.
struct Kept {
  RequestId request{0};
  std::uint32_t tokens = 0;
};

/// What stays findable when a request ends.
enum class Prefix : std::uint8_t { keep, drop };

struct Event {
  enum class Kind : std::uint8_t { stored, removed, cleared };
  Kind kind = Kind::stored;
  std::string group;
  std::string leaf;
  std::array<std::uint8_t, 16> key{};         // chained page key
  std::array<std::uint8_t, 16> parent_key{};  // of the page before it; zeros at the root
  std::uint32_t tokens = 0;                   // covered up to the page's end
};

/// Which boundaries of a prefix are kept in preference: pages that none of them uses go first.
struct Retention {
  enum class Kind : std::uint8_t {
    tail,    // the last boundary of prompt and sequence, junctions; states: docs/retention.md
    dense,   // every boundary
    spaced,  // powers of two of pages from the prompt's end and start, and tail
    every    // every `tokens` tokens, and tail
  };
  Kind kind = Kind::tail;
  std::uint32_t tokens = 0;  // every
  static Retention tail() { return {Kind::tail, 0}; }
  static Retention dense() { return {Kind::dense, 0}; }
  static Retention spaced() { return {Kind::spaced, 0}; }
  static Retention every(std::uint32_t tokens) { return {Kind::every, tokens}; }
  bool operator==(const Retention&) const = default;
};

enum class EvictionOrder : std::uint8_t {
  value,  // unused by kept boundaries, priority, proof, recency, depth
  lru     // recency and depth alone
};
enum class KeyHash : std::uint8_t {
  xxh3_128,  // fast; a random seed unless given, so keys of two managers differ
  sha256     // equal across processes and machines for equal seeds
};

}  // namespace kvleaf
