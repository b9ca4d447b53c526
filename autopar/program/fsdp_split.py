"""FSDP2 under zero-bubble schedules, which split backward passes: reduces the weight gradients that the second part (W) computes."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  torch's own convention
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .collectives import Work, reduce_scatter
from .fsdp import ShardedGroup, rows_of, shard_of
from .parameters import ParameterGroup
from .world import LoadedProgram


@dataclass(frozen=True, slots=True)
class _RunningReduction:
    """A running reduce-scatter from ``unsharded`` to ``piece``; its result is then added to ``pieces[name]``."""

    work: Work | None
    pieces: dict[str, Tensor]
    name: str
    piece: Tensor
    unsharded: Tensor


class SingleReductionInFlight:
    """Limits a rank to one running reduction of a weight gradient, which overlaps the computation of the next: each running one keeps an
    unsharded gradient in memory."""

    def __init__(self) -> None:
        self.running: _RunningReduction | None = None

    def finish(self) -> None:
        """Wait for the running reduction."""
        if (last := self.running) is not None:
            if last.work is not None:
                last.work.wait()
            sums = last.pieces
            sums[last.name] = sums[last.name].add_(last.piece) if last.name in sums else last.piece
            self.running = None


class SplitWeightGradients:
    """Sums, over microbatches and ranks, an FSDP layer's weight gradients from the second part (W) of its backward passes.

    FSDP2 reduces only gradients that autograd computes. This class reduce-scatters the others one by one, in ``dtype``, into pieces as
    large as FSDP2's shards: rows divided as by ``torch.chunk``, padded to equal pieces. ``shards`` is the process group that shards the
    layer; ``copies`` is HSDP's replicate group, over which the pieces are summed once a step. With ``once``, a rank first sums
    the unsharded gradients over its microbatches.
    """

    def __init__(
        self, shards: dist.ProcessGroup, copies: dist.ProcessGroup | None, dtype: torch.dtype, once: bool
    ) -> None:
        self._shards, self._copies, self._dtype, self._once = shards, copies, dtype, once
        self.in_flight = SingleReductionInFlight()  # until ``join_stages`` gives all groups of the rank the same one
        self._unsharded: dict[str, Tensor] = {}
        self._pieces: dict[str, Tensor] = {}

    def clear(self) -> None:
        """Drop the last step's gradients, before another step."""
        self._pieces = {}

    def add(self, name: str, gradient: Tensor) -> None:
        """Add one microbatch's unsharded gradient of the parameter ``name``: start its reduction or, if gradients are reduced once a step,
        accumulate it."""
        if not self._once:
            self._reduce(name, gradient)
        elif name in self._unsharded:
            self._unsharded[name] += gradient
        else:
            self._unsharded[name] = gradient.to(self._dtype)

    def _reduce(self, name: str, gradient: Tensor) -> None:
        size, rows = dist.get_world_size(self._shards), gradient.shape[0]
        share = -(-rows // size)
        unsharded = gradient.to(self._dtype)
        if share * size > rows:
            unsharded = F.pad(unsharded, [0, 0] * (gradient.dim() - 1) + [0, share * size - rows])
        self.in_flight.finish()
        piece = unsharded.new_empty(share, *gradient.shape[1:])
        work = reduce_scatter(piece, unsharded, group=self._shards, async_op=True)
        self.in_flight.running = _RunningReduction(work, self._pieces, name, piece, unsharded)

    def finish(self) -> dict[str, Tensor]:
        """Wait for all sums; return this rank's piece of each parameter's gradient, padding included, by the parameter's name."""
        for name in list(self._unsharded):
            self._reduce(name, self._unsharded.pop(name))
        self.in_flight.finish()
        if self._copies is not None:
            for piece in self._pieces.values():
                dist.all_reduce(piece, group=self._copies)
        return self._pieces


class SplitShardedGroup(ShardedGroup):
    """A layer's parameters under FSDP2, where the second part of a backward pass computes some of the gradients."""

    def _allocate(self, program: LoadedProgram) -> None:
        super()._allocate(program)
        own, group = self.placement, self._world.group
        copies = group(own.copies) if own.copies else None
        self._split_gradients = SplitWeightGradients(group(own.shards), copies, own.gradient_dtype, self.reduces_once)
        self.module.register_forward_pre_hook(self._register_adders)

    @staticmethod
    def join_stages(
        stages: Mapping[int, nn.Module], groups: Mapping[int, Sequence[ParameterGroup]], program: LoadedProgram
    ) -> None:
        """Set up prefetching as in ``ShardedGroup``, and let all groups of the rank share one ``SingleReductionInFlight``."""
        ShardedGroup.join_stages(stages, groups, program)
        in_flight = SingleReductionInFlight()
        for group in (group for own in groups.values() for group in own):
            if isinstance(group, SplitShardedGroup):
                group._split_gradients.in_flight = in_flight

    def _register_adders(self, *_: object) -> None:
        """Register an adder for each tensor that FSDP2 has gathered for this forward pass: products read these tensors, not the shards."""
        for layout in self._params:
            gathered = self._module.get_parameter(layout.name)
            self.adders[id(gathered)] = functools.partial(self._split_gradients.add, layout.name)

    def finish_adding(self) -> None:
        """Wait for the last reduction: otherwise its unsharded operand would stay in memory."""
        self._split_gradients.in_flight.finish()

    def zero_grad(self) -> None:
        super().zero_grad()
        self._split_gradients.clear()

    def finish_reduction(self) -> None:
        """Add the gradients of the second parts to those that FSDP2 has reduced."""
        for name, rows in self._split_gradients.finish().items():
            param = self._module.get_parameter(name)
            start, stop = rows_of(param, param.shape[0])
            if param.grad is not None:  # some microbatches had an unsplit backward pass
                shard_of(param.grad).add_(rows[: stop - start])
            else:
                param.grad = _dtensor_like(param, rows[: stop - start])
        super().finish_reduction()


def _dtensor_like(param: Tensor, shard: Tensor) -> Tensor:
    """Return a DTensor with the sharding of ``param`` whose local tensor on this rank is ``shard``."""
    assert isinstance(param, DTensor)
    return DTensor.from_local(
        shard, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
    )
