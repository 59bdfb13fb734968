#include "verify.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <fstream>
#include <numeric>
#include <unordered_map>

#include "kvleaf/kernels/append.h"
#include "kvleaf/kernels/copy.h"
#include "kvleaf/kernels/gather.h"

namespace kvleaf::cli {
namespace {

using Word = std::uint64_t;
constexpr std::size_t word_bytes = sizeof(Word);
constexpr std::size_t buffer_bytes = std::size_t{1} << 20;  // of entries moved at once
constexpr std::uint32_t sampled_slots = 6;                  // beside the first and the last

// ---- what bytes must be
// ---------------------------------------------------------------------------

constexpr Word odd = 0x9E3779B97F4A7C15;

/// Every bit of the result depends on every bit of x.
Word mixed(Word x) noexcept {
  x = (x ^ (x >> 32)) * 0xD6E8FEB86659FD93;
  x = (x ^ (x >> 32)) * 0xD6E8FEB86659FD93;
  return x ^ (x >> 32);
}

Word hash_of(std::string_view text) noexcept {
  Word hash = odd;
  for (const char c : text) hash = mixed(hash ^ static_cast<unsigned char>(c));
  return hash;
}

/// An entry's bytes are words that follow from its first: moved or exchanged words show as well.
void fill_entry(std::byte* entry, std::uint64_t bytes, Word first) noexcept {
  const std::uint64_t words = bytes / word_bytes;
  for (std::uint64_t i = 0; i < words; ++i) {
    const Word word = first + i * odd;
    std::memcpy(entry + i * word_bytes, &word, word_bytes);
  }
  const Word last = first + words * odd;
  std::memcpy(entry + words * word_bytes, &last, bytes % word_bytes);
}

bool entry_matches(const std::byte* entry, std::uint64_t bytes, Word first) noexcept {
  const std::uint64_t words = bytes / word_bytes;
  Word difference = 0;
  for (std::uint64_t i = 0; i < words; ++i) {
    Word word;
    std::memcpy(&word, entry + i * word_bytes, word_bytes);
    difference |= word ^ (first + i * odd);
  }
  const Word last = first + words * odd;
  return difference == 0 && std::memcmp(entry + words * word_bytes, &last, bytes % word_bytes) == 0;
}

bool all_zero(const std::byte* entry, std::uint64_t bytes) noexcept {
  return std::all_of(entry, entry + bytes, [](std::byte b) { return b == std::byte{0}; });
}

/// What a request's bytes follow from, and how far it is.
struct Known {
  std::vector<Word> prefix;        // of the first i tokens, i = 0 … tokens known
  std::uint32_t computed = 0;      // tokens, by the steps that were run
  std::uint32_t read_in_full = 0;  // computed when its whole reach was last read
  bool scratch_written = false;
  Word encoder = 0;
  std::uint32_t encoder_tokens = 0;

  void append(std::span<const Token> tokens) {
    const std::size_t before = prefix.size();
    prefix.resize(before + tokens.size());
    Word hash = prefix[before - 1];
    for (std::size_t i = 0; i < tokens.size(); ++i) {
      hash = (hash ^ static_cast<std::uint32_t>(tokens[i])) * odd;
      hash ^= hash >> 29;
      prefix[before + i] = hash;
    }
  }
};

// ---- a leaf's bytes
// ---------------------------------------------------------------------------------

struct Region {
  const KVLeafRegion* leaf;
  LeafId id;
  Writing writing;
  std::uint32_t tokens_per_page;
  std::uint32_t slots_per_page;
  Word seed;
  kernels::RowPages rows;  // an entry per slot; of states and scratch one entry per page

  /// First word of the entry of token `position`.
  Word text_word(const Known& known, std::uint32_t position) const noexcept {
    return mixed(known.prefix[position + 1] ^ (seed + position));
  }
  Word encoder_word(const Known& known, std::uint32_t position) const noexcept {
    return mixed(known.encoder ^ (seed + position));
  }
  Word state_word(const Known& known, std::uint32_t length) const noexcept {
    return mixed(known.prefix[length] ^ (seed + length));
  }
  Word scratch_word(RequestId request) const noexcept {
    return mixed(seed ^ mixed(request.value()));
  }

  bool by_token() const noexcept {
    return writing == Writing::append || writing == Writing::write_once;
  }
  std::uint32_t slots_of_a_page() const noexcept { return by_token() ? slots_per_page : 1; }
};

/// Bytes of a page when a token's are divided by `factor`.
std::uint64_t scaled_bytes(const KVLeafRegion& leaf, std::uint32_t slots, std::uint64_t factor) {
  if (factor == 1) return leaf.bytes_per_page();
  const std::uint64_t entry = leaf.bytes_per_page() / slots;
  const std::uint64_t bytes = (entry + factor - 1) / factor;
  return (bytes + word_bytes - 1) / word_bytes * word_bytes * slots;
}

/// The pool's tiling with smaller pages: the same blocks in the same huge blocks.
Geometry scaled(const Geometry& pool, std::vector<PageSpec> pages) {
  std::vector<std::uint64_t> ratios;
  std::uint64_t unit = word_bytes;  // a stride is a whole number of words, so huge blocks are too
  for (const LeafGeometry& leaf : pool.leaves()) {
    ratios.push_back(leaf.ratio);
    unit = std::lcm(unit, leaf.ratio * word_bytes);
  }
  std::uint64_t huge_bytes = 0;
  for (std::size_t i = 0; i < pages.size(); ++i) {
    pages[i].stride_alignment = word_bytes;
    huge_bytes = std::max(huge_bytes, pages[i].bytes_per_page * ratios[i]);
  }
  huge_bytes = (huge_bytes + unit - 1) / unit * unit;
  return Geometry::by_hand(pages, {.huge_bytes = huge_bytes,
                                   .huge_blocks = pool.huge_blocks(),
                                   .ratios = ratios,
                                   .alignment = 64});
}

// ---- reading a row's blocks
// -------------------------------------------------------------------------

/// The blocks of one row in one leaf: as staged for a forward, or as the manager holds them.
class RowBlocks {
 public:
  RowBlocks(const StepPlan& plan, const Region& region, std::uint32_t row) {
    const StagedArray* table = find(plan, region.id, "block_table");
    if (table != nullptr) {
      name_ = "block_table";
      first_ = table->row<std::int32_t>(row);
      count_ = table->shape[1];
      if (const StagedArray* first_slot = find(plan, region.id, "first_slot")) {
        const std::uint32_t head = region.leaf->group_id().pattern.head();
        sinks_ = (head + region.tokens_per_page - 1) / region.tokens_per_page;
        gap_ = *first_slot->row<std::int32_t>(row) - sinks_;
      }
    } else if (const StagedArray* indices = find(plan, region.id, "indices")) {
      name_ = "indices";
      const std::int32_t* indptr = plan.array(region.id, "indptr").row<std::int32_t>(0);
      first_ = indices->row<std::int32_t>(0) + indptr[row];
      count_ = indptr[row + 1] - indptr[row];
    }
  }
  explicit RowBlocks(std::span<const BlockId> blocks)
      : name_("the manager's row"),
        first_(reinterpret_cast<const std::int32_t*>(blocks.data())),
        count_(static_cast<std::int64_t>(blocks.size())) {}

  /// False for a leaf that stages neither form of table.
  bool known() const noexcept { return first_ != nullptr; }
  std::string_view name() const noexcept { return name_; }
  std::int32_t block(std::uint32_t slot) const noexcept {
    const std::int64_t column = slot < sinks_ ? slot : std::int64_t{slot} - gap_;
    return column < 0 || column >= count_ || (slot >= sinks_ && column < sinks_) ? 0
                                                                                 : first_[column];
  }

 private:
  static const StagedArray* find(const StepPlan& plan, LeafId leaf, std::string_view key) {
    for (const StagedArray& array : plan.arrays(leaf)) {
      if (array.key == key) return &array;
    }
    return nullptr;
  }

  std::string_view name_;
  const std::int32_t* first_ = nullptr;
  std::int64_t count_ = 0;
  std::int64_t sinks_ = 0;  // columns of a compact table that hold the sinks
  std::int64_t gap_ = 0;    // slots between them and the live span
};

}  // namespace

// ---- the verifier
// -----------------------------------------------------------------------------------

class Verifier::Impl {
 public:
  Impl(const BlockManager& manager, const VerifyOptions& options)
      : manager_(manager), arena_(make_arena(manager, options, stats_)) {
    stats_.arena_bytes = arena_.geometry().arena_bytes();
    const Geometry& geometry = arena_.geometry();
    std::uint64_t largest = 0;
    for (std::uint32_t i = 0; i < manager.leaves().size(); ++i) {
      const LeafId id{i};
      const KVLeafRegion& leaf = *manager.leaves()[i];
      const std::uint32_t tokens = manager.tokens_per_page(id);
      const LeafGeometry& tiled = geometry.leaf(id);
      Region region{.leaf = &leaf,
                    .id = id,
                    .writing = leaf.group_id().writing,
                    .tokens_per_page = tokens,
                    .slots_per_page = leaf.slots_per_page(tokens),
                    .seed = hash_of(leaf.leaf_id()),
                    .rows = {}};
      const std::uint32_t slots = region.slots_of_a_page();
      region.rows = {.base = arena_.view(id),
                     .page_stride = tiled.page_stride,
                     .offset = 0,
                     .row_bytes = tiled.bytes_per_page / slots,
                     .slots = slots,
                     .blocks = static_cast<std::uint32_t>(tiled.blocks)};
      pages_.push_back({.base = arena_.view(id),
                        .page_stride = tiled.page_stride,
                        .page_bytes = tiled.bytes_per_page,
                        .blocks = static_cast<std::uint32_t>(tiled.blocks)});
      largest = std::max(largest, region.rows.row_bytes);
      regions_.push_back(region);
    }
    buffer_.resize(std::max<std::uint64_t>(largest, buffer_bytes));
  }

  void admit(RequestId request, std::span<const Token> tokens, std::uint32_t hit_tokens,
             const EncoderInput* encoder) {
    Known& known = requests_[request];
    known = {};
    known.computed = hit_tokens;
    if (encoder != nullptr) {
      known.encoder = mixed(hash_of(encoder->digest) ^ encoder->tokens);
      known.encoder_tokens = encoder->tokens;
    }
    known.prefix.assign(1, mixed(known.encoder ^ odd));
    known.append(tokens);
  }

  void append(RequestId request, std::span<const Token> tokens) { at(request).append(tokens); }

  void fill_encoder(RequestId request) {
    const Known& known = at(request);
    for (const Region& region : regions_) {
      if (region.writing != Writing::write_once) continue;
      const RowBlocks blocks(manager_.blocks(request, region.id));
      const auto batch = tokens_at_once(region);
      for (std::uint32_t from = 0; from < known.encoder_tokens; from += batch) {
        const std::uint32_t to = std::min(known.encoder_tokens, from + batch);
        locate(request, region, blocks, from, to);
        write(region, entries_, [&](std::size_t i) {
          return region.encoder_word(known, from + static_cast<std::uint32_t>(i));
        });
      }
    }
  }

  void run(const StepPlan& plan, Check check) {
    step_ = plan.step().value();
    run_copies(plan);
    for (std::uint32_t row = 0; row < plan.rows().size(); ++row) {
      const RequestId request = plan.rows()[row];
      Known& known = at(request);
      const std::uint32_t begin = plan.cu_seqlens_q()[row];
      const std::uint32_t count = plan.cu_seqlens_q()[row + 1] - begin;
      if (plan.seq_lens()[row] != static_cast<std::int64_t>(known.computed) + count) {
        throw VerifyError(fmt::format(
            "request {}, step {}: seq_lens has {} where {} tokens were computed and {} are new",
            request.value(), step_, plan.seq_lens()[row], known.computed, count));
      }
      if (known.computed + count >= known.prefix.size()) {
        throw VerifyError(fmt::format("request {}, step {}: computes {} tokens of {} known",
                                      request.value(), step_, known.computed + count,
                                      known.prefix.size() - 1));
      }
      for (const Region& region : regions_) {
        switch (region.writing) {
          case Writing::append: text_step(plan, region, row, begin, count, check); break;
          case Writing::in_place: state_step(plan, region, row, count); break;
          case Writing::write_once: encoder_step(plan, region, row, check); break;
          case Writing::exclusive: scratch_step(plan, region, row); break;
        }
      }
      known.scratch_written = true;
      known.computed += count;
      if (check == Check::everything) known.read_in_full = known.computed;
    }
  }

  void release(RequestId request) {
    const Known& known = at(request);
    if (known.read_in_full != known.computed) {
      for (const Region& region : regions_) {
        if (region.writing == Writing::in_place) {
          const auto block = manager_.live_block(request, region.id);
          if (block) check_state(request, region, known.computed, block->value(), "the live state");
        } else if (region.by_token()) {
          read_reach(request, region, RowBlocks(manager_.blocks(request, region.id)),
                     Check::everything);
        }
      }
    }
    requests_.erase(request);
  }

  const VerifyStats& stats() const noexcept { return stats_; }
  const Arena& arena() const noexcept { return arena_; }
  bool lose_copies = false;
  bool lose_clears = false;

 private:
  static Arena make_arena(const BlockManager& manager, const VerifyOptions& options,
                          VerifyStats& stats) {
    std::vector<PageSpec> pages;
    for (const Leaf& leaf : manager.leaves()) pages.push_back(PageSpec::of(*leaf));
    for (std::uint64_t factor = 1;; factor *= 2) {
      long double written = 0;  // of all tokens and states
      bool smallest = true;
      for (std::uint32_t i = 0; i < pages.size(); ++i) {
        const KVLeafRegion& leaf = *manager.leaves()[i];
        const Writing writing = leaf.group_id().writing;
        const bool by_token = writing == Writing::append || writing == Writing::write_once;
        const std::uint32_t slots =
            by_token ? leaf.slots_per_page(manager.tokens_per_page(LeafId{i})) : 1;
        pages[i].bytes_per_page = scaled_bytes(leaf, slots, factor);
        smallest &= pages[i].bytes_per_page == slots * word_bytes;
        written += static_cast<long double>(pages[i].bytes_per_page) / slots *
                   (writing == Writing::append       ? options.tokens
                    : writing == Writing::write_once ? options.encoder_tokens
                                                     : options.steps);
      }
      const Geometry geometry =
          factor == 1 ? manager.geometry() : scaled(manager.geometry(), pages);
      const bool fits = geometry.arena_bytes() <= options.most_arena_bytes;
      if (smallest && !fits) {
        throw KVError(fmt::format(
            "verification needs {} bytes for {} huge blocks even at {} bytes an entry, and {} are "
            "there; "
            "a smaller --budget would be accepted",
            geometry.arena_bytes(), geometry.huge_blocks(), word_bytes, options.most_arena_bytes));
      }
      if (fits && (smallest || written <= static_cast<long double>(options.most_written_bytes))) {
        stats.factor = factor;
        return Arena::host(geometry);
      }
    }
  }

  Known& at(RequestId request) {
    const auto found = requests_.find(request);
    if (found == requests_.end()) {
      throw VerifyError(fmt::format("request {} is not known to the verifier", request.value()));
    }
    return found->second;
  }

  [[noreturn]] void fail(RequestId request, const Region& region, const std::string& what) const {
    throw VerifyError(fmt::format("request {}, leaf '{}', step {}: {}", request.value(),
                                  region.leaf->leaf_id(), step_, what));
  }

  std::uint32_t tokens_at_once(const Region& region) const noexcept {
    const std::uint64_t entries = buffer_bytes / std::max<std::uint64_t>(1, region.rows.row_bytes);
    return static_cast<std::uint32_t>(std::clamp<std::uint64_t>(entries, 1, 4096));
  }

  void run_copies(const StepPlan& plan) {
    copies_.clear();
    clears_.clear();
    for (const BlockCopy& copy : plan.copies()) {
      copies_.push_back({.leaf = copy.leaf.value(),
                         .src = static_cast<std::int32_t>(copy.src.value()),
                         .dst = static_cast<std::int32_t>(copy.dst.value())});
    }
    for (const ZeroFill& fill : plan.zero_fills()) {
      clears_.push_back(
          {.leaf = fill.leaf.value(), .block = static_cast<std::int32_t>(fill.block.value())});
    }
    stats_.copies += copies_.size();
    stats_.clears += clears_.size();
    try {
      if (!lose_copies) kernels::copy_pages(pages_, copies_);
      if (!lose_clears) kernels::zero_pages(pages_, clears_);
    } catch (const kernels::KernelError& error) {
      throw VerifyError(
          fmt::format("step {}: its copies and clears cannot be run: {}", step_, error.what()));
    }
  }

  /// Writes entry i of `entries` with bytes that follow from word(i).
  template <class WordOf>
  void write(const Region& region, std::span<const std::int64_t> entries, WordOf word) {
    const std::uint64_t bytes = region.rows.row_bytes;
    for (std::size_t i = 0; i < entries.size(); ++i) {
      fill_entry(buffer_.data() + i * bytes, bytes, word(i));
    }
    try {
      kernels::append_rows(buffer_.data(), bytes, entries, region.rows);
    } catch (const kernels::KernelError& error) {
      throw VerifyError(
          fmt::format("leaf '{}', step {}: {}", region.leaf->leaf_id(), step_, error.what()));
    }
    stats_.entries_written += entries.size();
    stats_.bytes_written += entries.size() * bytes;
  }

  /// Puts the slot mapping entries of tokens [from, to) into entries_.
  void locate(RequestId request, const Region& region, const RowBlocks& blocks, std::uint32_t from,
              std::uint32_t to) {
    entries_.resize(to - from);
    const std::uint32_t page = region.tokens_per_page;
    for (std::uint32_t token = from; token < to;) {
      const std::uint32_t slot = token / page;
      const std::int64_t block = blocks.block(slot);
      if (block <= 0 || block > region.rows.blocks) {
        fail(
            request, region,
            fmt::format("slot {}, which holds token {}, is block {} in {}; real blocks are 1 to {}",
                        slot, token, block, blocks.name(), region.rows.blocks));
      }
      const std::uint32_t end = std::min(to, (slot + 1) * page);
      const std::int64_t first = block * region.slots_per_page;
      if (region.slots_per_page == page) {
        std::iota(entries_.begin() + (token - from), entries_.begin() + (end - from),
                  first + token % page);
        token = end;
      } else {
        for (; token < end; ++token) {
          entries_[token - from] =
              first + std::uint64_t{token % page} * region.slots_per_page / page;
        }
      }
    }
  }

  /// Reads tokens [from, to) through `blocks` and compares them.
  template <class WordOf>
  void read(RequestId request, const Region& region, const RowBlocks& blocks, std::uint32_t from,
            std::uint32_t to, WordOf word) {
    const std::uint64_t bytes = region.rows.row_bytes;
    const std::uint32_t batch = tokens_at_once(region);
    for (; from < to; from += std::min(batch, to - from)) {
      const std::uint32_t end = std::min(to, from + batch);
      locate(request, region, blocks, from, end);
      kernels::gather_rows(region.rows, entries_, buffer_.data(), bytes);
      for (std::uint32_t token = from; token < end; ++token) {
        if (!holds_entry_of(region, token)) continue;
        const std::byte* entry = buffer_.data() + (token - from) * bytes;
        if (!entry_matches(entry, bytes, word(token))) {
          fail_entry(request, region, blocks, token, entry, word(token));
        }
      }
      stats_.entries_checked += end - from;
      stats_.bytes_checked += (end - from) * bytes;
    }
  }

  /// Several tokens may share a slot; the last of them writes what is left there.
  static bool holds_entry_of(const Region& region, std::uint32_t token) noexcept {
    return region.slots_per_page == region.tokens_per_page ||
           (std::uint64_t{token % region.tokens_per_page} + 1) * region.slots_per_page %
                   region.tokens_per_page ==
               0;
  }

  [[noreturn]] void fail_entry(RequestId request, const Region& region, const RowBlocks& blocks,
                               std::uint32_t token, const std::byte* entry, Word first) const {
    const std::uint64_t bytes = region.rows.row_bytes;
    std::vector<std::byte> expected(bytes);
    fill_entry(expected.data(), bytes, first);
    const auto at = static_cast<std::uint64_t>(
        std::mismatch(entry, entry + bytes, expected.begin()).first - entry);
    const std::uint64_t begin = at / word_bytes * word_bytes;
    Word wanted = 0, found = 0;
    const std::uint64_t count = std::min<std::uint64_t>(word_bytes, bytes - begin);
    std::memcpy(&wanted, expected.data() + begin, count);
    std::memcpy(&found, entry + begin, count);
    const std::uint32_t slot = token / region.tokens_per_page;
    fail(request, region,
         fmt::format(
             "token {} in slot {}, block {} by {}: expected {:#018x}, found {:#018x} at byte "
             "{} of {}",
             token, slot, blocks.block(slot), blocks.name(), wanted, found, begin, bytes));
  }

  void read_tokens(RequestId request, const Region& region, const RowBlocks& blocks,
                   std::uint32_t from, std::uint32_t to) {
    const Known& known = at(request);
    if (region.writing == Writing::append) {
      read(request, region, blocks, from, to,
           [&](std::uint32_t token) { return region.text_word(known, token); });
    } else {
      read(request, region, blocks, from, to,
           [&](std::uint32_t token) { return region.encoder_word(known, token); });
    }
  }

  /// Reads what computing the next token would read.
  void read_reach(RequestId request, const Region& region, const RowBlocks& blocks, Check check) {
    const Known& known = at(request);
    const bool text = region.writing == Writing::append;
    const std::uint32_t tokens = text ? known.computed : known.encoder_tokens;
    const AccessPattern& pattern = region.leaf->group_id().pattern;
    const std::uint32_t head = text ? std::min(pattern.head(), tokens) : 0;
    const std::uint32_t tail = text ? std::max(head, pattern.tail_begin(tokens)) : 0;
    if (check == Check::everything) {
      read_tokens(request, region, blocks, 0, head);
      read_tokens(request, region, blocks, tail, tokens);
      return;
    }
    if (tail >= tokens) return;
    const std::uint32_t page = region.tokens_per_page;
    const std::uint32_t first = tail / page;
    const std::uint32_t slots = (tokens - 1) / page - first + 1;
    const auto read_slot = [&](std::uint32_t slot) {
      read_tokens(request, region, blocks, std::max(tail, slot * page),
                  std::min(tokens, (slot + 1) * page));
    };
    read_slot(first);
    read_slot(first + slots - 1);
    for (std::uint32_t i = 0; i < std::min(sampled_slots, slots); ++i) {
      read_slot(first + static_cast<std::uint32_t>(mixed(++samples_) % slots));
    }
    if (head != 0) read_tokens(request, region, blocks, 0, std::min(head, page));
  }

  RowBlocks staged(const StepPlan& plan, const Region& region, std::uint32_t row) const {
    const RowBlocks blocks(plan, region, row);
    return blocks.known() ? blocks : RowBlocks(manager_.blocks(plan.rows()[row], region.id));
  }

  void text_step(const StepPlan& plan, const Region& region, std::uint32_t row, std::uint32_t begin,
                 std::uint32_t count, Check check) {
    const RequestId request = plan.rows()[row];
    const Known& known = at(request);
    const RowBlocks blocks = staged(plan, region, row);
    read_reach(request, region, blocks, check);

    const auto mapping = plan.slot_mapping(region.id).subspan(begin, count);
    const std::uint32_t batch = tokens_at_once(region);
    for (std::uint32_t done = 0; done < count; done += batch) {
      const std::uint32_t from = known.computed + done;
      const std::uint32_t to = from + std::min(batch, count - done);
      locate(request, region, blocks, from, to);
      for (std::uint32_t token = from; token < to; ++token) {
        const std::int64_t mapped = mapping[token - known.computed];
        if (mapped != entries_[token - from] && holds_entry_of(region, token)) {
          fail(request, region,
               fmt::format("slot_mapping writes token {} to {}, {} says {}", token, mapped,
                           blocks.name(), entries_[token - from]));
        }
      }
      write(region, mapping.subspan(done, to - from), [&](std::size_t i) {
        return region.text_word(known, from + static_cast<std::uint32_t>(i));
      });
    }
    read_tokens(request, region, blocks, known.computed, known.computed + count);
  }

  /// The block that a state array names at `index`: batch row, and boundary where there are
  /// several. Arrays of rows have the layers in front; theirs must be those of one block, in order.
  /// -1: none.
  std::int64_t state_block(RequestId request, const Region& region, const StagedArray& array,
                           std::span<const std::int64_t> index) const {
    array.check_element(sizeof(std::int32_t));
    const std::size_t layers_in_front = array.shape.size() - index.size();
    std::int64_t at = 0;
    for (std::size_t i = 0; i < index.size(); ++i)
      at += index[i] * array.strides[layers_in_front + i];
    const auto* entries = reinterpret_cast<const std::int32_t*>(array.data);
    const std::int64_t first = entries[at];
    if (layers_in_front == 0 || first == -1) return first;
    const auto rows_of_a_block =
        static_cast<std::int64_t>(region.leaf->bound_row_span(BlockId{1}).at(0).begin);
    for (std::int64_t layer = 0; layer < array.shape[0]; ++layer) {
      const std::int64_t found = entries[at + layer * array.strides[0]];
      if (first % rows_of_a_block != 0 || found != first + layer) {
        fail(request, region,
             fmt::format("{} has row {} for layer {}, and {} for layer 0; a block "
                         "begins every {} rows",
                         array.key, found, layer, first, rows_of_a_block));
      }
    }
    return first / rows_of_a_block;
  }

  void check_state(RequestId request, const Region& region, std::uint32_t length,
                   std::int64_t block, std::string_view where) {
    const std::uint64_t bytes = region.rows.row_bytes;
    if (block < (length == 0 ? 0 : 1) || block > region.rows.blocks) {
      fail(
          request, region,
          fmt::format("{} is block {}; real blocks are 1 to {}", where, block, region.rows.blocks));
    }
    kernels::gather_rows(region.rows, std::span(&block, 1), buffer_.data(), bytes);
    ++stats_.entries_checked;
    stats_.bytes_checked += bytes;
    if (length == 0) {
      if (all_zero(buffer_.data(), bytes)) return;
      fail(request, region,
           fmt::format("the state of a request that starts is block {} by {}, and is not zero",
                       block, where));
    }
    const Word first = region.state_word(at(request), length);
    if (entry_matches(buffer_.data(), bytes, first)) return;
    Word found = 0;
    std::memcpy(&found, buffer_.data(), std::min<std::uint64_t>(word_bytes, bytes));
    fail(request, region,
         fmt::format("the state at {} tokens, block {} by {}: expected {:#018x}, found {:#018x}",
                     length, block, where, first, found));
  }

  void state_step(const StepPlan& plan, const Region& region, std::uint32_t row,
                  std::uint32_t count) {
    const RequestId request = plan.rows()[row];
    const Known& known = at(request);
    const StagedArray* in = nullptr;
    const StagedArray* out = nullptr;
    const StagedArray* inside = nullptr;
    for (const StagedArray& array : plan.arrays(region.id)) {
      if (array.key == "state_rows" || array.key == "state_read_rows") in = &array;
      if (array.key == "state_rows" || array.key == "state_write_rows") out = &array;
      if (array.key == "state_boundary_rows") inside = &array;
    }
    const std::uint32_t length = known.computed + count;
    const std::array<std::int64_t, 2> index{row, 0};
    std::int64_t written = 0;
    if (in != nullptr && out != nullptr) {
      check_state(request, region, known.computed,
                  state_block(request, region, *in, std::span(index).first(1)), in->key);
      written = state_block(request, region, *out, std::span(index).first(1));
    } else {
      written = manager_.live_block(request, region.id).value_or(null_block).value();
      check_state(request, region, known.computed, written, "the live state");
    }
    write_page(region, written, region.state_word(known, length));
    if (inside == nullptr) return;
    const std::uint32_t page = region.tokens_per_page;
    for (std::int64_t i = 0; i < inside->shape.back(); ++i) {
      const std::int64_t block = state_block(request, region, *inside, std::array{index[0], i});
      const std::uint64_t boundary = (std::uint64_t{known.computed} / page + 1 + i) * page;
      if (block == -1) continue;
      if (boundary > length) {
        fail(request, region,
             fmt::format("{} wants a state at {} tokens of a step that ends at {}", inside->key,
                         boundary, length));
      }
      write_page(region, block, region.state_word(known, static_cast<std::uint32_t>(boundary)));
    }
  }

  void write_page(const Region& region, std::int64_t block, Word word) {
    write(region, std::span(&block, 1), [&](std::size_t) { return word; });
  }

  void encoder_step(const StepPlan& plan, const Region& region, std::uint32_t row, Check check) {
    read_reach(plan.rows()[row], region, staged(plan, region, row), check);
  }

  void scratch_step(const StepPlan& plan, const Region& region, std::uint32_t row) {
    const RequestId request = plan.rows()[row];
    const std::uint64_t bytes = region.rows.row_bytes;
    const RowBlocks table(plan, region, row);
    const std::int64_t block =
        table.known() ? table.block(0)
                      : manager_.live_block(request, region.id).value_or(null_block).value();
    if (block < 1 || block > region.rows.blocks) {
      fail(request, region,
           fmt::format("scratch is block {}; real blocks are 1 to {}", block, region.rows.blocks));
    }
    if (at(request).scratch_written) {
      kernels::gather_rows(region.rows, std::span(&block, 1), buffer_.data(), bytes);
      ++stats_.entries_checked;
      stats_.bytes_checked += bytes;
      if (!entry_matches(buffer_.data(), bytes, region.scratch_word(request))) {
        fail(request, region, fmt::format("scratch in block {} is not what it wrote", block));
      }
    }
    write_page(region, block, region.scratch_word(request));
  }

  const BlockManager& manager_;
  VerifyStats stats_;
  Arena arena_;
  std::vector<Region> regions_;
  std::vector<kernels::Pages> pages_;
  std::unordered_map<RequestId, Known> requests_;
  std::vector<std::byte> buffer_;      // entries on their way
  std::vector<std::int64_t> entries_;  // where they go
  std::vector<kernels::BlockCopy> copies_;
  std::vector<kernels::BlockClear> clears_;
  std::uint64_t step_ = 0;
  Word samples_ = 0;
};

Verifier::Verifier(const BlockManager& manager, VerifyOptions options)
    : impl_(std::make_unique<Impl>(manager, options)) {}
Verifier::~Verifier() = default;

void Verifier::admit(RequestId request, std::span<const Token> tokens, std::uint32_t hit_tokens,
                     const EncoderInput* encoder) {
  impl_->admit(request, tokens, hit_tokens, encoder);
}
void Verifier::fill_encoder(RequestId request) { impl_->fill_encoder(request); }
void Verifier::append(RequestId request, std::span<const Token> tokens) {
  impl_->append(request, tokens);
}
void Verifier::run(const StepPlan& plan, Check check) { impl_->run(plan, check); }
void Verifier::release(RequestId request) { impl_->release(request); }
const VerifyStats& Verifier::stats() const noexcept { return impl_->stats(); }
const Arena& Verifier::arena() const noexcept { return impl_->arena(); }
void Verifier::lose_copies(bool lose) noexcept { impl_->lose_copies = lose; }
void Verifier::lose_clears(bool lose) noexcept { impl_->lose_clears = lose; }

std::uint64_t available_memory() {
  std::ifstream lines("/proc/meminfo");
  std::string name;
  std::uint64_t kib = 0;
  std::string unit;
  while (lines >> name >> kib && std::getline(lines, unit)) {
    if (name == "MemAvailable:") return kib * 1024;
  }
  return static_cast<std::uint64_t>(sysconf(_SC_PHYS_PAGES)) *
         static_cast<std::uint64_t>(sysconf(_SC_PAGESIZE));
}

}  // namespace kvleaf::cli
