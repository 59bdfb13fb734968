// Replays a trace of operations through the C++ interface; see replay.h.
#include "replay.h"

#include <algorithm>
#include <cstdio>
#include <deque>
#include <fstream>
#include <map>
#include <sstream>
#include <string>
#include <string_view>

#include "kvleaf/group/group.h"

using namespace kvleaf;

namespace {

const char* name_of(const KVError& error) {
  if (dynamic_cast<const InvalidArgument*>(&error)) return "InvalidArgument";
  if (dynamic_cast<const PoolExhausted*>(&error)) return "PoolExhausted";
  if (dynamic_cast<const RequestError*>(&error)) return "RequestError";
  if (dynamic_cast<const StepError*>(&error)) return "StepError";
  if (dynamic_cast<const PlanShapeError*>(&error)) return "PlanShapeError";
  return "other";
}

class Replay {
 public:
  void run(std::istream& trace) {
    std::string line;
    while (std::getline(trace, line)) {
      std::istringstream words(line);
      std::string operation;
      words >> operation;
      std::vector<std::uint32_t> given;
      for (std::uint32_t number; words >> number;) given.push_back(number);
      try {
        apply(operation, given);
      } catch (const KVError& error) {
        std::printf("%s: %s\n", operation == "resume" ? "admit" : operation.c_str(),
                    name_of(error));
      }
    }
    manager_.audit();
    const ManagerStats stats = manager_.stats();
    std::printf("admitted %u refused %u hit %u of %u checkpoints %u cached %u\n",
                unsigned(stats.admitted), unsigned(stats.refused), unsigned(stats.hit_tokens),
                unsigned(stats.prompt_tokens), unsigned(stats.checkpoints),
                unsigned(stats.committed_pages));
  }

 private:
  static Leaves leaves() {
    const AttentionOptions attention{.layers = 2,
                                     .kv_heads = 1,
                                     .head_dim = 8,
                                     .dtype = DType::float32,
                                     .tokens_per_page = replay_page_tokens};
    return {std::make_shared<FullAttentionLeaf>("full", attention),
            std::make_shared<SlidingWindowLeaf>("window", WindowOptions{.window = replay_window},
                                                attention),
            std::make_shared<RecurrentStateLeaf>(
                "state", StateOptions{.layers = 1,
                                      .slabs = {{"s", {96}, DType::float32}},
                                      .tokens_per_page = replay_page_tokens})};
  }

  void admit(std::uint32_t id) {
    const Admission admission = manager_.admit(RequestId(id), texts_[id]);
    std::printf("admit: hit %u stop %u lost", admission.hit_tokens,
                admission.next_stop.value_or(0));
    for (const GroupLoss& loss : admission.lost) {
      std::printf(" %s=%u", loss.group.c_str(), loss.tokens);
    }
    std::printf(" because '%s'\n", admission.reason.c_str());
  }

  void step(const std::vector<std::uint32_t>& given) {
    std::vector<StepRequest> batch;
    for (std::size_t i = 0; i + 1 < given.size(); i += 2) {
      const RequestId id(given[i]);
      if (!manager_.contains(id)) continue;
      const std::uint32_t left = manager_.length(id) - manager_.planned(id);
      if (left != 0) batch.push_back({id, std::min(given[i + 1], left)});
    }
    if (batch.empty()) return;
    const StepPlan& plan = planner_.plan(batch);
    steps_.push_back(plan.step());
    std::printf("step %u: rows", unsigned(plan.step().value()));
    for (const RequestId id : plan.rows()) std::printf(" %u", unsigned(id.value()));
    std::printf(" refused");
    for (const Refusal& refusal : plan.refused())
      std::printf(" %u", unsigned(refusal.request.value()));
    std::printf(" lens");
    for (const std::int32_t length : plan.seq_lens()) std::printf(" %d", length);
    for (std::uint32_t leaf = 0; leaf < 3; ++leaf) {
      const StagedArray& array = plan.array(LeafId(leaf), leaf == 2 ? "state_rows" : "block_table");
      std::printf(" %s", manager_.leaves()[leaf]->leaf_id().c_str());
      for (std::int64_t row = 0; row < array.shape[0]; ++row) {
        for (std::int64_t column = 0; column < (array.shape.size() == 2 ? array.shape[1] : 1);
             ++column) {
          std::printf(" %d", array.row<std::int32_t>(row)[column]);
        }
      }
      std::printf(" slots");
      for (const std::int64_t slot : plan.slot_mapping(LeafId(leaf))) std::printf(" %d", int(slot));
    }
    std::printf(" copies");
    for (const BlockCopy& copy : plan.copies()) {
      std::printf(" %u:%u>%u", copy.leaf.value(), copy.src.value(), copy.dst.value());
    }
    std::printf(" clears");
    for (const ZeroFill& fill : plan.zero_fills()) {
      std::printf(" %u:%u", fill.leaf.value(), fill.block.value());
    }
    std::printf("\n");
  }

  void apply(const std::string& operation, const std::vector<std::uint32_t>& given) {
    if (operation == "admit") {
      std::vector<Token>& text = texts_[given[0]];
      text.clear();
      for (std::uint32_t i = 0; i < given[2]; ++i) {
        text.push_back(Token(given[1] + i + (i >= given[3] ? replay_fork_shift : 0)));
      }
      admit(given[0]);
    } else if (operation == "resume") {
      admit(given[0]);
    } else if (operation == "append") {
      std::vector<Token> more;
      for (std::uint32_t i = 0; i < given[2]; ++i) more.push_back(Token(given[1] + i));
      manager_.append(RequestId(given[0]), more);
      texts_[given[0]].insert(texts_[given[0]].end(), more.begin(), more.end());
      std::puts("append");
    } else if (operation == "step") {
      step(given);
    } else if (operation == "settle" && !steps_.empty()) {
      planner_.settle(steps_.front());
      steps_.pop_front();
      std::puts("settle");
    } else if (operation == "abandon" && !steps_.empty()) {
      const auto lengths = planner_.abandon(steps_.front());
      steps_.clear();
      std::printf("abandon");
      for (const auto& [id, length] : lengths) std::printf(" %u=%u", unsigned(id.value()), length);
      std::puts("");
    } else if (operation == "fork") {
      texts_[given[1]] = texts_[given[0]];
      manager_.fork(RequestId(given[0]), RequestId(given[1]));
      std::puts("fork");
    } else if (operation == "rewind") {
      manager_.rewind(RequestId(given[0]), given[1]);
      texts_[given[0]].resize(given[1]);
      std::puts("rewind");
    } else if (operation == "preempt") {
      manager_.preempt(RequestId(given[0]));
      std::puts("preempt");
    } else if (operation == "release") {
      manager_.release(RequestId(given[0]), given[1] != 0 ? Prefix::keep : Prefix::drop);
      std::puts("release");
    }
  }

  BlockManager manager_{leaves(),
                        {.budget_bytes = replay_budget,
                         .page_tokens = replay_page_tokens,
                         .max_len = replay_max_len,
                         .max_step_tokens = replay_max_step_tokens}};
  StepPlanner planner_{manager_,
                       {.max_batch = replay_max_batch, .max_step_tokens = replay_step_tokens}};
  std::map<std::uint32_t, std::vector<Token>> texts_;
  std::deque<StepId> steps_;
};

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  std::ifstream trace(argv[1]);
  Replay().run(trace);
  return 0;
}
