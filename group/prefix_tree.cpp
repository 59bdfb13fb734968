#include "kvleaf/group/prefix_tree.h"

#define XXH_INLINE_ALL
#include <fmt/format.h>
#include <xxhash.h>

#include <algorithm>
#include <cassert>

#include "kvleaf/leaf/errors.h"

namespace kvleaf {
namespace {

bool same(const std::string* a, const std::string* b) noexcept {
  return a == nullptr || b == nullptr ? a == b : *a == *b;
}

constexpr std::uint32_t low_bits(std::uint32_t count) noexcept {
  return count >= 32 ? ~0u : (1u << count) - 1;
}

constexpr std::size_t rounded(std::size_t value, std::size_t to) noexcept {
  return (value + to - 1) / to * to;
}

}  // namespace

const std::string* extra_of(const PageExtras* extras, std::uint32_t page) noexcept {
  if (extras == nullptr || extras->empty()) return nullptr;
  const auto it = std::lower_bound(extras->begin(), extras->end(), page,
                                   [](const PageExtra& e, std::uint32_t p) { return e.page < p; });
  return it != extras->end() && it->page == page ? &it->key : nullptr;
}

PrefixTree::PrefixTree(Options options)
    : options_(std::move(options)), history_(options_.history_pages) {
  // A chunk: masks, blocks, keys, ahead tokens, tokens. The masks come first, so that the lines a
  // look-up reads of a segment lie together with the blocks it takes.
  std::array<std::size_t, ChunkStore::classes> sizes{};
  for (std::uint32_t c = 0; c < ChunkStore::classes; ++c) {
    const std::size_t pages = std::size_t{1} << c;
    Layout& l = layouts_[c];
    l.blocks = options_.leaves * sizeof(std::uint32_t);
    l.keys = rounded(l.blocks + options_.leaves * pages * sizeof(BlockId), 16);
    l.ahead = l.keys + (options_.page_keys ? pages * sizeof(PageDigest) : 0);
    l.tokens = rounded(l.ahead + (options_.ahead_tokens ? pages * sizeof(Token) : 0), 16);
    l.size = l.tokens + pages * options_.page_tokens * sizeof(Token);
    sizes[c] = l.size;
  }
  const std::uint64_t expected = std::max<std::uint64_t>(options_.expected_pages, 64);
  store_ = std::make_unique<ChunkStore>(
      sizes, (expected / segment_pages + 1) * sizes[ChunkStore::classes - 1] * 2);
  const std::uint64_t buckets =
      std::bit_ceil(std::clamp<std::uint64_t>(expected / 4, 1024, 1u << 26));
  buckets_.assign(buckets, none);
  const auto segments = std::min<std::uint64_t>(expected + 64, none - 1);
  segments_.reserve(segments);
  proofs_.reserve(segments);
  free_ids_.reserve(std::min<std::uint64_t>(segments, 1u << 20));
}

PrefixTree::~PrefixTree() = default;

// ---- finding
// -------------------------------------------------------------------------------------

std::optional<SegmentId> PrefixTree::find_root(std::string_view salt,
                                               std::string_view adapter) const {
  std::string name;
  append_unambiguously(name, salt);
  append_unambiguously(name, adapter);
  const auto it = roots_.find(name);
  if (it == roots_.end()) return {};
  return SegmentId{it->second};
}

SegmentId PrefixTree::root(std::string_view salt, std::string_view adapter) {
  if (const auto found = find_root(salt, adapter)) return *found;
  std::string name;
  append_unambiguously(name, salt);
  append_unambiguously(name, adapter);
  const SegmentId id = new_segment();
  at(id).root = true;
  --live_segments_;
  if (options_.page_keys) {  // a root's chunk holds one thing: the key that its children chain from
    at(id).size_class = 0;
    at(id).chunk = store_->take(0);
    std::memset(masks(at(id)), 0, options_.leaves * sizeof(std::uint32_t));
    keys(at(id))[0] = options_.hasher.root(salt, adapter);
  }
  proofs_[id.value()].key = XXH3_64bits(name.data(), name.size());
  proofs_[id.value()].key_known = true;
  roots_.emplace(std::move(name), id.value());
  return id;
}

std::uint64_t PrefixTree::child_hash(SegmentId parent, const Token* page,
                                     const std::string* extra) const noexcept {
  std::uint64_t seed = parent.value() * 0x9E3779B97F4A7C15ull;
  if (extra != nullptr) seed ^= XXH3_64bits(extra->data(), extra->size());
  return XXH3_64bits_withSeed(page, options_.page_tokens * sizeof(Token), seed);
}

SegmentId PrefixTree::find_child(SegmentId parent, const Token* page,
                                 const std::string* extra) const noexcept {
  SegmentId child = likely_child(parent, page, extra);
  while (child.value() != none) {
    const Segment& s = at(child);
    if (std::memcmp(tokens(s), page, options_.page_tokens * sizeof(Token)) == 0 &&
        same(extra_of(s.extras.get(), s.first), extra)) {
      return child;
    }
    child = likely_child(s.next_in_bucket, s.hash, parent);
  }
  return child;
}

/// The first under this hash, from segment `from` of its bucket on: nearly always the one.
SegmentId PrefixTree::likely_child(std::uint32_t from, std::uint64_t hash,
                                   SegmentId parent) const noexcept {
  while (from != none && (segments_[from].hash != hash || segments_[from].parent != parent.value()))
    from = segments_[from].next_in_bucket;
  return SegmentId{from};
}

SegmentId PrefixTree::likely_child(SegmentId parent, const Token* page,
                                   const std::string* extra) const noexcept {
  const std::uint64_t hash = child_hash(parent, page, extra);
  return likely_child(buckets_[hash & (buckets_.size() - 1)], hash, parent);
}

std::uint32_t PrefixTree::equal_pages(const Segment& s, std::uint32_t skip, const Token* asked,
                                      std::uint32_t pages, std::uint32_t first,
                                      const PageExtras& extras) const {
  const std::uint32_t count = std::min<std::uint32_t>(pages, s.pages - skip);
  const std::size_t page_bytes = options_.page_tokens * sizeof(Token);
  const Token* mine = tokens(s) + static_cast<std::size_t>(skip) * options_.page_tokens;
  std::uint32_t equal = count;
  if (std::memcmp(mine, asked, count * page_bytes) != 0) {
    equal = 0;
    while (std::memcmp(mine + static_cast<std::size_t>(equal) * options_.page_tokens,
                       asked + static_cast<std::size_t>(equal) * options_.page_tokens,
                       page_bytes) == 0) {
      ++equal;
    }
  }
  if (s.extras != nullptr || !extras.empty()) {
    for (std::uint32_t i = 0; i < equal; ++i) {
      if (!same(extra_of(s.extras.get(), first + i), extra_of(&extras, first + i))) return i;
    }
  }
  return equal;
}

void PrefixTree::fetch(const Segment& s) const noexcept {
  constexpr std::size_t line = 64;
  const std::size_t used =
      layouts_[s.size_class].tokens + std::size_t{s.pages} * options_.page_tokens * sizeof(Token);
  for (std::size_t at = 0; at < used; at += line) __builtin_prefetch(s.chunk + at);
}

void PrefixTree::match(SegmentId root, std::span<const Token> asked, const PageExtras& extras,
                       std::uint32_t max_pages, TreePath& out) const {
  out.clear();
  const std::uint32_t P = options_.page_tokens;
  const auto pages = static_cast<std::uint32_t>(std::min<std::size_t>(asked.size() / P, max_pages));
  // A long path is as fast as its segments come out of memory: while one's tokens are compared, the
  // one that will follow if they are equal is on its way.
  const auto likely_behind = [&](SegmentId parent, std::uint32_t behind) {
    if (behind >= pages) return SegmentId{none};
    const SegmentId likely = likely_child(
        parent, asked.data() + static_cast<std::size_t>(behind) * P, extra_of(&extras, behind));
    if (likely.value() != none) fetch(at(likely));
    return likely;
  };
  SegmentId parent = root;
  SegmentId child = likely_behind(root, 0);
  while (child.value() != none) {
    const Token* next = asked.data() + static_cast<std::size_t>(out.pages) * P;
    SegmentId likely = likely_behind(child, out.pages + at(child).pages);
    std::uint32_t equal = equal_pages(at(child), 0, next, pages - out.pages, out.pages, extras);
    if (equal == 0) {  // another page of the same hash
      child = find_child(parent, next, extra_of(&extras, out.pages));
      if (child.value() == none) break;
      likely = likely_behind(child, out.pages + at(child).pages);
      equal = equal_pages(at(child), 0, next, pages - out.pages, out.pages, extras);
    }
    out.parts.push_back({child, out.pages, equal});
    out.pages += equal;
    if (equal < at(child).pages) {
      out.left_path = out.pages < pages;
      return;
    }
    parent = child;
    child = likely;
  }
  out.left_path = out.pages < pages && at(parent).first_child != none;
}

PrefixTree::Common PrefixTree::common_tokens(TreeCursor cursor,
                                             std::span<const Token> asked) const {
  constexpr int children_to_try = 16;
  const std::uint32_t P = options_.page_tokens;
  Common best{0, cursor};
  const auto consider = [&](SegmentId id, std::uint32_t page) {
    const Segment& s = at(id);
    if (extra_of(s.extras.get(), page) != nullptr) return;
    const Token* mine = tokens(s) + static_cast<std::size_t>(page - s.first) * P;
    const std::size_t most = std::min<std::size_t>(asked.size(), P);
    std::uint32_t equal = 0;
    while (equal < most && mine[equal] == asked[equal]) ++equal;
    if (equal > best.tokens) best = {equal, {id, page + 1}};
  };
  const Segment& s = at(cursor.segment);
  if (cursor.pages < s.first + s.pages) {
    consider(cursor.segment, cursor.pages);
    return best;
  }
  int tried = 0;
  for (std::uint32_t i = s.first_child; i != none && tried < children_to_try;
       i = segments_[i].next, ++tried) {
    consider(SegmentId{i}, segments_[i].first);
  }
  return best;
}

// ---- filing
// --------------------------------------------------------------------------------------

SegmentId PrefixTree::new_segment() {
  std::uint32_t id;
  if (free_ids_.empty()) {
    if (segments_.size() >= none) throw KVError("the prefix tree has 2^32 segments");
    id = static_cast<std::uint32_t>(segments_.size());
    segments_.emplace_back();
    proofs_.emplace_back();
  } else {
    id = free_ids_.back();
    free_ids_.pop_back();
    segments_[id] = Segment{};
    proofs_[id] = Proof{};
  }
  segments_[id].used = true;
  ++live_segments_;
  return SegmentId{id};
}

void PrefixTree::move_pages(const Segment& from, std::uint32_t skip, const Segment& to,
                            std::uint32_t count) const {
  const std::size_t P = options_.page_tokens;
  for (std::uint32_t leaf = 0; leaf < options_.leaves; ++leaf) {
    masks(to)[leaf] = (masks(from)[leaf] >> skip) & low_bits(count);
    std::memmove(static_cast<void*>(block_array(to, leaf)), block_array(from, leaf) + skip,
                 count * sizeof(BlockId));
  }
  if (options_.page_keys) std::memmove(keys(to), keys(from) + skip, count * sizeof(PageDigest));
  if (options_.ahead_tokens) std::memmove(ahead(to), ahead(from) + skip, count * sizeof(Token));
  std::memmove(tokens(to), tokens(from) + skip * P, count * P * sizeof(Token));
}

void PrefixTree::resize_chunk(Segment& s, std::uint32_t pages) {
  const auto size_class = static_cast<std::uint8_t>(std::bit_width(std::bit_ceil(pages)) - 1);
  if (s.chunk != nullptr && s.size_class == size_class) return;
  Segment grown;
  grown.size_class = size_class;
  grown.chunk = store_->take(size_class);
  if (s.chunk != nullptr) {
    move_pages(s, 0, grown, std::min<std::uint32_t>(s.pages, pages));
    store_->give_back(s.chunk, s.size_class);
  } else {
    std::memset(masks(grown), 0, options_.leaves * sizeof(std::uint32_t));
  }
  s.chunk = grown.chunk;
  s.size_class = size_class;
}

void PrefixTree::append_pages(SegmentId id, const Token* pages, std::uint32_t count,
                              const PageExtras& extras) {
  Segment& s = at(id);
  const std::uint32_t P = options_.page_tokens;
  resize_chunk(s, s.pages + count);
  std::memcpy(tokens(s) + static_cast<std::size_t>(s.pages) * P, pages,
              static_cast<std::size_t>(count) * P * sizeof(Token));
  if (options_.ahead_tokens) std::memset(ahead(s) + s.pages, 0, count * sizeof(Token));
  const auto extra_at = [&](std::uint32_t i) { return extra_of(&extras, s.first + s.pages + i); };
  for (std::uint32_t i = 0; i < count && !extras.empty(); ++i) {
    const std::string* extra = extra_at(i);
    if (extra == nullptr) continue;
    if (s.extras == nullptr) s.extras = std::make_unique<PageExtras>();
    s.extras->push_back({s.first + s.pages + i, *extra});
  }
  if (options_.page_keys) {
    const Segment& up = segments_[s.parent];
    PageDigest above = s.pages > 0 ? keys(s)[s.pages - 1] : keys(up)[up.root ? 0 : up.pages - 1];
    const std::span<PageDigest> made(keys(s) + s.pages, count);
    for (std::uint32_t i = 0; i < count;) {  // those with an extra key one by one, others in runs
      std::uint32_t end = i;
      while (end < count && extra_at(end) == nullptr) ++end;
      const std::span<const Token> asked(pages, std::size_t{count} * P);
      options_.hasher.pages(above, asked.subspan(std::size_t{i} * P, std::size_t{end - i} * P),
                            made.subspan(i, end - i));
      if (end > i) above = made[end - 1];
      if (end < count)
        above = made[end] =
            options_.hasher.page(above, asked.subspan(std::size_t{end} * P, P), *extra_at(end));
      i = end + 1;
    }
  }
  s.pages = static_cast<std::uint8_t>(s.pages + count);
  pages_ += count;
  proofs_[id.value()].key_known = false;  // made when it is needed: most never are
}

void PrefixTree::enter_bucket(SegmentId id) noexcept {
  std::uint32_t& head = buckets_[at(id).hash & (buckets_.size() - 1)];
  at(id).next_in_bucket = head;
  head = id.value();
}

void PrefixTree::leave_bucket(SegmentId id) noexcept {
  std::uint32_t* link = &buckets_[at(id).hash & (buckets_.size() - 1)];
  while (*link != id.value()) link = &segments_[*link].next_in_bucket;
  *link = at(id).next_in_bucket;
}

void PrefixTree::link_child(SegmentId parent, SegmentId child) noexcept {
  Segment& c = at(child);
  c.parent = parent.value();
  c.previous = none;
  c.next = at(parent).first_child;
  if (c.next != none) segments_[c.next].previous = child.value();
  at(parent).first_child = child.value();
}

void PrefixTree::unlink_child(SegmentId child) noexcept {
  Segment& c = at(child);
  if (c.previous != none) {
    segments_[c.previous].next = c.next;
  } else {
    segments_[c.parent].first_child = c.next;
  }
  if (c.next != none) segments_[c.next].previous = c.previous;
}

SegmentId PrefixTree::split(SegmentId lower, std::uint32_t keep_above) {
  // The lower part keeps the id: its children are found under it, and blocks filed in it by
  // absolute page. The upper part takes its place under the parent.
  const SegmentId upper = new_segment();
  Segment& u = at(upper);
  Segment& l = at(lower);
  u.first = l.first;
  u.hash = l.hash;
  u.marks = l.marks;
  resize_chunk(u, keep_above);
  move_pages(l, 0, u, keep_above);
  u.pages = static_cast<std::uint8_t>(keep_above);
  leave_bucket(lower);
  const SegmentId parent{l.parent};
  unlink_child(lower);
  link_child(parent, upper);
  enter_bucket(upper);

  const auto rest = static_cast<std::uint8_t>(l.pages - keep_above);
  move_pages(l, keep_above, l, rest);
  l.pages = rest;
  l.first += keep_above;
  if (l.extras != nullptr) {
    const auto middle = std::find_if(l.extras->begin(), l.extras->end(),
                                     [&](const PageExtra& e) { return e.page >= l.first; });
    if (middle != l.extras->begin()) {
      u.extras = std::make_unique<PageExtras>(l.extras->begin(), middle);
      l.extras->erase(l.extras->begin(), middle);
    }
    if (l.extras->empty()) l.extras.reset();
  }
  resize_chunk(l, rest);
  link_child(upper, lower);
  l.hash = child_hash(upper, tokens(l), extra_of(l.extras.get(), l.first));
  enter_bucket(lower);

  Proof& proof = proofs_[lower.value()];
  if (proof.pages > 0) {  // the upper part counts as newer, as if the path had been told anew
    Proof& above = proofs_[upper.value()];
    above.pages = static_cast<std::uint8_t>(std::min<std::uint32_t>(proof.pages, keep_above));
    proof.pages = static_cast<std::uint8_t>(proof.pages - above.pages);
    link_proven(upper.value(), lower.value());
    if (proof.pages == 0) unlink_proven(lower.value());
  }
  if (on_split_) on_split_(lower, upper, l.first);
  return upper;
}

PrefixTree::Run PrefixTree::insert(TreeCursor& cursor, std::span<const Token> asked,
                                   const PageExtras& extras) {
  const std::uint32_t P = options_.page_tokens;
  const auto pages = static_cast<std::uint32_t>(asked.size() / P);
  assert(pages > 0);
  SegmentId here = cursor.segment;
  const std::uint32_t first = cursor.pages;
  const std::uint32_t end = at(here).first + at(here).pages;

  if (!at(here).root && first < end) {  // inside a segment: follow it, or split it
    const std::uint32_t skip = first - at(here).first;
    const std::uint32_t equal = equal_pages(at(here), skip, asked.data(), pages, first, extras);
    if (equal > 0) {
      cursor.pages += equal;
      return {here, first, equal};
    }
    here = skip > 0 ? split(here, skip) : SegmentId{at(here).parent};
  } else {
    const SegmentId child = find_child(here, asked.data(), extra_of(&extras, first));
    if (child.value() != none) {
      const std::uint32_t equal = equal_pages(at(child), 0, asked.data(), pages, first, extras);
      cursor = {child, first + equal};
      return {child, first, equal};
    }
    const Segment& s = at(here);
    if (!s.root && s.first_child == none && s.pages < segment_pages) {
      const std::uint32_t count = std::min(pages, segment_pages - s.pages);
      append_pages(here, asked.data(), count, extras);
      cursor = {here, first + count};
      return {here, first, count};
    }
  }
  const std::uint32_t count = std::min(pages, segment_pages);
  const SegmentId child = new_segment();
  at(child).first = first;
  at(child).parent = here.value();
  append_pages(child, asked.data(), count, extras);
  link_child(here, child);
  at(child).hash = child_hash(here, asked.data(), extra_of(&extras, first));
  enter_bucket(child);
  cursor = {child, first + count};
  return {child, first, count};
}

// ---- blocks
// --------------------------------------------------------------------------------------

BlockId PrefixTree::block(SegmentId segment, std::uint32_t page,
                          std::uint32_t leaf) const noexcept {
  const Segment& s = at(segment);
  return block_array(s, leaf)[page - s.first];
}

bool PrefixTree::resident(SegmentId segment, std::uint32_t page,
                          std::uint32_t leaf) const noexcept {
  const Segment& s = at(segment);
  return (masks(s)[leaf] >> (page - s.first) & 1) != 0;
}

void PrefixTree::set_block(SegmentId segment, std::uint32_t page, std::uint32_t leaf,
                           BlockId block) noexcept {
  const Segment& s = at(segment);
  masks(s)[leaf] |= 1u << (page - s.first);
  block_array(s, leaf)[page - s.first] = block;
}

void PrefixTree::clear_block(SegmentId segment, std::uint32_t page, std::uint32_t leaf) noexcept {
  const Segment& s = at(segment);
  masks(s)[leaf] &= ~(1u << (page - s.first));
  trim(segment);
}

std::uint32_t PrefixTree::mask(SegmentId segment, std::uint32_t leaf) const noexcept {
  return masks(at(segment))[leaf];
}

const BlockId* PrefixTree::blocks(SegmentId segment, std::uint32_t leaf) const noexcept {
  return block_array(at(segment), leaf);
}

Token PrefixTree::ahead_token(SegmentId segment, std::uint32_t page) const noexcept {
  const Segment& s = at(segment);
  return ahead(s)[page - s.first];
}

void PrefixTree::set_ahead_token(SegmentId segment, std::uint32_t page, Token token) noexcept {
  const Segment& s = at(segment);
  ahead(s)[page - s.first] = token;
}

PageDigest PrefixTree::page_key(SegmentId segment, std::uint32_t page) const {
  const Segment& s = at(segment);
  return keys(s)[page - s.first];
}

PageDigest PrefixTree::parent_key(SegmentId segment, std::uint32_t page) const {
  const Segment& s = at(segment);
  if (page > s.first) return keys(s)[page - 1 - s.first];
  const Segment& up = segments_[s.parent];
  return up.root ? PageDigest{} : keys(up)[up.pages - 1];
}

// ---- structure
// -----------------------------------------------------------------------------------

std::uint32_t PrefixTree::first_page(SegmentId segment) const noexcept { return at(segment).first; }
std::uint32_t PrefixTree::pages(SegmentId segment) const noexcept { return at(segment).pages; }
bool PrefixTree::is_root(SegmentId segment) const noexcept { return at(segment).root; }

std::optional<SegmentId> PrefixTree::parent(SegmentId segment) const noexcept {
  if (at(segment).root) return {};
  return SegmentId{at(segment).parent};
}

SegmentId PrefixTree::segment_of(TreeCursor cursor, std::uint32_t page) const noexcept {
  SegmentId id = cursor.segment;
  while (at(id).first > page) id = SegmentId{at(id).parent};
  return id;
}

void PrefixTree::pin(SegmentId segment) noexcept { ++at(segment).pins; }

void PrefixTree::unpin(SegmentId segment) noexcept {
  assert(at(segment).pins > 0);
  if (--at(segment).pins == 0) trim(segment);
}

bool PrefixTree::marked(SegmentId segment, std::uint32_t leaf) const noexcept {
  return (at(segment).marks >> leaf & 1) != 0;
}

void PrefixTree::set_mark(SegmentId segment, std::uint32_t leaf, bool on) noexcept {
  std::uint64_t& marks = at(segment).marks;
  marks = on ? marks | std::uint64_t{1} << leaf : marks & ~(std::uint64_t{1} << leaf);
}

void PrefixTree::trim(SegmentId id) noexcept {
  // Pages at a loose end that hold no block can never be hit again: drop them, and their parents
  // after them. Roots stay: there is one per salt and adapter in use, and they hold nothing.
  while (true) {
    Segment& s = at(id);
    if (s.root || s.pins > 0 || s.first_child != none) return;
    std::uint32_t any = 0;
    for (std::uint32_t leaf = 0; leaf < options_.leaves; ++leaf) any |= masks(s)[leaf];
    const auto needed = static_cast<std::uint32_t>(std::bit_width(any));
    if (needed == s.pages) return;
    remember(id, needed);
    pages_ -= s.pages - needed;
    set_proven(id, std::min<std::uint32_t>(proofs_[id.value()].pages, needed));
    if (needed > 0) {
      s.pages = static_cast<std::uint8_t>(needed);
      while (s.extras != nullptr && !s.extras->empty() &&
             s.extras->back().page >= s.first + needed) {
        s.extras->pop_back();
      }
      return;
    }
    const SegmentId parent{s.parent};
    leave_bucket(id);
    unlink_child(id);
    store_->give_back(s.chunk, s.size_class);
    s = Segment{};
    free_ids_.push_back(id.value());
    --live_segments_;
    id = parent;
  }
}

void PrefixTree::clear() {
  for (Segment& s : segments_) {
    if (s.chunk != nullptr) store_->give_back(s.chunk, s.size_class);
  }
  segments_.clear();
  proofs_.clear();
  free_ids_.clear();
  roots_.clear();
  history_.clear();
  oldest_proven_ = newest_proven_ = none;
  pages_ = proven_ = 0;
  std::fill(buckets_.begin(), buckets_.end(), none);
  live_segments_ = 0;
}

std::uint64_t PrefixTree::metadata_bytes() const noexcept {
  return store_->bytes() + segments_.size() * (sizeof(Segment) + sizeof(Proof)) +
         buckets_.size() * sizeof(std::uint32_t) + history_.metadata_bytes();
}

void PrefixTree::audit() const {
  std::uint32_t used = 0;
  std::uint64_t pages = 0;
  std::uint64_t proven = 0;
  std::uint32_t with_proof = 0;
  for (std::uint32_t i = 0; i < segments_.size(); ++i) {
    const Segment& s = segments_[i];
    if (!s.used || s.root) continue;
    ++used;
    pages += s.pages;
    proven += proofs_[i].pages;
    with_proof += proofs_[i].pages > 0 ? 1 : 0;
    const auto check = [&](bool good, std::string_view equation) {
      if (!good) throw InvariantError(fmt::format("prefix tree: segment {}: {}", i, equation));
    };
    check(s.pages >= 1 && s.pages <= segment_pages, "1 <= pages <= 32");
    check(s.pages <= 1u << s.size_class, "pages <= capacity");
    const Segment& up = segments_[s.parent];
    check(up.used, "its parent is in use");
    check(s.first == up.first + up.pages, "first page == parent's first + parent's pages");
    check(proofs_[i].pages <= s.pages, "proven pages <= pages");
    check(!proofs_[i].key_known || !proofs_[s.parent].key_known ||
              proofs_[i].key == proofs_[s.parent].key + hash_of_pages(s, 0, s.pages),
          "key == parent's key + hashes of its pages");
    check(s.hash == child_hash(SegmentId{s.parent}, tokens(s), extra_of(s.extras.get(), s.first)),
          "hash == hash of its first page under its parent");
    check(
        find_child(SegmentId{s.parent}, tokens(s), extra_of(s.extras.get(), s.first)).value() == i,
        "it is what its parent finds under its first page");
    for (std::uint32_t leaf = 0; leaf < options_.leaves; ++leaf) {
      check((masks(s)[leaf] & ~low_bits(s.pages)) == 0, "no block behind its last page");
    }
    if (s.extras != nullptr) {
      for (const PageExtra& e : *s.extras) {
        check(e.page >= s.first && e.page < s.first + s.pages, "extra keys belong to its pages");
      }
    }
  }
  if (used != live_segments_) {
    throw InvariantError(
        fmt::format("prefix tree: segments in use {} == counted {}", used, live_segments_));
  }
  if (pages != pages_ || proven != proven_) {
    throw InvariantError(fmt::format("prefix tree: pages {} == counted {}, of them proven {} == {}",
                                     pages, pages_, proven, proven_));
  }
  std::uint32_t older = none;
  for (std::uint32_t i = oldest_proven_; i != none; older = i, i = proofs_[i].newer) {
    if (with_proof-- == 0 || proofs_[i].pages == 0 || proofs_[i].older != older) {
      throw InvariantError(fmt::format("prefix tree: segment {} is out of the order of proof", i));
    }
  }
  if (with_proof != 0 || older != newest_proven_) {
    throw InvariantError("prefix tree: the order of proof lists all segments with proven pages");
  }
}

}  // namespace kvleaf
