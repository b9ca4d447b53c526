"""Rehearsal: runs one rank of a plan on a single device, to measure its peak memory and step time without the other devices.

The emitted program runs as rank ``r`` of the full world, with the same stage modules, local shapes and schedule, but with torch's fake
process group: collectives return at once, with the rank's own data in place of the others'. A pipeline stage receives random values,
because arithmetic on zeros or NaN takes less power, and so less time. Losses are meaningless. Memory doesn't depend on values, except in
mixtures of experts, where values decide how many tokens an expert gets.

On a GPU the peak is that of PyTorch's caching allocator (``torch.cuda.max_memory_allocated``), on a CPU the highest running sum of all
allocations and releases (``allocations``).
"""

from __future__ import annotations

import contextlib
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from autopar.devices import Cluster
from autopar.devices.cluster import Link
from autopar.errors import LaunchError, UsageError
from autopar.graph import Graph
from autopar.plan import Memory, Plan
from autopar.run.allocations import Allocations
from autopar.run.folder import import_runtime, program_modules
from autopar.run.processes import Processes
from autopar.torch_private import fake_store, functional_collectives, overload_name

WARM_UP = 2
"""Steps before the measured ones: the first compiles layers and allocates optimizer states, and the allocator's cache settles."""
TIMEOUT_S = 1800.0
INSTANT_LINK = Link(0.0, float("inf"), "a rehearsal's collectives return at once")


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """The result of one rank's rehearsal: predicted and measured bytes and seconds of a step.

    ``predicted_s`` counts compute and the optimizer's update, but no communication and no bubbles; ``rounds_s`` has the seconds of each
    measured step; ``at_rest_bytes`` are allocated between steps; ``reserved_bytes`` is the caching allocator's peak (0 on a CPU).
    """

    rank: int
    stages: tuple[int, ...]
    device: str
    predicted: Memory
    peak_bytes: int
    at_rest_bytes: int
    reserved_bytes: int
    predicted_s: float
    rounds_s: tuple[float, ...]

    @property
    def step_s(self) -> float:
        return statistics.median(self.rounds_s)

    @property
    def memory_error(self) -> float:
        """Predicted over measured peak memory, minus 1."""
        return self.predicted.total / self.peak_bytes - 1

    @property
    def time_error(self) -> float:
        """Predicted over measured seconds of a step, minus 1."""
        return self.predicted_s / self.step_s - 1

    def to_json(self) -> dict[str, Any]:
        parts = {part: getattr(self.predicted, part) for part in Memory.__slots__}
        return {
            "rank": self.rank,
            "stages": list(self.stages),
            "device": self.device,
            "predicted_bytes": self.predicted.total,
            "predicted_parts": parts,
            "peak_bytes": self.peak_bytes,
            "at_rest_bytes": self.at_rest_bytes,
            "reserved_bytes": self.reserved_bytes,
            "memory_error": self.memory_error,
            "predicted_s": self.predicted_s,
            "step_s": self.step_s,
            "rounds_s": list(self.rounds_s),
            "time_error": self.time_error,
        }


def rank_of_each_position(plan: Plan) -> tuple[int, ...]:
    """Return the first rank at every position of the pipeline; all ranks at one position run the same stages at the same local shapes."""
    return tuple(range(0, plan.device_count, plan.devices_per_stage))


def check_ranks(plan: Plan, ranks: Sequence[int]) -> None:
    """Raise ``UsageError`` if the plan has no such rank."""
    for rank in ranks:
        if not 0 <= rank < plan.device_count:
            raise UsageError(
                f"the plan has no rank {rank}: it is for {plan.device_count} devices",
                f"write a rank from 0 to {plan.device_count - 1}",
            )


def random_batch(graph: Graph) -> dict[str, Tensor]:
    """Return a random global batch by input name: normal floats, and integers that are valid for every embedding and loss."""
    generator = torch.Generator().manual_seed(0)
    count = _integer_limit(graph)
    batch = {}
    for value in graph.inputs:
        if value.dtype.is_floating_point:
            batch[value.name] = torch.randn(value.shape, generator=generator).to(value.dtype)
        else:
            batch[value.name] = torch.randint(0, count, value.shape, generator=generator).to(value.dtype)
    return batch


def _integer_limit(graph: Graph) -> int:
    """Return the upper limit (exclusive) of integer inputs: the fewest rows of an embedding or classes of a loss; 2 without either."""
    places = {
        "aten::embedding": 0,
        "aten::cross_entropy_loss": 1,
    }  # the dim of an op's first argument that limits the integers
    counts = []
    for cls in graph.classes.values():
        for node in cls.graph.graph.nodes:
            name = (overload_name(node.target) or "").partition(".")[0]
            if name in places:
                shape = node.args[0].meta["val"].shape
                counts.append(int(shape[min(places[name], len(shape) - 1)]))
    return min(counts, default=2)


def with_free_communication(cluster: Cluster) -> Cluster:
    """Return the cluster with communication that takes no time, for the predictions of a rehearsal."""
    return replace(
        cluster,
        intra=INSTANT_LINK,
        inter=INSTANT_LINK,
        inter_part=None if cluster.inter_part is None else INSTANT_LINK,
        collective_s=0.0,
        network=None,
        collective_times=None,
        parts=tuple(with_free_communication(part) for part in cluster.parts),
    )


def rehearse(
    folder: str | os.PathLike[str],
    plan: Plan,
    batch: dict[str, Tensor],
    ranks: Sequence[int],
    device: str,
    steps: int = 5,
    progress: Callable[[str], None] = lambda text: None,
) -> Iterator[Rehearsal]:
    """Rehearse ranks of the program in ``folder``, each in its own process.

    Args:
        folder: the emitted program.
        plan: the program's plan, priced on the cluster of ``with_free_communication``.
        batch: a global batch, as tensors by input name.
        ranks: the ranks to rehearse.
        device: "cuda" or "cpu".
        steps: how many steps to time.
        progress: called with the rank that is about to run, as text.

    Raises:
        UsageError: the plan has no such rank.
        LaunchError: the program fails, for example out of memory.
    """
    check_ranks(plan, ranks)
    for rank in ranks:
        progress(f"rank {rank}")
        workers = Processes(1, env={"LOCAL_WORLD_SIZE": "1"})
        try:
            (measured,) = workers.call(
                "autopar.run.rehearsal:perform",
                str(folder),
                batch,
                rank,
                plan.device_count,
                device,
                steps,
                timeout_s=TIMEOUT_S,
            )
        except LaunchError as error:
            raise LaunchError(f"rank {rank} fails in rehearsal: {error.message}", error.hint) from error
        finally:
            workers.close()
        stages = tuple(measured["stages"])
        passes = plan.microbatches / plan.sized_schedule.copies  # microbatches that each of the rank's stages runs
        yield Rehearsal(
            rank=rank,
            stages=stages,
            device=measured["device"],
            predicted=plan.stages[stages[0]].memory,
            peak_bytes=measured["peak_bytes"],
            at_rest_bytes=measured["at_rest_bytes"],
            reserved_bytes=measured["reserved_bytes"],
            predicted_s=sum(passes * plan.stages[s].microbatch_s + plan.stages[s].optimizer_s for s in stages),
            rounds_s=tuple(measured["rounds_s"]),
        )


# -- in the worker ----------------------------------------------------------------------------------------------------


def perform(folder: str, batch: dict[str, Tensor], rank: int, count: int, device: str, steps: int) -> dict[str, Any]:
    """Run as rank ``rank`` of ``count``: warm-up steps, then ``steps`` timed steps, then one whose memory is measured.

    Raises ``RuntimeError`` if the loss or a parameter isn't finite at the end.
    """
    dist.init_process_group("fake", store=fake_store(), rank=rank, world_size=count)
    _patch_fake_collectives()
    memory = _OnGpu() if device == "cuda" else Allocations()
    with memory.recorded():
        trainer = _open(folder, device)
        for _ in range(WARM_UP):
            trainer.step(batch)
        rounds = []
        for _ in range(steps):
            start = time.perf_counter()
            trainer.step(batch)  # returns the loss, which synchronises
            rounds.append(time.perf_counter() - start)
        with memory.step():
            loss = trainer.step(batch)
    values = {name: each for stage in trainer.stages.values() for name, each in stage.named_parameters()}
    wrong = [] if math.isfinite(loss) else ["the loss"]
    wrong += [name for name, value in values.items() if not bool(_local(value).isfinite().all())]
    if wrong:
        raise RuntimeError(
            f"{', '.join(wrong[:3])} is NaN or infinite, so the measured times are for arithmetic on NaN"
        )
    name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    return {
        "stages": list(trainer.world.stages),
        "device": name,
        "rounds_s": rounds,
        "peak_bytes": memory.peak_bytes,
        "at_rest_bytes": memory.at_rest_bytes,
        "reserved_bytes": torch.cuda.max_memory_reserved() if device == "cuda" else 0,
    }


def _open(folder: str, device: str) -> Any:
    with program_modules(folder):
        runtime = import_runtime(folder)
        program = runtime.load(folder)
        world = runtime.start(program, device=device)
        generator = torch.Generator(world.device).manual_seed(0)

        def drawn(layout: Any) -> Tensor:
            values = torch.empty(layout.original_shape, dtype=layout.dtype, device=world.device)
            return values.normal_(0, 0.02, generator=generator)

        trainer = runtime.Trainer(program, world, values=drawn)
    for stage in trainer.stages.values():
        stage.register_forward_pre_hook(lambda _, activations: _draw(activations, 1.0))
        stage.register_forward_hook(_draw_gradients)
    return trainer


def _local(parameter: Tensor) -> Tensor:
    value = parameter.detach()
    return value.to_local() if isinstance(value, DTensor) else value


def _patch_fake_collectives() -> None:
    """Fill outputs that torch's fake process group leaves uninitialised: NaN would spread from them.

    ``recv`` gets ones: torch's stages use it to validate shapes before the first step. In a batch of transfers, as in ring attention, a
    receive gets the tensor of the same shape that this rank sends, or else ones. Up to torch 2.11 the fake group doesn't write the
    results of reduce-scatters and all-to-alls; they become this rank's data. ``spmd_types`` reduce-scatters by torch's functional
    collectives.
    """
    functional = functional_collectives()
    reduce_functional = functional.reduce_scatter_tensor
    reduce, exchange, exchange_single = dist.reduce_scatter_tensor, dist.all_to_all, dist.all_to_all_single
    transfer = dist.batch_isend_irecv

    def own_share(output: Tensor, input: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, **options: Any) -> Any:
        work = reduce(output, input, op, group, **options)
        output.detach().copy_(input.view(-1).chunk(dist.get_world_size(group))[dist.get_rank(group)].view_as(output))
        return work

    def own_slice(input: Tensor, op: str, dim: int, group: Any, tag: str = "") -> Tensor:
        result: Tensor = reduce_functional(input, op, dim, group, tag)
        own = input.detach().chunk(dist.get_world_size(group), dim)[dist.get_rank(group)]
        functional.wait_tensor(result).data.copy_(
            own
        )  # selective recomputation refuses a saved tensor whose version has changed
        return result

    def own_parts(outputs: list[Tensor], inputs: list[Tensor], *given: Any, **options: Any) -> Any:
        work = exchange(outputs, inputs, *given, **options)
        for output, own in zip(outputs, inputs, strict=True):
            _copy_part(output, own)
        return work

    def own_rows(output: Tensor, input: Tensor, *given: Any, **options: Any) -> Any:
        work = exchange_single(output, input, *given, **options)
        _copy_part(output, input)
        return work

    def own_messages(operations: list[dist.P2POp]) -> list[Any]:
        works = transfer(operations)
        sent = {each.tensor.shape: each.tensor for each in operations if each.op is dist.isend}
        for each in operations:
            if each.op is dist.irecv:
                received, own = each.tensor.detach(), sent.get(each.tensor.shape)
                received.fill_(1) if own is None else received.copy_(own.detach())
        return works

    replaced = {"reduce_scatter_tensor": own_share, "all_to_all": own_parts, "all_to_all_single": own_rows}
    replaced["batch_isend_irecv"] = own_messages
    for name, function in {**replaced, "recv": lambda tensor, *_, **__: tensor.fill_(1)}.items():
        setattr(dist, name, function)
    functional.reduce_scatter_tensor = own_slice


def _copy_part(output: Tensor, own: Tensor) -> None:
    """Copy as many elements of ``own`` as fit into ``output``, and fill the rest of ``output`` with zeros."""
    count, flat = min(output.numel(), own.numel()), output.detach().view(-1)
    flat[:count].copy_(own.detach().reshape(-1)[:count])
    flat[count:].zero_()


def _draw(received: Sequence[Any], scale: float) -> None:
    """Overwrite the tensors that a stage received with random values."""
    for tensor in received:
        if isinstance(tensor, Tensor) and tensor.is_floating_point():
            tensor.detach().normal_(0, scale)


def _draw_gradients(stage: Any, _: Any, out: Any) -> None:
    """Overwrite the gradients that a stage receives for its outputs; the last stage starts from its loss."""
    for tensor in out if isinstance(out, tuple) else (out,):
        if tensor.requires_grad and tensor.dim():
            tensor.register_hook(lambda gradient: _draw([gradient], 1e-3))


class _OnGpu:
    """Measures the same bytes as ``Allocations``, but in the GPU's caching allocator."""

    def __init__(self) -> None:
        self.peak_bytes = self.at_rest_bytes = 0

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        yield

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        torch.cuda.synchronize()
        self.at_rest_bytes = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        yield
        torch.cuda.synchronize()
        self.peak_bytes = torch.cuda.max_memory_allocated()
