"""The loads of experts: the rows (pairs of a token and a chosen expert) that a router sends to each of them, measured or assumed.

Expert parallelism gives each rank a slice of the experts; all ranks wait for the busiest one when results are combined, and that one keeps
the most activations. The *imbalance* is its load divided by the mean (MaxVio of Wang et al. 2024, arXiv:2408.15664, plus 1). It grows with
the degree, because a rank with several experts averages their loads.

``train.py --record-expert-loads FILE`` records the loads of a run: the sums of each step over all data-parallel ranks and microbatches. The
rows of one microbatch on one rank are less even, so that the measured imbalance is a lower bound.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.data_files import MalformedFileError, read_json, shown
from autopar.errors import UsageError
from autopar.graph import Graph
from autopar.program.expert_loads import FORMAT

Counts = NDArray[np.int64]
"""The rows of each recorded step and expert: ``[step, expert]``."""


@dataclass(frozen=True, eq=False)
class ExpertLoads:
    """The loads of all layers: measured ``counts`` by layer name, one array for each mixture of the layer, or the same ``assumed``
    imbalance everywhere. ``source`` says where they are from."""

    source: str
    counts: Mapping[str, tuple[Counts, ...]] = field(default_factory=dict)
    assumed: float = 1.0

    def on(self, graph: Graph) -> Graph:
        """Return the graph with these loads in its layer classes.

        Raises ``UsageError`` if they are of other layers or of other numbers of experts.
        """
        layers: dict[str, list[str]] = {}
        experts = {name: [count for count, _ in cls.mixtures] for name, cls in graph.classes.items()}
        for layer in graph.layers:
            if experts[layer.cls]:
                layers.setdefault(layer.cls, []).append(layer.name)
                if self.counts:
                    self._check(layer.name, experts[layer.cls])
        if not layers:
            raise UsageError(f"{self.source}: {graph.name} has no experts", "leave --expert-loads (expert_loads=) out")
        classes = {
            name: dataclasses.replace(graph.classes[name], loads=ClassLoads(self, tuple(names), tuple(experts[name])))
            for name, names in layers.items()
        }
        return dataclasses.replace(graph, classes=graph.classes | classes)

    def _check(self, layer: str, experts: Sequence[int]) -> None:
        own = self.counts.get(layer, ())
        if len(own) == len(experts) and all(
            counts.shape[1] >= n and not counts[:, n:].any() for counts, n in zip(own, experts, strict=True)
        ):  # a program may have padded experts, which no token chooses
            return
        measured = ", ".join(str(counts.shape[1]) for counts in own)
        has = f"has loads of {measured} experts for {layer}" if measured else f"has no loads for {layer}"
        raise UsageError(
            f"{self.source} {has}, and the model has {', '.join(map(str, experts))} there",
            "record them with a program of the same model",
        )


@dataclass(frozen=True, eq=False)
class ClassLoads:
    """The loads of the layers of one class, and the number of experts of each of its mixtures."""

    of_all: ExpertLoads
    layers: tuple[str, ...]
    experts: tuple[int, ...]
    _known: dict[tuple[int, int], float] = field(default_factory=dict)

    def imbalance(self, mixture: int, ranks: int) -> float:
        """Return the imbalance of a mixture, the n-th of each layer, whose experts are sharded over ``ranks``: the mean over layers and
        recorded steps."""
        if ranks == 1:
            return 1.0
        if (mixture, ranks) not in self._known:
            self._known[mixture, ranks] = self._imbalance(mixture, ranks)
        return self._known[mixture, ranks]

    def _imbalance(self, mixture: int, ranks: int) -> float:
        if not self.of_all.counts:
            return min(self.of_all.assumed, float(ranks))
        found = []
        for layer in self.layers:
            counts = self.of_all.counts[layer][mixture][:, : self.experts[mixture]]
            counts = np.pad(counts, ((0, 0), (0, -counts.shape[1] % ranks)))
            by_rank = counts.reshape(len(counts), ranks, -1).sum(axis=2)
            found.append(by_rank.max(axis=1) / by_rank.mean(axis=1))
        return float(np.concatenate(found).mean())


EVEN = ExpertLoads("even loads")
UNEVEN = ExpertLoads("an imbalance of 1.2", assumed=1.2)
"""An example, for what uneven loads would cost."""


_HINT = "give a file that `train.py --record-expert-loads FILE` wrote, or a number such as 1.2"


def expert_loads(given: str | Path | float | None) -> ExpertLoads | None:
    """Return the loads that ``--expert-loads`` gives: a file that a run recorded, or an imbalance to assume for every degree; ``None`` for
    ``None``. Raises ``UsageError``."""
    if given is None:
        return None
    if isinstance(given, os.PathLike):
        return _read(Path(given))
    try:
        assumed = float(given)
    except ValueError:
        return _read(Path(str(given)))
    except TypeError as error:
        raise UsageError(f"expert_loads is {given!r}, neither a file nor a number", _HINT) from error
    if not 1 <= assumed < math.inf:
        raise UsageError(
            f"an imbalance of {given} is impossible",
            "it is the load of the busiest expert-parallel rank divided by the mean: 1 or more",
        )
    return ExpertLoads(f"an imbalance of {assumed:g}", assumed=assumed)


def _read(path: Path) -> ExpertLoads:
    try:
        record = read_json(path)
        layers = record["layers"] if isinstance(record, dict) and record.get("format") == FORMAT else None
        if not isinstance(layers, dict) or not layers:
            raise MalformedFileError("it is no record of experts' loads")
        return ExpertLoads(path.name, {name: _counts(name, layers[name]) for name in layers})
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}", _HINT) from error
    except MalformedFileError as error:
        raise UsageError(f"{path}: {error}", _HINT) from error
    except ValueError as error:  # a null character in the path
        raise UsageError(f"{path} is no path: {error}", _HINT) from error


def _counts(layer: str, mixtures: Any) -> tuple[Counts, ...]:
    """Return a layer's arrays. Raises ``MalformedFileError``."""
    found = []
    for steps in mixtures if isinstance(mixtures, list) else [None]:
        rows = steps if isinstance(steps, list) and steps and all(isinstance(row, list) for row in steps) else [[]]
        whole = all(type(n) is int and 0 <= n < 2**40 for row in rows for n in row)
        if not whole or not rows[0] or len({len(row) for row in rows}) > 1 or not all(map(sum, rows)):
            raise MalformedFileError(f"the loads of {shown(layer)} are not a table of integers (steps x experts)")
        found.append(np.array(rows, dtype=np.int64))
    return tuple(found)
