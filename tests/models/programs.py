"""Programs written by hand, for tests of the runtime: the folder, and the same model on one device."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.emit.runtime import copy_runtime
from autopar.plan import Axis, LayerPlan, Memory, Plan, Prediction, Role, StagePlan, Strategy
from autopar.program.state import CONSTANTS
from autopar.program.type_check import write_digests
from autopar.program.weights import write_file
from autopar.run.folder import program_modules

FIXTURE = Path(__file__).parent / "program_mlp" / "model.py"
BATCH, LENGTH, VOCABULARY, WIDTH, HIDDEN = 8, 3, 11, 6, 8
SCALE = 0.7


@dataclass(frozen=True)
class Shape:
    """What of the fixture's plan varies."""

    pipeline: int = 1
    data: int = 1
    tensor: int = 1
    zero: tuple[int, int] = (0, 0)
    microbatches: int = 1
    schedule: str = "gpipe"
    precision: str = "float64"
    batch: int = BATCH

    @property
    def devices(self) -> int:
        return self.pipeline * self.data * self.tensor


class Mlp(nn.Module):
    """The fixture's model as its user wrote it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {
                    "norm": nn.LayerNorm(WIDTH),
                    "gate_up": nn.Linear(WIDTH, 2 * HIDDEN, bias=False),
                    "down": nn.Linear(HIDDEN, WIDTH),
                }
            )
            for _ in range(2)
        )
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        hidden = self.embed(input_ids)
        for layer in self.layers:
            gate, up = layer["gate_up"](layer["norm"](hidden)).chunk(2, -1)
            hidden = hidden + SCALE * layer["down"](F.silu(gate) * up)
        return F.cross_entropy(self.head(self.norm(hidden)).flatten(0, 1), labels.flatten(), ignore_index=-100)


def mlp_model() -> Mlp:
    """The same weights every time, in float64."""
    torch.manual_seed(1)
    model = Mlp().double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, dtype=torch.float64) * 0.4 + 0.1)
    return model


def mlp_batch(seed: int = 0) -> dict[str, Tensor]:
    """Labels are masked unevenly, so that a mean over microbatches would be wrong."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCABULARY, (BATCH, LENGTH), generator=generator)
    labels = torch.randint(VOCABULARY, (BATCH, LENGTH), generator=generator)
    labels[0, :] = -100
    labels[5, 1:] = -100
    return {"input_ids": ids, "labels": labels}


def _layouts(shape: Shape) -> list[dict[str, Any]]:
    def record(stage: int, name: str, original: str, size: tuple[int, ...], tensor: str = "I", **other: Any) -> None:
        whole = other.pop("whole", size)
        types = {"data": "R", "tensor": tensor}
        base = {"stage": stage, "name": name, "original": original, "original_shape": whole, "part": None}
        base |= {
            "global_shape": size,
            "padded_shape": size,
            "dtype": dtype,
            "trainable": True,
            "tied": [],
            "types": types,
            "shared": None,
        }
        records.append(base | other)

    dtype = "float32" if shape.precision == "bfloat16" else shape.precision
    records: list[dict[str, Any]] = []
    last = shape.pipeline - 1
    tied = {"tied": ["head.weight"], "shared": "embed.weight" if last else None}
    record(0, "table", "embed.weight", (VOCABULARY, WIDTH), **tied)
    for i, stage in ((0, 0), (1, last)):
        mine, user = f"layer_{i}", f"layers.{i}"
        for name in ("norm.weight", "norm.bias"):
            record(stage, f"{mine}.{name}", f"{user}.{name}", (WIDTH,), "R" if i == 1 else "I")
        for name, start in (("gate", 0), ("up", HIDDEN)):
            part = {"dim": 0, "start": start, "length": HIDDEN}
            size, whole = (HIDDEN, WIDTH), (2 * HIDDEN, WIDTH)
            record(stage, f"{mine}.{name}.weight", f"{user}.gate_up.weight", size, "S(0)", whole=whole, part=part)
        record(stage, f"{mine}.down.weight", f"{user}.down.weight", (WIDTH, HIDDEN), "S(1)")
        record(stage, f"{mine}.down.bias", f"{user}.down.bias", (WIDTH,))
    for name in ("norm.weight", "norm.bias"):
        record(last, f"head.{name}", name, (WIDTH,))
    if last:
        record(1, "head.table", "embed.weight", (VOCABULARY, WIDTH), **tied)
    return records


def mlp_plan(shape: Shape) -> Plan:
    """The plan that the fixture carries out; its prices are nobody's."""
    strategies = [Strategy((Role.DATA, Role.TENSOR), zero=zero) for zero in shape.zero]
    per_stage = 2 // shape.pipeline
    devices = shape.data * shape.tensor
    memory = Memory(1, 1, 1, 1, 1)
    return Plan(
        model="mlp",
        devices=str(shape.devices),
        mesh=(Axis("data", shape.data, shape.tensor), Axis("tensor", shape.tensor, 1)),
        stages=tuple(
            StagePlan(s * per_stage, (s + 1) * per_stage, (s * devices, devices), memory, 10, 1.0)
            for s in range(shape.pipeline)
        ),
        schedule=shape.schedule if shape.pipeline > 1 else "none",
        microbatches=shape.microbatches,
        global_batch=shape.batch,
        precision=shape.precision,
        layers=tuple(LayerPlan(f"layers.{i}", "Layer", strategy) for i, strategy in enumerate(strategies)),
        prediction=Prediction(1.0, 1.0, 0.0, 0.0, 0.0, 0.5, 1.0),
        bound_s=1.0,
        gap=0.0,
    )


def write_mlp(folder: Path, shape: Shape) -> Path:
    """Write the fixture's program for ``shape`` into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    text = FIXTURE.read_text()
    values = {
        "MESH": {"data": shape.data, "tensor": shape.tensor},
        "PIPELINE": shape.pipeline,
        "MICROBATCHES": shape.microbatches,
        "ZERO": shape.zero,
    }
    for name, value in values.items():
        text, count = re.subn(rf"^{name} = .*$", f"{name} = {value!r}", text, flags=re.MULTILINE)
        assert count == 1, name
    if shape.precision != "float64":
        text = text.replace("torch.float64", f"torch.{shape.precision}")
    text = text.replace(
        "BATCH, LENGTH, VOCABULARY, WIDTH, HIDDEN = 8,", f"BATCH, LENGTH, VOCABULARY, WIDTH, HIDDEN = {shape.batch},"
    )
    (folder / "model.py").write_text(text)
    (folder / "plan.json").write_text(mlp_plan(shape).dumps())
    (folder / "layouts.json").write_text(json.dumps({"parameters": _layouts(shape)}))
    copy_runtime(folder, ("fsdp", "microbatches", "pipeline", "spec", "whole_tensors"))
    write_file(folder / CONSTANTS, {"scale": torch.tensor(SCALE, dtype=getattr(torch, shape.precision))})
    write_digests(folder)
    return folder


def ran(folder: str, *args: str) -> tuple[dict[int, float], str]:
    """In a worker: ``train.py`` with these arguments; the training losses by step, and what it says to people."""
    out, talk = io.StringIO(), io.StringIO()
    with program_modules(folder), contextlib.redirect_stdout(out), contextlib.redirect_stderr(talk):
        before, sys.argv = sys.argv, [f"{folder}/train.py", "--device", "cpu", *args]
        try:
            importlib.import_module("train").main()
        except SystemExit as end:
            talk.write(f"exit {end.code}\n")
        finally:
            sys.argv = before
    lines = map(json.loads, out.getvalue().splitlines())
    return {line["step"]: line["loss"] for line in lines if "loss" in line}, talk.getvalue()
