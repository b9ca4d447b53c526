"""Excludes the collectives and type conversions of ``spmd`` from ``torch.compile``, in programs with compiled layers.

``torch.compile`` can't trace them (they read a tensor's ``grad_fn``), and could not speed them up: a collective is one kernel. So a
layer becomes several compiled parts with its collectives between them. Importing this module changes ``spmd`` for the entire program.
"""

from __future__ import annotations

import torch

from .spmd import spmd

COLLECTIVES = ("all_gather", "all_reduce", "all_to_all", "convert", "redistribute", "reduce_scatter", "reinterpret")

vars(spmd).update((name, torch.compiler.disable(getattr(spmd, name))) for name in COLLECTIVES)
