"""Captures the graph of an architecture with a few blocks, and then repeats one of them.

A model of 105 equal blocks is captured with three: the first, a middle one, the last. If the middle one has the layer class of a
neighbour, a deeper model is the same graph with the middle layer repeated (``deepen``), which takes a fraction of the time of a capture.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from autopar.capture import capture
from autopar.flow import parameter_nodes
from autopar.graph import Graph, GraphLayer, LayerClass
from autopar.plan import Role
from autopar.shard import annotate, role_types
from autopar.shard.plan import Solve
from autopar.shard.solve import solve as solve_class
from autopar.sharding import AxisTypes
from autopar.validate.rows import Architecture, RowError
from autopar.zoo.hf import build_config

_CAPTURED = 3
_HEAD_DIM, _TOKENS = 64, 2048  # maximum sizes in ``textbook``


def config_of(a: Architecture, layers: int) -> dict[str, Any]:
    """Return a transformers configuration of the architecture with ``layers`` blocks."""
    if not a.gated:
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
    if a.experts:
        return common | {
            "model_type": "mixtral",
            "architectures": ["MixtralForCausalLM"],
            "num_local_experts": a.experts,
            "num_experts_per_tok": a.experts_per_token,
        }
    return common | {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}


def graph_of(a: Architecture, global_batch: int) -> Graph:
    """Return the captured graph of the architecture on a global batch of ``global_batch`` sequences.

    Raises ``RowError`` if the architecture has no blocks, or if the middle block can't be repeated.
    """
    if a.layers < 1:
        raise RowError("n_layers = 0")
    model, batch = build_config(config_of(a, min(a.layers, _CAPTURED)), a.seq, global_batch)
    graph = annotate(capture(model, batch, None, precision="bfloat16", name="row"))
    return deepen(graph, a.layers)


def textbook(a: Architecture) -> Architecture:
    """Return the architecture at modest sizes, at which the optimal types are those of the trainers.

    A published run has its trainer's layout at any size, but with longer sequences or wider blocks the optimum can differ from it.
    """
    width = min(a.hidden // a.heads, _HEAD_DIM)
    inner, remainder = divmod(a.ffn * width * a.heads, a.hidden)
    return dataclasses.replace(
        a,
        layers=min(a.layers, _CAPTURED),
        hidden=a.heads * width,
        ffn=a.ffn if remainder else inner,
        seq=min(a.seq, _TOKENS),
    )


def textbook_types(graph: Graph, plain: Graph) -> Solve:
    """Return a ``Solve`` for ``Pricer`` that gives layers of ``graph`` the types in ``plain``, the same architecture at modest sizes.

    Without a solution in ``plain``, a layer gets its own optimum.
    """
    last = len(plain.layers) - 1

    def solve(cls: LayerClass, role: Role, size: int) -> AxisTypes | None:
        layer = next(i for i, layer in enumerate(graph.layers) if layer.cls == cls.name)
        at = last if layer == len(graph.layers) - 1 else min(layer, last - 1)
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


def deepen(graph: Graph, blocks: int) -> Graph:
    """Return ``graph`` with its middle block repeated so that there are ``blocks`` blocks. Raises ``RowError`` if it can't be repeated."""
    more = blocks - _CAPTURED
    if more <= 0:
        return graph
    middle = len(graph.layers) - _CAPTURED  # the layers are embedding, three blocks, head: this is the second block
    kinds = [layer.cls for layer in graph.layers]
    if len(kinds) != _CAPTURED + 2 or kinds[middle] not in (kinds[middle - 1], kinds[middle + 1]):
        raise RowError(f"the model's blocks differ: {', '.join(kinds)}")
    pattern = graph.layers[middle]
    if len(pattern.activations) != 1 or len(pattern.outputs) != 1:
        raise RowError(f"{pattern.name} has several inputs or outputs, so it can't be repeated")
    (made,) = pattern.outputs
    layers: list[GraphLayer] = list(graph.layers[: middle + 1])
    values, parameters = dict(graph.values), dict(graph.parameters)
    last = made
    for k in range(more):
        name = f"{made}.{k}"
        values[name] = dataclasses.replace(graph.values[made], name=name)
        renamed = {old: f"{old}.{k}" for old in pattern.parameters}
        parameters |= {new: dataclasses.replace(graph.parameters[old], name=new) for old, new in renamed.items()}
        layers.append(
            dataclasses.replace(
                pattern,
                name=f"{pattern.name}.{k}",
                activations=(last,),
                parameters=tuple(renamed[old] for old in pattern.parameters),
                outputs=(name,),
            )
        )
        last = name
    following = graph.layers[middle + 1]
    layers.append(
        dataclasses.replace(following, activations=tuple(last if v == made else v for v in following.activations))
    )
    layers += graph.layers[middle + 2 :]
    return dataclasses.replace(graph, layers=tuple(layers), values=values, parameters=parameters)
