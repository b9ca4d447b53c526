"""``spmd``: spmd-types for programs whose layers ``torch.compile`` compiles. Collectives and conversions between types stay as they are.

``torch.compile`` cannot trace them (they ask a tensor for its ``grad_fn``), and has nothing to gain: a collective is one kernel. So a
layer becomes several compiled parts, with its collectives between them. Everything else of ``spmd`` is that of ``spmd_types``.
"""

from __future__ import annotations

from types import SimpleNamespace

import spmd_types
import torch

COLLECTIVES = ("all_gather", "all_reduce", "all_to_all", "convert", "redistribute", "reduce_scatter", "reinterpret")

spmd = SimpleNamespace(
    **{name: getattr(spmd_types, name) for name in dir(spmd_types)}
    | {name: torch.compiler.disable(getattr(spmd_types, name)) for name in COLLECTIVES}
)
