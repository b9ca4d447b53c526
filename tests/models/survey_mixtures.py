"""Mixtures of experts for the survey: those of transformers, a line each, and ones in the style of other code bases (``mixture_styles``).

Four experts or eight, so that they can be distributed over four devices, and no dropout: eager PyTorch has to give the same loss twice.
"""

from __future__ import annotations

from typing import Any

import mixture_styles
from survey_models import Entry
from survey_text import (
    BOTH,
    EXPERTS,
    GROUPED,
    LATENT,
    LINEAR,
    MIXTURES,
    SMALL,
    T5,
    Factory,
    causal,
    decoder,
    seq2seq,
)

ROUTED: dict[str, Any] = GROUPED | {
    "n_routed_experts": 8,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "head_dim": 8,
}
DENSE_THEN_SPARSE: dict[str, Any] = {"mlp_layer_types": ["dense", "sparse"]}
MAMBA: dict[str, Any] = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_chunk_size": 8}
DELTA: dict[str, Any] = {"linear_head_dim": 8, "linear_num_heads": 4}

TRANSFORMERS: dict[str, Factory] = MIXTURES | {
    "phimoe": decoder("Phimoe", EXPERTS, router_jitter_noise=0.0, input_jitter_noise=0.0),
    "mixtral_balanced": decoder("Mixtral", EXPERTS, output_router_logits=True, router_aux_loss_coef=0.1),
    "qwen2_moe_balanced": decoder(
        "Qwen2Moe", EXPERTS, shared_expert_intermediate_size=32, output_router_logits=True, router_aux_loss_coef=0.1
    ),
    "qwen3_5_moe": causal("Qwen3_5MoeForCausalLM", "Qwen3_5MoeTextConfig", EXPERTS | LINEAR),
    "flex_olmo": decoder("FlexOlmo", EXPERTS),
    "glm4_moe": decoder("Glm4Moe", ROUTED),
    "glm4_moe_lite": decoder("Glm4MoeLite", SMALL | LATENT | DENSE_THEN_SPARSE),
    "llama4": causal("Llama4ForCausalLM", "Llama4TextConfig", EXPERTS, head_dim=8, intermediate_size_mlp=64),
    "llama4_every_second": causal(
        "Llama4ForCausalLM",
        "Llama4TextConfig",
        EXPERTS,
        head_dim=8,
        intermediate_size_mlp=64,
        num_experts_per_tok=1,
        interleave_moe_layer_step=2,
    ),
    "granitemoeshared": decoder("GraniteMoeShared", EXPERTS, shared_intermediate_size=32),
    "granitemoehybrid": decoder(
        "GraniteMoeHybrid", EXPERTS | MAMBA, shared_intermediate_size=32, layer_types=["mamba", "attention"]
    ),
    "hunyuan_v1_moe": decoder("HunYuanMoEV1", EXPERTS, moe_topk=2, head_dim=8),
    "ernie4_5_moe": causal(
        "Ernie4_5_MoeForCausalLM",
        "Ernie4_5_MoeConfig",
        EXPERTS,
        moe_num_experts=4,
        moe_k=2,
        moe_num_shared_experts=1,
        moe_layer_start_index=0,
    ),
    "minimax": decoder("MiniMax", EXPERTS, head_dim=8, block_size=8),
    "minimax_m2": decoder(
        "MiniMaxM2", EXPERTS, head_dim=8, rope_parameters={"rope_type": "default", "rope_theta": 1e4}
    ),
    "dots1": decoder("Dots1", ROUTED),
    "lfm2_moe": decoder("Lfm2Moe", EXPERTS, num_dense_layers=1, layer_types=["conv", "full_attention"]),
    "longcat_flash": decoder(
        "LongcatFlash",
        SMALL | LATENT,
        num_layers=2,
        ffn_hidden_size=64,
        expert_ffn_hidden_size=32,
        moe_topk=2,
        zero_expert_num=2,
        head_dim=8,
    ),
    "kimi_linear": decoder(
        "KimiLinear",
        SMALL | LATENT | DELTA | DENSE_THEN_SPARSE,
        num_local_experts=4,
        layer_types=["linear_attention", "full_attention"],
    ),
    "bailing_hybrid": decoder(
        "BailingHybrid",
        SMALL | LATENT | DENSE_THEN_SPARSE,
        num_local_experts=4,
        head_dim=8,
        num_mtp_layers=0,
        layer_types=["linear_attention", "full_attention"],
    ),
    "afmoe": decoder("Afmoe", ROUTED, num_dense_layers=1, sliding_window=8, global_attn_every_n_layers=2),
    "exaone_moe": decoder("ExaoneMoe", ROUTED, sliding_window=8, sliding_window_pattern=2),
    "solar_open": decoder("SolarOpen", ROUTED),
    "cohere2_moe": decoder("Cohere2Moe", EXPERTS, head_dim=8, sliding_window=8, num_shared_experts=1),
    "mimo_v2_flash": decoder("MiMoV2Flash", ROUTED, v_head_dim=8, sliding_window=8, **DENSE_THEN_SPARSE),
    "nemotron_h": decoder(
        "NemotronH",
        ROUTED,
        layers_block_type=["mamba", "moe", "attention", "moe"],
        mamba_num_heads=4,
        mamba_head_dim=16,
        n_groups=2,
        ssm_state_size=8,
        chunk_size=8,
        moe_shared_expert_intermediate_size=32,
        use_mamba_kernels=False,
    ),
    "jetmoe": decoder("JetMoe", EXPERTS, kv_channels=8),
    "switch_transformers": seq2seq(
        "SwitchTransformers",
        T5,
        decoder_start_token_id=0,
        num_experts=4,
        expert_capacity=16,
        router_jitter_noise=0.0,
        dropout_rate=0.0,
    ),
    "nllb_moe": seq2seq(
        "NllbMoe",
        BOTH,
        num_experts=4,
        expert_capacity=16,
        encoder_sparse_step=2,
        decoder_sparse_step=2,
        dropout=0.0,
        attention_dropout=0.0,
        moe_token_dropout=0.0,
    ),
    "doge": decoder("Doge", GROUPED, num_experts=16, num_experts_per_tok=2, is_moe=True),
    "laguna": decoder("Laguna", ROUTED),
    "mistral4": decoder("Mistral4", SMALL | LATENT),
    "hy_v3": decoder("HYV3", ROUTED),
}

GROUPS: dict[str, dict[str, Factory]] = {
    "transformers, mixtures of experts": TRANSFORMERS,
    "in the style of other code": mixture_styles.STYLES,
}
MODELS: dict[str, Entry] = {name: Entry(group, make) for group, of in GROUPS.items() for name, make in of.items()}
