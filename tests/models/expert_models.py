"""Models with mixtures of experts for the exactness matrix: small, and awkward on purpose."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

ROWS = 8

Model = tuple[nn.Module, Any, Any]


def _tokens(sequence: int = 16) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 96, (ROWS, sequence), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[0, :9] = -100
    labels[3, 2:5] = -100
    return {"input_ids": ids, "labels": labels}


_COMMON: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vocab_size": 96,
    "use_cache": False,
    "experts_implementation": "eager",  # what eager PyTorch runs in float64; capture takes the one that exports
}


def mixtral(**options: Any) -> Model:
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"intermediate_size": 48, "num_key_value_heads": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
    return MixtralForCausalLM(MixtralConfig(**{**_COMMON, **sizes, **options})), _tokens(), None


def mixtral_balanced() -> Model:
    """With the auxiliary loss that balances the experts' loads: it couples the whole batch."""
    return mixtral(output_router_logits=True, router_aux_loss_coef=0.1)


def qwen3_moe() -> Model:
    """A dense layer between mixtures, and the choices' weights not normalised."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        **_COMMON,
        head_dim=8,
        intermediate_size=64,
        moe_intermediate_size=24,
        num_key_value_heads=2,
        num_experts=8,
        num_experts_per_tok=3,
        norm_topk_prob=False,
        mlp_only_layers=[1],
    )
    return Qwen3MoeForCausalLM(config), _tokens(), None


def deepseek() -> Model:
    """Latent attention, a shared expert, and choices limited to groups of experts by corrected scores."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    config = DeepseekV3Config(
        **_COMMON,
        intermediate_size=64,
        moe_intermediate_size=24,
        num_key_value_heads=4,
        n_routed_experts=8,
        n_shared_experts=1,
        num_experts_per_tok=2,
        n_group=4,
        topk_group=2,
        first_k_dense_replace=1,
        kv_lora_rank=16,
        q_lora_rank=24,
        qk_rope_head_dim=4,
        qk_nope_head_dim=8,
        v_head_dim=8,
    )
    model = DeepseekV3ForCausalLM(config)
    generator = torch.Generator().manual_seed(2)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.rand(buffer.shape, generator=generator) * 0.1)
    return model, _tokens(), None


MODELS: dict[str, Callable[[], Model]] = {
    "mixtral": mixtral,
    "mixtral_balanced": mixtral_balanced,
    "qwen3_moe": qwen3_moe,
    "deepseek": deepseek,
}
