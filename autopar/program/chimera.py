"""Runs Chimera's bidirectional pipeline: two pipelines in opposite directions through the same pipeline ranks.

Chimera (Li and Hoefler, "Chimera: efficiently training large-scale neural networks with bidirectional pipelines", SC 2021,
arXiv:2107.06925) has two copies of every stage. The first half of the microbatches goes from the first pipeline rank to the last, the
second half from the last to the first. ``runtime/schedule.csv`` has a row for each pipeline rank with its actions in order: ``2F0`` and
``2B0`` are the forward and the backward of stage 2 for microbatch 0. Each copy of a stage has the gradients of its microbatches; a
reduction over the axis ``mirror`` (``world``) sums those of both copies. Transfers and these reductions have one order on all
ranks (``with_transfers``): NCCL may deadlock if two ranks use two communicators in opposite orders. torch's pipeline schedules can't
run this: they number the stages in one sequence, and assume that consecutive numbers are neighbouring stages.
"""

from __future__ import annotations

import csv
import re
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .microbatches import Microbatches
from .processes import start_transfers
from .tracing import action

ORDERS = "runtime/schedule.csv"
"""The file in a program's folder with the actions of every pipeline rank."""

FORWARD, BACKWARD, REDUCE = "F", "B", "R"


@dataclass(frozen=True, slots=True)
class RankStep:
    """One step of a rank: an action (``peer`` is ``None``), or a transfer with the pipeline rank ``peer``.

    The action ``REDUCE`` starts the sum of both copies' gradients of a stage; its microbatch is 0. A transfer of the kind ``FORWARD`` moves
    activations from ``stage - 1`` to ``stage``, one of the kind ``BACKWARD`` their gradients from ``stage + 1`` to ``stage``. ``send``
    says whether this rank sends or receives.
    """

    kind: str
    stage: int
    microbatch: int
    peer: int | None = None
    send: bool = False


def read_orders(folder: Path) -> list[list[RankStep]]:
    """Return the actions of every pipeline rank from the folder's ``runtime/schedule.csv``. Raises ``ValueError`` for other text."""
    with (folder / ORDERS).open(newline="") as file:
        return [[_parsed(text) for text in row] for row in csv.reader(file)]


def _parsed(text: str) -> RankStep:
    found = re.fullmatch(r"(\d+)([FB])(\d+)", text.strip())
    if found is None:
        raise ValueError(f"{ORDERS} has {text!r}; an action is a stage, F or B, and a microbatch, such as 2F0")
    return RankStep(found[2], int(found[1]), int(found[3]))


def with_transfers(orders: Sequence[Sequence[RankStep]], stages: int) -> list[list[RankStep]]:
    """Return every rank's actions, transfers and reductions, in an order that cannot deadlock.

    The ranks take turns. An action's results are sent right after it; the receive is added to the receiver's list at once. When both ranks
    with copies of a stage have run all its backward passes, both lists get the stage's reduction. So every rank's transfers and reductions
    follow one common order.

    Raises ``ValueError`` if some actions can never run, because their inputs are never computed.
    """
    ranks = {(step.stage, step.microbatch): rank for rank, order in enumerate(orders) for step in order}
    result: list[list[RankStep]] = [[] for _ in orders]
    available: set[tuple[str, int, int]] = set()  # the inputs of actions that exist by now
    backwards = Counter(step.stage for order in orders for step in order if step.kind == BACKWARD)  # still to run
    remaining = [deque(order) for order in orders]
    while any(remaining):
        progressed = False
        for rank, order in enumerate(remaining):
            if not order or not _ready(order[0], available, stages):
                continue
            step, progressed = order.popleft(), True
            result[rank].append(step)
            if step.kind == BACKWARD:
                backwards[step.stage] -= 1
                for member in sorted(
                    {r for (stage, _), r in ranks.items() if stage == step.stage and not backwards[stage]}
                ):
                    result[member].append(RankStep(REDUCE, step.stage, 0))
            target = step.stage + (1 if step.kind == FORWARD else -1)
            if not 0 <= target < stages:
                if step.kind == FORWARD:
                    available.add((BACKWARD, step.stage, step.microbatch))
                continue
            available.add((step.kind, target, step.microbatch))
            peer = ranks[target, step.microbatch]
            result[rank].append(RankStep(step.kind, target, step.microbatch, peer, True))
            result[peer].append(RankStep(step.kind, target, step.microbatch, rank, False))
        if not progressed:
            stuck = [f"{order[0].stage}{order[0].kind}{order[0].microbatch}" for order in remaining if order]
            raise ValueError(f"{ORDERS} has actions that wait for each other: {', '.join(stuck)}")
    return result


def _ready(step: RankStep, available: set[tuple[str, int, int]], stages: int) -> bool:
    if step.kind == FORWARD and step.stage == 0:
        return True
    return (step.kind, step.stage, step.microbatch) in available


Metas = tuple[Tensor, ...]
"""The tensors that one stage sends to the next, on the meta device; those that require a gradient get one back."""


class Chimera(Microbatches):
    """Runs half of the microbatches from the first pipeline rank to the last, and half of them from the last to the first."""

    ends_backwards = False

    def _prepare(self) -> None:
        world = self.world
        group = world.mesh.get_group("pipeline")
        self._schedule = ScheduleChimera(
            with_transfers(read_orders(self.program.folder), self.last + 1)[dist.get_rank(group)],
            self._modules,
            {index: (self.receives(index), self.sends(index)) for index in self._modules},
            last=self.last,
            term=self._term,
            links={dist.get_group_rank(group, rank): link for rank, link in world.links.items()},
            reduce=self._reductions.start_stage,
            device=world.device,
        )

    def step(self, inputs: dict[str, Tensor]) -> None:
        self._schedule.step(self.chunks(inputs))


class ScheduleChimera:
    """Runs one rank's actions.

    ``modules`` are its stages; ``borders`` maps a stage to the tensors that it receives and sends. ``term`` turns the last stage's result
    into the scalar at which a microbatch's backward pass starts. ``links`` maps another pipeline rank to the process group of that rank
    and this one. ``reduce`` starts the sum of both copies' gradients of a stage.
    """

    def __init__(
        self,
        steps: Sequence[RankStep],
        modules: Mapping[int, nn.Module],
        borders: Mapping[int, tuple[Metas, Metas]],
        *,
        last: int,
        term: Callable[[Tensor], Tensor],
        links: Mapping[int, dist.ProcessGroup],
        reduce: Callable[[int], None],
        device: torch.device,
    ) -> None:
        self._steps, self._modules, self._borders = steps, modules, borders
        self._last, self._term, self._links, self._reduce, self._device = last, term, links, reduce, device
        self._clear()

    def _clear(self) -> None:
        self._received: dict[tuple[str, int, int], tuple[list[dist.Work], list[Tensor]]] = {}
        self._saved: dict[tuple[int, int], tuple[list[Tensor], tuple[Tensor, ...]]] = {}  # inputs and outputs
        self._gradients: dict[tuple[int, int], list[Tensor]] = {}  # of inputs, until they are sent
        self._sent: deque[tuple[list[dist.Work], list[Tensor]]] = deque()

    def step(self, inputs: Sequence[dict[str, Tensor]]) -> None:
        """Run all actions; ``inputs`` has the inputs of each microbatch."""
        self._clear()
        for step in self._steps:
            if step.peer is not None:
                self._send(step) if step.send else self._receive(step)
            elif step.kind == REDUCE:
                self._reduce(step.stage)
            elif step.kind == FORWARD:
                with action(FORWARD, step.stage, step.microbatch):
                    self._forward(step, inputs[step.microbatch])
            else:
                with action(BACKWARD, step.stage, step.microbatch):
                    self._backward(step)
        while self._sent:
            _wait(self._sent.popleft()[0])
        self._clear()

    def _forward(self, step: RankStep, inputs: dict[str, Tensor]) -> None:
        arrived = self._await_received(step) if step.stage else []
        for tensor, meta in zip(arrived, self._borders[step.stage][0], strict=True):
            tensor.requires_grad_(meta.requires_grad)
        result: Any = self._modules[step.stage](*arrived, **inputs)
        if step.stage == self._last:
            result = self._term(result)
        outputs = (result,) if isinstance(result, Tensor) else tuple(result)
        self._saved[step.stage, step.microbatch] = arrived, outputs

    def _backward(self, step: RankStep) -> None:
        arrived, outputs = self._saved.pop((step.stage, step.microbatch))
        if step.stage == self._last:
            outputs[0].backward()
        else:
            used = [
                output
                for output, meta in zip(outputs, self._borders[step.stage][1], strict=True)
                if _needs_gradient(meta)
            ]
            pairs = [pair for pair in zip(used, self._await_received(step), strict=True) if pair[0].requires_grad]
            if pairs:
                torch.autograd.backward([output for output, _ in pairs], [gradient for _, gradient in pairs])
        if step.stage:
            self._gradients[step.stage, step.microbatch] = [
                torch.zeros_like(tensor) if tensor.grad is None else tensor.grad.contiguous()
                for tensor in arrived
                if tensor.requires_grad
            ]

    def _await_received(self, step: RankStep) -> list[Tensor]:
        """Wait for the tensors that a step receives from another stage, and return them."""
        works, tensors = self._received.pop((step.kind, step.stage, step.microbatch))
        _wait(works)
        return tensors

    def _receive(self, step: RankStep) -> None:
        receives, sends = self._borders[step.stage]
        metas = receives if step.kind == FORWARD else [meta for meta in sends if _needs_gradient(meta)]
        tensors = [torch.empty(meta.shape, dtype=meta.dtype, device=self._device) for meta in metas]
        self._received[step.kind, step.stage, step.microbatch] = self._transfer(dist.irecv, tensors, step), tensors

    def _send(self, step: RankStep) -> None:
        while self._sent and all(work.is_completed() for work in self._sent[0][0]):
            self._sent.popleft()
        if step.kind == FORWARD:
            tensors = [output.detach() for output in self._saved[step.stage - 1, step.microbatch][1]]
        else:
            tensors = self._gradients.pop((step.stage + 1, step.microbatch))
        self._sent.append((self._transfer(dist.isend, tensors, step), tensors))

    def _transfer(self, op: Callable[..., Any], tensors: Sequence[Tensor], step: RankStep) -> list[dist.Work]:
        assert step.peer is not None
        link = self._links[step.peer]
        peer = 1 - dist.get_rank(link)
        return start_transfers([dist.P2POp(op, tensor, group=link, group_peer=peer) for tensor in tensors])


def _needs_gradient(meta: Tensor) -> bool:
    return meta.requires_grad


def _wait(works: Sequence[dist.Work]) -> None:
    for work in works:
        work.wait()
