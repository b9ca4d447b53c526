"""Captures the graph of an architecture with a few blocks, and then repeats one of them.

A model of 105 equal blocks is captured with three: the first, a middle one, the last. If the middle one has the layer class of a
neighbour, a deeper model is the same graph with the middle layer repeated (``capture.deepen``), which takes a fraction of the time.
Where the first blocks have no experts and the others do, two of the first kind are captured, and the second is repeated.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from autopar.capture import capture, deepen
from autopar.flow import parameter_nodes
from autopar.graph import Graph, LayerClass
from autopar.plan import Role
from autopar.shard import annotate, role_types
from autopar.shard.plan import Solve
from autopar.shard.solve import solve as solve_class
from autopar.sharding import AxisTypes
from autopar.validate.architecture import Architecture, LatentAttention
from autopar.validate.fields import RowError
from autopar.zoo.hf import build_config

_CAPTURED = 3
_CAPTURED_DENSE = 2  # of the first blocks of a mixture that have no experts
_HEAD_DIM, _TOKENS = 64, 2048  # maximum sizes in ``textbook``


def config_of(a: Architecture, layers: int) -> dict[str, Any]:
    """Return a transformers configuration of the architecture with ``layers`` blocks."""
    if not a.gated and a.kv_heads == a.heads and not a.head and not a.squared_relu:
        return _gpt2(a, layers)
    common = {
        "hidden_size": a.hidden,
        "intermediate_size": a.ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": a.heads,
        "num_key_value_heads": a.kv_heads,
        "vocab_size": a.vocabulary,
        "max_position_embeddings": a.seq,
        "tie_word_embeddings": a.tied,
    }
    if not a.gated:
        activation = "relu2" if a.squared_relu else "gelu_pytorch_tanh"
        return _model("nemotron", "Nemotron") | common | {"head_dim": a.head_size, "hidden_act": activation}
    if a.latent:
        return _model("deepseek_v3", "DeepseekV3") | common | _latent(a.latent) | _deepseek_experts(a, layers)
    if a.head:
        common["head_dim"] = a.head
    if not a.experts:
        return (_model("qwen3", "Qwen3") if a.qk_norm else _model("llama", "Llama")) | common
    if a.shared_experts or a.dense_layers or a.groups > 1:
        return _model("glm4_moe", "Glm4Moe") | common | {"use_qk_norm": a.qk_norm} | _deepseek_experts(a, layers)
    if a.qk_norm:
        experts = {"num_experts": a.experts, "moe_intermediate_size": a.expert_ffn or a.ffn}
        return _model("qwen3_moe", "Qwen3Moe") | common | experts | {"num_experts_per_tok": a.experts_per_token}
    experts = {"num_local_experts": a.experts, "intermediate_size": a.expert_ffn or a.ffn}
    return _model("mixtral", "Mixtral") | common | experts | {"num_experts_per_tok": a.experts_per_token}


def _model(kind: str, name: str) -> dict[str, Any]:
    return {"model_type": kind, "architectures": [f"{name}ForCausalLM"]}


def _gpt2(a: Architecture, layers: int) -> dict[str, Any]:
    rate = 0.1 if a.dropout else 0.0
    return {
        "model_type": "gpt2",
        "activation_function": "gelu_pytorch_tanh",  # which is one op, as in the trainers
        "architectures": ["GPT2LMHeadModel"],
        "n_embd": a.hidden,
        "n_layer": layers,
        "n_head": a.heads,
        "n_inner": a.ffn,
        "n_positions": a.seq,
        "vocab_size": a.vocabulary,
        "tie_word_embeddings": a.tied,
        "resid_pdrop": rate,
        "embd_pdrop": rate,
        "attn_pdrop": rate,
    }


def _latent(latent: LatentAttention) -> dict[str, Any]:
    return {
        "q_lora_rank": latent.query_rank or None,
        "kv_lora_rank": latent.rank,
        "qk_nope_head_dim": latent.plain,
        "qk_rope_head_dim": latent.rotary,
        "v_head_dim": latent.value,
    }


def _deepseek_experts(a: Architecture, layers: int) -> dict[str, Any]:
    """Return DeepSeek-V3's fields of experts, which GLM-4.5 has, too."""
    if not a.experts:
        return {"first_k_dense_replace": layers}
    return {
        "moe_intermediate_size": a.expert_ffn or a.ffn,
        "n_routed_experts": a.experts,
        "n_shared_experts": a.shared_experts,
        "num_experts_per_tok": a.experts_per_token,
        "first_k_dense_replace": _captured(a)[0],
        "n_group": a.groups,
        "topk_group": a.chosen_groups,
    }


def _captured(a: Architecture) -> tuple[int, int]:
    """Return how many of the first blocks, which have no experts in a mixture, and of the others are captured."""
    return min(a.dense_layers, _CAPTURED_DENSE), min(a.layers - a.dense_layers, _CAPTURED)


def graph_of(a: Architecture, global_batch: int) -> Graph:
    """Return the captured graph of the architecture on a global batch of ``global_batch`` sequences.

    Raises ``RowError`` if the architecture has no blocks, or if the middle block can't be repeated.
    """
    if a.layers < 1:
        raise RowError("n_layers = 0")
    dense, others = _captured(a)
    model, batch = build_config(config_of(a, dense + others), a.seq, global_batch)
    graph = annotate(capture(model, batch, None, precision="bfloat16", name="row"))
    if dense + others < a.layers and len(graph.layers) != dense + others + 2:
        raise RowError(f"the model's blocks differ: {', '.join(layer.cls for layer in graph.layers)}")
    # the layers are embedding, blocks without experts, the other blocks, head
    for number, more in ((dense + others - 2, a.layers - a.dense_layers - others), (dense - 1, a.dense_layers - dense)):
        deeper = deepen(graph, number, more)
        if deeper is None:
            raise RowError(f"the model's blocks differ: {', '.join(layer.cls for layer in graph.layers)}")
        graph = deeper
    return graph


def textbook(a: Architecture) -> Architecture:
    """Return the architecture at modest sizes, at which the optimal types are those of the trainers.

    A published run has its trainer's layout at any size, but with longer sequences or wider blocks the optimum can differ from it.
    """
    dense, others = _captured(a)
    small = dataclasses.replace(a, layers=dense + others, dense_layers=dense, seq=min(a.seq, _TOKENS))
    size = a.head_size
    width = min(size, _HEAD_DIM)
    if a.latent or a.hidden * width % size:
        return small
    inner, remainder = divmod(a.ffn * width, size)
    inner_of_experts, rest = divmod(a.expert_ffn * width, size)
    return dataclasses.replace(
        small,
        hidden=a.hidden * width // size,
        head=width if a.head else 0,
        ffn=a.ffn if remainder else inner,
        expert_ffn=a.expert_ffn if rest else inner_of_experts,
    )


def textbook_types(graph: Graph, plain: Graph) -> Solve:
    """Return a ``Solve`` for ``Pricer`` that gives layers of ``graph`` the types in ``plain``, the same architecture at modest sizes.

    Without a solution in ``plain``, a layer gets its own optimum.
    """
    last = len(plain.layers) - 1
    ours, theirs = ([layer.cls for layer in each.layers] for each in (graph, plain))
    # the graphs have the same classes in the same order, unless a long sequence has made classes of their own
    alike = len(set(ours)) == len(set(theirs))
    at_of = dict(zip(dict.fromkeys(ours), map(theirs.index, dict.fromkeys(theirs)), strict=False)) if alike else {}

    def solve(cls: LayerClass, role: Role, size: int) -> AxisTypes | None:
        layer = ours.index(cls.name)
        at = at_of.get(cls.name, last if layer == len(graph.layers) - 1 else min(layer, last - 1))
        found = role_types(plain, at, role, size)
        if found is None:
            return role_types(graph, layer, role, size)
        if {node.name for node in cls.graph.graph.nodes if node.op != "output"} <= found.produced.keys():
            return found
        # a long sequence is captured with other constants: then only the parameters take their types from ``plain``
        plain_nodes = parameter_nodes(plain.classes[plain.layers[at].cls])
        stored = [found.produced[node.name] for node in plain_nodes]
        names = [node.name for node in parameter_nodes(cls)]
        return solve_class(cls, role, size, tuple(sorted(zip(names, stored, strict=True))))

    return solve
