"""The options of ``torch.compile`` in programs with compiled layers, and what it does not compile: collectives and conversions of ``spmd``.

``torch.compile`` can't trace them (they read a tensor's ``grad_fn``), and could not speed them up: a collective is one kernel. So a
layer becomes several compiled parts with its collectives between them. Importing this module changes ``spmd`` for the entire program.
"""

from __future__ import annotations

import torch

from .spmd import spmd

OPTIONS = {"cpp.max_horizontal_fusion_size": 1}
"""On CPUs, torch 2.13 joins independent loops into one, and gets gradients of layers with a transposed input wrong, silently (a layer norm
behind a residual connection was off by half). Each loop alone is right; GPUs run other code."""

COLLECTIVES = ("all_gather", "all_reduce", "all_to_all", "convert", "redistribute", "reduce_scatter", "reinterpret")

vars(spmd).update((name, torch.compiler.disable(getattr(spmd, name))) for name in COLLECTIVES)
