"""Traces ``F.ctc_loss`` as an op that takes padded labels and returns one loss per example.

torch's op needs the values of the lengths, which do not exist while it is traced. Models often pass the labels as the concatenated valid
elements of a padded table (``labels.masked_select(mask)``), whose size depends on values, too. If the lengths are ``mask.sum(-1)`` of the
same mask, moving the valid labels to the start of their row gives an equivalent padded table.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  torch's own convention
from torch import Tensor

from autopar.capture.backward import NotTraceableError, caller
from autopar.errors import OPAQUE_HINT
from passes.clean.ctc import traced


class MaskedRows:
    """The result of ``masked_select`` on a table: its size depends on values, so only the CTC loss may read it."""

    def __init__(self, table: Tensor, mask: Tensor, line: str) -> None:
        self.table, self.mask, self.line = table, mask, line
        self.versions = table._version, mask._version

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        selected = next(value for value in _flat((args, kwargs or {})) if isinstance(value, cls))
        raise selected.not_traceable()

    def not_traceable(self) -> NotTraceableError:
        return NotTraceableError(f"torch.export refused {self.line}: a shape depends on the data", OPAQUE_HINT)

    def __getattr__(self, name: str) -> Any:
        raise self.not_traceable()

    def _refuse(self, *_: Any) -> Any:
        raise self.not_traceable()

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __pow__ = __neg__ = (
        _refuse
    )
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __and__ = __or__ = __invert__ = __matmul__ = _refuse
    __getitem__ = __setitem__ = __len__ = __iter__ = __bool__ = __int__ = __float__ = __index__ = _refuse
    __hash__ = object.__hash__


class CtcLoss:
    """Traces the loss; every torch function that the forward calls goes through ``call``."""

    def __init__(self) -> None:
        self.counts: list[tuple[Tensor, Tensor, int]] = []
        """For each ``mask.sum(-1)`` of the forward: the result, the mask, and the mask's version (``_version``) at that time."""

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if (func is Tensor.masked_select or func is torch.masked_select) and len(args) == 2 and _is_table(*args):
            return MaskedRows(args[0], args[1], caller())
        if func is F.ctc_loss:
            bound = inspect.signature(F.ctc_loss).bind(*args, **kwargs)
            bound.apply_defaults()
            if bound.arguments["log_probs"].dim() == 3:
                return self._loss(**bound.arguments)
        result = func(*args, **kwargs)
        if (func is Tensor.sum or func is torch.sum) and args and _counts_rows(args[0], *args[1:2], **kwargs):
            self.counts.append((result, args[0], args[0]._version))
        return result

    def _loss(
        self,
        log_probs: Tensor,
        targets: Any,
        input_lengths: Any,
        target_lengths: Any,
        blank: int,
        reduction: str,
        zero_infinity: bool,
    ) -> Tensor:
        if isinstance(targets, MaskedRows):
            targets = self._pad_labels(targets, target_lengths)
        elif targets.dim() != 2:
            raise NotTraceableError(
                f"{caller()} takes one tensor with the labels of all examples, in which a rank cannot find those of its examples",
                "give padded labels [batch, length]: the loss ignores those beyond an example's target length",
            )
        device = log_probs.device
        frames, lengths = (torch.as_tensor(value, device=device) for value in (input_lengths, target_lengths))
        losses = traced(log_probs.transpose(0, 1), targets, frames, lengths, blank, zero_infinity)
        if reduction == "mean":
            losses = (losses / lengths.to(losses.dtype).clamp(min=1)).mean()
        return losses.sum() if reduction == "sum" else losses

    def _pad_labels(self, selected: MaskedRows, lengths: Any) -> Tensor:
        """Return the table with each row's selected elements moved to its start; ``lengths`` must be the counts of the mask."""
        table, mask = selected.table, selected.mask
        versions = [version for count, counted, version in self.counts if count is lengths and counted is mask]
        if versions != [mask._version] or selected.versions != (table._version, mask._version) or lengths._version:
            raise selected.not_traceable()
        width = table.shape[1]
        columns = torch.where(mask, mask.to(torch.int64).cumsum(1) - 1, width)
        return table.new_zeros(table.shape[0], width + 1).scatter(1, columns, table)[:, :width]


def _is_table(table: Any, mask: Any) -> bool:
    may_be_labels = table.dim() == 2 and not table.is_floating_point()
    return may_be_labels and isinstance(mask, Tensor) and table.shape == mask.shape


def _counts_rows(mask: Tensor, dim: Any = None, **options: Any) -> bool:
    return mask.dtype == torch.bool and mask.dim() == 2 and dim in (1, -1) and not options


def _flat(value: Any) -> list[Any]:
    if isinstance(value, dict):
        value = list(value.values())
    return [item for part in value for item in _flat(part)] if isinstance(value, list | tuple) else [value]
