"""The result of the op-level optimum, for the cost model and the passes.

An ``AxisTypes`` has, for a layer class and an axis in a role, the type of every value and of every operand. It doesn't depend on the axis's
size or name, so that it serves every mesh. A layer's ``Sharding`` assigns an ``AxisTypes`` to each mesh axis; local shapes follow from all
of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from autopar.plan import Axis, Role
from autopar.types import SpmdType


@dataclass(frozen=True)
class AxisTypes:
    """The solution of an axis for a layer class.

    ``produced[node]`` is the type of the node's value as its op produces it (a placeholder's: as it enters the layer).
    ``needed[node][i]`` is the type in which the node reads its i-th tensor operand (``ops.operands.operands(node)`` order); if it differs
    from the produced type, a conversion stands between. ``outputs[i]`` is the type of the layer's i-th output after its last
    conversion; the new values of buffers follow. ``letter[node]`` is the letter of its rule that the axis shards (absent: none),
    ``kernel[node]`` the kernel that replaces its op. Values without gradient never have type ``I``: ``R`` means the same for them.
    ``cost_s`` is the optimum's objective.
    """

    role: Role
    produced: dict[str, SpmdType]
    needed: dict[str, tuple[SpmdType, ...]]
    outputs: tuple[SpmdType, ...]
    letter: dict[str, str]
    kernel: dict[str, str]
    cost_s: float


def local_shape(shape: tuple[int, ...], axes: Iterable[Axis], types: Iterable[SpmdType]) -> tuple[int, ...]:
    """One rank's shape of a tensor of global ``shape`` that has ``types[i]`` on ``axes[i]``."""
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
        """The node's type on each axis, as its op produces it."""
        return tuple(types.produced[node] for types in self.types)

    def needed(self, node: str, operand: int) -> tuple[SpmdType, ...]:
        """The type on each axis in which the node reads its ``operand``-th tensor operand."""
        return tuple(types.needed[node][operand] for types in self.types)

    def output(self, index: int) -> tuple[SpmdType, ...]:
        """The type on each axis of the layer's ``index``-th output."""
        return tuple(types.outputs[index] for types in self.types)

    def local_shape(self, node: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape on one rank of the value that ``node`` produces."""
        return local_shape(shape, self.axes, self.produced(node))
