// The block manager's insides, shared by its source files: admission.cpp (the answer to a prompt),
// finding.cpp (what of it is there), fitting.cpp (whether the rest would fit; promises),
// encoders.cpp, stepping.cpp (begin), settling.cpp, going_back.cpp (abandon, and what rewinds share
// with it), checkpoints.cpp (of states), committing.cpp (pages become findable), valuing.cpp (what
// they are worth; evictions), sharing.cpp (fork, rewind, preempt, release), manager_audit.cpp.
#pragma once

#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "kvleaf/group/block_manager.h"
#include "kvleaf/group/joint_hit.h"
#include "kvleaf/group/last_writer.h"
#include "kvleaf/group/page_value.h"
#include "kvleaf/group/prefix_tree.h"
#include "kvleaf/group/request.h"

namespace kvleaf {

/// What the manager knows of one leaf.
struct LeafInfo {
  LeafId id{0};
  const KVLeafRegion* leaf = nullptr;
  AccessPattern pattern = AccessPattern::full();
  Writing writing = Writing::append;
  std::uint32_t tokens_per_page = 0;
  std::uint32_t pages = 0;  // tokens_per_page / page_tokens
  std::uint32_t group = 0;
  std::optional<std::uint32_t> tree;  // its arrays in the prefix tree; none: not cached by page
  std::uint32_t kind_index = 0;       // among the leaves of its writing
  bool needs_all = false;             // every later token needs the whole prefix
  bool ahead = false;
  /// Its pages complete a prefix that another leaf needs whole. What a kept boundary needs of them
  /// is little beside that prefix, which serves nobody without: so it is worth as much as a proven
  /// page from the start. (What no kept boundary needs is evicted first all the same.)
  bool completes = false;
};

struct GroupInfo {
  std::string name;
  AccessPattern pattern;
  Writing writing;
  std::vector<std::uint32_t> leaves;
  std::uint64_t lost_tokens = 0;
};

/// A copy that the next step must list. The source carries one reference.
struct PendingCopy {
  LeafId leaf{0};
  BlockId src{0};
  BlockId dst{0};
  std::uint32_t tokens = 0;  // text: those below are wanted of the source
  bool spoilt = false;       // a later step that failed has overwritten the source
  bool dst_gone = false;     // listed, and the target was given up since
};

/// A step in flight, beyond what its caller sees.
struct StepRecord {
  Step step;
  struct Entry {
    Request* request = nullptr;  // null once released
    RequestId id{0};
    std::uint32_t begin = 0;
    std::uint32_t count = 0;
    std::uint32_t known = 0;     // ids known when it was begun
    std::uint32_t stands = 0;    // tokens of `count` that settle: fewer where drafts were rejected
    bool cleared_state = false;  // its states were zero-filled in this step
  };
  /// What a state is read from, where that is not the block it is written to; one reference, freed
  /// when the step settles.
  struct Source {
    Request* request = nullptr;  // null once released
    LeafId leaf{0};
    BlockId block{0};
    bool was_live = false;  // it was the live state until this step; else a checkpoint
  };
  std::vector<Entry> entries;
  std::vector<std::pair<LeafId, BlockId>> returning;  // one reference each, freed when it settles
  std::vector<Source> sources;
  std::vector<PendingCopy>
      held_copies;  // listed copies whose sources are referenced until it settles
};

class BlockManager::Impl {
 public:
  Impl(Leaves leaves, ManagerOptions options);
  ~Impl();

  // ---- admission.cpp
  Admission admit(RequestId id, std::span<const Token> tokens, const AdmitOptions& options);
  Admission probe(std::span<const Token> tokens, const AdmitOptions& options);
  std::optional<std::uint32_t> next_stop(const Request& r) const;

  // ---- fitting.cpp
  std::uint32_t longest_request() const;

  // ---- encoders.cpp
  void encoder_filled(Request& r);

  // ---- stepping.cpp, settling.cpp, going_back.cpp
  const Step& begin_step(std::span<const StepRequest> batch);
  void settle(StepId step, std::span<const Kept> kept);
  enum class DeviceWork { failed, never_ran };  // failed: states may be half written
  std::vector<std::pair<RequestId, std::uint32_t>> abandon(StepId step,
                                                           DeviceWork work = DeviceWork::failed);

  // ---- sharing.cpp
  void fork(RequestId parent, RequestId child);
  void rewind(RequestId id, std::uint32_t tokens);
  void release(RequestId id, Prefix prefix, std::optional<std::uint32_t> addressable);
  void preempt(RequestId id);
  void reset_cache();

  // ---- manager_audit.cpp
  void audit() const;
  void audit_bounds(const Request& r) const;  // what its steps are spared, it does not need
  ManagerStats stats() const;

  Request* find(RequestId id) const noexcept;  // null: not live
  Request& get(RequestId id) const;
  StepRecord* record_of(std::uint64_t step) noexcept;  // in flight, else nullptr

  Leaves leaves_;
  ManagerOptions options_;
  std::vector<LeafInfo> info_;
  std::vector<GroupInfo> groups_;
  std::vector<std::uint32_t> text_;      // leaves with writing append
  std::vector<std::uint32_t> states_;    // in_place
  std::vector<std::uint32_t> encoders_;  // write_once
  std::vector<std::uint32_t> scratch_;   // exclusive
  std::uint32_t unit_ = 1;  // tokens: boundaries at which a hit can be are multiples of it
  bool any_ahead_ = false;  // some leaf is fed the next token
  bool caching_ = true;     // prefix caching, and some leaf with a text reach is cacheable
  bool in_chunk_ = false;   // every cached state leaf emits its state at boundaries inside a step
  std::unique_ptr<BlockPool> pool_;
  std::unique_ptr<PrefixTree> tree_;
  std::unique_ptr<LastWriter> last_writer_;

  std::unordered_map<RequestId, std::unique_ptr<Request>> requests_;
  std::vector<std::unique_ptr<Request>> spare_;  // ended requests: their arrays are used again
  std::vector<Request*> prompts_;                // admitted, planned < prompt
  std::vector<Request*> guaranteed_;             // admitted with a guarantee
  std::unordered_map<RequestId, std::uint32_t> preempted_;  // and the tokens they had computed
  std::unordered_map<std::string, std::unique_ptr<EncoderNode>> encoder_index_;
  std::unordered_map<std::uint64_t, EncoderNode*> encoder_ids_;
  std::vector<std::unique_ptr<EncoderNode>> encoder_orphans_;  // in use, no longer findable

  std::vector<StepRecord> steps_;  // a ring of max_steps_in_flight
  std::uint64_t first_step_ = 1;   // oldest not settled
  std::uint64_t next_step_ = 1;    // first_step_ … next_step_ - 1 are in flight
  std::vector<PendingCopy> pending_copies_;
  std::vector<ZeroFill> pending_fills_;  // scratch of forks
  std::uint64_t clock_ = 0;              // of recency: one tick per admission, settling, release
  std::uint64_t serials_ = 0;
  std::uint64_t encoder_serials_ = 0;
  std::uint64_t batch_marks_ = 0;
  std::uint32_t observers_ = 0;  // of rows: planners' host sets
  ManagerStats counters_;        // those that only count
  std::vector<Event> events_;

  // ---- admission.cpp
  void check_admission(std::span<const Token> tokens, const AdmitOptions& options) const;
  /// What the caller said of it.
  void describe(Request& r, std::span<const Token> tokens, const AdmitOptions& options) const;
  Admission answer(RequestId id, std::span<const Token> tokens, const AdmitOptions& options,
                   bool keep);
  void plan_kept(Request& r, std::uint32_t junction) const;
  void count_admission(const Request& r, const Admission& admission);

  // ---- finding.cpp
  struct Found {
    TreePath path;
    std::optional<SegmentId> root;
    std::vector<LeafResidency> residency;
    std::vector<std::uint32_t> residency_leaf;  // leaf of each
    std::uint32_t limit = 0;                    // deepest boundary that could be hit
    std::uint32_t hit = 0;
    std::uint32_t extra = 0;  // tokens of the page behind the hit, with partial
    TreeCursor extra_behind;
    std::uint32_t junction = 0;  // where the look-up left a cached path; 0: nowhere
  };
  void find(std::span<const Token> tokens, const AdmitOptions& options, const Request& r,
            Found& found);
  std::string reason_of(const Found& found, std::span<const Token> tokens,
                        const AdmitOptions& options) const;
  void claim(Request& r, const Found& found, std::uint32_t hit, bool with_extra);
  void unclaim(Request& r);
  /// r stands behind its hit in the tree, and what the look-up met knows that it was asked for.
  void enter_tree(Request& r, const Found& found, std::uint32_t hit, std::span<const Token> tokens,
                  const AdmitOptions& options);
  /// Whether a media item or the encoder's input begins at this token: then its id does not say
  /// what it is, and a leaf that is fed it cannot be shared by it.
  static bool input_begins(const Request& r, std::uint32_t token);

  // ---- fitting.cpp
  /// Blocks that `r` still has to draw for its first `length` tokens, beyond those it holds.
  std::uint64_t outstanding(const Request& r, const LeafInfo& leaf, std::uint32_t length,
                            std::uint32_t step_tokens) const;
  /// Blocks of `leaf` that r's guarantee still needs; and once it has drawn `drawing` more for
  /// tokens up to `end` in one more step.
  std::uint64_t promise(const Request& r, const LeafInfo& leaf) const;
  std::uint64_t promise_after(const Request& r, const LeafInfo& leaf, std::uint32_t end,
                              std::uint64_t drawing) const;
  /// Whether a block of r's row will serve r to the end of its guarantee, or comes back to it
  /// before.
  bool owned(const Request& r, const LeafInfo& leaf, std::uint32_t slot, BlockId block) const;
  template <class Visit>  // (slot, block) of what the row holds, leaving blocks included
  void each_held(const Request& r, const LeafInfo& leaf, Visit&& visit) const;
  std::uint64_t promise_of(const Request& r, const LeafInfo& leaf, std::uint32_t planned,
                           std::uint64_t slots, std::uint64_t drawing,
                           std::uint32_t steps_to_come) const;
  /// Whether all promises could still be kept if r went back to `tokens`: it would share fewer
  /// pages, and hold a checkpoint that nobody may hold now.
  bool promises_allow_going_back(const Request& r, std::uint32_t tokens);
  /// Blocks that r holds alone and, sharing them with a child, could not count on any more.
  std::uint64_t lent_by_fork(const Request& r, const LeafInfo& leaf) const;
  void form_promises(const Request* without = nullptr);
  /// Whether the rest of r's prompt fits beside what earlier prompts still have to plan.
  bool would_fit(const Request& r, bool take_checkpoint, std::uint32_t encoder_tokens,
                 std::string* why);
  /// The deepest hit with which the rest fits, claimed; its encoder pinned if it is there. Throws
  /// PoolExhausted, with nothing claimed, where none does.
  struct Claimed {
    std::uint32_t hit = 0;
    bool steals = false;  // its checkpoints are to become its live states
    std::string why;      // deeper ones did not fit
    EncoderNode* encoder = nullptr;
    bool encoder_cached = false;
  };
  Claimed claim_deepest(Request& r, const Found& found, const AdmitOptions& options);
  /// Whether r's checkpoints are unshared, and making them its live states.
  bool may_take_checkpoints(const Request& r) const;
  void take_checkpoints(Request& r);

  // ---- encoders.cpp
  EncoderNode* find_encoder(const AdmitOptions& options) const;
  static std::string encoder_name(const AdmitOptions& options);
  EncoderNode* make_encoder(const AdmitOptions& options);
  void pin_encoder(const EncoderNode* encoder);    // null: none
  void unpin_encoder(const EncoderNode* encoder);  // null: none
  /// r is one of those that hold it, pinned already.
  void use_encoder(Request& r, EncoderNode& encoder);
  void encoder_lost(EncoderNode& node);

  // ---- stepping.cpp
  /// Finds the batch's requests, into batch_. Throws RequestError for one that cannot be planned
  /// so.
  void check_batch(std::span<const StepRequest> batch);
  /// Steps of so many rows ask for no memory of their own.
  void reserve_steps(std::size_t rows);
  void check_row(const Request& r, StepRequest row, std::size_t index, bool twice) const;
  bool serve(Request& r, std::uint32_t new_tokens, StepRecord& record, std::string& why);
  StepRecord::Entry& plan_row(Request& r, std::uint32_t new_tokens, StepRecord& record);
  /// Serves the rows from `first` on that need nothing but pages of text behind those they have, in
  /// one transaction. Returns how many; 0, with nothing changed, where their pages do not fit
  /// together.
  std::size_t serve_growing(std::span<const StepRequest> batch, std::size_t first,
                            StepRecord& record);
  static std::uint32_t missing_slots(const Row& row, std::uint32_t tokens_per_page,
                                     std::uint32_t tokens) noexcept;
  /// Puts drawn blocks behind r's row, up to `tokens`; returns those behind them.
  const BlockId* extend(Request& r, const LeafInfo& info, std::uint32_t tokens,
                        const BlockId* drawn, StepRecord& record);
  /// The least length at which one of r's rows slides further than it has.
  std::uint32_t next_slide(const Request& r) const;
  /// Whether somebody else may still read the block after a forward that writes to it from token
  /// `from` on.
  bool shared(LeafId leaf, BlockId block, std::uint32_t from) const;
  /// Whether somebody else reads r's live state, so that the next step must write beside it.
  bool shared_state(const Request& r, const LeafInfo& leaf) const;
  void slide(Request& r, std::uint32_t tokens);
  void free_leaving(Request& r);
  void add_copy(StepRecord& record, LeafId leaf, BlockId src, BlockId dst);
  void add_source(StepRecord& record, Request& r, const LeafInfo& leaf, BlockId block,
                  bool was_live);
  void take_back_sources(StepRecord& record, Request& r, std::uint32_t begin);
  // ---- settling.cpp
  /// What r's rows hold behind `tokens` is given back.
  void cut_rows(Request& r, std::uint32_t tokens);

  // ---- going_back.cpp
  void unslide(Request& r, std::uint32_t tokens);
  /// Whether some request has the block.
  bool held(LeafId leaf, BlockId block) const;
  /// Copies that would read what `copy` was to write read what it reads.
  void pass_over(const PendingCopy& copy);
  void back_to(Request& r, std::uint32_t tokens);
  /// Whether r has the state after `tokens` tokens itself, in its ring or as what it reads next.
  bool holds_state(const Request& r, const LeafInfo& leaf, std::uint32_t tokens) const;
  bool can_go_back(const Request& r, std::uint32_t tokens) const;
  std::uint32_t deepest_return(const Request& r, std::uint32_t at_most) const;
  std::optional<BlockId> checkpoint_at(const Request& r, const LeafInfo& leaf,
                                       std::uint32_t tokens) const;

  // ---- checkpoints.cpp
  void due_checkpoint(Request& r, StepRecord& record, StepRecord::Entry& entry);
  /// Blocks for the states that the step passes at kept boundaries, where kernels emit them.
  void due_in_chunk(Request& r, const StepRecord& record, const StepRecord::Entry& entry);
  void file_checkpoints(Request& r);
  void file_live_state(Request& r);
  bool file_checkpoint(Request& r, std::uint32_t tokens, std::span<const BlockId> blocks);
  /// Checkpoints that wait for their step to settle, and are not wanted any more.
  template <class Which, class GiveBack>
  void drop_unfiled(Request& r, Which&& which, GiveBack&& give);

  // ---- committing.cpp
  void commit(Request& r);
  void commit_run(Request& r, const LeafInfo& info, const PrefixTree::Run& run);
  void record(Event::Kind kind, std::uint32_t leaf, SegmentId segment, std::uint32_t page);
  void move_cursor(Request& r, TreeCursor cursor);

  // ---- valuing.cpp
  bool kept_boundary(const Request& r, std::uint32_t tokens) const;
  /// Whether a kept boundary uses the slot; slots up to `until` have the same answer.
  struct KeptRun {
    bool kept = false;
    std::uint32_t until = 0;  // exclusive
  };
  KeptRun kept_run(const Request& r, const LeafInfo& leaf, std::uint32_t slot) const;
  /// What r's pages share of their value now.
  PageValue page_value(const Request& r) const noexcept;
  /// Whether a page counts as proven: as r knows its own path, and as the tree does.
  static bool proven_by(const Request& r, const LeafInfo& leaf, std::uint32_t slot);
  bool proven_in_tree(const LeafInfo& leaf, SegmentId segment, std::uint32_t page) const;
  /// r gives up the blocks of slots first, first + 1, …: values those that are findable (what
  /// somebody else's boundary needs stays kept), and returns all but null ones, valid until the
  /// next call.
  enum class Proof : std::uint8_t {
    of_path,  // r.matched was just read from the tree
    of_page   // as it was valued before
  };
  std::span<const BlockId> value_given_up(const Request& r, const LeafInfo& leaf,
                                          std::uint32_t first, std::span<const BlockId> blocks,
                                          Proof proof);
  /// After a look-up: what it met is recent, and kept where a junction needs it.
  void refresh(Request& r, const Found& found, std::uint32_t hit);
  /// Proven pages beyond their share of all that are findable count as unproven, the oldest first.
  void limit_proven();
  /// The block of this page is findable no more; a live one stays live.
  void forget(std::uint32_t leaf, SegmentId segment, std::uint32_t page);
  void evicted(LeafId leaf, BlockId block, PageKey key);
  void mark_unreachable(std::uint32_t leaf, SegmentId segment, std::uint32_t page);

  // ---- sharing.cpp
  std::unique_ptr<Request> make_request(RequestId id);
  void retire(std::unique_ptr<Request> request);
  void leave(Request& r);
  void give_back(Request& r, LeafId leaf, BlockId block);
  void give_back(Request& r, LeafId leaf, std::span<const BlockId> blocks);
  void give_back_all(Request& r);
  /// The page that token r.planned goes into is findable no more if r alone holds it: r writes into
  /// it, and was not promised a block for a copy.
  void forget_partly(Request& r);
  void cut_tokens(Request& r, std::uint32_t tokens);
  void forget_own(Request& r, std::uint32_t from_tokens);
  /// The block is given up: what was to be done to it first is dropped, and its bytes are nobody's.
  void drop_pending(LeafId leaf, BlockId block);
  /// Whether any block has something to be done to it first.
  bool anything_pends() const;
  /// Whether a copy to the block is listed or waits: until its step settles nobody else may rely on
  /// it.
  bool awaits_copy(LeafId leaf, BlockId block) const;

  /// Of the step begun last, in row order: the next one is mostly of the same. A request that has
  /// ended since has another serial, or none.
  std::vector<Request*> batch_;
  std::vector<StepRecord::Entry*> kept_;   // scratch of settle
  std::vector<BlockPool::Demand> demand_;  // scratch of serve
  std::vector<BlockId> drawn_;             // scratch of serve
  std::vector<std::uint64_t> wanted_;      // scratch of would_fit
  std::vector<BlockId> file_scratch_;      // scratch of file_live_state
  std::vector<BlockId> given_up_;          // of value_given_up
  struct {
    std::vector<BlockId> blocks;
    std::vector<Value> values;
    std::vector<PageKey> keys;
    void reserve(std::size_t count) {
      blocks.reserve(count);
      values.reserve(count);
      keys.reserve(count);
    }
    void clear() {
      blocks.clear();
      values.clear();
      keys.clear();
    }
    void push(BlockId block, Value value) {
      blocks.push_back(block);
      values.push_back(value);
    }
  } pages_;      // scratch of whoever values many pages
  Found found_;  // scratch of answer
};

template <class Which, class GiveBack>
void BlockManager::Impl::drop_unfiled(Request& r, Which&& which, GiveBack&& give) {
  for (const PendingCheckpoint& pending : r.unfiled) {
    if (!which(pending)) continue;
    for (const std::uint32_t leaf : states_) {
      const BlockId block = pending.blocks[info_[leaf].kind_index];
      if (block != null_block) give(LeafId{leaf}, block);
    }
  }
  std::erase_if(r.unfiled, which);
}

constexpr std::uint32_t ceil_div(std::uint32_t a, std::uint32_t b) noexcept {
  return a / b + (a % b != 0 ? 1 : 0);
}

/// Key of an encoder's page in the pool; a page of the tree has its segment and absolute page.
inline constexpr std::uint64_t encoder_key = std::uint64_t{1} << 63;

}  // namespace kvleaf
