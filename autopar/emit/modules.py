"""Uses torch's modules (``nn.Linear`` etc.) in emitted layers where their parameters are unsharded and read only once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from typing import Any

import torch
from torch import fx

from autopar.emit.names import attributes
from autopar.ops.facts import op_name
from autopar.ops.meta import meta
from autopar.ops.operands import arguments
from passes.layer import LocalLayer

_Arguments = Mapping[str, Any]


def _linear(given: _Arguments, shape: torch.Size) -> str | None:
    return f"nn.Linear({shape[1]}, {shape[0]}{_without_bias(given)}"


def _embedding(given: _Arguments, shape: torch.Size) -> str | None:
    if given["scale_grad_by_freq"] or given["sparse"]:
        return None
    padding = "" if given["padding_idx"] in (-1, None) else f", padding_idx={given['padding_idx']}"
    return f"nn.Embedding({shape[0]}, {shape[1]}{padding}"


def _layer_norm(given: _Arguments, shape: torch.Size) -> str | None:
    return f"nn.LayerNorm({_size(shape)}, eps={given['eps']}{_without_bias(given)}" if _is_norm(given, shape) else None


def _rms_norm(given: _Arguments, shape: torch.Size) -> str | None:
    return f"nn.RMSNorm({_size(shape)}, eps={given['eps']}" if _is_norm(given, shape) else None


def _is_norm(given: _Arguments, shape: torch.Size) -> bool:
    return list(given["normalized_shape"]) == list(shape)


def _without_bias(given: _Arguments) -> str:
    return ", bias=False" if given["bias"] is None else ""


def _size(shape: torch.Size) -> str:
    return str(shape[0]) if len(shape) == 1 else str(tuple(shape))


_CALLS: dict[str, Callable[[_Arguments, torch.Size], str | None]] = {
    "aten.linear": _linear,
    "aten.embedding": _embedding,
    "aten.layer_norm": _layer_norm,
    "aten.rms_norm": _rms_norm,
}
"""By op, a function of the call's arguments and the weight's shape. It returns the start of the module's constructor call, or ``None``."""


def torch_modules(layer: LocalLayer, shared: Set[int]) -> dict[str, str]:
    """Return the constructor calls of the layer's torch modules by path; their nodes get the path as ``meta["module"]``.

    A node becomes a module's call if its weight (and bias) are unsharded and trainable, nothing else is stored at their path, and no other
    node reads them. ``shared`` are the indices of parameters that the stage owns.
    """
    inputs = [node for node in layer.graph.graph.nodes if node.op == "placeholder"]
    holders = inputs[len(inputs) - len(layer.parameters) :]
    paths = attributes((*(p.name for p in layer.parameters), *(buffer.name for buffer in layer.cls.buffers)))
    own: dict[fx.Node | None, str] = {
        holder: paths[parameter.name]
        for i, (holder, parameter) in enumerate(zip(holders, layer.parameters, strict=True))
        if i not in shared
        and layer.cls.parameters[i].requires_grad
        and not any(each.sharded for each in parameter.types)
    }
    found: dict[str, str] = {}
    for node in layer.graph.graph.nodes:
        meta(node).pop("module", None)
        if node.op != "call_function" or op_name(node) not in _CALLS or meta(node).get("caller"):
            continue
        given = arguments(node)
        held = {leaf: tensor for leaf in ("weight", "bias") if isinstance(tensor := given.get(leaf), fx.Node)}
        path = own.get(held.get("weight"), "").rpartition(".")[0]
        dtypes = {meta(tensor)["val"].dtype for tensor in held.values()}
        if (
            path
            and all(own.get(tensor) == f"{path}.{leaf}" for leaf, tensor in held.items())
            and all(tuple(tensor.users) == (node,) for tensor in held.values())
            and sum(name.startswith(f"{path}.") for name in paths.values()) == len(held)
            and len(dtypes) == 1
            and (call := _CALLS[op_name(node)](given, meta(held["weight"])["val"].shape)) is not None
        ):
            found[path] = f"{call}, **factory, dtype={dtypes.pop()})"
            meta(node)["module"] = path
    return found
