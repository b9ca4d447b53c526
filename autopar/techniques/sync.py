"""How a plan synchronises its data-parallel replicas.

``all-reduce``: every replica receives the sum of all gradients, and updates its parameters. ``parameter-server``: one rank of each replica
group receives the sum, stores the optimizer states, updates the parameters and broadcasts them. ``local-steps:K`` (not exact): each replica
updates with the gradients of its own samples, and every *K* steps the replicas average their parameters (local SGD, Stich 2019,
arXiv:1805.09767). ``stale:K`` (not exact): every replica updates with the sum of all gradients of *K* steps before (delayed SGD, Langford
et al. 2009, arXiv:0911.0491), whose all-reduce overlaps the steps in between (``program.late_gradients``). The staleness is always *K*, so
that runs are reproducible; in stale synchronous parallel training (Ho et al. 2013) it is at most *K*.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from autopar.schedules import CHIMERA
from autopar.techniques.activations import ACTIVATIONS
from autopar.techniques.technique import PLAN, Case, Conflict, Mode, Technique

ALL_REDUCE, PARAMETER_SERVER, LOCAL_STEPS, STALE = "all-reduce", "parameter-server", "local-steps", "stale"

LOCAL_SGD = "local_steps"
"""The numerical deviation of ``local-steps``."""

STALE_GRADIENTS = "stale_gradients"
"""The numerical deviation of ``stale``."""


class Sync(Technique):
    scope = PLAN
    name = "sync"
    modes = (
        Mode(ALL_REDUCE, cell=ALL_REDUCE),
        Mode(PARAMETER_SERVER, "synchronized by a parameter server", PARAMETER_SERVER, max_zero=0, has_server=True),
        Mode(
            LOCAL_STEPS,
            "averaged every {} steps",
            LOCAL_STEPS,
            deviation=LOCAL_SGD,
            inexact="between averages replicas train independently, unlike one device",
            max_zero=0,
            counted=1,
            local_sgd=True,
        ),
        Mode(
            STALE,
            "updated by gradients {} steps old",
            STALE,
            deviation=STALE_GRADIENTS,
            inexact="an update uses the gradients of an earlier step, taken at parameters that have changed since",
            max_zero=0,
            counted=1,
            stale=True,
        ),
    )
    subject = "replicas"
    meaning = "how replicas are synchronized under ZeRO 0; default: all-reduce"
    example = "sync=parameter-server"
    conflicts = (
        Conflict(
            (PARAMETER_SERVER, LOCAL_STEPS, STALE),
            "schedule",
            (CHIMERA,),
            f"{CHIMERA} sums the gradients of a stage's two copies by {ALL_REDUCE}, which goes with every schedule",
        ),
    )
    advice = f"leave sync out: {ALL_REDUCE} computes what one device computes"

    def refusal_of_plan(self, graph: Any, value: str, data: Sequence[int | None]) -> str:
        mode = self.mode(value)
        if not mode.deviation:
            return ""
        if mode.stale and str(graph.dtype) == "torch.float16":
            return "the loss of a program in float16 is rescaled every step, and late gradients have the scale of an earlier one"
        if graph.unmicrobatchable and not mode.stale:
            return f"local SGD replicas cannot train independently: {graph.unmicrobatchable}"
        if graph.buffers and not mode.stale:
            return f"local SGD replicas cannot train independently: the model writes {next(iter(graph.buffers))}"
        if len(set(data)) > 1 or None in data:
            found = ", ".join("any" if n is None else str(n) for n in dict.fromkeys(data))
            only_some = "gradients are late only in layers that have replicas"
            return (
                f"{only_some if mode.stale else 'the result depends on the number of replicas'}, so the data degree must be pinned, to one "
                f"number for all layers and without expert parallelism; the layers' data degrees are {found}"
            )
        return ""

    def phrase(self, value: str) -> str:
        return self.mode(value).phrase.format(self.split(value)[1])

    def note(self, names: Sequence[str], total: int, value: str) -> str:
        if late := self.staleness(value):
            return (
                f"not exact, as {STALE_GRADIENTS} allows: every update uses the gradients of {late} step{'s' * (late > 1)} before (the "
                "first ones zeros), whose sum runs under the steps in between; the device has these gradients, too"
            )
        if not (steps := self.averaging_steps(value)):
            return ""
        every = "in every step" if steps == 1 else f"every {steps} steps"
        return (
            f"not exact, as {LOCAL_SGD} allows: each replica updates with the gradients of its own samples, and parameters are averaged "
            f"{every}; optimizer states are not"
        )

    def compared(self, value: str) -> str:
        if late := self.staleness(value):
            return (
                f"the first step of one device (its loss, gradients and update by plain SGD), which is applied {late} updates late; later "
                "steps are not those of one device"
            )
        if not self.averaging_steps(value):
            return ""
        return (
            "the first step of one device (the mean of the replicas' losses, gradients and updates by plain SGD); later steps, in which "
            "local SGD replicas train independently, are not those of one device"
        )

    def runtime_parts(self, value: str) -> Mapping[str, str]:
        return {"reductions": "late_gradients.LateReductions"} if self.staleness(value) else {}

    def header(self, value: str, gives_loss: bool = False) -> str:
        if late := self.staleness(value):
            return f"Every update uses the gradients of {late} step(s) before, as {STALE_GRADIENTS} allows."
        if not (steps := self.averaging_steps(value)):
            return ""
        return (
            f"Local SGD replicas train independently, as {LOCAL_SGD} allows: each updates by the gradients of its own samples, and\n"
            f"parameters are averaged every {steps} step(s)."
        )

    def cases(self, n: int) -> Iterator[Case]:
        if n == 1:
            return
        server = {self.name: PARAMETER_SERVER}
        yield f"data {n}, parameter server", {"data": n, "microbatches": 2} | server
        if n % 2 or n < 4:
            return
        half = n // 2
        yield (
            f"data {half} x tensor+sequence 2, parameter server",
            {"data": half, "tensor": 2, "sequence": True} | server,
        )
        yield f"ring 2 x ulysses {half}, parameter server", {"ring": 2, "ulysses": half} | server
        pipelined = {"data": half, "pipeline": 2, "microbatches": 4} | server
        recomputed = {"schedule": "1f1b", ACTIVATIONS.name: ACTIVATIONS.value_with(recomputes="all")}
        yield f"pipeline 2 x data {half}, parameter server{{}}", pipelined | recomputed
        yield f"pipeline 2, zero bubble x data {half}, parameter server", pipelined | {"schedule": "zero-bubble"}


SYNC = Sync()
