"""What a forward asks of its batch's values: answered as for the user's batch, checked in every step, refused where more decides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from workers import WorkerPool

from autopar.capture import capture, check_capture, flatten_batch, reference
from autopar.errors import CaptureError, LaunchError
from autopar.program.guards import GuardError
from autopar.search.manual import manual_plan
from autopar.verify import check_plan, make_subject
from autopar.verify.attacks import compare_with_eager
from autopar.verify.subject import with_batch

CLASSES = 5


class Asking(nn.Module):
    """``ask`` gives what the forward multiplies by, from the batch and the hidden values."""

    def __init__(self, ask: Callable[[Tensor, Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, CLASSES)
        self.c, self.d = nn.Linear(8, 8), nn.Linear(8, 8)
        self.ask = ask
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("limit", torch.tensor(3.0))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        if labels.max() >= CLASSES:
            raise ValueError("no such class")
        h = torch.tanh(self.a(x))
        h = h * self.ask(x, labels, h)
        return F.cross_entropy(self.b(self.d(torch.tanh(self.c(h)))), labels, reduction="sum")


def batch(ignored: int = 1) -> dict[str, Tensor]:
    labels = torch.arange(8) % CLASSES
    labels[:ignored] = -100
    return {"x": torch.linspace(-2, 3, 32).reshape(8, 4).sin(), "labels": labels}


def model(ask: Callable[[Tensor, Tensor, Tensor], Any]) -> nn.Module:
    torch.manual_seed(0)
    return Asking(ask)


def branch(x: Tensor, labels: Tensor, h: Tensor) -> float:
    return 2.0 if (labels < 0).any() else 3.0


def item(x: Tensor, labels: Tensor, h: Tensor) -> float:
    return 1 / int((labels >= 0).sum().item())


def listed(x: Tensor, labels: Tensor, h: Tensor) -> float:
    return float(sum(labels.clamp(min=0).tolist()))


def equal(x: Tensor, labels: Tensor, h: Tensor) -> float:
    return 2.0 if torch.equal(labels, labels.flip(0)) else 0.5


def written_later(x: Tensor, labels: Tensor, h: Tensor) -> float:
    mask = labels < 0
    found = 2.0 if mask.any() else 3.0
    mask.fill_(False)
    return found if not mask.any() else 0.0


def size(x: Tensor, labels: Tensor, h: Tensor) -> Tensor:
    return h[:, : int(labels.max())].sum(1, keepdim=True)


ASKED = {f.__name__: f for f in (branch, item, listed, equal, written_later, size)}


@pytest.mark.parametrize("name", ASKED)
def test_the_answer_is_that_of_the_batch(name: str) -> None:
    subject = make_subject(model(ASKED[name]), batch())
    assert compare_with_eager(subject).exact
    assert len(subject.graph.guards) >= 2
    assert not subject.graph.guards[0].value
    assert "if labels.max() >= CLASSES" in subject.graph.guards[0].line
    assert any("assumed to be False" in note for note in subject.graph.notes)


def test_another_answer_is_refused_by_name() -> None:
    given = model(branch)
    graph = capture(given, batch(), None)
    parameters = dict(given.named_parameters())
    assert reference.run(graph, parameters, flatten_batch(graph.structure, batch(ignored=3))).isfinite()
    with pytest.raises(GuardError, match=r"any\(\) else 3\.0`: .* True .* False now.*plan again"):
        reference.run(graph, parameters, flatten_batch(graph.structure, batch(ignored=0)))


def test_the_check_compares_rows_that_go_the_same_way() -> None:
    given = model(branch)
    said = check_capture(capture(given, batch(), None), given, batch(), None).note
    assert "equals the model over two steps of 2 rows and a step of 3 rows" in said

    def last(x: Tensor, labels: Tensor, h: Tensor) -> float:
        return 2.0 if labels[-1] < 0 else 3.0

    values = batch(ignored=0)
    values["labels"][-1] = -100
    given = model(last)
    said = check_capture(capture(given, values, None), given, values, None).note
    assert "of 8 rows (not compared on 9 rows: they take a different branch at" in said
    assert "labels[-1] < 0" in said


def activation(x: Tensor, labels: Tensor, h: Tensor) -> float:
    return 2.0 if h.max() > 0.5 else 3.0


def real(x: Tensor, labels: Tensor, h: Tensor) -> float:
    return float(x.mean())  # another number in every batch


def drawn(x: Tensor, labels: Tensor, h: Tensor) -> float:
    return 2.0 if torch.rand(()) < 2.0 else 3.0


def many(x: Tensor, labels: Tensor, h: Tensor) -> float:
    return float(len(x.repeat(20, 1).flatten().tolist()))


VALUES, DATA = "values that differ from step to step", "the data"


@pytest.mark.parametrize(("ask", "what"), [(activation, VALUES), (drawn, VALUES), (many, DATA), (real, DATA)])
def test_what_is_no_property_of_the_batch_stays_refused(
    ask: Callable[[Tensor, Tensor, Tensor], Any], what: str
) -> None:
    with pytest.raises(CaptureError, match=rf"test_guards.py:\d+ .*depends on {what}") as error:
        capture(model(ask), batch(), None)
    assert error.value.hint


class Counting(Asking):
    """Asks for a buffer that the forward writes."""

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        self.seen.add_(1)
        scale = 2.0 if self.seen > 3 else 1.0
        return super().forward(x, labels) * scale


def test_a_written_buffer_stays_refused() -> None:
    torch.manual_seed(0)
    with pytest.raises(CaptureError, match=r"if self.seen > 3 .*depends on values that differ from step to step"):
        capture(Counting(branch), batch(), None)


def asserted(x: Tensor, labels: Tensor, h: Tensor) -> float:
    assert h.isfinite().all(), f"the largest is {h.max().item()}"
    return 2.0


def limited(x: Tensor, labels: Tensor, h: Tensor) -> float:
    if not (labels < CLASSES).all() or (x.abs().max() * h.abs().max() > 1e9):
        raise ValueError("too large")
    return 3.0


@pytest.mark.parametrize("ask", [asserted, limited])
def test_a_check_that_only_raises_is_left_out_with_a_note(ask: Callable[[Tensor, Tensor, Tensor], Any]) -> None:
    subject = make_subject(model(ask), batch())
    assert compare_with_eager(subject).exact
    assert any("raises an error if the value is not" in note and ask.__name__ for note in subject.graph.notes)
    assert not subject.graph.opaque


def other_branch(x: Tensor, labels: Tensor, h: Tensor) -> Tensor:
    return h[:, :1] if h.abs().max() < 1e9 else h[:, labels + 100].sum(1, keepdim=True)


def decides_again(x: Tensor, labels: Tensor, h: Tensor) -> float:
    if h.abs().max() > 1e9:
        if h.min() < 1e9:
            raise ValueError("too large")
        return 2.0
    return 3.0


@pytest.mark.parametrize("ask", [other_branch, decides_again])
def test_a_branch_that_may_go_on_is_refused(ask: Callable[[Tensor, Tensor, Tensor], Any]) -> None:
    """An error of an op depends on values, and so does a decision after the first one."""
    with pytest.raises(CaptureError, match="depends on values that differ from step to step"):
        capture(model(ask), batch(), None)


class Initialised(Asking):
    """Asks for a buffer inside a region, as codebooks do, and writes another."""

    def __init__(self, ask: Callable[[Tensor, Tensor, Tensor], Any]) -> None:
        super().__init__(ask)
        self.register_buffer("initted", torch.tensor([True]))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False), torch.no_grad():
            mean = torch.tanh(self.a(x)).mean()
            if not self.initted:
                self.limit.copy_(mean)
                self.initted.fill_(True)
            self.seen.lerp_(mean, 0.5)
        return super().forward(x, labels) + self.seen.detach() * self.d.weight.sum()


def test_a_buffer_that_is_asked_for_in_a_region_needs_no_guard() -> None:
    torch.manual_seed(0)
    subject = make_subject(Initialised(branch), batch())
    assert compare_with_eager(subject).exact
    assert set(subject.graph.buffers) == {"seen"}
    assert not any("self.initted" in guard.line for guard in subject.graph.guards)
    fresh = Initialised(branch)
    fresh.get_buffer("initted").fill_(False)
    with pytest.raises(CaptureError, match=r"if not self.initted.*depends on values that differ from step to step"):
        capture(fresh, batch(), None)


class Limited(Asking):
    """Asks for a buffer that nothing writes."""

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return super().forward(x, labels) * (2.0 if self.limit > 1 else 1.0)


def test_what_constants_decide_needs_no_guard() -> None:
    torch.manual_seed(0)
    subject = make_subject(Limited(branch), batch())
    assert compare_with_eager(subject).exact
    assert not any("self.limit" in guard.line for guard in subject.graph.guards)


def test_without_values_it_stays_refused() -> None:
    blank = {name: tensor.to("meta") for name, tensor in batch().items()}
    with pytest.raises(CaptureError, match=r"if labels.max\(\) >= CLASSES.*depends on the data"):
        capture(model(branch), blank, None)


@pytest.mark.parametrize(
    "options", [{"data": 2, "zero": 3}, {"tensor": 2}, {"pipeline": 2, "microbatches": 2}], ids=str
)
def test_programs_are_exact_and_check_the_whole_batch(options: dict[str, Any], workers2: WorkerPool) -> None:
    subject = make_subject(model(branch), batch())
    plan = manual_plan(subject.graph, **options)
    assert check_plan(subject, plan, workers2).error.exact  # the ignored label is in one rank's rows alone


def test_a_program_refuses_another_answer(workers2: WorkerPool) -> None:
    given = model(branch)
    subject = make_subject(given, batch())
    other = with_batch(subject, given, make_subject(given, batch(ignored=0)).batch, None)
    with pytest.raises(
        LaunchError, match="this value was True at capture and is False now, so the model may take another branch"
    ):
        check_plan(subject, manual_plan(subject.graph, data=2), workers2, attack=other)
