"""Evaluation mode of programs: dropout, stochastic depth and batch norm, against ``model.eval()`` in float64."""

from __future__ import annotations

import functools
import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from test_compiled import BACKEND
from test_randomness import BOTH_WAYS, PIPELINE, gpt2
from tiers import in_short
from torch import Tensor, nn
from torch.nn import functional as F
from workers import WorkerPool

from autopar.capture import NOT_COMPARED, Float64Everywhere, capture, check, check_capture
from autopar.emit import emit
from autopar.graph import Graph
from autopar.planning import compared_graph
from autopar.run.folder import import_runtime, program_modules
from autopar.search.manual import manual_plan
from autopar.shard import annotate
from autopar.workload import Workload

EXACT = 1e-9
Made = tuple[nn.Module, Any, Any]


class Convolutional(nn.Module):
    """Batch norm, dropout of elements and of channels, and stochastic depth, as torchvision and timm write it."""

    def __init__(self, momentum: float | None = 0.3) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8, momentum=momentum)
        self.second, self.again = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.channels, self.elements, self.head = nn.Dropout2d(0.4), nn.Dropout(0.5), nn.Linear(8, 4)

    def branch(self, x: Tensor) -> Tensor:
        y = self.again(self.second(x))
        if not self.training:
            return y
        kept = torch.empty((len(x), 1, 1, 1), dtype=x.dtype).bernoulli_(0.8)
        return y * kept.div_(0.8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.channels(self.norm(self.first(x)).relu())
        x = x + self.branch(x)
        return self.head(self.elements(x.mean((2, 3))))


def convolutional() -> Made:
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    x = torch.randn(8, 3, 6, 6, generator=generator, dtype=torch.float64)
    return Convolutional().double(), (x, torch.arange(8) % 4), F.cross_entropy


def text() -> Made:
    ids = torch.randint(32, (8, 8), generator=torch.Generator().manual_seed(0))
    return gpt2(0.25, 0.25), {"input_ids": ids, "labels": ids.clone()}, None


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.LSTM(4, 4, 2, dropout=0.5, batch_first=True), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x)[0][:, -1])


def recurrent() -> Made:
    torch.manual_seed(0)
    return Recurrent().double(), (torch.randn(8, 5, 4, dtype=torch.float64), torch.arange(8) % 3), F.cross_entropy


def linear() -> Made:
    return OtherMode().double(), torch.randn(8, 4, dtype=torch.float64), None


MODELS = {"text": text, "convolutional": convolutional, "recurrent": recurrent}


@functools.cache
def compared(name: str, local_batch_norm: bool = False) -> Graph:
    """The graph of a model in training mode, with the result of its comparison with the model."""
    model, batch, loss_fn = MODELS[name]()
    with Float64Everywhere():
        graph = annotate(capture(model, batch, loss_fn, precision="float64", local_batch_norm=local_batch_norm))
    checked = check_capture(graph, model, batch, loss_fn, local_batch_norm=local_batch_norm)
    return replace(graph, no_evaluation=checked.no_evaluation)


def trained(folder: str, state: dict[str, Tensor], batch: dict[str, Tensor]) -> Any:
    """In a worker: the loss in evaluation mode after two steps, the state dict then, and the losses of two more steps, before which the
    program evaluates or does not."""
    backend = functools.partial(torch.compile, backend=BACKEND)  # without code of Inductor, for compiled layers
    with program_modules(folder), mock.patch("torch.compile", backend):
        runtime = import_runtime(folder)
        program = runtime.load(folder)
        world = runtime.start(program, device="cpu", timeout_s=60)
        found: list[Any] = []
        for evaluates in (True, False):
            trainer = runtime.Trainer(program, world, optimizer=functools.partial(torch.optim.SGD, lr=0.1), state=state)
            for _ in range(2):
                trainer.step(batch)
            if evaluates:
                found += [trainer.evaluate(batch), trainer.evaluate(batch), trainer.state_dict()]
            found.append([trainer.step(batch) for _ in range(2)])
        return found


PLANS: dict[str, tuple[str, dict[str, Any]]] = {
    "text, ZeRO 3": ("text", {"data": 2, "zero": 3, "microbatches": 2}),
    "text, tensor": ("text", {"tensor": 2}),
    "text, tensor and sequence": ("text", {"tensor": 2, "sequence": True}),
    "text, ring": ("text", {"ring": 2}),
    "text, recomputed": ("text", {"data": 2, "recompute": True}),
    "text, pipeline": ("text", PIPELINE),
    "text, Chimera": ("text", BOTH_WAYS),
    "convolutional, data": ("convolutional", {"data": 2}),
    "convolutional, ZeRO 3": ("convolutional", {"data": 2, "zero": 3}),
    "convolutional, tensor": ("convolutional", {"tensor": 2}),
    "convolutional, compiled": ("convolutional", {"data": 2, "compile": "layers"}),
    "recurrent, data": ("recurrent", {"data": 2}),
}


@pytest.mark.parametrize(
    "case",
    # the others have one axis less than these
    in_short(PLANS, *(case for case in PLANS if case not in ("text, tensor", "convolutional, data"))),
)
def test_evaluation_is_eager_evaluation(case: str, workers2: WorkerPool, tmp_path: Path) -> None:
    name, options = PLANS[case]
    same_as_eager(name, compared(name), options, workers2, tmp_path)


def test_local_batch_norm_evaluates_by_running_statistics(workers2: WorkerPool, tmp_path: Path) -> None:
    graph = compared("convolutional", local_batch_norm=True)
    same_as_eager("convolutional", graph, {"pipeline": 2, "microbatches": 2, "schedule": "gpipe"}, workers2, tmp_path)


def same_as_eager(name: str, graph: Graph, options: dict[str, Any], pool: WorkerPool, folder: Path) -> None:
    model, batch, loss_fn = MODELS[name]()
    assert graph.no_evaluation == ""
    emit(graph, manual_plan(graph, **options), folder)
    values = list(batch.values()) if isinstance(batch, dict) else list(batch)
    inputs = dict(zip((value.name for value in graph.inputs), values, strict=True))
    loss, again, state, after, unevaluated = pool.run(
        "test_evaluation:trained", str(folder), model.state_dict(), inputs
    )[0]
    model.load_state_dict(state)
    eager, random = (eager_loss(model.train(training), batch, loss_fn) for training in (False, True))
    assert loss == again == pytest.approx(eager, rel=EXACT)
    assert after == unevaluated  # evaluation changed nothing
    assert abs(random - eager) > 1e-3  # the modes differ


def eager_loss(model: nn.Module, batch: Any, loss_fn: Any) -> float:
    with torch.no_grad(), Float64Everywhere():
        return float(model(**batch).loss if loss_fn is None else loss_fn(model(batch[0]), batch[1]))


def test_train_py_evaluates_held_out_rows(workers2: WorkerPool, tmp_path: Path) -> None:
    """The losses of ``--eval-data`` are those of ``model.eval()`` with the weights of that step."""
    model, batch, _ = text()
    held_out = {"input_ids": torch.randint(32, (20, 8), generator=torch.Generator().manual_seed(1))}
    held_out["labels"] = held_out["input_ids"]
    for name, rows in (("train.pt", batch), ("held_out.pt", held_out)):
        torch.save(rows, tmp_path / name)
    graph = compared("text")
    emit(graph, manual_plan(graph, data=2, zero=3), tmp_path / "program", state=model.state_dict())
    data = ["--dataset", str(tmp_path / "train.pt"), "--eval-data", str(tmp_path / "held_out.pt"), "--eval-every", "2"]
    rest = [
        "--steps",
        "3",
        "--log-every",
        "10",
        "--save",
        str(tmp_path / "end.pt"),
        "--log-file",
        str(tmp_path / "log"),
    ]
    workers2.run("programs:ran", str(tmp_path / "program"), *data, *rest)
    records = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert [(record["step"], "eval_loss" in record) for record in records] == [
        (1, False), (2, False), (2, True), (3, False), (3, True)
    ]  # fmt: skip
    assert all(record["gradient_norm"] > 0 for record in records if "loss" in record)
    model.load_state_dict(torch.load(tmp_path / "end.pt"))
    losses = [
        eager_loss(model.eval(), {name: rows[i : i + 8] for name, rows in held_out.items()}, None) for i in (0, 8)
    ]  # four rows are left over
    assert records[-1]["eval_loss"] == pytest.approx(sum(losses) / 2, rel=EXACT)


# -- what is refused --------------------------------------------------------------------------------------------------


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.norm = nn.Linear(4, 4), nn.Linear(4, 1), nn.BatchNorm1d(4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.first(x))).square().mean()

    def middle(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class AlwaysDropping(Small):
    def middle(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.5)  # also in evaluation


class Branching(Small):
    def middle(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.5, self.training) * (1.0 if self.training else 2.0)


class CountingCalls(Small):
    def middle(self, x: Tensor) -> Tensor:
        self.calls.add_(1)  # type: ignore[operator]
        return x.tanh()


class WithoutALoss(Small):
    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            raise ValueError("no targets")
        return super().forward(x)

    def middle(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.5, self.training)


class Untracked(Small):
    """Batch norm without running statistics takes those of the batch in both modes."""

    def middle(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, None, None, training=True)


class Noisy(Small):
    """The noise of training has mean one."""

    def middle(self, x: Tensor) -> Tensor:
        return x * torch.empty_like(x).uniform_(0.5, 1.5) if self.training else x


class OtherMode(Small):
    """Nothing random, and no buffer, but another result in evaluation."""

    def middle(self, x: Tensor) -> Tensor:
        return x.tanh() if self.training else x


class OneMode(Small):
    def middle(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.5, self.training).tanh()


REFUSED: dict[type[Small], str] = {
    AlwaysDropping: "applies dropout in evaluation mode, too",
    Branching: "its loss is not that of model.eval",
    CountingCalls: "writes the buffer calls in evaluation mode, too",
    WithoutALoss: "in evaluation mode the model raises ValueError: no targets",
    Untracked: "",
    Noisy: "",
}


@pytest.mark.parametrize("kind", REFUSED, ids=lambda kind: kind.__name__)
def test_evaluation_is_compared_with_the_model_s(kind: type[Small]) -> None:
    torch.manual_seed(0)
    model, batch = kind(), torch.randn(6, 4)
    refusal = check_capture(capture(model, batch), model, batch, None).no_evaluation
    assert REFUSED[kind] in refusal if REFUSED[kind] else refusal == ""


NOT_PROVED: dict[type[Small], str] = {
    AlwaysDropping: "draws random numbers in evaluation mode, too",
    OtherMode: "graph in evaluation mode is another one",
    CountingCalls: "writes the buffer calls in evaluation mode, too",
    WithoutALoss: "can't be captured in evaluation mode",
    OneMode: "",
}


@pytest.mark.parametrize("kind", NOT_PROVED, ids=lambda kind: kind.__name__)
def test_graphs_of_both_modes_are_compared_if_the_model_does_not_run(
    kind: type[Small], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "LIMIT_BYTES", 0)
    model, batch = kind(), torch.randn(6, 4)
    note, refusal = check_capture(capture(model, batch), model, batch, None)
    assert note.startswith(NOT_COMPARED) and model.training
    assert NOT_PROVED[kind] in refusal if NOT_PROVED[kind] else refusal == ""


def test_a_graph_that_was_not_compared_is_not_evaluated(tmp_path: Path) -> None:
    for (model, batch, loss_fn), training in itertools.product((convolutional(), linear()), (True, False)):
        workload = Workload(model.train(training), batch, loss_fn, precision="float64")
        graph = compared_graph(workload, compare=False)
        emit(graph, manual_plan(graph, data=2), tmp_path)
        text = (tmp_path / "model.py").read_text()
        assert ("the comparison is switched off (--no-capture-check" in text) == ("no_evaluation=" in text) == training
