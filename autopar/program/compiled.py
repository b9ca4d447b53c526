"""The options of ``torch.compile`` in programs with compiled layers, and what it does not compile: collectives and conversions of ``spmd``.

``torch.compile`` can't trace them (they read a tensor's ``grad_fn``), and could not speed them up: a collective is one kernel. So a
layer becomes several compiled parts with its collectives between them. Importing this module changes ``spmd`` for the entire program.
"""

from __future__ import annotations

import torch

from .spmd import spmd

OPTIONS = {"cpp.max_horizontal_fusion_size": 1}
"""In torch 2.13, Inductor's horizontal fusion on CPUs computes wrong gradients for layers with transposed inputs, silently (a layer norm
behind a residual connection was off by half); this turns it off. Code for GPUs does not have it."""

COLLECTIVES = ("all_gather", "all_reduce", "all_to_all", "convert", "redistribute", "reduce_scatter", "reinterpret")

vars(spmd).update((name, torch.compiler.disable(getattr(spmd, name))) for name in COLLECTIVES)
