"""The list of measurements: shapes, sizes and kinds of op, small enough that all of them take less than two minutes.

Bytes and FLOPs of an op are counted as ``autopar.price`` counts them, because prices look them up in the measured curves. Forward reads
an op's operands and writes its result; backward reads the result's gradient and, for each operand, the operand and (where it has one)
its gradient.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

# (rows, contracted, columns): from a skinny product that reads its matrix once, bound by memory, to a square one
PRODUCTS = (
    (1, 1024, 1024),
    (4, 1024, 1024),
    (16, 512, 4096),
    (16, 4096, 512),
    (32, 512, 512),
    (64, 256, 1024),
    (128, 128, 128),
    (256, 512, 512),
    (512, 256, 688),
    (1024, 512, 512),
    (1024, 1024, 1024),
)
DTYPES = ("float32", "bfloat16", "float64")
ATTENTIONS = ((4, 4, 64, 64), (4, 4, 256, 64), (2, 2, 1024, 64), (1, 2, 2048, 64))  # batch, heads, length, head size
# By an op's name: the multiples of its result's bytes that it moves forward and backward.
MOVES: dict[str, tuple[int, int]] = {
    "pointwise": (3, 5),  # a product of two values
    "add": (3, 0),
    "gelu": (2, 3),
    "silu": (2, 3),
    "softmax": (2, 3),
    "layer_norm": (2, 3),
    "rms_norm": (2, 3),
    "cat": (2, 3),
    "cross_entropy_loss": (1, 2),  # of the logits
}
MOVE_ELEMENTS = (1 << 13, 1 << 17, 1 << 20, 1 << 23)
WIRE_BYTES = (1 << 8, 1 << 14, 1 << 17, 1 << 20, 1 << 22, 1 << 24)
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
SHARDED_WIDTHS = (64, 512, 1536)  # of a square matrix in one FSDP module
UPDATE_ELEMENTS = (1 << 8, 1 << 14, 1 << 18, 1 << 22)


@dataclass(frozen=True, slots=True)
class Task:
    """One measurement in the workers: ``function`` of ``remote``, with ``arguments``."""

    function: str
    arguments: dict[str, Any] = field(default_factory=dict)

    @property
    def title(self) -> str:
        words = (str(value) for value in self.arguments.values() if not isinstance(value, bool))
        return f"{self.function} {' '.join(words)}"


def tasks(processes: int) -> list[Task]:
    """All measurements while ``processes`` run."""
    return list(_tasks(processes))


def _tasks(processes: int) -> Iterator[Task]:
    yield Task("launch")
    for dtype in DTYPES:
        for shape in PRODUCTS if dtype != "float64" else PRODUCTS[6:8]:
            yield Task("product", {"dtype": dtype, "shape": list(shape)})
    for sizes in ATTENTIONS:
        yield Task("attention", {"dtype": "float32", "shape": list(sizes)})
    for kind in MOVES:
        for elements in MOVE_ELEMENTS:
            yield Task("move", {"kind": kind, "elements": elements})
    for elements in UPDATE_ELEMENTS:
        yield Task("update", {"elements": elements})
    for members in range(2, processes + 1):
        if processes % members == 0:
            for name in COLLECTIVES:
                for size in WIRE_BYTES:
                    yield Task("wire", {"name": name, "members": members, "size": size})
            for width in SHARDED_WIDTHS:
                yield Task("sharded", {"members": members, "width": width})
            yield Task("meeting", {"members": members})
    if processes > 1:
        for size in WIRE_BYTES:
            yield Task("wire", {"name": "p2p", "members": 2, "size": size})
        yield Task("call", {"members": processes})
        yield Task("overlap", {"members": processes})
