"""Small models of real architectures, from their own configuration classes, weights random.

    model = make("llama")

Every dimension that decides the shape of a cache is small and different from the others where
the architecture allows it, windows are shorter than the prompts of the tests, and weights are
larger than a fresh model's, so that logits depend on every token that a layer should see.
"""

from collections.abc import Callable

import torch
import transformers as tf
from transformers import PreTrainedConfig, PreTrainedModel

VOCABULARY = 211
TEXT = dict(
    vocab_size=VOCABULARY,
    hidden_size=64,
    intermediate_size=96,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
    tie_word_embeddings=False,
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=None,
)


def text(**changes) -> dict:
    return TEXT | changes


def llama():
    return tf.LlamaConfig(**text(num_hidden_layers=4))


def gemma3():
    kinds = ["sliding_attention"] * 2 + ["full_attention"]
    return tf.Gemma3TextConfig(
        **text(num_hidden_layers=6, head_dim=24, sliding_window=20, layer_types=kinds * 2)
    )


def gpt_oss():
    return tf.GptOssConfig(
        **text(
            num_hidden_layers=4,
            head_dim=16,
            sliding_window=16,
            num_local_experts=4,
            num_experts_per_tok=2,
        )
    )


def llama4():
    return tf.Llama4TextConfig(
        **text(
            num_hidden_layers=4,
            head_dim=16,
            attention_chunk_size=16,
            intermediate_size_mlp=96,
            num_local_experts=4,
            num_experts_per_tok=1,
            interleave_moe_layer_step=2,
            no_rope_layer_interval=4,
        )
    )


def gemma3n():
    kinds = ["sliding_attention", "full_attention"]
    return tf.Gemma3nTextConfig(
        **text(
            num_hidden_layers=6,
            head_dim=16,
            sliding_window=18,
            layer_types=kinds * 3,
            num_kv_shared_layers=2,
            vocab_size_per_layer_input=VOCABULARY,
            hidden_size_per_layer_input=16,
            laurel_rank=8,
            activation_sparsity_pattern=[0.0] * 6,
        )
    )


def qwen3_next():
    return tf.Qwen3NextConfig(
        **text(
            num_hidden_layers=4,
            head_dim=24,
            full_attention_interval=4,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=16,
            linear_value_head_dim=24,
            linear_conv_kernel_dim=4,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=48,
            shared_expert_intermediate_size=48,
        )
    )


def qwen3_5():
    return tf.Qwen3_5TextConfig(
        **text(
            num_hidden_layers=4,
            head_dim=24,
            full_attention_interval=2,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=16,
            linear_value_head_dim=24,
            linear_conv_kernel_dim=4,
        )
    )


MAMBA2 = dict(
    mamba_n_heads=8,
    mamba_d_head=16,
    mamba_n_groups=2,
    mamba_d_state=12,
    mamba_d_conv=4,
    mamba_expand=2,
    mamba_chunk_size=16,
)


def bamba():
    return tf.BambaConfig(**text(num_hidden_layers=4, attn_layer_indices=[1, 3], **MAMBA2))


def granite_hybrid():
    return tf.GraniteMoeHybridConfig(
        **text(
            num_hidden_layers=4,
            layer_types=["mamba", "attention", "mamba", "attention"],
            num_local_experts=4,
            num_experts_per_tok=2,
            shared_intermediate_size=48,
            **MAMBA2,
        )
    )


def nemotron_h():
    return tf.NemotronHConfig(
        **text(
            head_dim=24,
            hybrid_override_pattern="M*-M*M",
            mamba_num_heads=8,
            mamba_head_dim=16,
            n_groups=2,
            ssm_state_size=12,
            conv_kernel=4,
            chunk_size=16,
        )
    )


def jamba():
    return tf.JambaConfig(
        **text(
            num_hidden_layers=4,
            attn_layer_period=2,
            attn_layer_offset=1,
            expert_layer_period=2,
            expert_layer_offset=1,
            num_experts=4,
            num_experts_per_tok=2,
            mamba_d_state=12,
            mamba_d_conv=4,
            mamba_expand=2,
            mamba_dt_rank=8,
            use_mamba_kernels=False,
        )
    )


def falcon_h1():
    return tf.FalconH1Config(**text(num_hidden_layers=3, head_dim=24, mamba_d_ssm=128, **MAMBA2))


def zamba2():
    return tf.Zamba2Config(
        **text(
            num_hidden_layers=4,
            layers_block_type=["mamba", "hybrid"] * 2,
            num_key_value_heads=4,
            num_mem_blocks=1,
            adapter_rank=4,
            n_mamba_heads=8,
            mamba_headdim=16,
            mamba_ngroups=2,
            mamba_d_state=12,
            mamba_d_conv=4,
            mamba_expand=2,
            chunk_size=16,
        )
    )


def deepseek_v3():
    return tf.DeepseekV3Config(
        **text(
            num_hidden_layers=4,
            num_key_value_heads=4,
            kv_lora_rank=24,
            q_lora_rank=32,
            qk_nope_head_dim=16,
            qk_rope_head_dim=8,
            v_head_dim=20,
            n_routed_experts=4,
            n_group=2,
            topk_group=1,
            num_experts_per_tok=2,
            moe_intermediate_size=48,
            first_k_dense_replace=1,
        )
    )


def lfm2():
    return tf.Lfm2Config(
        **text(
            num_hidden_layers=4,
            conv_L_cache=3,
            layer_types=["conv", "full_attention", "conv", "full_attention"],
            block_auto_adjust_ff_dim=False,
        )
    )


def whisper():
    return tf.WhisperConfig(
        vocab_size=VOCABULARY,
        d_model=64,
        num_mel_bins=16,
        encoder_layers=2,
        decoder_layers=3,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=96,
        decoder_ffn_dim=96,
        max_source_positions=50,
        max_target_positions=512,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=3,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )


def mllama():
    return tf.MllamaConfig(
        text_config=text(
            num_hidden_layers=5,
            cross_attention_layers=[1, 3],
            bos_token_id=1,
            eos_token_id=2,
            pad_token_id=0,
        ),
        vision_config=dict(
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_global_layers=1,
            attention_heads=4,
            image_size=28,
            patch_size=14,
            max_num_tiles=2,
            intermediate_layers_indices=[0],
            vision_output_dim=64,
            supported_aspect_ratios=[[1, 1], [1, 2], [2, 1]],
        ),
        image_token_index=VOCABULARY - 1,
    )


CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    f.__name__: f
    for f in (llama, gemma3, gemma3n, gpt_oss, llama4, qwen3_next, qwen3_5, bamba, granite_hybrid,
              nemotron_h, jamba, falcon_h1, zamba2, deepseek_v3, lfm2, whisper, mllama)
}  # fmt: skip

CLASSES = {
    "whisper": tf.WhisperForConditionalGeneration,
    "mllama": tf.MllamaForConditionalGeneration,
}


def make(name: str, seed: int = 0) -> PreTrainedModel:
    """The model `name` in float32, ready to run, the same for the same seed."""
    torch.manual_seed(seed)
    config = CONFIGS[name]()
    if name in CLASSES:
        model = CLASSES[name](config)
    else:
        model = tf.AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for parameter in model.parameters():
            # More spread than a fresh model has; weights that begin as a constant get some too.
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(noise * (0.1 if parameter.ndim > 1 else 0.02))
    return model.eval().to(torch.float32)
