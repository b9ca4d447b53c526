"""The tensors that the optimizer owns, and what every group of parameters can do."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

from .state_places import Offloaded
from .world import Layout, World


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


class ParameterGroup(Protocol):
    """Parameters of one layer of a stage that are kept alike; ``frozen`` are masters of those that are not trained.

    ``FlatGroup`` (``parameters``) is the usual one; ``LocalGroup`` and ``ShardedGroup`` (``fsdp``) are others.
    """

    layouts: tuple[Layout, ...]
    masters: list[Master]
    frozen: list[Master]

    @property
    def shared(self) -> str | None:
        """The key of tied copies in several stages."""

    def load(self, source: Callable[[Layout], Tensor]) -> None:
        """Set the parameters to this rank's slices of the originals from ``source``."""

    def zero_grad(self) -> None:
        """Before a step: forget the last one's gradients."""

    def finish_reduction(self) -> None:
        """After a step: give the masters their gradients."""

    def own_gradients(self) -> list[Tensor]:
        """The gradients that this rank's masters read, after the reduction."""

    def adders(self) -> Mapping[int, Callable[[Tensor], None]]:
        """By the identity of each trainable parameter that the stage reads: the function that adds a microbatch's gradient, for gradients
        that autograd does not compute."""

    def finish_adding(self) -> None:
        """Wait for what the adders have started."""

    def average(self) -> None:
        """Average the masters of replicas that train apart."""

    def upload(self) -> None:
        """Give the device the values of masters that are offloaded, after anything but an update set them."""

    def publish(self) -> None:
        """After the optimizer's update: copy the masters into the parameters that the stage reads."""

    def values(self) -> dict[str, Tensor]:
        """This rank's whole slice of every parameter, by its name in the stage."""

    def gradients(self) -> dict[str, Tensor]:
        """This rank's whole slice of every trainable parameter's gradient, by its name in the stage."""


def alike(layout: Layout, zero_axes: Sequence[str], world: World) -> tuple[str, ...]:
    """The axes on which neither the parameter nor ZeRO shards a master copy: their ranks all have the same values."""
    spread = {axis for axis, _ in layout.sharded}.union(zero_axes)
    return tuple(axis for axis in world.coordinates if axis not in spread)


def set_parameter(module: nn.Module, name: str, param: nn.Parameter) -> None:
    """Make ``param`` the module's parameter ``name``, which may be one of an inner module."""
    path, _, leaf = name.rpartition(".")
    setattr(module.get_submodule(path), leaf, param)
