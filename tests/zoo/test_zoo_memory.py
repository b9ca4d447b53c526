"""A model of a configuration takes no memory for its parameters, however its layers allocate them."""

from __future__ import annotations

import resource

import torch
from torch import nn

from autopar.zoo.hf import _on_meta, build_config

EXPERTS = {  # 1.3 billion parameters of torch.zeros
    "model_type": "llama4_text", "architectures": ["Llama4ForCausalLM"], "hidden_size": 2048, "intermediate_size": 8192,
    "intermediate_size_mlp": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "vocab_size": 256, "num_local_experts": 13, "interleave_moe_layer_step": 1,
}  # fmt: skip


def test_experts_that_are_made_of_zeros_take_no_memory():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    model, _ = build_config(EXPERTS, 16, 2)
    taken = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    assert size > 2 * 10**9 and taken < size / 4
    assert all(p.is_meta for p in model.parameters())


def test_large_zeros_are_zeros_and_shared_parameters_stay_shared():
    with _on_meta():
        buffer = torch.zeros(3000, 2000, dtype=torch.bfloat16)
        first, second = nn.Module(), nn.Module()
        shared = nn.Parameter(torch.ones(3000, 2000))
        first.weight, second.weight = shared, shared
        first.small = nn.Parameter(torch.ones(3))
    assert buffer.dtype is torch.bfloat16 and buffer.shape == (3000, 2000) and int(buffer.count_nonzero()) == 0
    assert first.weight is second.weight and first.weight.is_meta and not first.small.is_meta
    outside = nn.Module()
    outside.weight = shared
    assert outside.weight is shared
