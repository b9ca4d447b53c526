"""Programs whose collectives are recorded: kinds of the exactness matrix, other precisions, optimizers, checkpoints; and planted faults."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import exactness
import torch
from exactness import KINDS, Pair
from torch import Tensor, nn

from autopar.bench.models import DecoderBlock, Stack, token_loss
from autopar.capture import capture, flatten_batch, in_float8
from autopar.graph import Graph
from autopar.plan import Plan
from autopar.precision import FP8
from autopar.search.manual import make_mesh
from autopar.shard import annotate
from autopar.techniques.activations import INT8_ACTIVATIONS as INT8
from autopar.verify import PlanKind, kind
from autopar.verify.recording import RecordedSteps

MODELS = ("llama", "gpt2", "mixtral", "resnet")
"""Those of the exactness matrix that are recorded under every kind."""


@dataclass(frozen=True)
class Captured:
    graph: Graph
    state: Mapping[str, Tensor]
    batch: Mapping[str, Tensor]


@functools.cache
def captured(name: str) -> Captured:
    """A model of the exactness matrix in float64 (``"llama"``), in another precision (``"llama bfloat16"``), or 16 pairs (``"deep"``)."""
    model, _, precision = name.partition(" ")
    if model == "deep":
        return _deep(16)
    if model == "decoder":
        return _decoder(precision)
    if precision:
        return _narrow(model, precision)
    subject = exactness.subject(model)
    return Captured(subject.graph, subject.state, subject.batch)


def _capture(model: nn.Module, batch: Any, loss_fn: Any, precision: str, name: str) -> Captured:
    graph = annotate(capture(model, batch, loss_fn, precision=precision, name=name))
    dtype = getattr(torch, precision)
    tensors = flatten_batch(graph.structure, batch)  # type: ignore[arg-type]
    tensors = {n: (t.to(dtype) if t.is_floating_point() else t) for n, t in tensors.items()}
    return Captured(graph, {n: t.detach().clone() for n, t in model.state_dict().items()}, tensors)


def _narrow(model: str, precision: str) -> Captured:
    torch.manual_seed(0)
    return _capture(*exactness.MODELS[model](), precision, model)


def _decoder(precision: str) -> Captured:
    """Two blocks; ``float8``: bfloat16 with products in 8 bits."""
    torch.manual_seed(0)
    head = nn.Sequential(nn.RMSNorm(128), nn.Linear(128, 96, bias=False))
    model = Stack(nn.Embedding(96, 128), [DecoderBlock(128, 32, 256) for _ in range(2)], head)
    ids = torch.randint(96, (8, 17), generator=torch.Generator().manual_seed(1))
    found = _capture(model, (ids[:, :-1].contiguous(), ids[:, 1:].contiguous()), token_loss, "bfloat16", "decoder")
    return dataclasses.replace(found, graph=in_float8(found.graph)) if precision == "float8" else found


def _deep(layers: int) -> Captured:
    torch.manual_seed(0)
    model = nn.Sequential(*(Pair(16) for _ in range(layers))).double()
    x, y = torch.randn(2, 32, 4, 16, dtype=torch.float64)
    return _capture(model, (x, y), nn.functional.mse_loss, "float64", "deep")


@dataclass(frozen=True)
class Case:
    """A model (``captured``), how it is planned, and what its ranks do."""

    model: str
    kind: PlanKind
    recipe: RecordedSteps = RecordedSteps()  # noqa: RUF009  frozen
    tag: str = ""

    @property
    def key(self) -> tuple[str, str]:
        return self.model, f"{self.kind.name}{f' ({self.tag})' if self.tag else ''}"

    def plan(self, graph: Graph) -> Plan:
        plan = self.kind.plan(graph)
        precision = self.model.partition(" ")[2]
        if precision == "float8":
            return dataclasses.replace(plan, precision="bfloat16", allow=(FP8.name,))
        return dataclasses.replace(plan, precision=precision) if precision else plan


def matrix_cases() -> list[Case]:
    """Every kind of the exactness matrix on each of ``MODELS``."""
    return [Case(model, each) for model in MODELS for each in KINDS if each.devices > 1]


ONE = {"schedule": "1f1b", "microbatches": 4}
COMMON = (
    kind("data 4, zero 1", data=4, zero=1, microbatches=2),
    kind("data 4, zero 3", data=4, zero=3, microbatches=2),
    kind(
        "data 2 in 2 copies, zero 3", mesh=make_mesh(("replicas", 2), ("data", 2)), zero=3, replicate=2, microbatches=2
    ),
    kind(
        "data 2 x tensor+sequence 2, zero 1, in halves",
        data=2,
        tensor=2,
        sequence=True,
        zero=1,
        overlap="halves",
        microbatches=2,
    ),
    kind("parameter server", data=4, sync="parameter-server", microbatches=2),
    kind("pipeline 2 x data 2, zero 1", pipeline=2, data=2, zero=1, **ONE),
    kind(
        "pipeline 2, zero bubble x data 2, zero 3", pipeline=2, data=2, zero=3, microbatches=4, schedule="zero-bubble"
    ),
    kind("pipeline 2, Chimera x data 2, zero 1", pipeline=2, data=2, zero=1, microbatches=4, schedule="chimera"),
    kind("offload, data 4, zero 3", data=4, zero=3, offload="activations", microbatches=2),
    kind(
        "states in the host's memory, data 2 x tensor 2, zero 1",
        data=2,
        tensor=2,
        zero=1,
        states="host",
        microbatches=2,
    ),
    kind("states on NVMe, data 4, zero 2", data=4, zero=2, states="nvme", microbatches=2),
)
RINGS = (
    kind("rings 2 x 2", mesh=make_mesh(("ring0", 2), ("ring1", 2))),
    kind("rings 3 x 2", mesh=make_mesh(("ring0", 3), ("ring1", 2))),
    kind("rings 2 x 4", mesh=make_mesh(("ring0", 2), ("ring1", 4))),
    kind("rings 4 x 2", mesh=make_mesh(("ring0", 4), ("ring1", 2))),
)
SCHEDULES = (
    ("1f1b", 1),
    ("gpipe", 1),
    ("zero-bubble", 1),
    ("chimera", 1),
    ("interleaved-1f1b", 2),
    ("zero-bubble", 2),
    ("zbv", 2),
    ("dualpipev", 2),
)


def local(steps: int, **options: Any) -> PlanKind:
    name = ", ".join(f"{axis} {size}" for axis, size in options.items())
    return kind(f"{name}, averaged every {steps} steps", sync=f"local-steps:{steps}", allow={"local_steps"}, **options)


def int8(**options: Any) -> PlanKind:
    name = ", ".join(f"{axis} {size}" for axis, size in options.items())
    return kind(f"{name}, activations in 8 bits", saved="int8", allow={INT8}, **options)


def other_cases() -> list[Case]:
    """What the matrix lacks: precisions, clipping, optimizers, checkpoints, local steps, 8 bits, rings over two axes, deep pipelines."""
    clipped = RecordedSteps(max_norm=1.0)
    found = [Case(f"llama {p}", each, clipped, "clipped") for p in ("bfloat16", "float16") for each in COMMON]
    found += [Case("llama", each, clipped, "clipped") for each in COMMON]
    experts = (
        kind("expert 4, zero 1", expert=4, zero=1),
        kind("data 2 x expert 2, zero 2", data=2, expert=2, zero=2),
        kind("pipeline 2 x expert 2", pipeline=2, expert=2, **ONE),
    )
    found += [Case("mixtral bfloat16", each) for each in experts]
    for name in ("Muon", "Adafactor"):
        recipe = RecordedSteps(optimizer=f"recorded:{name.lower()}")
        found += [Case("llama", each, recipe, name) for each in COMMON if "NVMe" not in each.name]
    for save in ("wait", "async"):
        found += [Case("llama", each, RecordedSteps(save=save), f"saved, {save}") for each in COMMON]
        found += [Case("mixtral", each, RecordedSteps(save=save), f"saved, {save}") for each in experts]
    found += [
        Case("llama", each, RecordedSteps(steps=5))
        for each in (
            local(2, data=2),
            local(2, data=4),
            local(2, data=2, tensor=2),
            local(2, pipeline=2, data=2, **ONE),
        )
    ]
    found += [Case("decoder float8", each) for each in (COMMON[1], COMMON[3], COMMON[5], kind("tensor 2", tensor=2))]
    found += [
        Case("decoder bfloat16", each)
        for each in (int8(data=2), int8(tensor=2), int8(data=2, zero=3), int8(pipeline=2, data=2, **ONE))
    ]
    found += [Case("llama", each) for each in RINGS]
    for ranks in (4, 8, 16):
        for schedule, chunks in SCHEDULES:
            if ranks * chunks <= 16:
                name = f"pipeline {ranks}, {schedule}{f' of {chunks} chunks' if chunks > 1 else ''}"
                deep = {"pipeline": ranks, "chunks": chunks, "microbatches": 16, "schedule": schedule}
                found.append(Case("deep", kind(name, **deep)))
    for schedule, chunks in SCHEDULES:
        for zero in range(4):
            name = f"pipeline 4, {schedule}{f' of {chunks} chunks' if chunks > 1 else ''} x data 2, zero {zero}"
            deep = {"pipeline": 4, "chunks": chunks, "data": 2, "zero": zero, "microbatches": 8, "schedule": schedule}
            found.append(Case("deep", kind(name, **deep)))
    return found


def cases() -> list[Case]:
    """All cases, each once."""
    return list({case.key: case for case in (*other_cases(), *matrix_cases())}.values())


# -- optimizers, called in the ranks ------------------------------------------------------------------------------------


def muon(named_parameters: list[tuple[str, nn.Parameter]]) -> list[torch.optim.Optimizer]:
    whole = [parameter for _, parameter in named_parameters if parameter.dim() == 2]
    others = [parameter for _, parameter in named_parameters if parameter.dim() != 2]
    return [torch.optim.Muon(whole, lr=0.02), torch.optim.AdamW(others, lr=1e-3)]


def adafactor(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(parameters, lr=0.01)
