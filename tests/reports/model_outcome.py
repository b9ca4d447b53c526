"""What becomes of a random model: its captured graph against eager PyTorch as the model was given, a random plan of it on two processes.

Eager PyTorch runs a copy of the model, with the modes and flags that the model has, for two steps of plain SGD; so does the captured
graph. Losses, gradients, buffers and parameters must agree after each.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import random
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from model_text import Made, Text, make
from results import time_limit
from torch import Tensor, nn
from workers import WorkerPool

from autopar.capture import BatchStructure, Float64Everywhere, boundary, capture, check_capture, flatten_batch
from autopar.capture.batch import describe_batch
from autopar.capture.export import call_model
from autopar.capture.reference import run
from autopar.errors import AutoparError, CaptureError, LaunchError, ProgramError, UsageError
from autopar.graph import Graph
from autopar.measure import EXACT, Error, compare
from autopar.shard import annotate
from autopar.verify import Subject, check_plan
from autopar.verify.mixtures import describe, draw

STEPS = 2
LR = 0.05
DRAWS = 8
NOISE = 1e-14  # of what rounding does, relative
MOST_NOISE = 1e-10  # of gradients whose differences of 1e-9 say something
LONGEST_S = 120

KINDS = ("exact", "refused", "wrong", "crash")


@dataclass(frozen=True)
class Outcome:
    """``kind``: one of ``KINDS``. ``stage``: ``capture`` (one device) or ``plan`` (two). ``message``: of an error, or where it differs.
    ``plan`` describes the plan that was run; empty where none was admitted. ``seconds``: by stage."""

    kind: str
    stage: str
    message: str = ""
    plan: str = ""
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def like(self) -> tuple[str, str, str]:
        """What stays the same while a model is made smaller: the kind, the stage, and of a crash its class."""
        return self.kind, self.stage, self.message.split(":")[0] if self.kind == "crash" else ""


@dataclass
class Step:
    """What one step computed: the loss, the gradients of parameters that have one, the model's state after it."""

    loss: float
    gradients: dict[str, Tensor]
    state: dict[str, Tensor]


class InvalidError(Exception):
    """Eager PyTorch does not run the text, or its numbers are not finite."""


def eager(made: Made, structure: BatchStructure) -> list[Step]:
    """Steps of the model as it is given; ``made.model`` is not touched. Raises ``InvalidError``."""
    model = copy.deepcopy(made.model)
    loss_fn = copy.deepcopy(made.loss_fn)
    found = []
    for _ in range(STEPS):
        tensors = tuple(tensor.clone() for tensor in flatten_batch(structure, made.batch).values())
        model.zero_grad(set_to_none=True)
        loss = call_model(model, structure, loss_fn, tensors)
        loss.backward()
        gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.sub_(LR * parameter.grad)
        found.append(Step(float(loss.detach()), gradients, _state(model)))
        numbers = (torch.tensor(found[-1].loss), *gradients.values())
        if not all(bool(torch.isfinite(number).all()) for number in numbers) or not gradients:
            raise InvalidError("the loss or a gradient is not finite, or there is none")
        if max(float(number.abs().max()) for number in numbers) > 1e6:
            raise InvalidError("too large to be compared")
    return found


def conditioned(made: Made, structure: BatchStructure) -> bool:
    """Whether rounding stays rounding: parameters that differ in the fourteenth digit give the same gradients to ten in the first step,
    and to a comparison's tolerance in the second, in each of ``DRAWS`` draws. One draw is not enough: a softmax of numbers as large as
    1e7 jumps in some of them. One step is not enough: an update may take the model to such numbers."""
    given = eager(made, structure)
    for number in range(DRAWS):
        model = copy.deepcopy(made.model)
        with torch.no_grad():
            generator = torch.Generator().manual_seed(1 + number)
            for parameter in model.parameters():
                noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
                parameter.mul_(1.0 + NOISE * noise)
        near = eager(dataclasses.replace(made, model=model), structure)
        errors = [compare(a.loss, a.gradients, b.loss, b.gradients).value for a, b in zip(near, given, strict=True)]
        if not (errors[0] <= MOST_NOISE and errors[1] <= EXACT):
            return False
    return True


def _state(model: nn.Module) -> dict[str, Tensor]:
    return {n: t.detach().clone() for n, t in (*model.named_parameters(), *model.named_buffers())}


def captured(graph: Graph, made: Made) -> list[Step]:
    """Two steps of the captured graph, from the same values."""
    state = _state(made.model)
    frozen = {n for n, p in made.model.named_parameters() if not p.requires_grad}
    names = [n for n, _ in made.model.named_parameters()]
    written: dict[str, Tensor] = {}
    steps = []
    for _ in range(STEPS):
        parameters = {n: state[n].clone().requires_grad_(n not in frozen) for n in names}
        batch = {n: t.clone() for n, t in flatten_batch(graph.structure, made.batch).items()}
        loss = run(graph, parameters, batch, buffers=written)
        loss.backward()
        gradients = {n: p.grad for n, p in parameters.items() if p.grad is not None}
        state |= {n: state[n] - LR * gradient for n, gradient in gradients.items()} | written
        steps.append(Step(float(loss.detach()), gradients, dict(state)))
    return steps


def first_difference(found: list[Step], wanted: list[Step]) -> Error | None:
    """The first error that is not rounding, in the order of the steps."""
    for number, (mine, theirs) in enumerate(zip(found, wanted, strict=True)):
        errors = [compare(mine.loss, mine.gradients, theirs.loss, theirs.gradients)]
        errors.append(compare(0.0, mine.state, 0.0, theirs.state))
        for error, what in zip(errors, ("", "the new value of "), strict=True):
            if not error.value <= EXACT:
                return Error(error.value, f"{what}{error.where}, step {number + 1}")
    return None


def runs(text: Text) -> bool:
    """Whether eager PyTorch runs the text and gives finite numbers, which rounding does not change."""
    try:
        with Float64Everywhere():
            made = make(text)
            structure = describe_batch(made.model, made.batch, made.loss_fn)
            eager(made, structure)
            return conditioned(made, structure)
    except Exception:  # whatever a text that was cut or drawn badly raises
        return False


def outcome(text: Text, seed: int, pool: WorkerPool | None, *, typed: bool = True) -> Outcome:
    """Capture the model, compare, and run a random plan of it on the pool's processes. Raises ``InvalidError``."""
    seconds: dict[str, float] = {}
    with time_limit(LONGEST_S):
        return _outcome(text, seed, pool, typed, seconds)


def _outcome(text: Text, seed: int, pool: WorkerPool | None, typed: bool, seconds: dict[str, float]) -> Outcome:
    with Float64Everywhere():
        with _timed(seconds, "eager"):
            try:
                made = make(text)
                wanted = eager(made, describe_batch(made.model, made.batch, made.loss_fn))
            except Exception as error:
                raise InvalidError(f"{type(error).__name__}: {error}") from error
        try:
            with _timed(seconds, "capture"):
                graph = annotate(capture(made.model, made.batch, made.loss_fn, precision="float64"))
        except AutoparError as error:
            if error.hint is boundary.HINT and isinstance(error.__cause__, Exception):  # eager PyTorch ran the model
                return Outcome("crash", "capture", _crash(error.__cause__), seconds=seconds)
            return Outcome("refused", "capture", error.message, seconds=seconds)
        except Exception as error:
            return Outcome("crash", "capture", _crash(error), seconds=seconds)
        try:
            with _timed(seconds, "graph"):
                difference = first_difference(captured(graph, made), wanted)
        except Exception as error:
            return Outcome("crash", "capture", "running the graph: " + _crash(error), seconds=seconds)
    if difference is not None:
        return _found(graph, made, difference, seconds)
    if pool is None:
        return Outcome("exact", "capture", seconds=seconds)
    return _planned(graph, made, wanted[0], seed, pool, typed, seconds)


def _found(graph: Graph, made: Made, difference: Error, seconds: dict[str, float]) -> Outcome:
    """A graph that is not the model: whether the comparison that stands before every plan refuses it."""
    try:
        with _timed(seconds, "check"):
            said = check_capture(graph, made.model, made.batch, made.loss_fn).note
    except CaptureError as error:
        return Outcome("refused", "check", error.message, seconds=seconds)
    text = f"{difference.where} is off by {difference.value:.1e}; {said}"
    return Outcome("wrong", "capture", text, seconds=seconds)


def _planned(
    graph: Graph, made: Made, wanted: Step, seed: int, pool: WorkerPool, typed: bool, seconds: dict[str, float]
) -> Outcome:
    with _timed(seconds, "draw"):
        try:
            plan = draw(graph, pool.count, random.Random(f"plan {seed}"))
        except UsageError as error:
            return Outcome("exact", "capture", error.message, seconds=seconds)
        except Exception as error:
            return Outcome("crash", "plan", _crash(error), seconds=seconds)
    kept = {n for n, buffer in graph.buffers.items() if buffer.persistent}
    subject = Subject(
        graph,
        {n: t.detach().clone() for n, t in made.model.state_dict().items()},
        {n: t.clone() for n, t in flatten_batch(graph.structure, made.batch).items()},
        wanted.loss,
        wanted.gradients,
        buffers={n: wanted.state[n] for n in kept},
    )
    try:
        with _timed(seconds, "plan"):
            error = check_plan(subject, plan, pool, typed=typed).error
    except UsageError as refused:
        return Outcome("refused", "plan", refused.message, describe(plan), seconds)
    except (ProgramError, LaunchError) as failed:
        return Outcome("crash", "plan", f"{type(failed).__name__}: {failed.message}", describe(plan), seconds)
    except Exception as failed:
        return Outcome("crash", "plan", _crash(failed), describe(plan), seconds)
    if not error.value <= EXACT:
        return Outcome("wrong", "plan", f"{error.where} is off by {error.value:.1e}", describe(plan), seconds)
    return Outcome("exact", "plan", plan=describe(plan), seconds=seconds)


def _crash(error: Exception) -> str:
    """The class, the message, and the last line of autopar's own code."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [f for f in frames if "/autopar/" in f.filename or "/passes/" in f.filename]
    where = f" ({Path(ours[-1].filename).name}:{ours[-1].lineno})" if ours else ""
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}{where}"


@contextlib.contextmanager
def _timed(seconds: dict[str, float], what: str) -> Iterator[None]:
    start = time.perf_counter()
    try:
        yield
    finally:
        seconds[what] = round(time.perf_counter() - start, 3)
