"""The predicted cost of a layer under a strategy: ``autopar.price`` computes it, ``autopar.search`` chooses by it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Protocol, overload

import numpy as np
from numpy.typing import NDArray

from autopar.plan import Strategy


class Tried(Protocol):
    """``every``: the candidate strategies of a layer. ``quickest``: a few strategies, not necessarily candidates, at least one of which is
    as fast per microbatch as the fastest candidate."""

    @property
    def every(self) -> Iterable[Strategy]: ...
    @property
    def quickest(self) -> Iterable[Strategy]: ...


@dataclass(frozen=True, slots=True)
class LayerPrice:
    """The cost of a layer on a device of its pipeline stage: seconds and bytes.

    Seconds are for one microbatch, except ``step_s``, and include exposed communication and recomputation:

    ===================  =============================================================================================
    ``forward_s``        the forward pass
    ``backward_s``       the backward pass
    ``communication_s``  the exposed communication in both, with waits for slower ranks and exposed copies to and from the host
    ``weight_s``         the part of ``backward_s`` that computes and accumulates weight gradients (``price.split``)
    ``paired_s``         saved if a forward and a backward run as a pair (``Schedule.paired``)
    ``step_s``           once per step: gradient reduction and ZeRO's gathers if not in every microbatch, the optimizer
    ===================  =============================================================================================

    Bytes, and FLOPs:

    =======================  ==============================================================================================
    ``saved_bytes``          saved for the backward pass, per microbatch in flight
    ``new_gradient_bytes``   not yet accumulated gradients, live after the layer's backward pass, when ``saved_bytes`` are freed
    ``transient_bytes``      the peak while the layer runs, above all other memory listed here
    ``boundary_bytes``       one pipeline buffer if a stage begins or ends here: the layer's input activations, or its outputs without any
    ``deferred_bytes``       live between the two parts of a split backward, until the deferred weight gradients are computed
    ``host_bytes``           in host memory during the whole step
    ``nvme_bytes``           on NVMe during the whole step
    ``host_saved_bytes``     in host memory, per microbatch in flight
    ``in_turns``             1 if a forward and a backward run in turns as a pair, so that the transients of both are live
    ``segment``              the number of consecutive layers that are recomputed as one
    ``segment_saved_bytes``  saved by the first layer of a segment; ``saved_bytes`` is one layer's share of it, rounded down, and
                             ``transient_bytes`` the peak after the whole segment is recomputed
    ``flops``                model FLOPs of one microbatch, forward and backward, over all devices of the stage: replicated work
                             counts once, recomputation does not count
    =======================  ==============================================================================================
    """

    forward_s: float
    backward_s: float
    communication_s: float
    step_s: float
    parameters_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    saved_bytes: int
    transient_bytes: int
    flops: float
    new_gradient_bytes: int = 0
    boundary_bytes: int = 0
    weight_s: float = 0.0
    paired_s: float = 0.0
    deferred_bytes: int = 0
    in_turns: int = 0
    host_bytes: int = 0
    host_saved_bytes: int = 0
    segment: int = 1
    segment_saved_bytes: int = 0
    nvme_bytes: int = 0


NAMES = tuple(field.name for field in fields(LayerPrice))
_INTEGERS = frozenset(field.name for field in fields(LayerPrice) if field.type == "int")


class LayerPrices(Sequence[LayerPrice]):
    """The prices of several candidates: an array per field of ``LayerPrice``, and a ``LayerPrice`` per candidate on demand.

    A search compares thousands of candidates, and reads the records of a few.
    """

    def __init__(
        self,
        columns: Mapping[str, NDArray[np.float64]],
        record: Callable[[int], LayerPrice] | None = None,
        rows: NDArray[np.int64] | None = None,
    ) -> None:
        """``rows``: the candidates among those of ``columns`` (default: all). ``record`` returns the price in a row of ``columns``
        (default: a new ``LayerPrice``)."""
        self._columns, self._rows = columns, rows
        self._record = self.record if record is None else record

    @classmethod
    def of(cls, prices: Sequence[LayerPrice]) -> LayerPrices:
        """Return the columns of ``prices``."""
        columns = {name: np.array([getattr(p, name) for p in prices], dtype=np.float64) for name in NAMES}
        return cls(columns, prices.__getitem__)

    def record(self, row: int) -> LayerPrice:
        """Return a new ``LayerPrice`` of a row of the columns."""
        found = {name: column[row].item() for name, column in self._columns.items()}
        return LayerPrice(**{name: int(value) if name in _INTEGERS else value for name, value in found.items()})

    def column(self, name: str) -> NDArray[np.float64]:
        """Return the field ``name`` of each candidate."""
        column = self._columns[name]
        return column if self._rows is None else column[self._rows]

    def take(self, rows: NDArray[np.int64]) -> LayerPrices:
        """Return the prices of some candidates."""
        return LayerPrices(self._columns, self._record, rows if self._rows is None else self._rows[rows])

    def __len__(self) -> int:
        return len(self._columns[NAMES[0]] if self._rows is None else self._rows)

    @overload
    def __getitem__(self, index: int) -> LayerPrice: ...
    @overload
    def __getitem__(self, index: slice) -> list[LayerPrice]: ...
    def __getitem__(self, index: int | slice) -> LayerPrice | list[LayerPrice]:
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        row = range(len(self))[index]  # raises IndexError, with which iteration ends
        return self._record(row if self._rows is None else int(self._rows[row]))
