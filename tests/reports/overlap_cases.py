"""What the report of overlap measures: kinds of overlap with a program that lacks it, and contests against hand-written programs.

A kind of overlap is one entry of ``FEATURES``. Its program without overlap is the emitted one with ``patch``: lines of Python at the end
of files of the folder, which replace what starts communication early.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autopar.bench.baselines import HandTunedRecipe, recipes
from autopar.bench.models import MODELS
from autopar.search import manual_plan

FAST, SLOW = "1gbit", "200mbit"
"""The rates of links, as tc(8) writes them: with them communication takes about a third to a half of a step."""


@dataclass(frozen=True, slots=True)
class Feature:
    """A kind of overlap: a plan whose program has it (``pins`` of ``manual_plan``), what to change so that it does not, and the program
    that a person would write with PyTorch's own parts. What changes is the plan (``pins_without``, in place of those of ``pins``) or lines
    of the emitted program (``patch``). ``about`` and ``without`` say what each does, ``note`` what to expect."""

    kind: str
    about: str
    without: str
    model: str
    rate: str
    pins: Mapping[str, Any]
    by_hand: HandTunedRecipe
    note: str
    patch: Mapping[str, str] = field(default_factory=dict)
    pins_without: Mapping[str, Any] = field(default_factory=dict)
    nodes: int = 2

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.nodes}"

    def plan(self, graph: Any) -> Any:
        """The plan of the program with overlap."""
        return self._plan(graph, self.pins)

    def plan_without(self, graph: Any) -> Any:
        """The plan of the program without."""
        return self._plan(graph, {**self.pins, **self.pins_without})

    def _plan(self, graph: Any, pins: Mapping[str, Any]) -> Any:
        """The stages are those of the program by hand: an equal number of blocks each, the embedding in the first, the loss in the last."""
        stages, blocks = pins.get("pipeline", 1), len(graph.layers) - 2
        cuts = tuple(1 + stage * blocks // stages for stage in range(1, stages))
        return manual_plan(graph, precision="float32", cuts=cuts or None, **pins)

    def change(self, folder: Path) -> None:
        """Take the overlap out of an emitted program."""
        for name, lines in self.patch.items():
            path = folder / "runtime" / name
            path.write_text(f"{path.read_text()}\n\n{lines}")


NOTHING_EARLY = {"reductions.py": "_early = lambda groups, layers: []\n"}
SENT_AT_ONCE = {
    "reductions.py": "Publications.start = lambda self: [group.publish() for group in self._groups] and None\n"
}
OWN_ROOTS = {"fsdp.py": "gather_ahead = lambda stage, layers, mesh: None\n"}
WAITING = {
    "pipeline.py": """from unittest import mock

import torch.distributed.pipelining.schedules as schedules


class Waiting(Schedule1F1B):
    def _step_microbatches(self, *args, **kwargs):
        start = schedules._batch_p2p

        def waited(ops, desc=None):
            schedules._wait_batch_p2p(start(ops, desc=desc))
            return []

        with mock.patch.object(schedules, "_batch_p2p", waited):
            super()._step_microbatches(*args, **kwargs)


Schedule1F1B = Waiting
"""
}


def features(nodes: int) -> tuple[Feature, ...]:
    """The kinds of overlap on so many nodes."""
    return (
        Feature(
            "zero0",
            "ZeRO 0: each layer's gradients are all-reduced during the backward pass of earlier layers",
            "every all-reduce starts after the backward pass",
            "llama",
            FAST,
            {"data": nodes, "zero": 0},
            HandTunedRecipe(data=nodes, bucket_mb=4),
            "By hand: DDP, whose buckets do the same.",
            patch=NOTHING_EARLY,
            nodes=nodes,
        ),
        Feature(
            "zero1",
            "ZeRO 1: each layer's gradients are reduce-scattered during the backward pass of earlier layers, and its "
            "updated parameters are "
            "all-gathered during the next forward pass of earlier layers",
            "every reduce-scatter starts after the backward pass, and all parameters are gathered before the step ends",
            "llama",
            FAST,
            {"data": nodes, "zero": 1},
            HandTunedRecipe(data=nodes, bucket_mb=4),
            "By hand: DDP, which keeps the full optimizer state on every node and gathers no parameters.",
            patch={name: NOTHING_EARLY[name] + SENT_AT_ONCE[name] for name in NOTHING_EARLY},
            nodes=nodes,
        ),
        Feature(
            "zero3",
            "ZeRO 3: the layers have one FSDP root, and the parameters of the next layer are prefetched",
            "each layer is its own root, without prefetch",
            "llama",
            FAST,
            {"data": nodes, "zero": 3},
            HandTunedRecipe(data=nodes, sharding="fsdp"),
            "FSDP2 overlaps on streams of the device. A CPU has none: it waits for each collective where it is issued, "
            "with one root or several. "
            "So nothing can be gained here; the simulation below shows the gain on a device with streams.",
            patch=OWN_ROOTS,
            nodes=nodes,
        ),
        Feature(
            "tensor",
            "Tensor parallelism: the input gradient of a column-parallel matmul is reduced while the weight gradient is computed",
            "the reduction is awaited where it is issued",
            "llama",
            FAST,
            {"tensor": nodes},
            HandTunedRecipe(tensor=nodes),
            "By hand: parallelize_module, whose collectives are awaited where their results are used.",
            pins_without={"overlap": "none"},
            nodes=nodes,
        ),
        Feature(
            "halves",
            "Tensor and sequence parallelism: each layer computes its microbatch in two halves, and the collectives of one "
            "half run while the "
            "other half computes",
            "every collective is awaited where it is issued",
            "llama",
            FAST,
            {"tensor": nodes, "overlap": "halves"},
            HandTunedRecipe(tensor=nodes),
            "By hand: parallelize_module.",
            pins_without={"overlap": "none"},
            nodes=nodes,
        ),
        Feature(
            "1f1b",
            "1F1B: during warm-up and cool-down, sends of a stage overlap with the next microbatch",
            "a stage waits for each send",
            "long-sequence",
            SLOW,
            {"pipeline": nodes, "microbatches": 4, "schedule": "1f1b"},
            HandTunedRecipe(pipeline=nodes, microbatches=4),
            "Both programs run torch's schedule, which in its steady state waits for each pair of send and receive.",
            patch=WAITING,
            nodes=nodes,
        ),
        Feature(
            "zero-bubble",
            "Zero bubble: weight gradients are computed while a stage waits for the gradients of its outputs",
            "1F1B, which computes weight and input gradients together",
            "long-sequence",
            SLOW,
            {"pipeline": nodes, "microbatches": 4, "schedule": "zero-bubble"},
            HandTunedRecipe(pipeline=nodes, microbatches=4, schedule="zero-bubble"),
            "By hand: torch's zero-bubble schedule on the stages of torch's pipeline.",
            pins_without={"schedule": "1f1b"},
            nodes=nodes,
        ),
    )


FEATURES = (*features(2), *features(4))


@dataclass(frozen=True, slots=True)
class Match:
    """A contest of a model's automatic program with hand-written ones, on ``nodes`` nodes of one process each."""

    model: str
    nodes: int
    rate: str

    @property
    def name(self) -> str:
        return f"{self.model} on {self.nodes} nodes"

    @property
    def choices(self) -> list[HandTunedRecipe]:
        """DDP with its own and with small buckets, FSDP2 that keeps parameters gathered or not, tensor parallelism, and pipelines under all
        of torch's schedules that ``recipes`` knows, with one, two and four microbatches for every node; each on all nodes."""
        chosen = []
        own = [r for r in recipes(self.nodes, MODELS[self.model]) if self.nodes in (r.data, r.tensor, r.pipeline)]
        for recipe in own:  # no mixtures
            if recipe.pipeline > 1 or recipe.microbatches == 1:
                chosen.append(recipe)
            if recipe == HandTunedRecipe(data=self.nodes):
                chosen.append(dataclasses.replace(recipe, bucket_mb=4))
        return chosen


MATCHES = (
    Match("llama", 2, FAST),
    Match("wide-mlp", 2, FAST),
    Match("long-sequence", 2, SLOW),
    Match("deep-gpt", 2, FAST),
    Match("large-vocabulary", 2, FAST),
    Match("llama", 4, FAST),
    Match("wide-mlp", 4, FAST),
    Match("long-sequence", 4, SLOW),
    Match("deep-gpt", 4, FAST),
    Match("large-vocabulary", 4, FAST),
)
