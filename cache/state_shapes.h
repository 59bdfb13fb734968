// Shapes of the states that recurrent layers keep, one layer and one rank each. The convolution's
// window holds the kernel - 1 inputs that the next token still needs.
//
//   kind            conv                                                recurrent
//   Mamba-1         [inner, kernel - 1]                                 [inner, d_state]
//   Mamba-2         [inner + 2 groups d_state, kernel - 1]              [heads, head_dim, d_state]
//   Gated DeltaNet  [2 k_heads k_dim + v_heads v_dim, kernel - 1]       [v_heads, v_dim, k_dim]
//   KDA             [3 heads head_dim, kernel - 1]                      [heads, head_dim, head_dim]
//   lightning       none                                                [heads, head_dim, head_dim]
//   RG-LRU          [width, kernel - 1]                                 [width]
//   short conv      [dim, kernel - 1]                                   none
//
// They are the shapes vLLM computes (vllm/model_executor/layers/mamba/mamba_utils.py).
#pragma once

#include <cstdint>

#include "kvleaf/cache/layer_spec.h"

namespace kvleaf {

struct StateDTypes {
  DType conv = DType::bfloat16;
  DType recurrent = DType::float32;
};

struct Mamba1Shape {
  std::uint32_t inner = 0;
  std::uint32_t d_state = 0;
  std::uint32_t kernel = 0;
};
struct Mamba2Shape {
  std::uint32_t heads = 0;
  std::uint32_t head_dim = 0;  // inner = heads · head_dim
  std::uint32_t groups = 0;
  std::uint32_t d_state = 0;
  std::uint32_t kernel = 0;
};
struct DeltaNetShape {
  std::uint32_t k_heads = 0;
  std::uint32_t k_dim = 0;
  std::uint32_t v_heads = 0;
  std::uint32_t v_dim = 0;
  std::uint32_t kernel = 0;
};
struct LinearShape {
  std::uint32_t heads = 0;
  std::uint32_t head_dim = 0;
  std::uint32_t kernel = 0;  // KDA only
};
struct ConvShape {
  std::uint32_t width = 0;
  std::uint32_t kernel = 0;
};

/// Each throws InvalidArgument for a zero, a kernel below 2 where there is a convolution, or a
/// dimension of 2^31 and more.
StateCache mamba1_state(Mamba1Shape shape, StateDTypes dtypes);
StateCache mamba2_state(Mamba2Shape shape, StateDTypes dtypes);
StateCache delta_net_state(DeltaNetShape shape, StateDTypes dtypes);
StateCache kda_state(LinearShape shape, StateDTypes dtypes);
StateCache lightning_state(LinearShape shape, StateDTypes dtypes);
StateCache rg_lru_state(ConvShape shape, StateDTypes dtypes);
StateCache short_conv_state(ConvShape shape, StateDTypes dtypes);

}  // namespace kvleaf
