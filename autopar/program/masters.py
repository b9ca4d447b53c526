"""The tensors that the optimizer updates, and the groups of parameters that they belong to."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .state_places import Offloaded
from .world import Layout, LoadedProgram, World


@dataclass(frozen=True, slots=True)
class Master:
    """A tensor that the optimizer owns: this rank's slice of a parameter, or under ZeRO its piece of that slice.

    ``alike`` are the axes whose ranks all have the same values; ``first`` is the piece's first element in the slice. ``offloaded`` is
    what the device has of a master that is not there itself.
    """

    layout: Layout
    tensor: nn.Parameter
    alike: tuple[str, ...]
    first: int = 0
    offloaded: Offloaded | None = None

    @property
    def holder(self) -> nn.Parameter:
        """The tensor on the device whose ``grad`` is the master's gradient."""
        return self.tensor if self.offloaded is None else self.offloaded.gradient

    @property
    def gradient(self) -> Tensor | None:
        """The gradient on the device."""
        return self.holder.grad


class ParameterGroup:
    """Parameters of one layer of a stage that are stored together.

    This class keeps parameters whose gradients no other rank and no other stage adds to, in the dtype of their masters: the masters are the
    parameters themselves, and autograd accumulates their gradients over microbatches, as it does on one device. ``FlatGroup``
    (``parameters``) and ``ShardedGroup`` (``fsdp``) keep the others.

    ``masters`` are what the optimizer updates, ``frozen`` those of parameters that are not trained. ``adders`` has, by the identity of each
    trainable parameter that the stage reads, the function that adds a microbatch's gradient which autograd does not compute.
    """

    def __init__(self, stage: nn.Module, layouts: Sequence[Layout], world: World, program: LoadedProgram) -> None:
        self.layouts, self.shared = tuple(layouts), layouts[0].shared  # the key of tied copies in several stages
        self._stage, self._world = stage, world
        self.masters: list[Master] = []
        self.frozen: list[Master] = []
        self.adders: dict[int, Callable[[Tensor], None]] = {}
        self._allocate(program)

    def _allocate(self, program: LoadedProgram) -> None:
        """Give the parameters memory, zeros, and make their masters."""
        for layout in self.layouts:
            dtype = program.placement(layout).wide
            values = torch.zeros(self._stage.get_parameter(layout.name).shape, dtype=dtype, device=self._world.device)
            param = nn.Parameter(values, layout.trainable)
            set_parameter(self._stage, layout.name, param)
            mine = self.masters if layout.trainable else self.frozen
            mine.append(Master(layout, param, alike(layout, (), self._world)))
            self.adders[id(param)] = functools.partial(_add, param)

    def zero_grad(self) -> None:
        """Forget the gradients of the last step, before another one."""
        for master in self.masters:
            master.holder.grad = None

    def finish_adding(self) -> None:
        """Wait for what the adders have started."""

    def finish_reduction(self) -> None:
        """Give the masters their gradients, after a step's backward passes. A parameter that got none has zeros, and so does padding."""
        for master in self.masters:
            param = master.tensor
            if param.grad is None:
                param.grad = torch.zeros_like(param)
            for dim, start, length in master.layout.beyond(self._world.coordinates):
                param.grad.narrow(dim, start, length).zero_()

    def gradients(self) -> list[Tensor]:
        """Return the gradients of this rank's masters, after the reduction."""
        return [gradient for master in self.masters if (gradient := master.gradient) is not None]

    def average(self) -> None:
        """Average the masters of local SGD replicas."""

    def publish(self) -> None:
        """Copy the masters, which an update has changed, into the parameters that the stage reads."""


def _add(param: nn.Parameter, gradient: Tensor) -> None:
    param.grad = gradient if param.grad is None else param.grad.add_(gradient)


def alike(layout: Layout, zero_axes: Sequence[str], world: World) -> tuple[str, ...]:
    """The axes on which neither the parameter nor ZeRO shards a master copy: their ranks all have the same values."""
    spread = {axis for axis, _ in layout.sharded}.union(zero_axes)
    return tuple(axis for axis in world.coordinates if axis not in spread)


def set_parameter(module: nn.Module, name: str, param: nn.Parameter) -> None:
    """Make ``param`` the module's parameter ``name``, which may be one of an inner module."""
    path, _, leaf = name.rpartition(".")
    setattr(module.get_submodule(path), leaf, param)
