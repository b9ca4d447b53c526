"""``spmd`` for programs whose layers ``torch.compile`` compiles: collectives and conversions between types stay as they are.

``torch.compile`` cannot trace them (they ask a tensor for its ``grad_fn``), and has nothing to gain: a collective is one kernel. So a
layer becomes several compiled parts, with its collectives between them. A program imports this module to have it so in all of its files.
"""

from __future__ import annotations

import torch

from .spmd import spmd

COLLECTIVES = ("all_gather", "all_reduce", "all_to_all", "convert", "redistribute", "reduce_scatter", "reinterpret")

vars(spmd).update((name, torch.compiler.disable(getattr(spmd, name))) for name in COLLECTIVES)
