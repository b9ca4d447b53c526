"""Connectionist temporal classification: one loss per example; the batch may be sharded."""

from __future__ import annotations

import torch.nn.functional as F  # noqa: N812  torch's own convention
from spmd_types import P
from torch import Tensor

from .kernels import _declare, _require, _sharding
from .spmd import spmd


def ctc_loss(
    scores: Tensor, labels: Tensor, frames: Tensor, lengths: Tensor, blank: int = 0, zero_infinity: bool = False
) -> Tensor:
    """Return the losses ``[batch]`` of ``scores [batch, time, classes]`` (log-probabilities) for ``labels [batch, max_labels]``.

    ``frames [batch]`` and ``lengths [batch]`` are the numbers of valid time steps and of valid labels.
    """
    if spmd.is_type_checking():
        rows = _sharding(scores)[0]
        _require(_sharding(scores)[1:] == [(), ()], "ctc_loss: time or classes are sharded")
        _require(_sharding(labels) == [rows, ()], "ctc_loss: the labels' batch is sharded differently")
        _require(_sharding(frames) == _sharding(lengths) == [rows], "ctc_loss: the lengths are sharded differently")
        _require(P not in spmd.get_local_type(scores).values(), "ctc_loss: scores are a partial sum")
    with spmd.local():
        if scores.is_meta:  # torch cannot infer the shape on the meta device
            out = scores.new_empty(scores.shape[:1])
        else:
            out = F.ctc_loss(scores.transpose(0, 1), labels, frames, lengths, blank, "none", zero_infinity)
    return _declare(out, _sharding(scores)[:1]) if spmd.is_type_checking() else out
