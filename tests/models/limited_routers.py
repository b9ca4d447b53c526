"""Mixtures of experts whose routers are limited to some groups of experts."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn

from autopar.capture import capture
from autopar.graph import Graph, LayerClass
from autopar.ops.experts import Experts
from autopar.ops.operands import operands
from autopar.ops.routing import Routing
from autopar.rules.traffic import kernel_traffic

_SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 256,
    "intermediate_size": 64,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_shared_experts": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "first_k_dense_replace": 1,
    "use_cache": False,
}


def deepseek_v3(experts: int, choices: int, groups: int, chosen: int) -> nn.Module:
    """DeepSeek-V3, which scores a group of experts by the sum of its two best sigmoid scores."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    sizes = {"n_routed_experts": experts, "num_experts_per_tok": choices, "n_group": groups, "topk_group": chosen}
    return DeepseekV3ForCausalLM(DeepseekV3Config(**_SIZES, **sizes)).train()


def deepseek_v2(experts: int, choices: int, groups: int, chosen: int) -> nn.Module:
    """DeepSeek-V2, which scores a group of experts by its best softmax score."""
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    sizes = {"n_routed_experts": experts, "num_experts_per_tok": choices, "n_group": groups, "topk_group": chosen}
    method = {"topk_method": "group_limited_greedy" if groups > 1 else "greedy"}
    return DeepseekV2ForCausalLM(DeepseekV2Config(**_SIZES, **sizes, **method)).train()


def captured(model: nn.Module, precision: str = "float32") -> Graph:
    """The graph of a language model on eight sequences."""
    ids = torch.randint(0, 64, (8, 16), generator=torch.Generator().manual_seed(1))
    return capture(model, {"input_ids": ids, "labels": ids}, precision=precision)


def mixture(graph: Graph) -> tuple[LayerClass, fx.Node]:
    """The first layer class with a mixture of experts, and the mixture."""
    nodes = ((cls, node) for cls in graph.classes.values() for node in cls.graph.graph.nodes)
    return next((cls, node) for cls, node in nodes if isinstance(node.target, Experts))


def priced_routing(node: fx.Node) -> Routing:
    """The routing with which prices send the rows of a mixture through relays."""
    (found,) = {one.routing for one in kernel_traffic("expert_relay", node) if one.value is operands(node)[0]}
    assert found is not None
    return found
