"""A forward's questions about tensors' values (``if labels.max() >= n``, ``lengths.max().item()``): the user's batch answers them, guards
check them.

A trace has no values. The model first runs on the batch once, and every question is recorded with its line and its answer. The trace gets
the same answers in the same order, and returns the tensors in question from the graph. Such a tensor must be computed from the batch
alone: the prelude computes it in every step, and a running program refuses a batch with another answer (``autopar.program.guards``). If a
parameter, a written buffer or a random draw affects the tensor, the answer is no property of the batch. Such a question is left out, with
a note, if the other answer makes the model raise an error (``assert h.isfinite().all()``); otherwise it stays refused.
"""

from __future__ import annotations

import dataclasses
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode

from autopar.capture.backward import OPAQUE_HINT, OURS, KeptWholeError, caller
from autopar.capture.blocks import stack
from autopar.capture.storage import copied
from autopar.errors import CaptureError
from autopar.graph import Graph, Guard
from autopar.ops.facts import is_random
from autopar.ops.meta import graph_meta, meta
from autopar.program.guards import answer
from autopar.torch_private import as_if_exported
from passes.clean.nodes import ancestors, note, returned

MOST = 256
"""Questions that a forward may ask; each number of a list counts as one. The answers are written into the program."""
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
"""By function: how to get the tensor whose values give the answer."""


def _equal(one: Tensor, other: Tensor) -> Tensor:
    return (one == other).all() if one.shape == other.shape else torch.zeros((), dtype=torch.bool)


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to one question: the line that asks, the tensor that the question is about, and the Python number."""

    line: str
    question: str
    value: Any


@dataclass
class Answers:
    """The answers of one forward, in order. ``asked`` are the tensors that the current trace has asked about. ``otherwise(index)`` runs
    the model with another answer to one question, and returns whether it raises an error at once."""

    known: list[Answer]
    asked: list[Tensor] = field(default_factory=list)
    otherwise: Callable[[int], bool] = lambda index: False

    def give(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func is Tensor.tolist:
            rows = args[0]
            return [self.give(func, (row,), {}) for row in rows] if rows.dim() else self.give(Tensor.item, args, {})
        line, name = caller(), func.__name__
        answer = self.known[len(self.asked)] if len(self.asked) < len(self.known) else None
        if answer is None or (answer.line, answer.question) != (line, name):
            expected = f"asks at {answer.line}" if answer is not None else "asks nothing more"
            raise CaptureError(
                f"{line} asks for a tensor's value, but the model on its batch {expected}: the value depends on more than the batch",
                OPAQUE_HINT,
            )
        self.asked.append(_QUESTIONS[func](*args, **kwargs).detach())
        return answer.value


class Answering(TorchFunctionMode):
    """Answers the questions of a trace."""

    def __init__(self, answers: Answers) -> None:
        super().__init__()
        self.answers = answers

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _is_question(func):
            return self.answers.give(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


class _Listening(TorchFunctionMode):
    """Records the questions of a run with values, and the answers."""

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


class _Otherwise(TorchFunctionMode):
    """Gives the opposite of the answer to the question with number ``index``; ``decided`` is set if another decision follows."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.left, self.decided = index, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not _is_question(func):
            return result
        self.decided |= self.left < 0 and isinstance(result, bool)
        self.left -= len(_numbers(result)) if isinstance(result, list) else 1
        return not result if self.left == -1 and isinstance(result, bool) else result


def _numbers(value: Any) -> list[Any]:
    """The leaves of nested lists, in order."""
    return [number for item in value for number in _numbers(item)] if isinstance(value, list) else [value]


def _is_question(func: Any) -> bool:
    try:
        return func is Tensor.tolist or func in _QUESTIONS
    except TypeError:  # an unhashable function is no question
        return False


def listen(model: nn.Module, run: Callable[[nn.Module], object]) -> Answers | None:
    """The questions of a copy of the model when ``run`` runs it, in the mode in which it is exported; ``None`` if it asks nothing, fails,
    or asks for an answer that cannot be recorded."""

    def otherwise(index: int) -> bool:
        (twin,), other = copied([model]), _Otherwise(index)
        with torch.random.fork_rng(devices=[]), as_if_exported(), other:
            try:
                run(twin)
            except (
                Exception
            ) as error:  # of any kind: what matters is that the model's own code ends the step, whatever the values are
                own = not traceback.extract_tb(error.__traceback__)[-1].filename.startswith(OURS)
                return own and not other.decided
        return False

    (twin,), listening = copied([model]), _Listening()
    with torch.random.fork_rng(devices=[]), as_if_exported(), listening:
        try:
            run(twin)
        except Exception:  # the model fails by itself, too: the error of export says where
            return None
    values = [answer.value for answer in listening.found]
    plain = all(type(value) in (bool, int) for value in values)  # a real number differs in every batch
    return Answers(listening.found, otherwise=otherwise) if plain and 0 < len(values) <= MOST else None


def keep_guards(gm: fx.GraphModule, answers: Answers | None) -> None:
    """Record on the exported graph the guards of the outputs that follow its loss.

    Raises:
        KeptWholeError: a question depends on more than the batch.
    """
    graph_meta(gm)["guards"] = tuple(Guard(answer.line, answer.value) for answer in answers.known) if answers else ()
    if answers is not None and len(answers.asked) != len(answers.known):
        raise CaptureError(
            f"{answers.known[len(answers.asked)].line} asks for a tensor's value, but not while it is exported",
            OPAQUE_HINT,
        )
    guards, nodes, kept = graph_meta(gm)["guards"], _nodes(gm), []
    for index, (guard, node) in enumerate(zip(guards, nodes, strict=True)):
        sources = ancestors([node])
        drawn = any("parameter" in meta(n) or (n.op == "call_function" and is_random(n)) for n in sources)
        if not drawn and not any("buffer" in meta(n) for n in sources):
            kept.append(index)
        elif answers is not None and answers.otherwise(index):
            note(gm, f"{guard.line} raises an error where the answer is not {guard.value}, and a program does not ask")
        elif drawn:
            raise _undecided(guard, node)
        else:
            kept.append(index)
    gm.graph.output_node().args = (
        (returned(gm)[0], *(nodes[index] for index in kept), *returned(gm)[1 + len(nodes) :]),
    )
    graph_meta(gm)["guards"] = tuple(guards[index] for index in kept)


def settle_guards(gm: fx.GraphModule) -> list[tuple[Guard, fx.Node]]:
    """The cleaned graph's guards that depend on the batch, with their nodes; ``mark_main`` must have run. A guard that depends on
    constants alone never changes."""
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
    """The graph, after a check that its own prelude computes its guards from the captured batch.

    Raises:
        CaptureError: the prelude's result differs from the answer that the model got.
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
