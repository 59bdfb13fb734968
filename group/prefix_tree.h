// PrefixTree: what is findable. A path-compressed tree of token pages: a node (segment) is a run of
// up to 32 consecutive pages without a branch, with its tokens in one array and, per leaf, its
// blocks in one array and a 32-bit residency mask. A child is found by a hash of its first page;
// what is compared are the tokens and extra keys themselves, so a collision of hashes costs time,
// never foreign data.
//
// It remembers which pages were asked for twice (proven), in the order of the last time, and, by
// key, what was here once: a second request proves a page that is long gone.
//
// It knows pages and blocks, no requests and no pool: whoever files a block here commits it there.
// "Page" is a page of page_tokens tokens. A leaf with longer pages files its block at the page
// where its own page ends. Page indices are absolute: page 0 is the first of the prompt.
#pragma once

#include <array>
#include <bit>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "kvleaf/group/chunk_store.h"
#include "kvleaf/group/page_history.h"
#include "kvleaf/group/page_key.h"
#include "kvleaf/leaf/ids.h"

namespace kvleaf {

using SegmentId = Id<struct SegmentTag>;

/// What identifies a page beside its tokens: media items and encoder inputs that begin in it.
struct PageExtra {
  std::uint32_t page = 0;  // absolute
  std::string key;         // digest, length and offset in the page, unambiguously
  bool operator==(const PageExtra&) const = default;
};
using PageExtras = std::vector<PageExtra>;  // ascending by page, one per page
/// The key of this page; null where it has none.
const std::string* extra_of(const PageExtras* extras, std::uint32_t page) noexcept;

/// A place in the tree: behind page `pages` - 1, in this segment.
struct TreeCursor {
  SegmentId segment{0};
  std::uint32_t pages = 0;  // absolute: pages from the root
};

/// The path of a look-up, from the root's first child down.
struct TreePath {
  struct Part {
    SegmentId segment{0};
    std::uint32_t first = 0;  // absolute index of its first page
    std::uint32_t pages = 0;  // matched, of this segment
  };
  std::vector<Part> parts;
  std::uint32_t pages = 0;  // matched in all
  bool left_path = false;   // tokens went on in the tree, but not with those asked for
  void clear() {
    parts.clear();
    pages = 0;
    left_path = false;
  }
};

class PrefixTree {
 public:
  static constexpr std::uint32_t segment_pages = 32;

  struct Options {
    std::uint32_t page_tokens = 16;
    std::uint32_t leaves = 0;          // arrays of blocks per page
    bool page_keys = false;            // keep the chained 128-bit key of each page
    bool ahead_tokens = false;         // keep, per page, the token that followed when it was filed
    std::uint64_t expected_pages = 0;  // sizes the table of children, and the reserved memory
    std::uint64_t history_pages = 0;   // pages of the pool, for a memory of what is gone; 0: none
    PageHasher hasher;
  };
  explicit PrefixTree(Options options);
  ~PrefixTree();
  PrefixTree(const PrefixTree&) = delete;
  PrefixTree& operator=(const PrefixTree&) = delete;

  // ---- finding
  // -----------------------------------------------------------------------------------
  /// The root of everything under this salt and adapter, made if need be.
  SegmentId root(std::string_view salt, std::string_view adapter);
  std::optional<SegmentId> find_root(std::string_view salt, std::string_view adapter) const;

  /// Follows the tokens from `root` as far as whole pages are equal, at most `max_pages`.
  void match(SegmentId root, std::span<const Token> tokens, const PageExtras& extras,
             std::uint32_t max_pages, TreePath& out) const;

  /// The longest common beginning, in tokens, of `tokens` (from the page behind `cursor` on) and
  /// any page that follows there and has no extra keys; with the cursor behind that page. Looks at
  /// a few children.
  struct Common {
    std::uint32_t tokens = 0;
    TreeCursor behind;
  };
  Common common_tokens(TreeCursor cursor, std::span<const Token> tokens) const;

  /// How many leading pages of `tokens`, at most `max_pages`, are in the tree or were before they
  /// were evicted; `path` is what match found of them. They are about to be filed: told once, the
  /// memory of those that are gone makes room for others.
  std::uint32_t recall(SegmentId root, std::span<const Token> tokens, const PageExtras& extras,
                       const TreePath& path, std::uint32_t max_pages);

  // ---- proof
  // -------------------------------------------------------------------------------------
  // The proven pages of a segment are its first ones, and all above it are proven too.
  /// The first `pages` of the segment are proven, and were asked for just now. A path is told from
  /// its deepest segment up, so that of what was asked for at once the deepest counts as oldest.
  void prove(SegmentId segment, std::uint32_t pages);
  /// All that is proven above the cursor was asked for just now. Returns how many pages that is.
  std::uint32_t refresh_proven(TreeCursor cursor);
  bool proven(SegmentId segment, std::uint32_t page) const noexcept;
  /// The deepest proven page of what was asked for longest ago counts as proven no more; it is the
  /// one behind which the cursor lies. None if nothing is proven.
  std::optional<TreeCursor> unprove_oldest() noexcept;
  std::uint64_t pages_in_all() const noexcept { return pages_; }
  std::uint64_t proven_in_all() const noexcept { return proven_; }

  // ---- filing
  // ------------------------------------------------------------------------------------
  /// A run of pages in one segment that an insertion walked over or made.
  struct Run {
    SegmentId segment{0};
    std::uint32_t first = 0;  // absolute page
    std::uint32_t pages = 0;
  };
  /// Moves `cursor` over as many of the given pages as lie in one segment, making them where they
  /// are not there yet; returns that run (at least one page). `tokens` start at the cursor; whole
  /// pages only. A segment that must be split is split: `moved` is told so that cursors in it can
  /// follow.
  Run insert(TreeCursor& cursor, std::span<const Token> tokens, const PageExtras& extras);

  /// Called when a segment was split: what lay before page `first_of_lower` now is in `upper`, what
  /// lies behind is still in `lower`. Blocks filed in upper have a new segment.
  using OnSplit =
      std::function<void(SegmentId lower, SegmentId upper, std::uint32_t first_of_lower)>;
  void on_split(OnSplit callback) { on_split_ = std::move(callback); }

  // ---- blocks
  // ------------------------------------------------------------------------------------
  BlockId block(SegmentId segment, std::uint32_t page, std::uint32_t leaf) const noexcept;
  bool resident(SegmentId segment, std::uint32_t page, std::uint32_t leaf) const noexcept;
  void set_block(SegmentId segment, std::uint32_t page, std::uint32_t leaf, BlockId block) noexcept;
  /// Forgets the block; the segment goes too if nothing needs it any more.
  void clear_block(SegmentId segment, std::uint32_t page, std::uint32_t leaf) noexcept;
  /// Bit i: page first(segment) + i holds a block of this leaf.
  std::uint32_t mask(SegmentId segment, std::uint32_t leaf) const noexcept;
  /// Blocks of the segment's pages; only those in the mask mean something.
  const BlockId* blocks(SegmentId segment, std::uint32_t leaf) const noexcept;
  Token ahead_token(SegmentId segment, std::uint32_t page) const noexcept;
  void set_ahead_token(SegmentId segment, std::uint32_t page, Token token) noexcept;
  /// Chained key of a page, of the page before it; zeros at the root. Only with page_keys.
  PageDigest page_key(SegmentId segment, std::uint32_t page) const;
  PageDigest parent_key(SegmentId segment, std::uint32_t page) const;

  // ---- structure
  // ---------------------------------------------------------------------------------
  std::uint32_t first_page(SegmentId segment) const noexcept;
  std::uint32_t pages(SegmentId segment) const noexcept;
  std::optional<SegmentId> parent(SegmentId segment) const noexcept;
  bool is_root(SegmentId segment) const noexcept;
  /// The segment at or above `cursor` that holds the page; the cursor must lie behind it.
  SegmentId segment_of(TreeCursor cursor, std::uint32_t page) const noexcept;
  /// Calls visit(segment) for all segments below; a false answer skips what lies below that one.
  template <class Visit>
  void each_below(SegmentId segment, Visit&& visit) const;
  template <class Visit>
  void each_segment(Visit&& visit) const;
  /// A pinned segment stays, whatever it holds.
  void pin(SegmentId segment) noexcept;
  void unpin(SegmentId segment) noexcept;
  /// A mark per segment and leaf for the owner's use; cleared on new segments.
  bool marked(SegmentId segment, std::uint32_t leaf) const noexcept;
  void set_mark(SegmentId segment, std::uint32_t leaf, bool on) noexcept;

  /// Drops everything but pinned segments' identity; returns with an empty tree. No cursor may be
  /// used afterwards.
  void clear();

  std::uint32_t segments() const noexcept { return live_segments_; }  // roots not counted
  std::uint64_t metadata_bytes() const noexcept;
  /// Throws InvariantError that names the first broken equation.
  void audit() const;

 private:
  static constexpr std::uint32_t none = 0xffffffff;

  struct Segment {
    std::uint32_t parent = none;
    std::uint32_t first_child = none;  // children are a doubly linked list …
    std::uint32_t next = none;
    std::uint32_t previous = none;
    std::uint32_t next_in_bucket = none;  // … and each is in the table under its first page's hash
    std::uint32_t first = 0;              // absolute index of the first page
    std::uint64_t hash = 0;
    std::byte* chunk = nullptr;  // tokens, masks, blocks; null for a root
    std::unique_ptr<PageExtras> extras;
    std::uint64_t marks = 0;
    std::uint32_t pins = 0;
    std::uint8_t pages = 0;
    std::uint8_t size_class = 0;  // capacity 1 << size_class
    bool root = false;
    bool used = false;
  };
  struct Layout {  // of a chunk, in bytes, for each size class
    std::size_t blocks = 0;
    std::size_t keys = 0;
    std::size_t ahead = 0;
    std::size_t tokens = 0;
    std::size_t size = 0;
  };

  /// What is known of a segment's past. Beside the segments, since a look-up does not need it.
  struct Proof {
    std::uint64_t key = 0;       // of the path to its last page, if key_known
    std::uint32_t older = none;  // segments with proven pages are a doubly linked list
    std::uint32_t newer = none;
    std::uint8_t pages = 0;  // proven
    bool key_known = false;
  };

  Segment& at(SegmentId id) noexcept { return segments_[id.value()]; }
  const Segment& at(SegmentId id) const noexcept { return segments_[id.value()]; }
  std::uint32_t* masks(const Segment& s) const noexcept {
    return reinterpret_cast<std::uint32_t*>(s.chunk);
  }
  BlockId* block_array(const Segment& s, std::uint32_t leaf) const noexcept {
    return reinterpret_cast<BlockId*>(s.chunk + layouts_[s.size_class].blocks) +
           (static_cast<std::size_t>(leaf) << s.size_class);
  }
  PageDigest* keys(const Segment& s) const noexcept {
    return reinterpret_cast<PageDigest*>(s.chunk + layouts_[s.size_class].keys);
  }
  Token* ahead(const Segment& s) const noexcept {
    return reinterpret_cast<Token*>(s.chunk + layouts_[s.size_class].ahead);
  }
  Token* tokens(const Segment& s) const noexcept {
    return reinterpret_cast<Token*>(s.chunk + layouts_[s.size_class].tokens);
  }
  std::uint64_t child_hash(SegmentId parent, const Token* page,
                           const std::string* extra) const noexcept;
  SegmentId find_child(SegmentId parent, const Token* page,
                       const std::string* extra) const noexcept;
  SegmentId likely_child(std::uint32_t from, std::uint64_t hash, SegmentId parent) const noexcept;
  SegmentId likely_child(SegmentId parent, const Token* page,
                         const std::string* extra) const noexcept;
  void fetch(const Segment& s) const noexcept;
  SegmentId new_segment();
  void resize_chunk(Segment& s, std::uint32_t pages);
  void move_pages(const Segment& from, std::uint32_t skip, const Segment& to,
                  std::uint32_t count) const;
  void append_pages(SegmentId id, const Token* pages, std::uint32_t count,
                    const PageExtras& extras);
  void link_child(SegmentId parent, SegmentId child) noexcept;
  void unlink_child(SegmentId child) noexcept;
  void enter_bucket(SegmentId id) noexcept;
  void leave_bucket(SegmentId id) noexcept;
  SegmentId split(SegmentId lower, std::uint32_t keep_above);
  void trim(SegmentId id) noexcept;
  void remember(SegmentId id, std::uint32_t from) noexcept;
  std::uint64_t page_hash(const Token* page, std::uint32_t number,
                          const std::string* extra) const noexcept;
  std::uint64_t hash_of_pages(const Segment& s, std::uint32_t from,
                              std::uint32_t to) const noexcept;
  std::uint64_t path_key(SegmentId id) noexcept;
  void set_proven(SegmentId id, std::uint32_t pages) noexcept;
  void link_proven(std::uint32_t id, std::uint32_t behind) noexcept;
  void unlink_proven(std::uint32_t id) noexcept;
  std::uint32_t equal_pages(const Segment& s, std::uint32_t skip, const Token* tokens,
                            std::uint32_t pages, std::uint32_t first,
                            const PageExtras& extras) const;

  Options options_;
  std::array<Layout, ChunkStore::classes> layouts_;
  std::unique_ptr<ChunkStore> store_;
  std::vector<Segment> segments_;        // reserved ahead; an id is an index
  std::vector<std::uint32_t> free_ids_;  // of segments_, !used
  std::vector<std::uint32_t> buckets_;   // power of two; first segment of a chain
  std::unordered_map<std::string, std::uint32_t> roots_;
  std::uint32_t live_segments_ = 0;  // used and not a root
  PageHistory history_;
  std::vector<Proof> proofs_;           // one per segment
  std::uint32_t oldest_proven_ = none;  // the ends of their list
  std::uint32_t newest_proven_ = none;
  std::uint64_t pages_ = 0;   // of all segments
  std::uint64_t proven_ = 0;  // of them
  OnSplit on_split_;
};

template <class Visit>
void PrefixTree::each_below(SegmentId segment, Visit&& visit) const {
  // Depth first without recursion: down to a child, else along to the next, else up.
  std::uint32_t at = segments_[segment.value()].first_child;
  while (at != none) {
    const bool descend = visit(SegmentId{at});
    if (descend && segments_[at].first_child != none) {
      at = segments_[at].first_child;
      continue;
    }
    while (at != none && segments_[at].next == none) {
      at = segments_[at].parent;
      if (at == segment.value()) return;
    }
    if (at != none) at = segments_[at].next;
  }
}

template <class Visit>
void PrefixTree::each_segment(Visit&& visit) const {
  for (std::uint32_t i = 0; i < segments_.size(); ++i) {
    if (segments_[i].used && !segments_[i].root) visit(SegmentId{i});
  }
}

}  // namespace kvleaf
