"""Replaces LSTM, GRU and plain RNN by one op with one result (``kernels_rnn.recurrent``), which contains outputs and states."""

from __future__ import annotations

import operator

from torch import fx

from autopar.ops.facts import op_name
from autopar.ops.meta import meta
from autopar.ops.operands import args_of, shape_of
from autopar.program import kernels_rnn
from passes.clean.nodes import add, aten, calls, replace

_MODES = ("lstm", "gru", "rnn_tanh", "rnn_relu")


def recurrent_pass(gm: fx.GraphModule) -> fx.GraphModule:
    """Replace recurrent ops over padded sequences; ops over packed sequences, and LSTMs with projections, stay unchanged."""
    for node in calls(gm):
        mode = op_name(node).removeprefix("aten.")
        if mode in _MODES and str(node.target).endswith(".input"):
            _replace(node, mode)
    return gm


def _replace(node: fx.Node, mode: str) -> None:
    x, states, weights, biases, layers, dropout, train, bidirectional, batch_first = args_of(node)
    states = list(states) if mode == "lstm" else [states]
    outputs, hidden = meta(node)["val"][:2]
    if outputs.shape[-1] != meta(states[-1])["val"].shape[-1] * (1 + bidirectional) or any(
        user.target is not operator.getitem for user in node.users
    ):
        return
    if not batch_first:
        x = add(node, aten.transpose.int, (x, 0, 1))
    if all(op_name(state) in ("aten.zeros", "aten.new_zeros", "aten.zeros_like") for state in states):
        states = []  # the kernel creates them, for the rows of its input
    options = (mode, biases, layers, dropout if train else 0.0, bidirectional)
    packed = add(node, kernels_rnn.recurrent, (x, states, weights, *options))
    length = shape_of(x)[1]
    for user in list(node.users):
        index = args_of(user)[1]
        start, end = (0, length) if index == 0 else (length + (index - 1) * layers, length + index * layers)
        part = add(user, aten.slice.Tensor, (packed, 1, start, end))
        if index == 0:
            part = part if batch_first else add(user, aten.transpose.int, (part, 0, 1))
        else:
            part = add(user, aten.reshape.default, (part, [*shape_of(part)[:2], 1 + bidirectional, hidden.shape[-1]]))
            part = add(user, aten.permute.default, (part, [1, 2, 0, 3]))
            part = add(user, aten.reshape.default, (part, list(hidden.shape)))
        replace(user, part)
    node.graph.erase_node(node)
