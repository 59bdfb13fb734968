#include "kvleaf/testing/leaf_contract.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "kvleaf/leaf/errors.h"
#include "kvleaf/testing/parts/kit.h"

namespace kvleaf::testing {

std::string_view name_of(Rule rule) noexcept {
  switch (rule) {
    case Rule::memory: return "memory";
    case Rule::reach: return "reach";
    case Rule::reserve: return "reserve";
    case Rule::cacheable: return "cacheable";
    case Rule::shapes: return "shapes";
    case Rule::inside: return "inside";
    case Rule::covers: return "covers";
    case Rule::delta: return "delta";
    case Rule::rows: return "rows";
    case Rule::copies: return "copies";
    case Rule::release: return "release";
    case Rule::resume: return "resume";
    case Rule::refusal: return "refusal";
  }
  return "";
}

std::string_view paragraph_of(Rule rule) noexcept {
  switch (rule) {
    case Rule::memory:
      return "A page is bytes_per_page of data inside a stride. The leaf works at every stride "
             "that it "
             "admits: each multiple of stride_alignment that holds a page, or exactly "
             "bytes_per_page "
             "where it declares none. A leaf that is addressed by row has pages of whole rows and "
             "declares a multiple of its row, so that block b begins b strides behind block 0 in "
             "rows "
             "as it does in bytes. slots_per_page divides tokens_per_page.";
    case Rule::reach:
      return "With n tokens computed, the tokens that must still be held are [0, head) and "
             "[tail_begin(n), n). tail_begin(n) is a function of n alone, lies in [0, n], and "
             "never "
             "decreases: what was let go has been given to somebody else, and does not come back.";
    case Rule::reserve:
      return "blocks_to_reserve(num_blocks, step_tokens=c) is the most slots that a request holds "
             "at "
             "once while it fills num_blocks slots with at most c tokens planned and not yet "
             "settled. "
             "One too few, and a request that was admitted is refused half way. It is a function "
             "of its "
             "arguments; with prefix caching it is never less than without, and a state then "
             "counts a "
             "checkpoint more. Too many are allowed, and are noted: nobody else gets them.";
    case Rule::cacheable:
      return "Whether blocks are found again by their content follows from the writing: scratch "
             "('private') is never cached, everything else is. A leaf that is not cached although "
             "its "
             "group is would shorten every hit of the model to nothing, silently.";
    case Rule::shapes:
      return "staged_input_shapes(batch, num_blocks) names the same arrays, in one order, with one "
             "rank "
             "and type, whatever the batch; no extent shrinks as batch or num_blocks grow, for "
             "arrays "
             "are allocated once at the widest and narrowed; and a batch of that many rows that "
             "reach "
             "that many slots can be written into them.";
    case Rule::inside:
      return "A write touches entries inside the narrowed shape only, at the strides given: what "
             "lies "
             "between and behind them belongs to wider batches and to other arrays. Arrays are "
             "those of "
             "the call; a view kept from an earlier one is of another batch.";
    case Rule::covers:
      return "write_staged_inputs writes every entry of its arrays, whatever they held before, and "
             "what "
             "it writes depends on the block of every slot that a row reaches: a slot whose block "
             "can be "
             "exchanged without a trace is one that no kernel can read.";
    case Rule::delta:
      return "After any history of forwards, write_staged_delta leaves the arrays as if all rows "
             "had "
             "just been written, and as write_staged_inputs does where the plans say as much: rows "
             "that "
             "grew, shrank, moved, ended, changed hands or became padding leave nothing behind. A "
             "delta "
             "that reports changes reports all of them, for what it does not report is not "
             "uploaded.";
    case Rule::rows:
      return "bound_row_span gives the rows of one block, at least one of each input, and the rows "
             "of two "
             "blocks never meet, the null block's included.";
    case Rule::copies:
      return "bound_row_copies(src, dst) pairs rows of src with as many rows of dst, of the same "
             "input, "
             "and all rows of src are among them, once.";
    case Rule::release:
      return "When every request has been released and the cache reset, the pool holds no block of "
             "the "
             "leaf, and the leaf stages what comes next as one fresh from the factory would: it "
             "keeps "
             "no memory of requests or blocks of its own, since nobody tells it when they end.";
    case Rule::resume:
      return "What a request computed is resumed by the next one with the same tokens, at the "
             "deepest "
             "page boundary before its last token, on the very blocks that hold it. An in_place "
             "leaf is "
             "resumed from a checkpoint at that boundary alone, so its pattern is point().";
    case Rule::refusal:
      return "An admission, a step or a fork that finds no room changes nothing: not the pool, not "
             "the "
             "other requests, and not what the leaf answers. Being asked is not being granted.";
  }
  return "";
}

bool ContractReport::breaks(Rule rule) const noexcept {
  return std::ranges::any_of(broken, [&](const BrokenRule& one) { return one.rule == rule; });
}

std::string ContractReport::text() const {
  const auto names = [](const std::vector<Rule>& rules) {
    std::vector<std::string_view> list;
    for (const Rule rule : rules) list.push_back(name_of(rule));
    return fmt::format("{}", fmt::join(list, ", "));
  };
  std::string text =
      broken.empty()
          ? fmt::format("leaf '{}' keeps the contract: {} rules\n", leaf, all_rules.size())
          : fmt::format("leaf '{}' breaks {} of the {} rules of the contract\n", leaf,
                        broken.size(), all_rules.size());
  for (const BrokenRule& one : broken) {
    text += fmt::format("\n{}: {}\n", name_of(one.rule), one.numbers);
    if (!one.sequence.empty()) text += "  the smallest sequence that shows it:\n";
    for (std::size_t i = 0; i < one.sequence.size(); ++i) {
      text += fmt::format("    {}. {}\n", i + 1, one.sequence[i]);
    }
    text += fmt::format("  the rule: {}\n", paragraph_of(one.rule));
  }
  if (!unchecked.empty()) {
    text += fmt::format("\nnot tried, since they rest on what is broken: {}\n", names(unchecked));
  }
  for (const std::string& note : notes) text += fmt::format("\nnote: {}\n", note);
  return text;
}

std::ostream& operator<<(std::ostream& out, const ContractReport& report) {
  return out << report.text();
}

ContractReport check_leaf(const MakeLeaf& make_leaf, const ContractOptions& options) {
  contract::Kit kit(make_leaf, options);
  using enum Rule;
  kit.run(memory, {}, contract::check_memory);
  kit.run(reach, {}, contract::check_reach);
  kit.run(reserve, {memory, reach}, contract::check_reserve);
  kit.run(cacheable, {}, contract::check_cacheable);
  kit.run(rows, {memory}, contract::check_rows);
  kit.run(copies, {memory, rows}, contract::check_copies);
  kit.run(shapes, {memory, reach}, contract::check_shapes);
  kit.run(inside, {memory, reach, shapes}, contract::check_inside);
  kit.run(covers, {memory, reach, shapes, inside}, contract::check_covers);
  kit.run(delta, {memory, reach, shapes, inside, covers}, contract::check_delta);
  // What is wrong of a leaf alone would only show again, and less clearly.
  const auto alone = {memory, reach, reserve, cacheable, shapes, inside, covers, delta};
  kit.run(release, alone, contract::check_release);
  kit.run(resume, alone, contract::check_resume);
  kit.run(refusal, alone, contract::check_refusal);
  return kit.finish();
}

namespace contract {
namespace {

constexpr std::uint32_t most_tokens = 65536;

/// Five times what the pattern reaches back, or 64 pages where it reaches everything.
std::uint32_t usual_max_len(const KVLeafRegion& leaf, std::uint32_t page) {
  const AccessPattern& pattern = leaf.group_id().pattern;
  if (leaf.group_id().writing == Writing::append) {
    for (std::uint32_t n = 16 * page; n <= most_tokens; n *= 2) {
      if (pattern.tail_begin(n) >= n / 5 * 4) return n;
    }
  }
  return std::min<std::uint32_t>(64 * page, std::max(most_tokens, page));
}

/// What two leaves of one factory must agree in.
std::string declarations(const KVLeafRegion& leaf) {
  const auto stride = leaf.stride_alignment();
  const auto page = leaf.tokens_per_page();
  return fmt::format(
      "leaf '{}' of group '{}' ({}, {}): {} bytes per page, alignment {}, {} tokens per page",
      leaf.leaf_id(), leaf.group_id().name, leaf.group_id().pattern.to_string(),
      name_of(leaf.group_id().writing), leaf.bytes_per_page(),
      stride ? std::to_string(*stride) : "none", page ? std::to_string(*page) : "the cache's");
}

}  // namespace

Kit::Kit(const MakeLeaf& make_leaf, const ContractOptions& options)
    : make_leaf_(make_leaf),
      options_(options),
      keep_(options.keep_alive != nullptr ? options.keep_alive : &kept_here_) {
  if (!make_leaf_) throw InvalidArgument("check_leaf needs a function that makes the leaf");
  if (options_.page_tokens == 0) throw InvalidArgument("page_tokens is 0; it must be at least 1");
  if (options_.histories == 0) throw InvalidArgument("histories is 0; it must be at least 1");
  read_facts(*fresh());
}

void Kit::read_facts(const KVLeafRegion& leaf) {
  report_.leaf = leaf.leaf_id();
  facts_.leaf_id = leaf.leaf_id();
  facts_.bytes = leaf.bytes_per_page();
  facts_.alignment = leaf.stride_alignment();
  facts_.writing = leaf.group_id().writing;
  facts_.pattern = leaf.group_id().pattern;
  facts_.page = leaf.tokens_per_page().value_or(options_.page_tokens);
  facts_.rollback = leaf.rollback();
  facts_.live_span = leaf.stages_live_span();
  facts_.writes_delta = leaf.can_write_delta();
  facts_.in_out = leaf.state_kernel() == StateKernel::in_out;
  facts_.in_chunk = leaf.emits_in_chunk();
  try {
    read_tail(leaf);
  } catch (const std::exception& error) {
    facts_.tail.clear();
    found(Rule::reach, fmt::format("tail_begin throws: {}", error.what()));
  }
}

void Kit::read_tail(const KVLeafRegion& leaf) {
  facts_.max_len = options_.max_len != 0 ? std::max(options_.max_len, facts_.page)
                                         : usual_max_len(leaf, facts_.page);
  facts_.some_len = std::min(facts_.max_len, 10 * facts_.page);
  if (!facts_.of_text()) return;
  facts_.tail.reserve(std::size_t{facts_.max_len} + 1);
  for (std::uint32_t n = 0; n <= facts_.max_len; ++n) {
    facts_.tail.push_back(facts_.pattern.tail_begin(n));
  }
  for (std::uint32_t n = 0; n <= facts_.max_len; ++n) {
    if (facts_.tail[n] >= 3 * facts_.page) {
      facts_.some_len = std::min(facts_.max_len, n + 5 * facts_.page);
      break;
    }
  }
}

Leaf Kit::fresh() {
  factory_failed_ = true;
  Leaf leaf = make();
  factory_failed_ = false;
  return leaf;
}

Leaf Kit::make() {
  Leaf leaf = make_leaf_();
  if (leaf == nullptr) throw InvalidArgument("make_leaf gave nothing; it must give a leaf");
  if (std::ranges::find(made_, leaf) != made_.end()) {
    throw InvalidArgument(
        fmt::format("make_leaf gave leaf '{}' a second time; it must make a new one at each call",
                    leaf->leaf_id()));
  }
  if (!made_.empty() && declarations(*leaf) != declarations(*made_.front())) {
    throw InvalidArgument(
        fmt::format("make_leaf gave {}, and before that {}; it must make equal leaves",
                    declarations(*leaf), declarations(*made_.front())));
  }
  made_.push_back(leaf);
  return leaf;
}

Leaf Kit::bound() {
  Leaf leaf = fresh();
  leaf->bind(facts_.least_stride());
  return leaf;
}

void Kit::found(Rule rule, std::string numbers, std::vector<std::string> sequence) {
  if (broken(rule)) return;
  report_.broken.push_back({rule, std::move(numbers), std::move(sequence)});
}

void Kit::note(std::string text) { report_.notes.push_back(std::move(text)); }

ContractReport Kit::finish() {
  const auto order = [](const BrokenRule& one) { return one.rule; };
  std::ranges::sort(report_.broken, {}, order);
  std::erase_if(report_.unchecked, [&](Rule rule) { return broken(rule); });
  return std::move(report_);
}

}  // namespace contract
}  // namespace kvleaf::testing
