"""Replaces the op that represents the CTC loss during tracing by ``kernels_ctc.ctc_loss``, which gives one loss per example."""

from __future__ import annotations

import torch
from torch import fx

from autopar.ops.facts import op_name
from autopar.ops.operands import args_of
from autopar.program import kernels_ctc
from passes.clean.nodes import add, calls, replace


@torch.library.custom_op("autopar::ctc_loss", mutates_args=())
def traced(
    scores: torch.Tensor,
    labels: torch.Tensor,
    frames: torch.Tensor,
    lengths: torch.Tensor,
    blank: int,
    zero_infinity: bool,
) -> torch.Tensor:
    """Call ``kernels_ctc.ctc_loss``. Export traces this op, because the result shape of torch's op depends on values."""
    return kernels_ctc.ctc_loss(scores, labels, frames, lengths, blank, zero_infinity)


@traced.register_fake
def _(
    scores: torch.Tensor,
    labels: torch.Tensor,
    frames: torch.Tensor,
    lengths: torch.Tensor,
    blank: int,
    zero_infinity: bool,
) -> torch.Tensor:
    return scores.new_empty(scores.shape[:1])


def ctc_pass(gm: fx.GraphModule) -> fx.GraphModule:
    """``autopar.ctc_loss(...)`` becomes ``kernels_ctc.ctc_loss(...)``, which a program calls."""
    for node in calls(gm):
        if op_name(node) == "autopar.ctc_loss":
            replace(node, add(node, kernels_ctc.ctc_loss, args_of(node)))
    return gm
