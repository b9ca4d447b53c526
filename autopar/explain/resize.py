"""The same request with other sizes, where nobody knows how to make model and batch anew: the example batch is cut or repeated."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from autopar.capture import capture
from autopar.errors import AutoparError, BatchError
from autopar.explain.study import Recapture
from autopar.graph import Graph
from autopar.shard import annotate


def sequence_length(graph: Graph) -> int | None:
    """Tokens in a sequence of the batch: dim 1 of its integer tensors of two dims; ``None`` where there are none, or they differ."""
    lengths = {v.shape[1] for v in graph.inputs if len(v.shape) == 2 and not v.dtype.is_floating_point}
    return lengths.pop() if len(lengths) == 1 else None


def recapture_cut(
    model: nn.Module,
    batch: Any,
    loss_fn: Callable[..., Tensor] | None,
    *,
    precision: str | None = None,
    name: str | None = None,
    local_batch_norm: bool = False,
) -> Recapture:
    """Captures ``model`` again with its example batch cut to (or repeated up to) other sizes; parameters stay what they are."""

    numbers = precision

    def again(*, seq: int | None = None, global_batch: int | None = None, precision: str | None = None) -> Graph:
        resized = resize_batch(batch, seq, global_batch)
        try:
            graph = capture(
                model, resized, loss_fn, precision=precision or numbers, name=name, local_batch_norm=local_batch_norm
            )
        except AutoparError:
            raise
        except Exception as error:  # the user's model may be unable to take a batch that it was not written for
            raise BatchError(
                f"the model does not take a batch of other sizes: {type(error).__name__}: {error}"
            ) from error
        return annotate(graph)

    return again


def resize_batch(batch: Any, seq: int | None, rows: int | None) -> Any:
    """``batch`` with ``rows`` along dim 0, and ``seq`` along dim 1 where that is the sequence; what is no tensor is left alone.

    Raises:
        BatchError: a sequence that cannot be told from the other dims, or that would have to grow.
    """
    lengths = {t.shape[1] for t in _tensors(batch) if t.dim() == 2 and not t.is_floating_point()}
    if seq is not None and (len(lengths) != 1 or seq > max(lengths)):
        raise BatchError(f"the batch has no one sequence that could be cut to {seq}")
    length = lengths.pop() if seq is not None else None

    def resized(tensor: Tensor) -> Tensor:
        if rows is not None and tensor.dim():
            tensor = tensor.index_select(0, torch.arange(rows, device=tensor.device) % tensor.shape[0])
        if seq is not None and tensor.dim() > 1 and tensor.shape[1] == length:
            tensor = tensor.narrow(1, 0, seq).contiguous()
        return tensor

    return _mapped(batch, resized)


def _mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return {key: _mapped(inner, change) for key, inner in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(_mapped(inner, change) for inner in value)
    return value


def _tensors(value: Any) -> list[Tensor]:
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    _mapped(value, note)
    return found
