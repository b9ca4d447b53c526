"""What a forward asks of tensors' values (``if labels.max() >= n``, ``lengths.max().item()``): answered from the user's batch, and guarded.

A trace has no values. The model is run on the batch once, and every question is written down with its line and its answer; the trace
is given the same answers in the same order, and hands the tensors that were asked out of the graph. What such a tensor is made of must
be the batch alone: the prelude computes it in every step, and a batch with another answer is refused while the program runs
(``autopar.program.guards``). What a parameter, a written buffer or a random draw has a say in is no property of the batch, and stays
refused.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode

from autopar.capture.backward import OPAQUE_HINT, KeptWholeError, caller
from autopar.capture.blocks import stack
from autopar.errors import CaptureError
from autopar.graph import Graph, Guard
from autopar.ops.facts import is_random
from autopar.ops.meta import graph_meta, meta
from autopar.program.guards import answer
from autopar.torch_private import as_if_exported
from passes.clean.nodes import ancestors, note, returned

MOST = 256
"""Questions that a forward may ask, each number of a list being one: the answers are written into the program."""
_SHOWN = 5

_QUESTIONS: dict[Any, Callable[..., Tensor]] = {
    **dict.fromkeys(
        (Tensor.__bool__, Tensor.__int__, Tensor.__float__, Tensor.__index__, Tensor.item),
        lambda tensor: tensor.clone(),  # the model may write to it later
    ),
    torch.is_nonzero: lambda tensor: tensor.clone(),
    Tensor.is_nonzero: lambda tensor: tensor.clone(),
    torch.equal: lambda one, other: _equal(one, other),
    Tensor.equal: lambda one, other: _equal(one, other),
}
"""By function: the tensor that its answer is read from."""


def _equal(one: Tensor, other: Tensor) -> Tensor:
    return (one == other).all() if one.shape == other.shape else torch.zeros((), dtype=torch.bool)


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to one question: where it is asked, which tensor it is about, and the Python number."""

    line: str
    question: str
    value: Any


@dataclass
class Answers:
    """The answers of one forward, in order. ``asked`` are the tensors that the trace in progress was asked for."""

    known: list[Answer]
    asked: list[Tensor] = field(default_factory=list)

    def give(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func is Tensor.tolist:
            rows = args[0]
            return [self.give(func, (row,), {}) for row in rows] if rows.dim() else self.give(Tensor.item, args, {})
        line, name = caller(), func.__name__
        answer = self.known[len(self.asked)] if len(self.asked) < len(self.known) else None
        if answer is None or (answer.line, answer.question) != (line, name):
            expected = f"asks at {answer.line}" if answer is not None else "asks nothing more"
            raise CaptureError(
                f"{line} asks for a tensor's value, and the model on its batch {expected}: the value depends on more than the batch",
                OPAQUE_HINT,
            )
        self.asked.append(_QUESTIONS[func](*args, **kwargs).detach())
        return answer.value


class Answering(TorchFunctionMode):
    """Answers what a trace asks."""

    def __init__(self, answers: Answers) -> None:
        super().__init__()
        self.answers = answers

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _is_question(func):
            return self.answers.give(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


class _Listening(TorchFunctionMode):
    """Writes down what a run with values asks, and the answers."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Answer] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is Tensor.tolist:
            self.found += [Answer(caller(), "item", number) for number in _numbers(result)]
        elif _is_question(func):
            self.found.append(Answer(caller(), func.__name__, result))
        return result


def _numbers(value: Any) -> list[Any]:
    """The leaves of nested lists, in order."""
    return [number for item in value for number in _numbers(item)] if isinstance(value, list) else [value]


def _is_question(func: Any) -> bool:
    try:
        return func is Tensor.tolist or func in _QUESTIONS
    except TypeError:  # what cannot be hashed is none
        return False


def listen(model: nn.Module, run: Callable[[nn.Module], object]) -> Answers | None:
    """What a copy of the model asks when ``run`` runs it, as it does while it is exported; ``None`` where it asks nothing, fails, or asks
    for what cannot be written down."""
    copied, listening = copy.deepcopy(model), _Listening()
    with torch.random.fork_rng(devices=[]), as_if_exported(), listening:
        try:
            run(copied)
        except Exception:  # by itself the model fails, too: what export met says where
            return None
    values = [answer.value for answer in listening.found]
    plain = all(type(value) in (bool, int) for value in values)  # a real number is another one in every batch
    return Answers(listening.found) if plain and 0 < len(values) <= MOST else None


def keep_guards(gm: fx.GraphModule, answers: Answers | None) -> None:
    """Write on the exported graph what follows its loss.

    Raises:
        KeptWholeError: a question is about more than the batch.
    """
    graph_meta(gm)["guards"] = tuple(Guard(answer.line, answer.value) for answer in answers.known) if answers else ()
    if answers is not None and len(answers.asked) != len(answers.known):
        raise CaptureError(
            f"{answers.known[len(answers.asked)].line} asks for a tensor's value, but not while it is exported",
            OPAQUE_HINT,
        )
    for guard, node in zip(graph_meta(gm)["guards"], _nodes(gm), strict=True):
        for source in ancestors([node]):
            if "parameter" in meta(source) or (source.op == "call_function" and is_random(source)):
                raise _undecided(guard, node)


def settle_guards(gm: fx.GraphModule) -> list[tuple[Guard, fx.Node]]:
    """The guards of the cleaned graph with their nodes, ``mark_main`` having run: those that the batch decides. One that constants decide
    is as it was forever."""
    found = []
    for guard, node in zip(graph_meta(gm).get("guards", ()), _nodes(gm), strict=True):
        if meta(node)["main"]:
            raise _undecided(guard, node)
        if meta(node)["fed"]:
            found.append((guard, node))
    for line in dict.fromkeys(guard.line for guard, _ in found):
        values = [str(guard.value) for guard, _ in found if guard.line == line]
        shown = ", ".join(values[:_SHOWN]) + (f" and {len(values) - _SHOWN} more" if len(values) > _SHOWN else "")
        note(
            gm,
            f"{line} asks for values of the batch, taken to be {shown}: a batch with others is refused while running",
        )
    return found


def check_guards(graph: Graph, batch: Sequence[Tensor]) -> Graph:
    """The graph, whose guards are what its own prelude computes from the batch that it was captured with.

    Raises:
        CaptureError: something else came out than the model was answered.
    """
    if not graph.guards:
        return graph
    assert graph.prelude is not None
    with torch.no_grad():
        values = graph.prelude(*(tensor.detach().cpu() for tensor in batch))[len(graph.scalars) :]
    found = [Guard(guard.line, answer(value, guard.value)) for guard, value in zip(graph.guards, values, strict=True)]
    for mine, theirs in zip(found, graph.guards, strict=True):
        if mine.value != theirs.value:
            raise CaptureError(
                f"{theirs.line} asks for a tensor's value, which is {theirs.value} in the model and {mine.value} in the captured graph",
                OPAQUE_HINT,
            )
    return dataclasses.replace(graph, guards=tuple(found))


def _undecided(guard: Guard, node: fx.Node) -> KeptWholeError:
    return KeptWholeError(
        f"torch.export refused {guard.line}: its control flow or a shape depends on the data, which is more than the batch",
        OPAQUE_HINT,
        tuple(path for path, _, _ in stack(node)),
    )


def _nodes(gm: fx.GraphModule) -> list[fx.Node]:
    return returned(gm)[1 : 1 + len(graph_meta(gm).get("guards", ()))]
