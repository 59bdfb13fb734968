// Which pages of the prefix tree were asked for twice, in the order of the last time, and the keys
// of those that are gone.
#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <array>

#include "kvleaf/group/prefix_tree.h"

namespace kvleaf {

// A path's key is the sum of its pages' hashes, each seeded with where it stands: so the key of the
// path without its last page is known without the rest of it.
std::uint64_t PrefixTree::page_hash(const Token* page, std::uint32_t number,
                                    const std::string* extra) const noexcept {
  std::uint64_t seed = (number + 1) * 0x9E3779B97F4A7C15ull;
  if (extra != nullptr) seed ^= XXH3_64bits(extra->data(), extra->size());
  return XXH3_64bits_withSeed(page, options_.page_tokens * sizeof(Token), seed);
}

std::uint64_t PrefixTree::hash_of_pages(const Segment& s, std::uint32_t from,
                                        std::uint32_t to) const noexcept {
  std::uint64_t sum = 0;
  for (std::uint32_t i = from; i < to; ++i) {
    sum += page_hash(tokens(s) + static_cast<std::size_t>(i) * options_.page_tokens, s.first + i,
                     extra_of(s.extras.get(), s.first + i));
  }
  return sum;
}

/// Key of the path to the segment's last page. What was hashed on the way is kept for those above.
std::uint64_t PrefixTree::path_key(SegmentId id) noexcept {
  std::uint64_t sum = 0;
  std::uint32_t up = id.value();
  for (; !proofs_[up].key_known; up = segments_[up].parent)
    sum += hash_of_pages(segments_[up], 0, segments_[up].pages);
  const std::uint64_t key = proofs_[up].key + sum;
  std::uint64_t here = key;
  for (up = id.value(); !proofs_[up].key_known; up = segments_[up].parent) {
    proofs_[up].key = here;
    proofs_[up].key_known = true;
    if (!proofs_[segments_[up].parent].key_known)
      here -= hash_of_pages(segments_[up], 0, segments_[up].pages);
  }
  return key;
}

/// The segment's pages from the `from`-th on are about to go.
void PrefixTree::remember(SegmentId id, std::uint32_t from) noexcept {
  if (options_.history_pages == 0) return;
  const Segment& s = at(id);
  std::uint64_t key = path_key(id);
  for (std::uint32_t i = s.pages; i-- > from;) {
    history_.remember(key);
    key -= hash_of_pages(s, i, i + 1);
  }
  Proof& rest = proofs_[from > 0 ? id.value() : s.parent];
  rest.key = key;
  rest.key_known = true;
}

std::uint32_t PrefixTree::recall(SegmentId root, std::span<const Token> asked,
                                 const PageExtras& extras, const TreePath& path,
                                 std::uint32_t max_pages) {
  const std::uint32_t P = options_.page_tokens;
  const auto pages = static_cast<std::uint32_t>(std::min<std::size_t>(asked.size() / P, max_pages));
  if (history_.size() == 0 || path.pages >= pages) return path.pages;
  std::uint64_t key = proofs_[root.value()].key;
  if (!path.parts.empty()) {
    const TreePath::Part& last = path.parts.back();
    const Segment& s = at(last.segment);
    key = path_key(last.segment) - hash_of_pages(s, last.pages, s.pages);
  }
  // What is remembered of a path is a beginning of it, but for lines that were crowded: the deepest
  // page goes first. So one question is enough where nothing is; the others are asked together.
  constexpr std::uint32_t together = 16;
  std::array<std::uint64_t, together> keys{};
  std::uint32_t known = path.pages;
  for (std::uint32_t batch = 1; known < pages; batch = together) {
    const std::uint32_t count = std::min(batch, pages - known);
    for (std::uint32_t i = 0; i < count; ++i) {
      key += page_hash(asked.data() + static_cast<std::size_t>(known + i) * P, known + i,
                       extra_of(&extras, known + i));
      keys[i] = key;
      history_.prefetch(key);
    }
    for (std::uint32_t i = 0; i < count; ++i) {
      if (!history_.remembers(keys[i])) return known + i;
      history_.forget(keys[i]);
    }
    known += count;
  }
  return known;
}

void PrefixTree::link_proven(std::uint32_t id, std::uint32_t behind) noexcept {
  Proof& proof = proofs_[id];
  proof.older = behind;
  proof.newer = behind == none ? oldest_proven_ : proofs_[behind].newer;
  (proof.older == none ? oldest_proven_ : proofs_[proof.older].newer) = id;
  (proof.newer == none ? newest_proven_ : proofs_[proof.newer].older) = id;
}

void PrefixTree::unlink_proven(std::uint32_t id) noexcept {
  Proof& proof = proofs_[id];
  (proof.older == none ? oldest_proven_ : proofs_[proof.older].newer) = proof.newer;
  (proof.newer == none ? newest_proven_ : proofs_[proof.newer].older) = proof.older;
  proof.older = proof.newer = none;
}

void PrefixTree::set_proven(SegmentId id, std::uint32_t pages) noexcept {
  Proof& proof = proofs_[id.value()];
  proven_ = proven_ - proof.pages + pages;
  if (proof.pages > 0 && pages == 0) unlink_proven(id.value());
  proof.pages = static_cast<std::uint8_t>(pages);
}

void PrefixTree::prove(SegmentId segment, std::uint32_t pages) {
  Proof& proof = proofs_[segment.value()];
  const auto most =
      std::min<std::uint32_t>(std::max<std::uint32_t>(pages, proof.pages), at(segment).pages);
  if (most == 0) return;
  if (proof.pages > 0) unlink_proven(segment.value());
  link_proven(segment.value(), newest_proven_);
  set_proven(segment, most);
}

std::uint32_t PrefixTree::refresh_proven(TreeCursor cursor) {
  std::uint32_t pages = 0;
  for (std::uint32_t id = cursor.segment.value(); !segments_[id].root; id = segments_[id].parent) {
    if (pages == 0) {
      const std::uint32_t above =
          std::min<std::uint32_t>(proofs_[id].pages, cursor.pages - segments_[id].first);
      if (above == 0) continue;
      pages = segments_[id].first + above;
    }
    prove(SegmentId{id}, std::min<std::uint32_t>(pages - segments_[id].first, segments_[id].pages));
  }
  return pages;
}

bool PrefixTree::proven(SegmentId segment, std::uint32_t page) const noexcept {
  return page - at(segment).first < proofs_[segment.value()].pages;
}

std::optional<TreeCursor> PrefixTree::unprove_oldest() noexcept {
  if (oldest_proven_ == none) return {};
  const SegmentId oldest{oldest_proven_};
  const std::uint32_t pages = proofs_[oldest.value()].pages;
  set_proven(oldest, pages - 1);
  return TreeCursor{oldest, at(oldest).first + pages};
}

}  // namespace kvleaf
