"""Traces ``rows.split(counts.tolist())``, and the ``cat`` of what experts make of the parts: each part's size depends on the data.

``tolist`` gives a list of unknown sizes, the split an op for each part, with a symbolic size, and ``cat`` an op whose result has as many
rows as were split. ``passes.clean.expert_segments`` replaces these ops; if it can't, or if the sizes are used in another way, the model is
refused like any other that reads values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode

from autopar.capture.backward import NotTraceableError, caller
from autopar.capture.blocks import stack
from autopar.errors import OPAQUE_HINT
from autopar.ops.source import source_line
from autopar.torch_private import has_values
from passes.clean.expert_segments import JOIN, SPLIT, lower_expert_segments

_SPLITS: tuple[Any, ...] = (Tensor.split, torch.split, Tensor.split_with_sizes, torch.split_with_sizes)
_CATS: tuple[Any, ...] = (torch.cat, torch.concat, torch.concatenate)


@torch.library.custom_op(f"autopar::{SPLIT}", mutates_args=())
def _split_segment(rows: Tensor, counts: Tensor, index: int) -> Tensor:
    raise AssertionError("passes.clean.expert_segments replaces this op")


@torch.library.custom_op(f"autopar::{JOIN}", mutates_args=())
def _join_segments(parts: Sequence[Tensor], rows: Tensor) -> Tensor:
    raise AssertionError("passes.clean.expert_segments replaces this op")


@_split_segment.register_fake
def _(rows: Tensor, counts: Tensor, index: int) -> Tensor:
    return rows.new_empty(torch.library.get_ctx().new_dynamic_size(), *rows.shape[1:])


@_join_segments.register_fake
def _(parts: Sequence[Tensor], rows: Tensor) -> Tensor:
    return parts[0].new_empty(rows.shape[0], *parts[0].shape[1:])


class _Sizes:
    """The unknown values of ``counts`` as a list, which only a split may read."""

    def __init__(self, counts: Tensor) -> None:
        self.counts, self._line = counts, caller()

    def __len__(self) -> int:
        return self.counts.shape[0]

    def _refuse(self, *_: Any) -> Any:
        raise NotTraceableError(
            f"torch.export refused {self._line}: its control flow or a shape depends on the data", OPAQUE_HINT
        )

    __iter__ = __getitem__ = __contains__ = __add__ = __radd__ = __mul__ = __eq__ = __bool__ = __getattr__ = _refuse
    __hash__ = None  # type: ignore[assignment]


class TraceSegments(TorchFunctionMode):
    """A context in which a tensor may be split by the ``sizes`` that another tensor has."""

    def __init__(self) -> None:
        super().__init__()
        self._splits: dict[
            tuple[str, ...], Tensor
        ] = {}  # by the symbolic sizes of a split's parts: the tensor that was split

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _SPLITS and len(args) > 1 and isinstance(args[1], _Sizes):
            dim = args[2] if len(args) > 2 else kwargs.get("dim", 0)
            if dim in (0, -args[0].dim()):
                return self._split(args[0], args[1].counts)
        if func in _CATS and (rows := self._joined(args, kwargs)) is not None:
            return torch.ops.autopar.join_segments(list(args[0]), rows)
        return func(*args, **kwargs)

    def sizes(self, counts: Tensor) -> Any:
        """Return the values of ``counts`` as sizes for a split, or ``None`` if the trace knows them or they can't be sizes."""
        whole = counts.dim() == 1 and counts.dtype in (torch.int32, torch.int64)
        return _Sizes(counts) if whole and not has_values(counts) else None

    def _split(self, rows: Tensor, counts: Tensor) -> tuple[Tensor, ...]:
        parts = tuple(torch.ops.autopar.split_segment(rows, counts, index) for index in range(counts.shape[0]))
        self._splits[tuple(str(part.shape[0]) for part in parts)] = rows
        return parts

    def _joined(self, args: Any, kwargs: Any) -> Tensor | None:
        """Return the rows of which a call of ``cat`` joins the parts; else ``None``."""
        parts, dim = args[0] if args else None, args[1] if len(args) > 1 else kwargs.get("dim", 0)
        if not self._splits or not isinstance(parts, tuple | list) or not all(isinstance(p, Tensor) for p in parts):
            return None
        if dim != 0 or any(part.dim() == 0 for part in parts):
            return None
        return self._splits.get(tuple(str(part.shape[0]) for part in parts))


def lower_segments(gm: fx.GraphModule, parameters: Mapping[fx.Node, str]) -> None:
    """Lower the experts on segments of rows in ``gm``; ``parameters`` has the names of the parameters' placeholders.

    Raises ``NotTraceableError`` for rows that are split by values otherwise.
    """
    for node in lower_expert_segments(gm, set(parameters)):
        raise NotTraceableError(
            f"{source_line(node)}\njoins parts whose sizes depend on the data, and which aren't computed by experts that are equal up to "
            "their parameters",
            OPAQUE_HINT,
            tuple(path for path, _, _ in stack(node)),
        )
