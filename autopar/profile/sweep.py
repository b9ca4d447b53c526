"""Lists the measurements on a CPU or GPU, which together take less than two minutes.

Bytes and FLOPs of an op are counted as in ``autopar.price``, which looks them up in the measured curves. Forward reads an op's operands and
writes its result. Backward reads the result's gradient and the operands, and writes the gradients of operands that need one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class SweepSizes:
    """The measurements on one kind of device.

    ``products`` are (rows, contracted, columns), from skinny, memory-bound products to square ones; ``attentions`` are (batch, heads,
    length, head size). ``dtypes`` are measured with all products, ``reduced_dtypes`` only with those in the slice ``reduced_products``.
    """

    products: tuple[tuple[int, int, int], ...]
    reduced_products: slice
    dtypes: tuple[str, ...]
    reduced_dtypes: tuple[str, ...]
    attentions: tuple[tuple[int, int, int, int], ...]
    attention: str  # its dtype
    moved: tuple[int, ...]  # elements
    updated: tuple[int, ...]  # elements


SIZES = {
    "cpu": SweepSizes(
        products=(
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
        ),
        reduced_products=slice(6, 8),
        dtypes=("float32", "bfloat16"),
        reduced_dtypes=("float64",),
        attentions=((4, 4, 64, 64), (4, 4, 256, 64), (2, 2, 1024, 64), (1, 2, 2048, 64)),
        attention="float32",
        moved=(1 << 13, 1 << 17, 1 << 20, 1 << 23),
        updated=(1 << 8, 1 << 14, 1 << 18, 1 << 22),
    ),
    # each op takes longer than its launch, which is measured separately
    "cuda": SweepSizes(
        products=(
            (16, 16384, 16384),
            (64, 16384, 16384),
            (256, 8192, 8192),
            (512, 8192, 8192),
            (1024, 8192, 8192),
            (2048, 4096, 4096),
            (4096, 4096, 4096),
            (16384, 768, 3072),
            (8192, 1024, 4096),
            (8192, 4096, 4096),
            (8192, 8192, 1024),
            (8192, 4096, 14336),
            (8192, 14336, 4096),
            (8192, 8192, 8192),
            (8192, 4096, 128256),
        ),
        reduced_products=slice(5, 7),
        dtypes=("bfloat16",),
        reduced_dtypes=("float32", "float64"),
        attentions=(
            (16, 16, 1024, 64),
            (4, 16, 4096, 64),
            (4, 32, 2048, 128),
            (1, 8, 8192, 128),
            (1, 32, 8192, 128),
            (1, 16, 16384, 128),
        ),
        attention="bfloat16",
        moved=(1 << 17, 1 << 20, 1 << 23, 1 << 26, 1 << 28),
        updated=(1 << 12, 1 << 18, 1 << 22, 1 << 25),
    ),
}
"""Device type -> measurements. A GPU reaches its peak rates only with operands that would take a CPU too long."""
# op -> bytes that it moves in forward and in backward, as multiples of its result's bytes; 0: not measured
MOVES: dict[str, tuple[int, int]] = {
    "pointwise": (3, 5),  # an elementwise product
    "add": (3, 0),
    "gelu": (2, 3),
    "silu": (2, 3),
    "softmax": (2, 3),
    "layer_norm": (2, 3),
    "rms_norm": (2, 3),
    "cat": (2, 3),
    "cross_entropy_loss": (1, 2),  # as multiples of the logits' bytes
}
WIRE_BYTES = (1 << 8, 1 << 14, 1 << 17, 1 << 19, 1 << 20, 1 << 22, 1 << 24)
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "flat reduce_scatter", "all_to_all")
SHARDED_WIDTHS = (64, 512, 1536)  # of the square weight of an FSDP module


@dataclass(frozen=True, slots=True)
class Task:
    """A measurement: every worker calls the function ``_FUNCTION`` of ``remote`` with ``arguments``."""

    function: str
    arguments: dict[str, Any] = field(default_factory=dict)

    @property
    def title(self) -> str:
        words = (str(value) for value in self.arguments.values() if not isinstance(value, bool))
        return f"{self.function} {' '.join(words)}"


def tasks(processes: int, device: str) -> list[Task]:
    """Return all measurements that ``processes`` workers make on devices of the type ``device`` ("cpu" or "cuda")."""
    return list(_tasks(processes, SIZES[device]))


def _tasks(processes: int, sizes: SweepSizes) -> Iterator[Task]:
    yield Task("launch")
    for dtype in (*sizes.dtypes, *sizes.reduced_dtypes):
        for shape in sizes.products if dtype in sizes.dtypes else sizes.products[sizes.reduced_products]:
            yield Task("product", {"dtype": dtype, "shape": list(shape)})
    for attention in sizes.attentions:
        yield Task("attention", {"dtype": sizes.attention, "shape": list(attention)})
    for kind in MOVES:
        for elements in sizes.moved:
            yield Task("move", {"kind": kind, "elements": elements})
    for elements in sizes.updated:
        yield Task("update", {"elements": elements})
    for members in range(2, processes + 1):
        if processes % members == 0:
            for name in COLLECTIVES:
                for size in WIRE_BYTES:
                    yield Task("wire", {"name": name, "members": members, "size": size})
            for width in SHARDED_WIDTHS:
                yield Task("sharded", {"members": members, "width": width})
            yield Task("straggler_wait", {"members": members})
    if processes % 2 == 0:  # there are groups of two; without these figures, prices of sends use the cluster's links
        for size in WIRE_BYTES:
            yield Task("wire", {"name": "p2p", "members": 2, "size": size})
    if processes > 1:
        yield Task("call", {"members": processes})
        yield Task("overlap", {"members": processes})
