// A serving loop over a hybrid model: chats arrive, are batched, share what they have in common,
// and come back for a second turn. The "model" is a toy, but its memory is real: it attends to all
// tokens and to a window of them, and keeps a state, all in one arena, reached through the arrays
// of each step only. What it says depends on every byte, so at the end each answer is compared with
// one computed without a cache.
#include <kvleaf/group/group.h>
#include <kvleaf/kernels/append.h>
#include <kvleaf/kernels/copy.h>
#include <kvleaf/kernels/gather.h>
#include <kvleaf/pool/arena.h>

#include <algorithm>
#include <cstdio>
#include <numeric>

using namespace kvleaf;

namespace {

constexpr std::uint32_t page_tokens = 16, window_tokens = 64, chunk_tokens = 128,
                        answer_tokens = 24;
constexpr LeafId full{0}, window{1}, state{2};

/// What the toy says after `text`: a recurrence over all of it, and sums over all and over the
/// window.
Token next_token(std::int64_t recurrence, std::int64_t all, std::int64_t recent) {
  return static_cast<Token>((recurrence + 3 * all + 7 * recent) % 5000);
}
std::int64_t advance(std::int64_t recurrence, Token token) {
  return (recurrence * 31 + token) % 1000003;
}

Leaves toy_leaves() {
  const AttentionOptions entry{.layers = 1,
                               .kv_heads = 1,
                               .head_dim = 1,
                               .dtype = DType::float32,
                               .tokens_per_page = page_tokens};  // 8 bytes: one number of a token
  return {
      std::make_shared<FullAttentionLeaf>("full", entry),
      std::make_shared<SlidingWindowLeaf>("window", WindowOptions{.window = window_tokens}, entry),
      std::make_shared<RecurrentStateLeaf>(
          "state", StateOptions{.layers = 1,
                                .slabs = {{"recurrence", {1}, DType::int64}},
                                .tokens_per_page = page_tokens})};
}

class ToyModel {
 public:
  explicit ToyModel(const Geometry& geometry) : arena_(Arena::host(geometry)) {
    for (const LeafGeometry& leaf : geometry.leaves()) {
      pages_.push_back({arena_.view(LeafId(static_cast<std::uint32_t>(pages_.size()))),
                        leaf.page_stride, leaf.bytes_per_page,
                        static_cast<std::uint32_t>(leaf.blocks)});
    }
  }

  /// One forward: `tokens` are the new ones of all rows. Returns what each row says next.
  std::vector<Token> forward(const StepPlan& plan, std::span<const Token> tokens) {
    std::vector<kernels::BlockCopy> copies;
    for (const BlockCopy& c : plan.copies()) {
      copies.push_back(
          {c.leaf.value(), static_cast<int>(c.src.value()), static_cast<int>(c.dst.value())});
    }
    std::vector<kernels::BlockClear> clears;
    for (const ZeroFill& z : plan.zero_fills()) {
      clears.push_back({z.leaf.value(), static_cast<int>(z.block.value())});
    }
    kernels::copy_pages(pages_, copies);
    kernels::zero_pages(pages_, clears);

    const std::vector<std::int64_t> entries(tokens.begin(), tokens.end());
    for (const LeafId leaf : {full, window}) {
      kernels::append_rows(reinterpret_cast<const std::byte*>(entries.data()), 8,
                           plan.slot_mapping(leaf), rows(leaf));
    }
    std::vector<Token> said;
    for (std::uint32_t row = 0; row < plan.batch(); ++row) {
      auto* recurrence = reinterpret_cast<std::int64_t*>(
          pages_[state.value()].page(plan.array(state, "state_rows").row<std::int32_t>(row)[0]));
      for (int i = plan.cu_seqlens_q()[row]; i < plan.cu_seqlens_q()[row + 1]; ++i) {
        *recurrence = advance(*recurrence, tokens[i]);
      }
      const std::uint32_t end = plan.seq_lens()[row];
      said.push_back(next_token(*recurrence, sum(plan, full, row, 0, end),
                                sum(plan, window, row, end - std::min(end, window_tokens), end)));
    }
    return said;
  }

 private:
  kernels::RowPages rows(LeafId leaf) const {
    const kernels::Pages& pages = pages_[leaf.value()];
    return {pages.base, pages.page_stride, 0, 8, page_tokens, pages.blocks};
  }
  std::int64_t sum(const StepPlan& plan, LeafId leaf, std::uint32_t row, std::uint32_t begin,
                   std::uint32_t end) {
    const std::int32_t* table = plan.array(leaf, "block_table").row<std::int32_t>(row);
    std::vector<std::int64_t> slots, entries(end - begin);
    for (std::uint32_t i = begin; i < end; ++i) {
      slots.push_back(std::int64_t{table[i / page_tokens]} * page_tokens + i % page_tokens);
    }
    kernels::gather_rows(rows(leaf), slots, reinterpret_cast<std::byte*>(entries.data()), 8);
    return std::accumulate(entries.begin(), entries.end(), std::int64_t{0});
  }

  Arena arena_;
  std::vector<kernels::Pages> pages_;
};

struct Chat {
  RequestId request;
  std::vector<Token> text;
  std::size_t wanted;  // length of the text with its answer
};

/// The same answer, computed from the whole text each time.
std::vector<Token> answered_without_cache(Chat chat) {
  while (chat.text.size() < chat.wanted) {
    std::int64_t recurrence = 0, all = 0, recent = 0;
    for (std::size_t i = 0; i < chat.text.size(); ++i) {
      recurrence = advance(recurrence, chat.text[i]);
      all += chat.text[i];
      if (i + window_tokens >= chat.text.size()) recent += chat.text[i];
    }
    chat.text.push_back(next_token(recurrence, all, recent));
  }
  return chat.text;
}

/// Serves all chats, a few at a time: prompts in chunks, answers token by token, in one batch.
void serve(std::vector<Chat>& chats, BlockManager& manager, StepPlanner& planner, ToyModel& model) {
  std::size_t waiting = 0;  // the first chat that was not admitted yet
  std::vector<Chat*> active;
  while (waiting < chats.size() || !active.empty()) {
    while (waiting < chats.size() && active.size() < planner.options().max_batch) {
      try {
        const Admission admission = manager.admit(chats[waiting].request, chats[waiting].text);
        std::printf("request %2u: %3u of %3zu prompt tokens reused\n",
                    static_cast<unsigned>(chats[waiting].request.value()), admission.hit_tokens,
                    chats[waiting].text.size());
      } catch (const PoolExhausted&) {
        if (active.empty()) throw;
        break;  // an active one will end first
      }
      active.push_back(&chats[waiting++]);
    }

    std::vector<StepRequest> batch;
    for (const Chat* chat : active) {
      const std::uint32_t done = manager.computed(chat->request),
                          length = manager.length(chat->request);
      const std::uint32_t stop =
          std::min(manager.next_stop(chat->request).value_or(length), done + chunk_tokens);
      batch.push_back({chat->request, stop - done});
    }
    const StepPlan& plan = planner.plan(batch);
    if (plan.rows().empty()) throw PoolExhausted(plan.refused().front().why);

    std::vector<Token> tokens;  // of the rows that were served; refused ones wait for the next step
    std::vector<Chat*> rows;
    for (std::size_t i = 0; i < active.size(); ++i) {
      if (std::ranges::find(plan.rows(), active[i]->request) == plan.rows().end()) continue;
      const auto first = active[i]->text.begin() + manager.computed(active[i]->request);
      tokens.insert(tokens.end(), first, first + batch[i].new_tokens);
      rows.push_back(active[i]);
    }
    const std::vector<Token> said = model.forward(plan, tokens);
    planner.settle(plan.step());

    for (std::size_t i = 0; i < rows.size(); ++i) {
      Chat& chat = *rows[i];
      if (manager.computed(chat.request) < chat.text.size()) continue;  // its prompt goes on
      if (chat.text.size() == chat.wanted) {
        manager.release(chat.request);
        std::erase(active, &chat);
        continue;
      }
      chat.text.push_back(said[i]);
      manager.append(chat.request, {&said[i], 1});
    }
  }
}

}  // namespace

int main() {
  BlockManager manager(toy_leaves(), {.budget_bytes = 256 << 10,
                                      .page_tokens = page_tokens,
                                      .max_len = 1024,
                                      .max_step_tokens = chunk_tokens});
  StepPlanner planner(manager, {.max_batch = 3, .max_step_tokens = 3 * chunk_tokens});
  ToyModel model(manager.geometry());

  std::vector<Token> system(200);  // what all chats begin with
  std::iota(system.begin(), system.end(), 100);
  std::vector<Chat> chats;
  for (std::uint32_t i = 0; i < 8; ++i) {
    chats.push_back({RequestId(i), system, 0});
  }
  bool right = true;
  for (std::uint32_t turn = 0; turn < 2; ++turn) {
    for (std::uint32_t i = 0; i < chats.size(); ++i) {
      chats[i].request = RequestId(10 * (turn + 1) + i);
      for (std::uint32_t t = 0; t < 40 + 7 * i; ++t)
        chats[i].text.push_back(static_cast<Token>(1000 * i + t));
      chats[i].wanted = chats[i].text.size() + answer_tokens;
    }
    std::vector<std::vector<Token>> expected;
    for (const Chat& chat : chats) expected.push_back(answered_without_cache(chat));
    serve(chats, manager, planner, model);
    for (std::size_t i = 0; i < chats.size(); ++i) right &= chats[i].text == expected[i];
  }
  manager.audit();
  const ManagerStats stats = manager.stats();
  std::printf("%llu of %llu prompt tokens reused; answers %s those without a cache\n",
              static_cast<unsigned long long>(stats.hit_tokens),
              static_cast<unsigned long long>(stats.prompt_tokens),
              right ? "equal" : "DIFFER FROM");
  return right && stats.hit_tokens > 0 ? 0 : 1;
}
