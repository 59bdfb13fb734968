// The prefix tree against a slow obvious model: a map from token prefixes to blocks.
#include "kvleaf/group/prefix_tree.h"

#include <doctest/doctest.h>

#include <map>
#include <set>
#include <vector>

#include "device.h"

namespace kvleaf {
namespace {
using kvleaf::testing::Random;

/// All that identifies the first n pages, as one string.
using Prefix = std::string;

class Model {
 public:
  explicit Model(std::uint32_t page_tokens) : page_tokens_(page_tokens) {}

  Prefix prefix(const std::vector<Token>& tokens, const PageExtras& extras,
                std::uint32_t pages) const {
    Prefix text;
    for (std::uint32_t page = 0; page < pages; ++page) {
      for (std::uint32_t i = 0; i < page_tokens_; ++i)
        text += std::to_string(tokens[page * page_tokens_ + i]) + ",";
      for (const PageExtra& e : extras) {
        if (e.page == page) text += "<" + e.key + ">";
      }
      text += ";";
    }
    return text;
  }
  void set(const Prefix& prefix, std::uint32_t leaf, std::uint32_t block) {
    blocks_[prefix][leaf] = block;
  }
  void clear(const Prefix& prefix, std::uint32_t leaf) {
    blocks_[prefix].erase(leaf);
    if (blocks_[prefix].empty()) blocks_.erase(prefix);
  }
  /// Whether a page with this prefix, or below it, holds a block.
  bool exists(const Prefix& prefix) const {
    const auto at = blocks_.lower_bound(prefix);
    return at != blocks_.end() && at->first.compare(0, prefix.size(), prefix) == 0;
  }
  /// Whether something lies below it.
  bool goes_on(const Prefix& prefix) const {
    const auto at = blocks_.upper_bound(prefix);
    return at != blocks_.end() && at->first.compare(0, prefix.size(), prefix) == 0;
  }
  const std::map<Prefix, std::map<std::uint32_t, std::uint32_t>>& blocks() const { return blocks_; }

 private:
  std::uint32_t page_tokens_;
  std::map<Prefix, std::map<std::uint32_t, std::uint32_t>> blocks_;  // per leaf
};

TEST_CASE("K-05 insertions, look-ups, splits and evictions agree with a map of prefixes") {
  for (std::uint64_t seed = 1; seed <= 60; ++seed) {
    Random random(seed);
    const std::uint32_t P = random.one_in(2) ? 1 : 3;
    const std::uint32_t leaves = random.between(1, 3);
    const std::uint32_t alphabet = random.one_in(2) ? 2 : 3;
    PrefixTree tree(
        {.page_tokens = P, .leaves = leaves, .page_keys = random.one_in(2), .expected_pages = 64});
    Model model(P);
    const SegmentId root = tree.root("salt", "adapter");
    struct Page {
      std::vector<Token> tokens;
      PageExtras extras;
      std::uint32_t pages;
      std::uint32_t leaf;
    };
    std::vector<Page> held;
    std::vector<Page> asked_before;
    std::uint32_t next_block = 1;
    std::vector<std::pair<SegmentId, std::uint32_t>> splits;
    tree.on_split([&](SegmentId, SegmentId, std::uint32_t first) { CHECK(first > 0); });

    for (int operation = 0; operation < 300; ++operation) {
      Page page;
      const std::uint32_t pages = random.between(1, random.one_in(4) ? 80 : 12);
      if (!asked_before.empty() && !random.one_in(3)) {
        const Page& base = asked_before[random.below(asked_before.size())];
        const std::uint32_t common = random.below(base.pages + 1) * P;
        page.tokens.assign(base.tokens.begin(), base.tokens.begin() + common);
        for (const PageExtra& e : base.extras) {
          if (e.page < common / P) page.extras.push_back(e);
        }
      }
      while (page.tokens.size() < pages * P)
        page.tokens.push_back(static_cast<Token>(random.below(alphabet)));
      page.tokens.resize(pages * P);
      while (!page.extras.empty() && page.extras.back().page >= pages) page.extras.pop_back();
      page.pages = pages;
      if (random.one_in(8) && page.extras.empty())
        page.extras.push_back({random.below(pages), random.one_in(2) ? "a" : "b"});
      asked_before.push_back(page);

      if (random.one_in(
              2)) {  // insert, and file a block somewhere along the way, surely at the end
        TreeCursor cursor{root, 0};
        tree.pin(cursor.segment);
        while (cursor.pages < pages) {
          const std::uint32_t before = cursor.pages;
          TreeCursor moved = cursor;
          const PrefixTree::Run run = tree.insert(
              moved, std::span(page.tokens).subspan(before * P, (pages - before) * P), page.extras);
          REQUIRE(run.first == before);
          REQUIRE(moved.pages == before + run.pages);
          tree.pin(moved.segment);
          tree.unpin(cursor.segment);
          cursor = moved;
          for (std::uint32_t at = run.first; at < run.first + run.pages; ++at) {
            for (std::uint32_t leaf = 0; leaf < leaves; ++leaf) {
              if (at + 1 < pages && !random.one_in(3)) continue;
              const Prefix prefix = model.prefix(page.tokens, page.extras, at + 1);
              const auto known = model.blocks().find(prefix);
              const bool resident = known != model.blocks().end() && known->second.contains(leaf);
              REQUIRE(tree.resident(run.segment, at, leaf) == resident);
              if (resident) {
                REQUIRE(tree.block(run.segment, at, leaf).value() == known->second.at(leaf));
                continue;
              }
              tree.set_block(run.segment, at, leaf, BlockId{next_block});
              model.set(prefix, leaf, next_block++);
              held.push_back({page.tokens, page.extras, at + 1, leaf});
            }
          }
        }
        tree.unpin(cursor.segment);
      } else if (!held.empty() && random.one_in(2)) {  // evict some
        for (std::uint32_t n = random.between(1, 30); n > 0 && !held.empty(); --n) {
          std::swap(held[random.below(held.size())], held.back());
          const Page gone = held.back();
          held.pop_back();
          TreePath path;
          tree.match(root, gone.tokens, gone.extras, gone.pages, path);
          REQUIRE(path.pages == gone.pages);
          const TreeCursor behind{path.parts.back().segment, gone.pages};
          const SegmentId segment = tree.segment_of(behind, gone.pages - 1);
          tree.clear_block(segment, gone.pages - 1, gone.leaf);
          model.clear(model.prefix(gone.tokens, gone.extras, gone.pages), gone.leaf);
        }
      }
      tree.audit();

      TreePath path;
      const std::uint32_t most = random.one_in(4) ? random.below(pages + 1) : pages;
      tree.match(root, page.tokens, page.extras, most, path);
      std::uint32_t expected = 0;
      while (expected < most && model.exists(model.prefix(page.tokens, page.extras, expected + 1)))
        ++expected;
      REQUIRE(path.pages == expected);
      REQUIRE(path.left_path ==
              (expected < most && model.goes_on(model.prefix(page.tokens, page.extras, expected))));
      for (const TreePath::Part& part : path.parts) {
        for (std::uint32_t at = part.first; at < part.first + part.pages; ++at) {
          const auto known = model.blocks().find(model.prefix(page.tokens, page.extras, at + 1));
          for (std::uint32_t leaf = 0; leaf < leaves; ++leaf) {
            const bool resident = known != model.blocks().end() && known->second.contains(leaf);
            REQUIRE(tree.resident(part.segment, at, leaf) == resident);
            if (resident)
              REQUIRE(tree.block(part.segment, at, leaf).value() == known->second.at(leaf));
          }
        }
      }
    }
    for (const Page& page : held) {
      TreePath path;
      tree.match(root, page.tokens, page.extras, page.pages, path);
      REQUIRE(path.pages == page.pages);
      tree.clear_block(path.parts.back().segment, page.pages - 1, page.leaf);
    }
    tree.audit();
    CHECK(tree.segments() == 0);
  }
}

TEST_CASE("K-05 thousands of first pages in a small table: equal ones are found, others never") {
  PrefixTree tree({.page_tokens = 1, .leaves = 1, .expected_pages = 1});
  const SegmentId root = tree.root("", "");
  for (Token token = 0; token < 6000; token += 2) {
    TreeCursor cursor{root, 0};
    const PrefixTree::Run run = tree.insert(cursor, {&token, 1}, {});
    tree.set_block(run.segment, 0, 0, BlockId{static_cast<std::uint32_t>(token) + 1});
  }
  for (Token token = 0; token < 6000; ++token) {
    TreePath path;
    tree.match(root, {&token, 1}, {}, 1, path);
    REQUIRE(path.pages == (token % 2 == 0 ? 1 : 0));
    if (path.pages == 1)
      CHECK(tree.block(path.parts[0].segment, 0, 0).value() ==
            static_cast<std::uint32_t>(token) + 1);
  }
}

TEST_CASE("K-06 keys of pages: a seed of its own, or the same everywhere") {
  const std::vector<Token> tokens{1, 2, 3, 4};
  const auto chain = [&](const PageHasher& hasher) {
    return hasher.page(hasher.root("", ""), tokens, "");
  };
  CHECK(chain(PageHasher(KeyHash::xxh3_128, 1)) != chain(PageHasher(KeyHash::xxh3_128, 2)));
  CHECK(chain(PageHasher(KeyHash::xxh3_128, 1)) == chain(PageHasher(KeyHash::xxh3_128, 1)));
  CHECK(chain(PageHasher(KeyHash::sha256, 0)) == chain(PageHasher(KeyHash::sha256, 0)));
  CHECK(chain(PageHasher(KeyHash::sha256, 0)) != chain(PageHasher(KeyHash::sha256, 1)));
}

TEST_CASE("the keys of many pages at once are those of one page after another") {
  std::vector<Token> tokens(5 * 300);
  for (std::size_t i = 0; i < tokens.size(); ++i) tokens[i] = static_cast<Token>(i * i % 1009);
  for (const KeyHash hash : {KeyHash::xxh3_128, KeyHash::sha256}) {
    const PageHasher hasher(hash, 0x0123456789abcdef);
    for (const std::size_t page : {1, 4, 16, 60, 64, 252, 300}) {  // tokens; 252: 1,024 bytes
      CAPTURE(page);
      const std::span<const Token> asked = std::span(tokens).first(5 * page);
      std::vector<PageDigest> keys(5);
      PageDigest key = hasher.root("salt", "");
      hasher.pages(key, asked, keys);
      for (std::size_t i = 0; i < keys.size(); ++i) {
        key = hasher.page(key, asked.subspan(i * page, page), "");
        CHECK(keys[i] == key);
      }
    }
  }
}

TEST_CASE("K-07 keys tell extras, parents and tokens apart") {
  const PageHasher hasher(KeyHash::sha256, 0);
  const std::vector<Token> tokens{1, 2, 3, 4};
  const std::vector<Token> others{1, 2, 3, 5};
  std::string ab_c;
  append_unambiguously(ab_c, "ab");
  append_unambiguously(ab_c, "c");
  std::string a_bc;
  append_unambiguously(a_bc, "a");
  append_unambiguously(a_bc, "bc");
  CHECK(ab_c != a_bc);
  const PageDigest root = hasher.root("s", "a");
  std::set<PageDigest> keys{root,
                            hasher.root("a", "s"),
                            hasher.root("sa", ""),
                            hasher.page(root, tokens, ""),
                            hasher.page(root, others, ""),
                            hasher.page(root, tokens, ab_c),
                            hasher.page(root, tokens, a_bc),
                            hasher.page(hasher.page(root, tokens, ""), tokens, "")};
  CHECK(keys.size() == 8);
}

TEST_CASE("keys in the tree are those of the chain, and survive splits") {
  const PageHasher hasher(KeyHash::sha256, 3);
  PrefixTree tree({.page_tokens = 2, .leaves = 1, .page_keys = true, .hasher = hasher});
  const SegmentId root = tree.root("s", "");
  const std::vector<Token> a{1, 2, 3, 4, 5, 6, 7, 8};
  const std::vector<Token> b{1, 2, 3, 4, 9, 9};
  const auto file = [&](const std::vector<Token>& tokens) {
    TreeCursor cursor{root, 0};
    while (cursor.pages * 2 < tokens.size()) {
      const PrefixTree::Run run =
          tree.insert(cursor, std::span(tokens).subspan(cursor.pages * 2), {});
      for (std::uint32_t page = run.first; page < run.first + run.pages; ++page)
        tree.set_block(run.segment, page, 0, BlockId{page + 1});
    }
  };
  file(a);
  file(b);
  for (const auto& tokens : {a, b}) {
    TreePath path;
    tree.match(root, tokens, {}, 8, path);
    PageDigest parent = hasher.root("s", "");
    for (const TreePath::Part& part : path.parts) {
      for (std::uint32_t page = part.first; page < part.first + part.pages; ++page) {
        CHECK(tree.parent_key(part.segment, page) == (page == 0 ? PageDigest{} : parent));
        parent = hasher.page(parent, std::span(tokens).subspan(page * 2, 2), "");
        CHECK(tree.page_key(part.segment, page) == parent);
      }
    }
  }
}

}  // namespace
}  // namespace kvleaf
