"""Hand-written training programs, as an expert builds them with PyTorch: DDP, FSDP2, tensor parallelism by ``parallelize_module``,
pipelines with torch's schedules, and combinations of two of them.

Everything here runs in the worker processes. A program is built from a ``HandTunedRecipe`` and trains on global batches.

Torch's zero-bubble schedules (``SPLIT``) compute weight gradients separately from input gradients, by ``torch.autograd.grad``. That
doesn't run the backward hooks of DDP, nor those of FSDP with resharding, so gradients are silently wrong: these schedules are refused with
data parallelism. Without it they are exact; torch refuses them for compiled stages. DualPipeV is left out, because it differs from ZBV
only by overlapped forward and backward passes, which torch runs one after the other.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from autopar.bench.models import BenchModel, Stack
from autopar.schedules import INTERLEAVED, ONE_F_ONE_B, SPLIT, ZERO_BUBBLE, ZERO_BUBBLE_V, Schedule

_SCHEDULES: dict[str, Any] = {
    ONE_F_ONE_B: Schedule1F1B,
    INTERLEAVED: ScheduleInterleaved1F1B,
    ZERO_BUBBLE: ScheduleInterleavedZeroBubble,
    ZERO_BUBBLE_V: ScheduleZBVZeroBubble,
}
PIPELINES = ((ONE_F_ONE_B, 1), (INTERLEAVED, 2), (ZERO_BUBBLE, 1), (ZERO_BUBBLE, 2), (ZERO_BUBBLE_V, 2))
"""The (schedule, stages per rank) that an expert tries for a pure pipeline."""


@dataclass(frozen=True, slots=True)
class HandTunedRecipe:
    """A hand-tuned configuration. ``sharding`` is the kind of data parallelism: ``ddp``, ``fsdp`` (ZeRO-3) or ``fsdp-keep`` (ZeRO-2). DDP
    reduces gradients in buckets of ``bucket_mb`` during the backward pass; FSDP prefetches one block. ``compiled``: the model runs under
    ``torch.compile``; ``autocast``: in bfloat16 by ``torch.autocast``. A pipeline rank has ``chunks`` stages under torch's ``schedule``,
    placed in a loop or in a V (``zbv``)."""

    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    sharding: str = "ddp"
    microbatches: int = 1
    bucket_mb: int = 25  # DDP's own default
    compiled: bool = False
    autocast: bool = False
    schedule: str = ONE_F_ONE_B
    chunks: int = 1

    def __post_init__(self) -> None:
        assert self.schedule in _SCHEDULES, f"{self.schedule!r} is none of {', '.join(_SCHEDULES)}"
        assert self.pipeline > 1 or (self.schedule, self.chunks) == (ONE_F_ONE_B, 1), (
            "without a pipeline there is no schedule"
        )
        assert self.schedule not in SPLIT or self.data == 1, (
            f"{self.schedule} skips the hooks of DDP and FSDP: gradients are wrong"
        )

    @property
    def name(self) -> str:
        parts = [f"{self.sharding} {self.data}"] if self.data > 1 else []
        parts += [f"{kind} {n}" for kind, n in (("tensor", self.tensor), ("pipeline", self.pipeline)) if n > 1]
        name = " x ".join(parts or ["one device"]) + f", {self.schedule}" * (self.schedule != ONE_F_ONE_B)
        name += f", {self.chunks} chunks" * (self.chunks > 1)
        name += f", {self.microbatches} microbatches" * (self.microbatches > 1)
        name += f", {self.bucket_mb} MB buckets" * (self.bucket_mb != 25)
        return name + ", autocast" * self.autocast + ", compiled" * self.compiled

    def stages(self, rank: int) -> list[int]:
        """Return the indices of a pipeline rank's stages, as torch places them."""
        return list(Schedule(self.schedule, self.pipeline, self.microbatches, self.chunks).stages_of(rank))

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def recipes(processes: int, subject: BenchModel) -> list[HandTunedRecipe]:
    """Return the recipes that an expert would try on ``processes`` devices: each kind of parallelism, combinations of two, a few numbers of
    microbatches.

    A pure pipeline is tried with every schedule (``PIPELINES``), a combined one with 1F1B. Every stage gets at least one block.
    """
    found: list[HandTunedRecipe] = []
    factors = [n for n in range(1, processes + 1) if processes % n == 0]
    for pipeline in factors:
        for tensor in (n for n in factors if processes // pipeline % n == 0):
            data = processes // pipeline // tensor
            if sum(n > 1 for n in (pipeline, tensor, data)) > 2 or subject.rows % data:
                continue
            counts = [pipeline * k for k in (1, 2, 4)] if pipeline > 1 else [1, 2, 4] if tensor == 1 else [1, 2]
            kinds = ["ddp"] if data == 1 else ["ddp", "fsdp"] if pipeline > 1 else ["ddp", "fsdp", "fsdp-keep"]
            if tensor > 1 and data > 1:
                kinds = kinds[1:]  # FSDP2 composes with tensor parallelism; DDP takes no DTensors
            schedules = PIPELINES if pipeline == processes > 1 else PIPELINES[:1]
            found += [
                HandTunedRecipe(data, tensor, pipeline, kind, m, schedule=schedule, chunks=chunks)
                for kind in kinds
                for schedule, chunks in schedules
                for m in counts
                if subject.rows // data % m == 0 and subject.blocks >= pipeline * chunks
            ]
    return found


class HandTuned:
    """The program of a recipe on this rank. ``step`` trains on a global batch and returns this rank's loss."""

    def __init__(self, subject: BenchModel, recipe: HandTunedRecipe, lr: float, device: str = "cpu") -> None:
        self.subject, self.recipe, self.device = subject, recipe, device
        sizes = {"pipeline": recipe.pipeline, "data": recipe.data, "tensor": recipe.tensor}
        self.mesh: DeviceMesh = init_device_mesh(device, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        self.place = dict(zip(sizes, self.mesh.get_coordinate() or (), strict=True))
        torch.manual_seed(0)
        module: nn.Module = subject.build().to(device)
        assert isinstance(module, Stack)
        if recipe.tensor > 1:
            _shard_tensors(module, self.mesh["tensor"])
        self._stages = recipe.stages(self.place["pipeline"])
        count = recipe.pipeline * recipe.chunks
        parts = [_stage_of(module, number, count) for number in self._stages] if recipe.pipeline > 1 else [module]
        self.modules = nn.ModuleList(self._data_parallel(part) for part in parts)
        self.optimizer = torch.optim.AdamW(self.modules.parameters(), lr=lr, fused=device == "cuda" or None)
        if recipe.compiled:
            for part in self.modules:
                part.compile()
        self._schedule = self._pipeline() if recipe.pipeline > 1 else None

    def step(self, inputs: Tensor, targets: Tensor) -> float | None:
        """Train on this rank's rows and return their loss; ``None`` on a rank of a pipeline without the last stage."""
        mine = [tensor.chunk(self.recipe.data)[self.place["data"]].to(self.device) for tensor in (inputs, targets)]
        with self._vocabulary_parallel():
            loss = self._accumulate(*mine) if self._schedule is None else self._run_schedule(*mine)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)  # free them now: dozens of these programs are in memory
        return loss

    def _data_parallel(self, module: nn.Module) -> nn.Module:
        recipe = self.recipe
        if recipe.data == 1:
            return module
        if recipe.sharding == "ddp":
            group = self.mesh.get_group("data")
            return DistributedDataParallel(module, process_group=group, bucket_cap_mb=recipe.bucket_mb)
        shard = functools.partial(fully_shard, mesh=self.mesh["data"], reshard_after_forward=recipe.sharding == "fsdp")
        blocks = [shard(block) for block in _blocks_of(module)]
        for before, after in itertools.pairwise(blocks):
            before.set_modules_to_forward_prefetch([after])
            after.set_modules_to_backward_prefetch([before])
        shard(module)
        return module

    def _accumulate(self, inputs: Tensor, targets: Tensor) -> float:
        count, total = self.recipe.microbatches, 0.0
        for i, (x, y) in enumerate(zip(inputs.chunk(count), targets.chunk(count), strict=True)):
            with self._sync(i == count - 1):
                with torch.autocast(self.device, torch.bfloat16, enabled=self.recipe.autocast):
                    loss = self.subject.loss_fn(self.modules[0](x), y) / count
                loss.backward()
                total += float(loss.detach())
        return total

    @contextlib.contextmanager
    def _sync(self, last: bool) -> Iterator[None]:
        """A context in which the backward pass reduces gradients only if this is the ``last`` microbatch."""
        module = self.modules[0]
        if isinstance(module, DistributedDataParallel) and not last:
            with module.no_sync():
                yield
            return
        if self.recipe.data > 1 and self.recipe.sharding != "ddp":
            module.set_requires_gradient_sync(last)  # type: ignore[operator]  # FSDP2 adds it
        yield

    def _vocabulary_parallel(self) -> Any:
        return loss_parallel() if self.recipe.tensor > 1 else contextlib.nullcontext()

    def _pipeline(self) -> Any:
        recipe, group = self.recipe, self.mesh.get_group("pipeline")
        count, device = recipe.pipeline * recipe.chunks, torch.device(self.device)
        stages: list[Any] = [
            PipelineStage(module, number, count, device, group=group)
            for number, module in zip(self._stages, self.modules, strict=True)
        ]
        given = stages[0] if recipe.schedule == ONE_F_ONE_B else stages
        return _SCHEDULES[recipe.schedule](given, recipe.microbatches, loss_fn=self.subject.loss_fn)

    def _run_schedule(self, inputs: Tensor, targets: Tensor) -> float | None:
        assert self._schedule is not None
        losses: list[Tensor] = []  # of the microbatches, on the rank of the last stage
        given = (inputs,) if self.place["pipeline"] == 0 else ()
        self._schedule.step(*given, target=targets, losses=losses, return_outputs=False)
        return sum(float(loss.detach()) for loss in losses) / len(losses) if losses else None


def _blocks_of(module: nn.Module) -> list[nn.Module]:
    return [block for block in module.modules() if type(block).__name__.endswith("Block")]


def _shard_tensors(module: Stack, mesh: DeviceMesh) -> None:
    """Shard products as Megatron does, by columns and then by rows. The logits of a vocabulary stay sharded for the loss."""
    plan: dict[str, Any] = {}
    for name, child in module.named_modules():
        last = name.rpartition(".")[2]
        if name.startswith("blocks.") and isinstance(child, nn.Linear):
            plan[name] = RowwiseParallel() if last in ("o", "down") else ColwiseParallel()
    if isinstance(module.embedding, nn.Embedding):
        plan["embedding"] = RowwiseParallel(input_layouts=Replicate())
        plan["head.1"] = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    parallelize_module(module, mesh, plan)


class _Stage(nn.Module):
    """A pipeline stage: consecutive children of a ``Stack``."""

    def __init__(self, parts: list[tuple[str, nn.Module]]) -> None:
        super().__init__()
        for name, part in parts:
            self.add_module(name, part)

    def forward(self, x: Tensor) -> Tensor:
        for part in self.children():
            x = part(x)
        return x


def _stage_of(module: Stack, index: int, count: int) -> _Stage:
    """Return stage ``index`` of ``count``: an equal share of the blocks, with the embedding in the first stage and the head in the last.
    Earlier stages get the remaining blocks, because the head is more work than the embedding; ranks with several stages then differ by at
    most one block."""
    blocks = [(f"block{i}", block) for i, block in enumerate(module.blocks)]
    share, odd = divmod(len(blocks), count)
    start, end = (share * i + min(i, odd) for i in (index, index + 1))
    first: list[tuple[str, nn.Module]] = [("embedding", module.embedding)] if index == 0 else []
    last: list[tuple[str, nn.Module]] = [("head", module.head)] if index == count - 1 else []
    return _Stage([*first, *blocks[start:end], *last])
