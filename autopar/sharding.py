"""The types of all values of a layer, as the op-level optimisation returns them for the cost model and the passes.

For a layer class and one axis in a role, an ``AxisTypes`` has the type of every value and of every operand. It depends neither on the
axis's size nor on its name, so that it applies to every mesh. A layer's ``Sharding`` assigns an ``AxisTypes`` to each mesh axis; these
determine local shapes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from autopar.plan import Axis, Role
from autopar.types import SpmdType


@dataclass(frozen=True)
class AxisTypes:
    """The solution of an axis for a layer class.

    ``produced[node]`` is the type of the value that the node's op produces (for a placeholder: of the value that enters the layer).
    ``needed[node][i]`` is the type that the op needs for its i-th tensor operand (in the order of ``ops.operands.operands(node)``); if it
    differs from the produced type, the value is converted. ``outputs[i]`` is the type of the layer's i-th output after its last conversion;
    the new values of buffers follow. ``letter[node]`` is the letter of the node's rule that the axis shards (missing if none),
    ``kernel[node]`` the kernel that replaces the node's op. Values without gradient never have type ``I``, because ``R`` means the same for
    them. ``cost_s`` is the objective at the optimum, in seconds.
    """

    role: Role
    produced: dict[str, SpmdType]
    needed: dict[str, tuple[SpmdType, ...]]
    outputs: tuple[SpmdType, ...]
    letter: dict[str, str]
    kernel: dict[str, str]
    cost_s: float


def local_shape(shape: tuple[int, ...], axes: Iterable[Axis], types: Iterable[SpmdType]) -> tuple[int, ...]:
    """Return one rank's shape of a tensor of global ``shape`` with type ``types[i]`` on ``axes[i]``."""
    local = list(shape)
    for axis, t in zip(axes, types, strict=True):
        if t.dim is not None:
            assert local[t.dim] % axis.size == 0, (shape, axis, str(t))
            local[t.dim] //= axis.size
    return tuple(local)


@dataclass(frozen=True)
class Sharding:
    """A layer class under a strategy: one ``AxisTypes`` per axis, the microbatch axis included as a separate data axis."""

    axes: tuple[Axis, ...]
    types: tuple[AxisTypes, ...]

    def produced(self, node: str) -> tuple[SpmdType, ...]:
        """Return the type on each axis of the value that the node's op produces."""
        return tuple(types.produced[node] for types in self.types)

    def needed(self, node: str, operand: int) -> tuple[SpmdType, ...]:
        """Return the type on each axis that the node's op needs for its ``operand``-th tensor operand."""
        return tuple(types.needed[node][operand] for types in self.types)

    def output(self, index: int) -> tuple[SpmdType, ...]:
        """Return the type on each axis of the layer's ``index``-th output."""
        return tuple(types.outputs[index] for types in self.types)
