"""``spmd`` for programs whose layers ``torch.compile`` compiles: collectives and type conversions are not compiled.

``torch.compile`` can't trace them (they read a tensor's ``grad_fn``), and could not speed them up: a collective is one kernel. So a
layer becomes several compiled parts with its collectives between them. A program that imports this module gets this in all of its files.
"""

from __future__ import annotations

import torch

from .spmd import spmd

COLLECTIVES = ("all_gather", "all_reduce", "all_to_all", "convert", "redistribute", "reduce_scatter", "reinterpret")

vars(spmd).update((name, torch.compiler.disable(getattr(spmd, name))) for name in COLLECTIVES)
