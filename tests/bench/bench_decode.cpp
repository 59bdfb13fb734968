// Workload "decode": 256 requests, one token each, by StepPlanner: reserve, tables, slot mappings,
// lengths. Per request and leaf, at three lengths, taken in turn: the cost must not grow with them.
//
// The floor writes one entry per row and leaf of tables that large. Beside it, what a device is
// sent for a step of the tables: 4 bytes for each entry that a page taken or let go of changes, at
// any length.
//
// Tables as CSR have no room between rows, so a row that takes a page shifts all that lies behind
// it, in nearly every step of a large batch. Their floor is that shift, one memmove of the indices.
#include <benchmark/benchmark.h>
#include <fmt/format.h>

#include <cstring>
#include <deque>
#include <iterator>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "bench/bench.h"
#include "kvleaf/group/group.h"

namespace {

using namespace kvleaf;

constexpr std::uint32_t batch = 256;
constexpr std::uint32_t page = 16;
constexpr std::uint32_t leaves = 2;

struct Server {
  explicit Server(std::uint32_t length, bool aligned, TableFormat table = TableFormat::dense) {
    AttentionOptions attention{
        .layers = 1, .kv_heads = 1, .head_dim = 8, .tokens_per_page = page, .table = table};
    Leaves kinds = {
        std::make_shared<FullAttentionLeaf>("full", attention),
        std::make_shared<SlidingWindowLeaf>("window", WindowOptions{.window = 1024}, attention)};
    ManagerOptions options;
    options.max_len = length + 4096;
    options.max_steps_in_flight = 2;
    const std::uint64_t slots = options.max_len / page + 1;
    const std::uint64_t blocks = batch * (2 * slots + 640);
    options.geometry = Geometry::by_hand(page_specs(kinds, page, length),
                                         {.huge_bytes = kinds[0]->bytes_per_page() * 16,
                                          .huge_blocks = blocks / 16,
                                          .ratios = {16, 16}});
    manager = std::make_unique<BlockManager>(kinds, options);
    planner = std::make_unique<StepPlanner>(
        *manager, PlannerOptions{.max_batch = batch, .max_step_tokens = 8192});
    for (std::uint32_t i = 0; i < batch; ++i) {
      // Lengths spread over the page, or all at the same place in it.
      const std::uint32_t tokens = length - (aligned ? 0 : i % page);
      std::vector<Token> prompt(tokens, static_cast<Token>(i));
      manager->admit(RequestId{i}, prompt);
      for (std::uint32_t at = 0; at < tokens; at += 8192) {
        const StepRequest row{RequestId{i}, std::min(8192u, tokens - at)};
        const Step& step = manager->begin_step({&row, 1});
        if (!step.refused.empty()) throw std::logic_error(step.refused.front().why);
        manager->settle(step.id);
      }
      rows.push_back({RequestId{i}, 1});
    }
  }
  void step() {
    const StepPlan& plan = planner->plan(rows);
    if (!plan.refused().empty()) throw std::logic_error(plan.refused().front().why);
    last = plan.step();
  }
  /// Of both leaves' tables, that changed in the step planned last.
  std::uint64_t dirty_bytes(const StepPlan& plan) const {
    std::uint64_t bytes = 0;
    for (std::uint32_t leaf = 0; leaf < leaves; ++leaf) {
      for (const StagedArray& array : plan.arrays(LeafId{leaf})) {
        for (const ByteRange& range : plan.dirty(LeafId{leaf}, array.key))
          bytes += range.end - range.begin;
      }
    }
    return bytes;
  }
  void settle() {
    planner->settle(*last);
    for (std::uint32_t i = 0; i < batch; ++i) {
      const Token token = static_cast<Token>(i);
      manager->append(RequestId{i}, {&token, 1});
    }
  }
  std::unique_ptr<BlockManager> manager;
  std::unique_ptr<StepPlanner> planner;
  std::vector<StepRequest> rows;
  std::optional<StepId> last;
};

/// Bytes that a device is sent of the tables, mean over a page of steps.
double upload_bytes(Server& server) {
  double bytes = 0;
  for (std::uint32_t i = 0; i < 2 * page; ++i) {
    const StepPlan& plan = server.planner->plan(server.rows);
    server.last = plan.step();
    if (i >= page) bytes += static_cast<double>(server.dirty_bytes(plan)) / page;
    server.settle();
  }
  return bytes;
}

/// Two pages of steps of a server, the first of which brings its data back to the caches that the
/// others used meanwhile. Of the second, planning the last `timed` steps counts.
bench::Round page_of_steps(Server& server, std::uint32_t timed) {
  return [&server, timed] {
    double seconds = 0;
    for (std::uint32_t i = 0; i < 2 * page; ++i) {
      const double planning = bench::seconds_of([&] { server.step(); });
      if (i + timed >= 2 * page) seconds += planning;
      server.settle();
    }
    return seconds;
  };
}

/// As many steps of the least that a step must do.
struct Floor {
  explicit Floor(std::uint32_t length)
      : columns(length / page + 256), table(std::size_t{batch} * columns * leaves) {}
  void step() {
    for (std::uint32_t row = 0; row < batch * leaves; ++row)
      table[std::size_t{row} * columns + column] = static_cast<std::int32_t>(row);
    column = (column + 1) % columns;
    benchmark::ClobberMemory();
  }
  std::uint32_t columns;
  std::vector<std::int32_t> table;
  std::uint32_t column = 0;
};

/// As many steps of shifting CSR indices by an entry.
struct ShiftFloor {
  explicit ShiftFloor(std::uint32_t length)
      : indices(std::size_t{batch} * (length / page) * leaves + page) {}
  void step() {
    std::memmove(indices.data() + 1, indices.data(), (indices.size() - 1) * sizeof(std::int32_t));
    benchmark::ClobberMemory();
  }
  std::vector<std::int32_t> indices;
};

template <class Least>
bench::Round page_of_least(Least& floor) {
  return [&floor] {
    const auto a_page = [&floor] {
      for (std::uint32_t i = 0; i < page; ++i) floor.step();
    };
    a_page();
    return bench::seconds_of(a_page);
  };
}

constexpr std::uint32_t lengths[] = {1024, 8192, 131072};
constexpr std::uint32_t csr_length = 8192;

std::vector<bench::Figure> measure(bool quick) {
  std::deque<Server> servers;
  std::deque<Floor> floors;
  std::vector<bench::Round> works;
  for (const std::uint32_t length : lengths)
    works.push_back(page_of_steps(servers.emplace_back(length, false), page));
  Server& aligned = servers.emplace_back(8192, true);
  works.push_back(page_of_steps(aligned, 1));
  for (const std::uint32_t length : lengths)
    works.push_back(page_of_least(floors.emplace_back(length)));
  Server& csr = servers.emplace_back(csr_length, false, TableFormat::csr);
  ShiftFloor shift(csr_length);
  works.push_back(page_of_steps(csr, page));
  works.push_back(page_of_least(shift));
  for (const bench::Round& warm_up : works) warm_up();
  bench::InTurn turns;
  turns.run(works, quick ? 1 : 60);

  const auto ns = [&](std::size_t index, std::uint32_t steps) {
    return turns.least(index) * 1e9 / (double{batch} * leaves * steps);
  };
  std::vector<bench::Figure> figures;
  for (std::size_t i = 0; i < std::size(lengths); ++i)
    figures.push_back({.name = fmt::format("full and window, B=256, L={}", lengths[i]),
                       .metric = "plan_ns_per_request_and_leaf",
                       .unit = "ns",
                       .value = ns(i, page),
                       .floor = ns(4 + i, page)});
  figures.push_back({.name = "full and window, B=256, L=8192, every row crosses a page",
                     .metric = "plan_ns_per_request_and_leaf",
                     .unit = "ns",
                     .value = ns(3, 1),
                     .floor = ns(5, page)});
  figures.push_back({.name = fmt::format("full and window as CSR, B=256, L={}", csr_length),
                     .metric = "plan_ns_per_request_and_leaf",
                     .unit = "ns",
                     .value = ns(7, page),
                     .floor = ns(8, page)});
  for (std::size_t i = 0; i < std::size(lengths); ++i)
    figures.push_back({.name = fmt::format("full and window, B=256, L={}", lengths[i]),
                       .metric = "upload_bytes_per_step",
                       .unit = "bytes",
                       .value = upload_bytes(servers[i]),
                       // A page is taken by each leaf and one let go of by the window, 16 tokens
                       // apart.
                       .floor = batch * 3.0 / page * sizeof(std::int32_t)});
  figures.push_back({.name = fmt::format("full and window as CSR, B=256, L={}", csr_length),
                     .metric = "upload_bytes_per_step",
                     .unit = "bytes",
                     .value = upload_bytes(csr),
                     .floor = static_cast<double>(shift.indices.size() * sizeof(std::int32_t))});
  return figures;
}

}  // namespace

int main(int argc, char** argv) {
  bench::Suite suite("decode", argc, argv);
  suite.add(measure);
  return suite.run();
}
