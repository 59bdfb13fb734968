#include <algorithm>
#include <array>

#include "kvleaf/cache/families/family.h"

namespace kvleaf::families {
namespace {

constexpr Family table[] = {
    {"bamba", bamba},
    {"bart", bart},
    {"cohere", plain},
    {"cohere2", cohere2},
    {"deepseek_v2", deepseek_v3},
    {"deepseek_v3", deepseek_v3},
    {"deepseek_v32", deepseek_v32},
    {"deepseek_v4", deepseek_v4},
    {"exaone4", exaone4},
    {"falcon_h1", falcon_h1},
    {"falcon_mamba", mamba1},
    {"florence2", bart},
    {"gemma", plain},
    {"gemma2", gemma2},
    {"gemma3", gemma3},
    {"gemma3_text", gemma3},
    {"gemma3n", gemma3n},
    {"gemma3n_text", gemma3n},
    {"gemma4", gemma4},
    {"gemma4_text", gemma4},
    {"glm4", plain},
    {"glm4_moe", plain},
    {"gpt_oss", gpt_oss},
    {"granite", plain},
    {"granitemoe", plain},
    {"granitemoehybrid", granite_hybrid},
    {"hunyuan", hunyuan},
    {"hunyuan_v1_dense", hunyuan},
    {"hunyuan_v1_moe", hunyuan},
    {"jamba", jamba},
    {"kimi_k2", deepseek_v3},
    {"kimi_k3", kimi_linear},
    {"kimi_linear", kimi_linear},
    {"lfm2", lfm2},
    {"lfm2_moe", lfm2},
    {"llama", plain},
    {"llama4", llama4},
    {"llama4_text", llama4},
    {"mamba", mamba1},
    {"mamba2", mamba2},
    {"mimo_v2_flash", mimo_v2},
    {"minimax_m2", minimax_text_01},
    {"minimax_m3", minimax_m3},
    {"minimax_text_01", minimax_text_01},
    {"mistral", windowed},
    {"mistral3", windowed},
    {"mixtral", windowed},
    {"mllama", mllama},
    {"nemotron_h", nemotron_h},
    {"olmo2", plain},
    {"phi3", windowed},
    {"phi4flash", phi4flash},
    {"qwen2", qwen},
    {"qwen2_5_vl", qwen},
    {"qwen2_moe", qwen},
    {"qwen2_vl", qwen},
    {"qwen3", qwen},
    {"qwen3_5", qwen3_next},
    {"qwen3_5_moe", qwen3_next},
    {"qwen3_5_moe_text", qwen3_next},
    {"qwen3_5_text", qwen3_next},
    {"qwen3_moe", qwen},
    {"qwen3_next", qwen3_next},
    {"qwen3_vl", qwen},
    {"qwen3_vl_moe", qwen},
    {"recurrent_gemma", recurrent_gemma},
    {"smollm3", qwen},
    {"starcoder2", windowed},
    {"step3p5", plain},
    {"step3p7", plain},
    {"whisper", whisper},
    {"zamba2", zamba2},
};
static_assert(std::ranges::is_sorted(table, {}, &Family::model_type));

}  // namespace

std::span<const Family> all() { return table; }

}  // namespace kvleaf::families
