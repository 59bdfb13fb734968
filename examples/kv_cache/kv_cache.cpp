// The whole cache of one model, in slots: chats that share what they have in common, batched as
// they come, on KVCache. The model is small and its weights are random, but it is one: attention to
// all tokens, attention to a window, and a recurrent state, each read and written through the
// tensors that the cache hands out. Every answer must be the one that the same model gives one chat
// at a time in a slotted cache, where nothing is shared.
#include <kvleaf/cache/kv_cache.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <optional>
#include <random>
#include <vector>

using namespace kvleaf;

namespace {

constexpr std::int64_t width = 16, heads = 2, dim = width / heads, vocabulary = 101, layers = 3;
constexpr std::int64_t window = 32, window_layer = 1, state_layer = 2;
constexpr std::size_t chunk = 48;  // most tokens of one chat in one step
constexpr std::size_t answer = 12;

using Row = std::vector<float>;
using Ids = std::vector<std::int32_t>;

/// Weights [layers][which][width, width], and an embedding that is the output's too.
struct Weights {
  Weights() {
    std::mt19937 random(7);
    std::normal_distribution<float> normal;
    const auto fill = [&](Row& row, std::size_t size) {
      for (std::size_t i = 0; i < size; ++i) row.push_back(normal(random) / std::sqrt(width));
    };
    fill(matrices, layers * 4 * width * width);
    fill(embedding, vocabulary * width);
  }
  Row times(std::int64_t layer, std::int64_t which, const Row& in) const {
    const float* matrix = matrices.data() + (layer * 4 + which) * width * width;
    Row out(width, 0.0f);
    for (std::int64_t i = 0; i < width; ++i)
      for (std::int64_t j = 0; j < width; ++j) out[i] += matrix[i * width + j] * in[j];
    return out;
  }
  Row matrices, embedding;
};

/// One row of a step, as a forward sees it.
struct Place {
  const StepIndices& step;
  std::int64_t row;
  std::int64_t position;  // of the token in its sequence

  /// Where the entry of a position lies in a layer's keys or values: [pages + 1, page, heads, dim]
  /// through the table of a paged cache, [slots, max_len, heads, dim] in a slotted one.
  float* entry(const Tensor& storage, std::uint32_t layer, std::int64_t at) const {
    const Tensor table = step.block_table(layer);
    if (!table.defined())
      return storage.at({*step.slot_ids().at({row}).data_as<std::int32_t>(), at}).data_as<float>();
    const std::int64_t page = storage.shape()[1];
    const std::int32_t block = *table.at({row, at / page}).data_as<std::int32_t>();
    return storage.at({block, at % page}).data_as<float>();
  }
};

Row attend(const KVCache& cache, const Weights& weights, std::int32_t layer, const Place& place,
           const Row& hidden) {
  const Tensor keys = cache.keys(layer), values = cache.values(layer);
  const auto store = [&](const Tensor& into, const Row& row) {
    std::memcpy(place.entry(into, static_cast<std::uint32_t>(layer), place.position), row.data(),
                width * sizeof(float));
  };
  const Row query = weights.times(layer, 0, hidden);
  store(keys, weights.times(layer, 1, hidden));
  store(values, weights.times(layer, 2, hidden));

  const std::int64_t first =
      layer == window_layer ? std::max<std::int64_t>(0, place.position - window + 1) : 0;
  Row out(width, 0.0f), sums(heads, 0.0f);
  for (std::int64_t at = first; at <= place.position; ++at) {
    const float* key = place.entry(keys, static_cast<std::uint32_t>(layer), at);
    const float* value = place.entry(values, static_cast<std::uint32_t>(layer), at);
    for (std::int64_t h = 0; h < heads; ++h) {
      float score = 0;
      for (std::int64_t d = h * dim; d < (h + 1) * dim; ++d) score += query[d] * key[d];
      const float share = std::exp(score / std::sqrt(dim));
      sums[h] += share;
      for (std::int64_t d = h * dim; d < (h + 1) * dim; ++d) out[d] += share * value[d];
    }
  }
  for (std::int64_t d = 0; d < width; ++d) out[d] /= sums[d / dim];
  return out;
}

/// Linear attention: the state [heads, dim, dim] of the slot forgets a little and takes in k · vᵀ.
Row recur(const KVCache& cache, const Weights& weights, const Place& place, const Row& hidden) {
  const std::int32_t slot = *place.step.slot_ids().at({place.row}).data_as<std::int32_t>();
  auto* state = cache.recurrent_state(state_layer).at({slot}).data_as<float>();
  const Row query = weights.times(state_layer, 0, hidden);
  const Row key = weights.times(state_layer, 1, hidden);
  const Row value = weights.times(state_layer, 2, hidden);
  Row out(width, 0.0f);
  for (std::int64_t h = 0; h < heads; ++h) {
    for (std::int64_t k = h * dim; k < (h + 1) * dim; ++k) {
      for (std::int64_t v = h * dim; v < (h + 1) * dim; ++v, ++state) {
        *state = 0.95f * *state + key[k] * value[v];
        out[v] += query[k] * *state;
      }
    }
  }
  return out;
}

/// The forward of a step: `tokens` are the new ones of all rows. What each row says next.
Ids forward(const KVCache& cache, const Weights& weights, const StepIndices& step,
            const Ids& tokens) {
  Ids said;
  const auto* begins = step.cu_seqlens_q().data_as<std::int32_t>();
  const auto* past = step.past_lens().data_as<std::int32_t>();
  for (std::int64_t row = 0; row < step.batch(); ++row) {
    Row hidden;
    for (std::int32_t i = begins[row]; i < begins[row + 1]; ++i) {
      const auto from = weights.embedding.begin() + tokens[i] * width;
      hidden.assign(from, from + width);
      const Place place{step, row, past[row] + i - begins[row]};
      for (std::int32_t layer = 0; layer < layers; ++layer) {
        const Row out = layer == state_layer ? recur(cache, weights, place, hidden)
                                             : attend(cache, weights, layer, place, hidden);
        const Row mixed = weights.times(layer, 3, out);
        for (std::int64_t d = 0; d < width; ++d) hidden[d] = std::tanh(hidden[d] + mixed[d]);
      }
    }
    Row logits(vocabulary, 0.0f);
    for (std::int64_t token = 0; token < vocabulary; ++token)
      for (std::int64_t d = 0; d < width; ++d)
        logits[token] += weights.embedding[token * width + d] * hidden[d];
    said.push_back(static_cast<std::int32_t>(std::ranges::max_element(logits) - logits.begin()));
  }
  return said;
}

KVCache make(KVCacheMode mode, std::uint32_t slots) {
  const AttentionCache full{.kv_heads = heads, .head_dim = dim};
  AttentionCache windowed = full;
  windowed.window = window;
  return KVCache::make({.num_layers = layers,
                        .max_seqs = slots,
                        .max_len = 512,
                        .mode = mode,
                        .dtype = DType::float32},
                       {KVLayerSpec::attention(full), KVLayerSpec::attention(windowed),
                        KVLayerSpec::state({.heads = heads, .k_dim = dim, .v_dim = dim})});
}

struct Chat {
  Ids ids;               // prompt, and then what was said
  std::size_t done = 0;  // tokens that are computed
  std::size_t end = 0;   // prompt and answer
};

/// Serves all prompts, as many at a time as there are slots. Their prompts and answers.
std::vector<Ids> serve(KVCache& cache, const Weights& weights, const std::vector<Ids>& prompts,
                       std::size_t& reused) {
  const bool paged = cache.mode() == KVCacheMode::paged;
  std::vector<Ids> answers(prompts.size());
  std::vector<std::optional<Chat>> slots(cache.config().max_seqs);
  std::vector<std::size_t> whose(slots.size());
  for (std::size_t waiting = 0, finished = 0; finished < prompts.size();) {
    Ids tokens, begins = {0}, past, batch;
    for (std::size_t s = 0; s < slots.size(); ++s) {
      const auto slot = static_cast<std::int32_t>(s);
      if (!slots[s]) {
        if (waiting == prompts.size()) continue;
        Chat chat{prompts[waiting], 0, prompts[waiting].size() + answer};
        if (paged) chat.done = cache.admit(slot, Tensor::of(chat.ids));
        reused += chat.done;
        whose[s] = waiting++;
        slots[s] = std::move(chat);
      }
      // The rest of the prompt up to where a state is to be kept, a chunk of it at most; or the one
      // token that was said last.
      Chat& chat = *slots[s];
      std::size_t stop = std::min(chat.ids.size(), chat.done + chunk);
      if (const auto wanted = cache.next_stop(slot)) stop = std::min<std::size_t>(stop, *wanted);
      tokens.insert(tokens.end(), chat.ids.begin() + static_cast<std::ptrdiff_t>(chat.done),
                    chat.ids.begin() + static_cast<std::ptrdiff_t>(stop));
      past.push_back(static_cast<std::int32_t>(chat.done));
      begins.push_back(static_cast<std::int32_t>(tokens.size()));
      batch.push_back(slot);
      chat.done = stop;
    }
    const StepIndices step = cache.prepare_step(begins, past, batch);
    const Ids said = forward(cache, weights, step, tokens);
    for (std::size_t row = 0; row < batch.size(); ++row) {
      const auto s = static_cast<std::size_t>(batch[row]);
      Chat& chat = *slots[s];
      if (chat.done < chat.ids.size()) continue;  // in the middle of its prompt
      chat.ids.push_back(said[row]);
      if (chat.ids.size() < chat.end) continue;
      answers[whose[s]] = chat.ids;
      if (paged) cache.retire(batch[row], Tensor::of(chat.ids));  // findable for the next turn
      if (!paged) cache.evict_batch(batch[row]);
      slots[s].reset();
      ++finished;
    }
  }
  return answers;
}

}  // namespace

int main() {
  const Weights weights;
  KVCache shared = make(KVCacheMode::paged, 4), alone = make(KVCacheMode::slotted, 1);
  std::vector<Ids> prompts;
  for (std::int32_t chat = 0; chat < 6; ++chat) {  // one system prompt, and a question each
    Ids ids;
    for (std::int32_t i = 0; i < 90 + 5 * chat; ++i)
      ids.push_back(i < 70 ? i : (i * 7 + chat * 13) % static_cast<std::int32_t>(vocabulary));
    prompts.push_back(ids);
  }
  for (int turn = 1; turn <= 3; ++turn) {
    std::size_t reused = 0, none = 0, all = 0;
    for (const Ids& prompt : prompts) all += prompt.size();
    const std::vector<Ids> answers = serve(shared, weights, prompts, reused);
    if (answers != serve(alone, weights, prompts, none)) {
      std::printf("turn %d: the answers differ\n", turn);
      return 1;
    }
    std::printf("turn %d: %zu of %zu prompt tokens reused, answers as without a cache\n", turn,
                reused, all);
    prompts = answers;  // what was said, and another question
    for (Ids& prompt : prompts)
      for (std::int32_t i = 0; i < 20; ++i) prompt.push_back((i * 5 + turn) % 50);
  }
  shared.audit();
}
