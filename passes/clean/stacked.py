"""Replaces ``torch.stack`` of parameters by one parameter, which plans shard and programs store like any other.

If each expert of a mixture is a module, the mixture reads stacks of the experts' parameters. If these were results of an op, every device
would have the parameters of all experts. As a parameter (``Parameter.stacked``), a stack is sharded over the experts. Where the user's
names count (weights, checkpoints, the optimizer's groups), it is the parameters that it stacks.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from autopar.graph import Parameter
from autopar.ops.meta import meta
from autopar.ops.operands import args_of, argument
from passes.clean.nodes import aten, calls, copy_origin, like


def stacked_parameters_pass(gm: fx.GraphModule) -> fx.GraphModule:
    """Replace every stack of parameters that allows it by a new parameter (see ``not_stackable_reason``)."""
    parameters = [node for node in gm.graph.nodes if node.op == "placeholder" and "parameter" in meta(node)]
    taken = {name for node in parameters for name in (meta(node)["parameter"].name, meta(node)["parameter"].original)}
    made: dict[tuple[fx.Node, ...], fx.Node] = {}
    for node in calls(gm, aten.stack.default):
        operands = stacked_parameters(node)
        if not operands or not_stackable_reason(node):
            continue
        if operands not in made:
            made[operands] = _stacked(operands, taken)
        node.replace_all_uses_with(made[operands])
        gm.graph.erase_node(node)
    for operand in (operand for operands in made for operand in operands):
        gm.graph.erase_node(operand)
    return gm


def stacked_parameters(node: fx.Node) -> tuple[fx.Node, ...]:
    """Return the placeholders of the parameters that a node stacks along a new dim 0; none if it does anything else."""
    if node.target is not aten.stack.default or argument(node, 1, "dim", 0) != 0:
        return ()
    operands: tuple[Any, ...] = tuple(args_of(node)[0])
    return operands if all("parameter" in meta(each) and each.op == "placeholder" for each in operands) else ()


def not_stackable_reason(node: fx.Node) -> str:
    """Return why a stack of parameters can't be stored as one parameter, or ``""``."""
    operands = stacked_parameters(node)
    found: list[Parameter] = [meta(each)["parameter"] for each in operands]
    first = found[0]
    if len(set(operands)) < len(operands):
        return f"{first.original} belongs to several experts"
    for operand, parameter in zip(operands, found, strict=True):
        if parameter.tied:
            return f"{parameter.original} is tied to {parameter.tied[0]}"
        if parameter.trainable != first.trainable:
            return f"only one of {first.original} and {parameter.original} is trained"
        if parameter.dtype != first.dtype:
            return f"{first.original} and {parameter.original} have different dtypes"
        if parameter.dim is not None or parameter.stacked or "buffer" in meta(operand):
            return f"the program stores or writes {parameter.original} in parts"
        if any(stacked_parameters(user) != operands for user in operand.users):
            return f"forward also reads {parameter.original} elsewhere"
    return ""


def _stacked(operands: tuple[fx.Node, ...], taken: set[str]) -> fx.Node:
    """Return a new placeholder for the parameters stacked."""
    found: list[Parameter] = [meta(each)["parameter"] for each in operands]
    first, shape = found[0], (len(found), *found[0].shape)
    original = _pattern([parameter.name for parameter in found])
    name = ".".join(word for word in original.split(".") if word != "*")
    if original.endswith("*") or name in taken or original in taken:  # unlike experts
        name, original = f"{first.name}_stacked", f"{first.original}, ..."
    while name in taken:
        name += "_stacked"
    taken |= {name, original}
    with operands[0].graph.inserting_before(operands[0]):
        node = operands[0].graph.placeholder(f"{operands[0].name}_stacked")
    copy_origin(operands[0], node)
    meta(node)["parameter"] = Parameter(
        name=name,
        original=original,
        original_shape=first.original_shape,
        shape=shape,
        dtype=first.dtype,
        trainable=first.trainable,
        stacked=tuple(parameter.original for parameter in found),
    )
    val = meta(operands[0])["val"]
    meta(node)["val"] = like(torch.stack([val] * len(found)))
    return node


def _pattern(names: Sequence[str]) -> str:
    """Return the names' common words, with ``*`` for a word that differs; between names of different lengths, one ``*`` for all words from
    the first to the last that differ."""
    parts = [name.split(".") for name in names]
    if len({len(words) for words in parts}) > 1:
        first = _common(parts)
        last = _common([words[len(first) :][::-1] for words in parts])[::-1]
        return ".".join([*first, "*", *last])
    return ".".join(words[0] if len(set(words)) == 1 else "*" for words in zip(*parts, strict=True))


def _common(parts: Sequence[Sequence[str]]) -> list[str]:
    """Return the first words that all have in common."""
    columns = itertools.takewhile(lambda words: len(set(words)) == 1, zip(*parts, strict=False))
    return [words[0] for words in columns]
