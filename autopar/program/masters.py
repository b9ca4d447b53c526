"""The tensors that the optimizer owns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from autopar.program.state_places import Away
from autopar.program.world import Layout, World


@dataclass(frozen=True, slots=True)
class Master:
    """A tensor that the optimizer owns: this rank's slice of a parameter, or under ZeRO its piece of that slice.

    ``alike`` are the axes whose ranks all have the same values; ``first`` is the piece's first element in the slice. ``away`` is what the
    device has of a master that is not there itself.
    """

    layout: Layout
    tensor: nn.Parameter
    alike: tuple[str, ...]
    first: int = 0
    away: Away | None = None

    @property
    def holder(self) -> nn.Parameter:
        """The tensor on the device whose ``grad`` is the master's gradient."""
        return self.tensor if self.away is None else self.away.gradient

    @property
    def gradient(self) -> Tensor | None:
        """The gradient on the device."""
        return self.holder.grad


def alike(layout: Layout, zero_axes: Sequence[str], world: World) -> tuple[str, ...]:
    """The axes on which neither the parameter nor ZeRO shards a master copy: their ranks all have the same values."""
    spread = {axis for axis, _ in layout.sharded}.union(zero_axes)
    return tuple(axis for axis in world.coordinates if axis not in spread)


def set_parameter(module: nn.Module, name: str, param: nn.Parameter) -> None:
    """Make ``param`` the module's parameter ``name``, which may be one of an inner module."""
    path, _, leaf = name.rpartition(".")
    setattr(module.get_submodule(path), leaf, param)
