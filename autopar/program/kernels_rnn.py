"""Recurrent layers as one op with one result. Only the batch may be sharded.

torch's ops return a tuple of tensors with different batch dims. Here the states are concatenated to the outputs along time: one tensor with
one type.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from spmd_types import P
from torch import Tensor

from .kernels import _declare, _require, _seeded, _sharding
from .kernels_random import UNSEEDED
from .spmd import spmd


def recurrent(
    x: Tensor,
    states: Sequence[Tensor],
    weights: Sequence[Tensor],
    mode: str,
    has_biases: bool = True,
    num_layers: int = 1,
    dropout: float = 0.0,
    bidirectional: bool = False,
    seed: int | None = UNSEEDED,
) -> Tensor:
    """Run an LSTM (``mode`` is "lstm"), a GRU ("gru") or a plain RNN ("rnn_tanh", "rnn_relu") in training mode, on padded sequences.

    ``x`` is ``[batch, time, width]`` and each of ``states`` ``[layers * directions, batch, hidden]``, with the same sharding of the batch;
    if ``states`` is empty, they are zeros. The result is ``[batch, time + layers * states, directions * hidden]``: the outputs, the last
    hidden states of the layers, and then an LSTM's cell states. The dropout between layers is a function of ``seed``; there is none if the
    seed is ``None``, as in evaluation mode.
    """
    if spmd.is_type_checking():
        rows = _sharding(x)[0]
        _require(
            all(_sharding(state) == [(), rows, ()] for state in states),
            "recurrent: the states' batch is sharded differently from x's",
        )
        _require(not any(entry for weight in weights for entry in _sharding(weight)), "recurrent: weights are sharded")
        _require(_sharding(x)[1:] == [(), ()], "recurrent: time or width is sharded")
        _require(P not in spmd.get_local_type(x).values(), "recurrent: x is a partial sum, and must be reduced first")
    if seed is None:
        dropout = 0.0
    with spmd.local(), _seeded(None if not dropout or seed == UNSEEDED else seed, x.device):
        if not states:
            hidden, directions = weights[1].shape[1], 2 if bidirectional else 1
            zeros = x.new_zeros(num_layers * directions, x.shape[0], hidden)
            states = [zeros] * (2 if mode == "lstm" else 1)
        options = (has_biases, num_layers, dropout, True, bidirectional, True)
        if mode == "lstm":
            parts = torch.lstm(x, list(states), list(weights), *options)
        else:
            parts = getattr(torch, mode)(x, states[0], list(weights), *options)
        last = [_states_as_time_steps(state, num_layers) for state in parts[1:]]
        out = torch.cat([parts[0], *last], dim=1)
    return _declare(out, _sharding(x)) if spmd.is_type_checking() else out


def _states_as_time_steps(state: Tensor, layers: int) -> Tensor:
    """Reshape ``[layers * directions, batch, hidden]`` to ``[batch, layers, directions * hidden]``."""
    return state.unflatten(0, (layers, -1)).permute(2, 0, 1, 3).flatten(2)
