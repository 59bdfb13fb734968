// A small model with fixed weights, computed in two ways: over plain arrays from token 0 on, and
// through the tensors of a KVCache. What the two give must be equal for every token.
//
// Layers: attention of any reach over kv_heads 2, head_dim 4 (four query heads), a state layer with
// a convolution window [8, 2] and a recurrent state [2, 4, 4], and cross attention. Float32
// throughout.
#pragma once

#include <cmath>
#include <cstring>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "kvleaf/cache/kv_cache.h"
#include "kvleaf/kernels/append.h"
#include "kvleaf/kernels/attention.h"

namespace toy {

using kvleaf::KVCache;
using kvleaf::KVLayerSpec;
using kvleaf::StepIndices;
using kvleaf::Tensor;
using kvleaf::Token;
using Row = std::vector<float>;
using Rows = std::vector<Row>;

inline constexpr std::size_t width = 16;  // of the hidden state
inline constexpr std::size_t kv_heads = 2;
inline constexpr std::size_t query_heads = 4;
inline constexpr std::size_t dim = 4;
inline constexpr std::size_t channels = 8;  // of the convolution
inline constexpr std::size_t state_heads = 2;

enum class Kind { full, window, chunk, state, cross };
struct Layer {
  Kind kind = Kind::full;
  std::uint32_t tokens = 0;  // window or chunk
  std::uint32_t sinks = 0;
};
using Model = std::vector<Layer>;

inline KVLayerSpec spec(const Layer& layer) {
  kvleaf::AttentionCache attention{.kv_heads = kv_heads, .head_dim = dim};
  switch (layer.kind) {
    case Kind::full: break;
    case Kind::window:
      attention.window = layer.tokens;
      attention.sinks = layer.sinks;
      break;
    case Kind::chunk: attention.chunk = layer.tokens; break;
    case Kind::state:
      return KVLayerSpec::state(kvleaf::LayerState{
          .conv = {{channels, 2}}, .heads = state_heads, .k_dim = dim, .v_dim = dim});
    case Kind::cross: return KVLayerSpec::cross_attention(kv_heads, dim);
  }
  return KVLayerSpec::attention(attention);
}
inline std::vector<KVLayerSpec> specs(const Model& model) {
  std::vector<KVLayerSpec> all;
  for (const Layer& layer : model) all.push_back(spec(layer));
  return all;
}

/// A weight: fixed, in [-0.5, 0.5], different for each place.
inline float weight(std::size_t layer, std::size_t which, std::size_t i, std::size_t j) {
  std::uint64_t x = layer * 0x9E3779B97F4A7C15u + which * 0xBF58476D1CE4E5B9u +
                    i * 0x94D049BB133111EBu + j * 0xD6E8FEB86659FD93u;
  x ^= x >> 31;
  x *= 0x7FB5D329728EA185u;
  x ^= x >> 27;
  return static_cast<float>(x % 10007) / 10006.0f - 0.5f;
}
inline Row times(std::size_t layer, std::size_t which, const Row& in, std::size_t out) {
  Row result(out, 0.0f);
  for (std::size_t i = 0; i < out; ++i)
    for (std::size_t j = 0; j < in.size(); ++j) result[i] += weight(layer, which, i, j) * in[j];
  return result;
}
inline Row embed(Token token) {
  Row row(width);
  for (std::size_t i = 0; i < width; ++i)
    row[i] = 2.0f * weight(1000, 0, static_cast<std::size_t>(token), i);
  return row;
}
inline Row after(std::size_t layer, const Row& hidden, const Row& out) {
  Row next = times(layer, 9, out, width);
  for (std::size_t i = 0; i < width; ++i) next[i] = std::tanh(next[i] + hidden[i]);
  return next;
}

/// One token of attention over given keys and values, [kv_heads · dim] each.
inline Row attend(const Row& query, const std::vector<const float*>& keys,
                  const std::vector<const float*>& values) {
  Row out(query_heads * dim, 0.0f);
  if (keys.empty()) return out;
  for (std::size_t h = 0; h < query_heads; ++h) {
    const std::size_t kv = h / (query_heads / kv_heads);
    std::vector<float> scores;
    float most = -1e30f;
    for (const float* key : keys) {
      float score = 0;
      for (std::size_t d = 0; d < dim; ++d) score += query[h * dim + d] * key[kv * dim + d];
      scores.push_back(score * 0.5f);
      most = std::max(most, scores.back());
    }
    float sum = 0;
    for (float& score : scores) sum += score = std::exp(score - most);
    for (std::size_t k = 0; k < keys.size(); ++k)
      for (std::size_t d = 0; d < dim; ++d)
        out[h * dim + d] += scores[k] / sum * values[k][kv * dim + d];
  }
  return out;
}

inline bool sees(const Layer& layer, std::size_t query, std::size_t key) {
  if (key > query) return false;
  if (layer.kind == Kind::window) return key < layer.sinks || key + layer.tokens > query;
  if (layer.kind == Kind::chunk) return key >= query / layer.tokens * layer.tokens;
  return true;
}

/// One token of a state layer: shifts the window [channels, 2], updates the state [heads, k, v].
inline Row step_state(std::size_t layer, const Row& hidden, float* window, float* state) {
  const Row in = times(layer, 4, hidden, channels);
  Row mixed(channels);
  for (std::size_t c = 0; c < channels; ++c) {
    mixed[c] = 0.3f * window[2 * c] + 0.5f * window[2 * c + 1] + in[c];
    window[2 * c] = window[2 * c + 1];
    window[2 * c + 1] = in[c];
  }
  const Row key = times(layer, 5, mixed, state_heads * dim);
  const Row value = times(layer, 6, mixed, state_heads * dim);
  const Row query = times(layer, 7, mixed, state_heads * dim);
  Row out(state_heads * dim, 0.0f);
  for (std::size_t h = 0; h < state_heads; ++h)
    for (std::size_t k = 0; k < dim; ++k)
      for (std::size_t v = 0; v < dim; ++v) {
        float& entry = state[(h * dim + k) * dim + v];
        entry = 0.9f * entry + key[h * dim + k] * value[h * dim + v];
        out[h * dim + v] += entry * query[h * dim + k];
      }
  return out;
}

/// Keys and values of an encoder's input, of one layer.
struct Encoded {
  Rows keys, values;
};
inline Encoded encode(std::size_t layer, int input, std::size_t tokens) {
  Encoded encoded;
  for (std::size_t t = 0; t < tokens; ++t) {
    const Row hidden = embed(static_cast<Token>(10000 + input * 1000) + static_cast<Token>(t));
    encoded.keys.push_back(times(layer, 2, hidden, kv_heads * dim));
    encoded.values.push_back(times(layer, 3, hidden, kv_heads * dim));
  }
  return encoded;
}

/// The hidden state of every token, computed over plain arrays.
inline Rows compute(const Model& model, std::span<const Token> tokens, int input = 0,
                    std::size_t encoder_tokens = 0) {
  Rows hidden;
  for (const Token token : tokens) hidden.push_back(embed(token));
  for (std::size_t l = 0; l < model.size(); ++l) {
    const Layer& layer = model[l];
    Rows next;
    if (layer.kind == Kind::state) {
      std::vector<float> window(channels * 2, 0.0f);
      std::vector<float> state(state_heads * dim * dim, 0.0f);
      for (const Row& h : hidden)
        next.push_back(after(l, h, step_state(l, h, window.data(), state.data())));
    } else {
      Encoded encoded;
      if (layer.kind == Kind::cross) encoded = encode(l, input, encoder_tokens);
      Rows& keys = encoded.keys;
      Rows& values = encoded.values;
      if (layer.kind != Kind::cross) {
        for (const Row& h : hidden) {
          keys.push_back(times(l, 2, h, kv_heads * dim));
          values.push_back(times(l, 3, h, kv_heads * dim));
        }
      }
      for (std::size_t q = 0; q < hidden.size(); ++q) {
        std::vector<const float*> k, v;
        for (std::size_t t = 0; t < keys.size(); ++t) {
          if (layer.kind != Kind::cross && !sees(layer, q, t)) continue;
          k.push_back(keys[t].data());
          v.push_back(values[t].data());
        }
        next.push_back(
            after(l, hidden[q], attend(times(l, 1, hidden[q], query_heads * dim), k, v)));
      }
    }
    hidden = std::move(next);
  }
  return hidden;
}

/// The hidden state of every new token of a step, computed through the cache's tensors.
inline Rows compute(const Model& model, const KVCache& cache, const StepIndices& step,
                    std::span<const Token> new_tokens) {
  const auto* slots = step.slot_ids().data_as<std::int32_t>();
  const auto* cu = step.cu_seqlens_q().data_as<std::int32_t>();
  const auto* past = step.past_lens().data_as<std::int32_t>();
  const auto* lens = step.seq_lens().data_as<std::int32_t>();
  const bool paged = cache.mode() == kvleaf::KVCacheMode::paged;
  Rows hidden;
  for (const Token token : new_tokens) hidden.push_back(embed(token));
  for (std::size_t l = 0; l < model.size(); ++l) {
    const Layer& layer = model[l];
    const auto number = static_cast<std::int32_t>(l);
    Rows next;
    if (layer.kind == Kind::state) {
      const Tensor conv = cache.conv_state(number);
      const Tensor recurrent = cache.recurrent_state(number);
      for (std::uint32_t row = 0; row < step.batch(); ++row) {
        auto* window = conv.at({slots[row]}).data_as<float>();
        auto* state = recurrent.at({slots[row]}).data_as<float>();
        for (std::int32_t t = cu[row]; t < cu[row + 1]; ++t) {
          const Row& h = hidden[static_cast<std::size_t>(t)];
          next.push_back(after(l, h, step_state(l, h, window, state)));
        }
      }
      hidden = std::move(next);
      continue;
    }

    const Tensor keys = cache.keys(number);
    const Tensor values = cache.values(number);
    const auto entries = static_cast<std::uint32_t>(keys.shape()[1]);
    const std::uint64_t row_bytes = kv_heads * dim * sizeof(float);
    if (layer.kind != Kind::cross) {
      std::vector<float> k, v;
      for (const Row& h : hidden) {
        const Row key = times(l, 2, h, kv_heads * dim);
        const Row value = times(l, 3, h, kv_heads * dim);
        k.insert(k.end(), key.begin(), key.end());
        v.insert(v.end(), value.begin(), value.end());
      }
      const Tensor mapping = step.slot_mapping(static_cast<std::uint32_t>(l));
      std::vector<std::int64_t> where(mapping.data_as<std::int64_t>(),
                                      mapping.data_as<std::int64_t>() + mapping.size());
      // Slot 0 of a slotted cache is no null block: its rows are numbered from 1 here.
      const std::uint64_t shift = paged ? 0 : 1;
      for (std::int64_t& entry : where) entry += static_cast<std::int64_t>(shift * entries);
      const auto append = [&](const Tensor& into, const std::vector<float>& rows) {
        const auto stride = static_cast<std::uint64_t>(into.strides()[0]) * sizeof(float);
        kvleaf::kernels::append_rows(
            reinterpret_cast<const std::byte*>(rows.data()), row_bytes, where,
            {.base = into.data() - shift * stride,
             .page_stride = stride,
             .offset = 0,
             .row_bytes = row_bytes,
             .slots = entries,
             .blocks = static_cast<std::uint32_t>(into.shape()[0]) - (paged ? 1 : 0)});
      };
      append(keys, k);
      append(values, v);
    }

    std::vector<float> queries;
    for (const Row& h : hidden) {
      const Row query = times(l, 1, h, query_heads * dim);
      queries.insert(queries.end(), query.begin(), query.end());
    }
    std::vector<float> out(queries.size(), 0.0f);
    if (paged) {
      const Tensor table = step.block_table(static_cast<std::uint32_t>(l));
      std::vector<std::int32_t> seen(lens, lens + step.batch());
      if (layer.kind == Kind::cross) {
        const auto* encoder = cache.encoder_lens().data_as<std::int32_t>();
        for (std::size_t row = 0; row < seen.size(); ++row) seen[row] = encoder[slots[row]];
      }
      kvleaf::kernels::Reach reach;
      reach.causal = layer.kind != Kind::cross;
      if (layer.kind == Kind::window) reach.window = layer.tokens;
      if (layer.kind == Kind::window) reach.sinks = layer.sinks;
      if (layer.kind == Kind::chunk) reach.chunk = layer.tokens;
      const auto key_stride = static_cast<std::uint64_t>(keys.strides()[0]) * sizeof(float);
      kvleaf::kernels::paged_attention(
          {.queries = queries.data(),
           .output = out.data(),
           .query_heads = query_heads,
           .scale = 0.5f,
           .cu_seqlens_q = {cu, step.batch() + std::size_t{1}},
           .seq_lens = seen,
           .table = {.blocks = table.data_as<std::int32_t>(),
                     .columns = table.shape()[1],
                     .row_stride = table.strides()[0]},
           .pages = {.base = keys.data(),
                     .page_stride = key_stride,
                     .blocks = static_cast<std::uint32_t>(keys.shape()[0] - 1),
                     .layout = {.layers = 1,
                                .slots = entries,
                                .kv_heads = kv_heads,
                                .key_dim = dim,
                                .value_dim = dim,
                                .element_bytes = sizeof(float)},
                     .number = kvleaf::kernels::Number::float32},
           .reach = reach});
    } else {
      for (std::uint32_t row = 0; row < step.batch(); ++row) {
        for (std::int32_t t = cu[row]; t < cu[row + 1]; ++t) {
          const auto position = static_cast<std::size_t>(past[row] + t - cu[row]);
          std::vector<const float*> k, v;
          const std::int32_t count = layer.kind == Kind::cross
                                         ? cache.encoder_lens().data_as<std::int32_t>()[slots[row]]
                                         : lens[row];
          for (std::int32_t e = 0; e < count; ++e) {
            if (layer.kind != Kind::cross && !sees(layer, position, static_cast<std::size_t>(e)))
              continue;
            k.push_back(keys.at({slots[row], e}).data_as<float>());
            v.push_back(values.at({slots[row], e}).data_as<float>());
          }
          const auto* q = queries.data() + static_cast<std::size_t>(t) * query_heads * dim;
          const Row result = attend(Row(q, q + query_heads * dim), k, v);
          std::copy(result.begin(), result.end(),
                    out.begin() + static_cast<std::ptrdiff_t>(t) * query_heads * dim);
        }
      }
    }
    for (std::size_t t = 0; t < hidden.size(); ++t) {
      const auto* o = out.data() + t * query_heads * dim;
      next.push_back(after(l, hidden[t], Row(o, o + query_heads * dim)));
    }
    hidden = std::move(next);
  }
  return hidden;
}

/// The next token a model would take: depends on every number of the last hidden state.
inline Token next_token(const Row& hidden, Token vocabulary) {
  float sum = 0;
  for (const float value : hidden) sum += value;
  return static_cast<Token>(std::fabs(sum) * 1000.0f) % vocabulary;
}

/// Fills the cross attention of a slot.
inline void fill(const Model& model, KVCache& cache, std::int32_t slot, int input,
                 std::size_t tokens) {
  for (std::size_t l = 0; l < model.size(); ++l) {
    if (model[l].kind != Kind::cross) continue;
    const Encoded encoded = encode(l, input, tokens);
    std::vector<float> k, v;
    for (std::size_t t = 0; t < tokens; ++t) {
      k.insert(k.end(), encoded.keys[t].begin(), encoded.keys[t].end());
      v.insert(v.end(), encoded.values[t].begin(), encoded.values[t].end());
    }
    const std::int64_t shape[] = {static_cast<std::int64_t>(tokens), kv_heads, dim};
    cache.fill(static_cast<std::int32_t>(l), slot,
               Tensor(reinterpret_cast<std::byte*>(k.data()), shape, {}, kvleaf::DType::float32),
               Tensor(reinterpret_cast<std::byte*>(v.data()), shape, {}, kvleaf::DType::float32));
  }
}

}  // namespace toy
