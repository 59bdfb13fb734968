// The rules of what a leaf writes: shapes, inside, covers, delta.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "kvleaf/testing/parts/arrays.h"
#include "kvleaf/testing/parts/rows.h"

namespace kvleaf::testing::contract {
namespace {

constexpr std::uint32_t most_rows = Batch::most_rows;

std::string shape_text(const StagedInput& input) {
  return fmt::format("'{}' [{}] {}", input.key, fmt::join(input.shape, ", "), name_of(input.dtype));
}

std::string batch_text(const Facts& facts, const Batch& batch, std::uint32_t num_blocks) {
  std::string text = fmt::format("{} rows, num_blocks {}", batch.rows(), num_blocks);
  for (std::uint32_t i = 0; i < batch.rows(); ++i) {
    text += fmt::format("; row {}: {}", i, batch.row(i).text(facts));
  }
  return text;
}

/// Lengths that show the ends of pages, and rows that let go of pages: few and short ones first.
std::vector<std::pair<std::uint32_t, std::uint32_t>> some_rows(const Facts& facts) {
  const std::uint32_t page = facts.page;
  std::vector<std::pair<std::uint32_t, std::uint32_t>> rows = {
      {0, 1}, {0, page}, {page, 1}, {page, page}, {2 * page, page + 1}};
  if (facts.some_len > 4 * page) {
    rows.emplace_back(facts.some_len - 2 * page - 1, 1);
    rows.emplace_back(facts.some_len - 2 * page, page);
  }
  std::erase_if(rows, [&](const auto& row) {
    return row.first + row.second > facts.max_len || (row.second == 0);
  });
  return rows;
}

/// The widest arrays that any of these checks needs.
StagedInputs widest(const Facts& facts, const KVLeafRegion& leaf) {
  return leaf.staged_input_shapes(
      most_rows, widest_blocks(facts, leaf, facts.some_len + 4 * facts.page, facts.some_len));
}

/// Nothing, or why one set of shapes is not another's, grown.
std::optional<std::string> not_grown(const StagedInputs& less, const StagedInputs& more) {
  if (less.size() != more.size()) {
    return fmt::format("{} arrays became {}", less.size(), more.size());
  }
  for (std::size_t i = 0; i < less.size(); ++i) {
    const bool same = less[i].key == more[i].key && less[i].dtype == more[i].dtype &&
                      less[i].shape.size() == more[i].shape.size();
    if (!same) return fmt::format("{} became {}", shape_text(less[i]), shape_text(more[i]));
    for (std::size_t d = 0; d < less[i].shape.size(); ++d) {
      if (less[i].shape[d] > more[i].shape[d]) {
        return fmt::format("{} shrank to {}", shape_text(less[i]), shape_text(more[i]));
      }
    }
  }
  return {};
}

}  // namespace

void check_shapes(Kit& kit) {
  const Facts& facts = kit.facts();
  const Leaf leaf = kit.bound();
  const std::vector<std::uint32_t> columns = {1, 2, 3, 4, 5, 8, 13, 33};
  for (std::uint32_t batch = 1; batch <= most_rows + 2; ++batch) {
    for (std::size_t c = 0; c < columns.size(); ++c) {
      const StagedInputs now = leaf->staged_input_shapes(batch, columns[c]);
      for (std::size_t i = 0; i < now.size(); ++i) {
        for (std::size_t j = 0; j < i; ++j) {
          if (now[i].key == now[j].key) {
            return kit.found(Rule::shapes, fmt::format("two arrays are called '{}'", now[i].key));
          }
        }
        for (const std::int64_t extent : now[i].shape) {
          if (extent < 0) {
            return kit.found(Rule::shapes,
                             fmt::format("{} for a batch of {}", shape_text(now[i]), batch));
          }
        }
      }
      const auto grown = [&](std::uint32_t b, std::uint32_t n) {
        const StagedInputs less = leaf->staged_input_shapes(b, n);
        if (const auto why = not_grown(less, now)) {
          kit.found(
              Rule::shapes, *why,
              {fmt::format("staged_input_shapes(batch={}, num_blocks={})", b, n),
               fmt::format("staged_input_shapes(batch={}, num_blocks={})", batch, columns[c])});
          return false;
        }
        return true;
      };
      if (batch > 1 && !grown(batch - 1, columns[c])) return;
      if (c > 0 && !grown(batch, columns[c - 1])) return;
    }
  }
  // Whatever is declared of it, a batch fits into its own shapes.
  for (const std::uint32_t rows : {1u, most_rows}) {
    for (const auto& [computed, count] : some_rows(facts)) {
      Batch batch(facts);
      batch.set_rows(rows);
      for (std::uint32_t i = 0; i < rows; ++i) batch.start(i, computed, count);
      const std::uint32_t blocks = batch.num_blocks();
      const StagedInputs shapes = leaf->staged_input_shapes(rows, blocks);
      auto arrays = std::make_shared<Arrays>(shapes);
      kit.keep(arrays);
      try {
        leaf->write_staged_inputs(batch.plans(), arrays->narrow(shapes));
      } catch (const std::exception& error) {
        return kit.found(
            Rule::shapes,
            fmt::format("a batch of {} rows that reach {} slots does not fit the shapes for it: {}",
                        rows, blocks, error.what()),
            {fmt::format("staged_input_shapes(batch={}, num_blocks={})", rows, blocks),
             fmt::format("write_staged_inputs: {}", batch_text(facts, batch, blocks))});
      }
    }
  }
}

void check_inside(Kit& kit) {
  const Facts& facts = kit.facts();
  const Leaf leaf = kit.bound();
  auto arrays = std::make_shared<Arrays>(widest(facts, *leaf));
  kit.keep(arrays);
  // From wide to narrow and back, as batches come: what a wide one left is not a narrow one's.
  std::vector<std::string> lines;
  for (const std::uint32_t rows : {most_rows, 1u, 2u, most_rows, 2u}) {
    for (const auto& [computed, count] : some_rows(facts)) {
      Batch batch(facts);
      batch.set_rows(rows);
      for (std::uint32_t i = 0; i < rows; ++i) batch.start(i, computed, count);
      const std::uint32_t blocks = batch.num_blocks();
      leaf->write_staged_inputs(batch.plans(),
                                arrays->narrow(leaf->staged_input_shapes(rows, blocks)));
      lines.push_back(fmt::format("write_staged_inputs: {}", batch_text(facts, batch, blocks)));
      const auto outside = arrays->outside();
      if (!outside) continue;
      // The last write alone may be enough.
      auto alone = std::make_shared<Arrays>(widest(facts, *leaf));
      kit.keep(alone);
      const Leaf again = kit.bound();
      again->write_staged_inputs(batch.plans(),
                                 alone->narrow(again->staged_input_shapes(rows, blocks)));
      if (alone->outside()) {
        lines = {lines.back()};
      } else {
        lines = {lines.front(), lines.back()};
      }
      return kit.found(Rule::inside, *outside, lines);
    }
  }
}

void check_covers(Kit& kit) {
  const Facts& facts = kit.facts();
  const Leaf leaf = kit.bound();
  auto of_zeros = std::make_shared<Arrays>(widest(facts, *leaf));
  auto of_others = std::make_shared<Arrays>(widest(facts, *leaf), std::byte{0xa5});
  kit.keep(of_zeros);
  kit.keep(of_others);
  for (const std::uint32_t rows : {1u, 2u, most_rows}) {
    for (const auto& [computed, count] : some_rows(facts)) {
      Batch batch(facts);
      batch.set_rows(rows);
      for (std::uint32_t i = 0; i < rows; ++i) batch.start(i, computed, count);
      if (rows == most_rows) batch.pad(rows - 1);
      const std::uint32_t blocks = batch.num_blocks();
      const StagedInputs shapes = leaf->staged_input_shapes(rows, blocks);
      const auto write = [&](Arrays& arrays, std::byte fill) {
        arrays.refill(fill);
        leaf->write_staged_inputs(batch.plans(), arrays.narrow(shapes));
        return arrays.visible();
      };
      const auto base = write(*of_zeros, std::byte{0});
      if (write(*of_others, std::byte{0xa5}) != base) {
        return kit.found(
            Rule::covers,
            fmt::format("an entry is left as it was: over bytes 0xa5, {}, as it is over zeros",
                        of_others->difference(*of_zeros)),
            {fmt::format("write_staged_inputs: {}", batch_text(facts, batch, blocks))});
      }
      for (std::uint32_t i = 0; i < rows; ++i) {
        std::vector<BlockId>& plan = batch.row(i).plan;
        // Of a long row, both ends: what lies between is like them.
        for (std::size_t slot = 0; slot < plan.size(); ++slot) {
          if (plan[slot] == null_block || (slot > 24 && slot + 24 < plan.size())) continue;
          const BlockId held = plan[slot];
          plan[slot] = BlockId(held.value() + 5000);
          const bool same = write(*of_others, std::byte{0}) == base;
          plan[slot] = held;
          if (!same) continue;
          return kit.found(
              Rule::covers,
              fmt::format("row {} reaches block {} in slot {}; with block {} in its place the "
                          "arrays are the "
                          "same to the last entry",
                          i, held.value(), slot, held.value() + 5000),
              {fmt::format("write_staged_inputs: {}", batch_text(facts, batch, blocks))});
        }
      }
    }
  }
}

// ---- deltas
// ------------------------------------------------------------------------------------------

namespace {

/// What one row does in one forward. Meaningful in any state, so that sequences can be cut.
struct Act {
  enum class Kind : std::uint8_t { extend, start, rewind, pad } kind = Kind::extend;
  std::uint32_t a = 0;  // tokens computed, or rewound to
  std::uint32_t b = 1;  // tokens new
  std::uint32_t exchange = ~0u;
  std::uint32_t blur = 0;
};
using Forward = std::vector<Act>;  // one per row

std::vector<Forward> history(const Facts& facts, Dice& dice, bool whole_pages) {
  const std::uint32_t page = facts.page;
  const std::uint32_t longest = std::max(facts.some_len, 3 * page);
  const auto count = [&] {
    if (whole_pages) return page * (1 + dice.below(3));
    return dice.one_in(3) ? page * (1 + dice.below(2)) + dice.below(3) : 1 + dice.below(3);
  };
  std::vector<Forward> forwards;
  std::uint32_t rows = 1 + dice.below(most_rows);
  const std::uint32_t length = 3 + dice.below(10);
  for (std::uint32_t i = 0; i < length; ++i) {
    if (dice.one_in(3)) rows = 1 + dice.below(most_rows);
    Forward forward;
    for (std::uint32_t r = 0; r < rows; ++r) {
      Act act;
      act.b = count();
      switch (dice.below(8)) {
        case 0:
          act.kind = Act::Kind::start;
          act.a = dice.one_in(2) ? 0 : dice.below(longest / page) * page;
          break;
        case 1: act.kind = whole_pages ? Act::Kind::extend : Act::Kind::pad; break;
        case 2:
          act.kind = Act::Kind::rewind;
          act.a = whole_pages ? dice.below(longest / page) * page : dice.below(longest);
          break;
        default: break;
      }
      if (dice.one_in(6)) act.exchange = dice.below(64);
      if (dice.one_in(4)) act.blur = dice.below(4);
      forward.push_back(act);
    }
    forwards.push_back(std::move(forward));
  }
  return forwards;
}

class Histories {
 public:
  explicit Histories(Kit& kit) : kit_(kit), facts_(kit.facts()) {}

  /// Nothing, or how the arrays differ after some forward.
  std::optional<Finding> run(const std::vector<Forward>& forwards) {
    const Leaf leaf = kit_.bound();
    const Leaf other = kit_.bound();  // writes everything anew
    const StagedInputs all = widest(facts_, *leaf);
    auto arrays = std::make_shared<Arrays>(all);
    auto anew = std::make_shared<Arrays>(all);
    kit_.keep(arrays);
    kit_.keep(anew);
    Batch batch(facts_);
    std::array<std::uint32_t, most_rows> filled{};  // notes outlive the rows of a batch
    std::vector<std::string> lines;
    for (const Forward& forward : forwards) {
      const auto before = batch.rows();
      for (std::uint32_t i = 0; i < before; ++i) filled[i] = batch.row(i).filled_columns;
      batch.set_rows(static_cast<std::uint32_t>(forward.size()));
      for (std::uint32_t i = before; i < batch.rows(); ++i) batch.row(i).filled_columns = filled[i];
      for (std::uint32_t i = 0; i < batch.rows(); ++i) apply(batch, i, forward[i]);
      const std::uint32_t blocks = batch.num_blocks();
      lines.push_back(batch_text(facts_, batch, blocks));
      const StagedInputs shapes = leaf->staged_input_shapes(batch.rows(), blocks);
      const auto finding = [&](Rule rule, std::string numbers) {
        return Finding{rule, std::move(numbers), lines};
      };
      try {
        leaf->write_staged_delta(batch.deltas(), arrays->narrow(shapes));
        if (const auto outside = arrays->outside()) return finding(Rule::inside, *outside);
        if (const auto missed = arrays->unreported()) {
          return finding(Rule::delta, fmt::format("{} changed and was not reported", *missed));
        }
        anew->refill(std::byte{0});
        other->write_staged_delta(batch.fresh_deltas(), anew->narrow(shapes));
        if (arrays->visible() != anew->visible()) {
          return finding(Rule::delta,
                         fmt::format("after these forwards {}, as it is when all rows are new",
                                     arrays->difference(*anew)));
        }
        if (!batch.plans_say_all()) continue;
        anew->refill(std::byte{0});
        other->write_staged_inputs(batch.plans(), anew->narrow(shapes));
        if (arrays->visible() != anew->visible()) {
          return finding(Rule::delta,
                         fmt::format("after these forwards {}, as write_staged_inputs leaves it",
                                     arrays->difference(*anew)));
        }
      } catch (const std::exception& error) {
        return finding(Rule::delta, fmt::format("it throws: {}", error.what()));
      }
    }
    return {};
  }

 private:
  void apply(Batch& batch, std::uint32_t row, const Act& act) {
    const std::uint32_t longest = facts_.some_len + 3 * facts_.page;
    Act now = act;
    // A row that grew too long hands over to the next request.
    const BatchRow& is = batch.row(row);
    const bool goes_on = now.kind == Act::Kind::extend || now.kind == Act::Kind::rewind;
    if (goes_on && !is.padding && is.planned + now.b > longest) {
      now.kind = Act::Kind::start;
      now.a = 0;
    }
    switch (now.kind) {
      case Act::Kind::extend: batch.extend(row, now.b); break;
      case Act::Kind::start: batch.start(row, std::min(now.a, longest - now.b), now.b); break;
      case Act::Kind::rewind:
        batch.rewind(row, is.padding ? 0 : std::min(now.a, is.planned), now.b);
        break;
      case Act::Kind::pad: batch.pad(row); break;
    }
    if (now.exchange != ~0u) batch.exchange(row, now.exchange);
    if (now.blur != 0) batch.blur(row, now.blur);
  }

  Kit& kit_;
  const Facts& facts_;
};

/// What goes wrong in up to two forwards of one row, alone or beside a longer one: the shortest
/// sequence there is.
std::optional<Finding> least_history(const Facts& facts, Histories& histories) {
  using Kind = Act::Kind;
  const std::uint32_t page = facts.page;
  const Act long_one{.kind = Kind::extend, .a = 0, .b = 3 * page};
  const std::array acts = {Act{.kind = Kind::start, .a = 0, .b = page + 1},
                           Act{.kind = Kind::extend, .b = 1},
                           Act{.kind = Kind::extend, .b = 2 * page},
                           Act{.kind = Kind::rewind, .a = 1, .b = 1},
                           Act{.kind = Kind::pad},
                           Act{.kind = Kind::start, .a = page, .b = page}};
  for (const bool beside : {false, true}) {
    std::vector<std::vector<Forward>> shorter = {{}};
    for (std::uint32_t length = 1; length <= 2; ++length) {
      std::vector<std::vector<Forward>> longer;
      for (const std::vector<Forward>& begin : shorter) {
        for (const Act& act : acts) {
          std::vector<Forward> forwards = begin;
          forwards.push_back(beside ? Forward{act, long_one} : Forward{act});
          if (auto finding = histories.run(forwards)) return finding;
          longer.push_back(std::move(forwards));
        }
      }
      shorter = std::move(longer);
    }
  }
  return {};
}

std::vector<Forward> simpler_forwards(const Forward& forward, std::uint32_t page) {
  std::vector<Forward> variants;
  if (forward.size() > 1) variants.emplace_back(forward.begin(), forward.end() - 1);
  for (std::size_t i = 0; i < forward.size(); ++i) {
    const auto with = [&](auto change) {
      Forward variant = forward;
      change(variant[i]);
      variants.push_back(std::move(variant));
    };
    const Act& act = forward[i];
    if (act.exchange != ~0u) with([](Act& a) { a.exchange = ~0u; });
    if (act.blur != 0) with([](Act& a) { a.blur = 0; });
    if (act.kind == Act::Kind::rewind || act.kind == Act::Kind::pad)
      with([](Act& a) { a.kind = Act::Kind::extend; });
    if (act.a > 0) {
      with([](Act& a) { a.a = 0; });
      with([&](Act& a) { a.a = a.a / 2 / page * page; });
    }
    if (act.b > page) with([&](Act& a) { a.b = page; });
    if (act.b > 1) with([](Act& a) { a.b = 1; });
  }
  std::erase_if(variants, [&](const Forward& variant) {
    return variant.size() == forward.size() &&
           std::ranges::equal(variant, forward, [](const Act& x, const Act& y) {
             return x.kind == y.kind && x.a == y.a && x.b == y.b && x.exchange == y.exchange &&
                    x.blur == y.blur;
           });
  });
  return variants;
}

}  // namespace

void check_delta(Kit& kit) {
  const Facts& facts = kit.facts();
  if (!facts.writes_delta) return;  // planners rewrite everything
  Histories histories(kit);
  if (const auto finding = least_history(facts, histories)) {
    return kit.found(finding->rule, finding->numbers, finding->sequence);
  }
  for (std::uint32_t i = 0; i < kit.options().histories; ++i) {
    Dice dice(kit.options().seed + i);
    const std::vector<Forward> forwards = history(facts, dice, i % 2 == 0);
    std::optional<Finding> finding = histories.run(forwards);
    if (!finding) continue;
    const Finding least = shrunk(
        forwards, *finding, [&](const std::vector<Forward>& fewer) { return histories.run(fewer); },
        [&](const Forward& forward) { return simpler_forwards(forward, facts.page); });
    return kit.found(least.rule, least.numbers, least.sequence);
  }
}

}  // namespace kvleaf::testing::contract
