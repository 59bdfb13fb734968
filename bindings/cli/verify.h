// Verification of a replay with real bytes. A verifier stands in for the model: it runs each step's
// copies and clears, writes what the step's tokens would write, and reads what they would read,
// through the very arrays that a forward gets. All bytes follow from the tokens they stand for:
//
//   text entry   leaf, position, and every token up to it (and the encoder's input)
//   state        leaf, and every token up to its length; zeros at length 0
//   encoder      leaf, position, and the input's digest
//   scratch      leaf and request
//
// So a wrong table entry, a stale or foreign page, a block used twice, a lost copy or clear and a
// checkpoint of another length all show as bytes that nobody expected, at the first step that reads
// them.
//
// What is read when:
//   first step of a request, and where the caller asks   every entry in reach, through the staged
//   table other steps                                          a sample of them, the first and the
//   last included every step                                           what it wrote, its states,
//   the encoder's first pages release                                              what no step has
//   read in full
//
// The arena has the pool's own tiling. Where it would not fit the memory, or the writing would take
// too long, bytes per token are divided by one factor for all leaves: the same blocks lie in the
// same huge blocks, only smaller.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "kvleaf/group/group.h"

namespace kvleaf::cli {

/// Bytes that are not what they must be. The message names request, leaf, slot and block.
class VerifyError : public KVError {
 public:
  using KVError::KVError;
};

struct VerifyOptions {
  std::uint64_t most_arena_bytes = std::uint64_t{1} << 30;
  /// Bytes written for tokens and states together; with `tokens` and `steps` it bounds the time.
  std::uint64_t most_written_bytes = std::uint64_t{4} << 30;
  std::uint64_t tokens = 0;          // that will be computed, at most
  std::uint64_t encoder_tokens = 0;  // that will be filled, at most
  std::uint64_t steps = 0;           // that will be run, about
};

/// How much of its reach a step reads.
enum class Check : std::uint8_t { sample, everything };

struct VerifyStats {
  std::uint64_t factor = 1;  // bytes per token are scaled down by it, rounded up to whole 8 bytes
  std::uint64_t arena_bytes = 0;
  std::uint64_t entries_written = 0;  // of tokens, states, encoder inputs and scratch
  std::uint64_t bytes_written = 0;
  std::uint64_t entries_checked = 0;
  std::uint64_t bytes_checked = 0;
  std::uint64_t copies = 0;  // blocks
  std::uint64_t clears = 0;  // blocks
};

class Verifier {
 public:
  /// Throws KVError where even the smallest bytes do not fit most_arena_bytes.
  Verifier(const BlockManager& manager, VerifyOptions options);
  ~Verifier();
  Verifier(const Verifier&) = delete;
  Verifier& operator=(const Verifier&) = delete;

  /// A request was admitted with these tokens, of which `hit_tokens` need not be computed.
  void admit(RequestId request, std::span<const Token> tokens, std::uint32_t hit_tokens,
             const EncoderInput* encoder = nullptr);
  /// Writes the encoder's pages, as an engine does before encoder_filled.
  void fill_encoder(RequestId request);
  /// Ids that became known.
  void append(RequestId request, std::span<const Token> tokens);
  /// Everything that one forward does. To be called once per plan, before it is settled.
  /// Throws VerifyError.
  void run(const StepPlan& plan, Check check = Check::sample);
  /// To be called before the manager releases it. Throws VerifyError.
  void release(RequestId request);

  const VerifyStats& stats() const noexcept;

  /// What a test breaks to see that verification notices: the bytes themselves, and copies and
  /// clears that are counted but not run.
  const Arena& arena() const noexcept;
  void lose_copies(bool lose) noexcept;
  void lose_clears(bool lose) noexcept;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

/// Memory that this machine could give without swapping, in bytes.
std::uint64_t available_memory();

}  // namespace kvleaf::cli
