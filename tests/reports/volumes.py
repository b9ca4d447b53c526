"""Communication volumes per layer, as emitted, against the published formulas (``make report NAME=volumes``).

The numbers are counted on the local graphs that the emitter writes down (``autopar.checks.collectives.exchanges``): what one device sends
for one block, forward and backward, in elements. Nothing is run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

import torch
from places import EVIDENCE
from torch import Tensor, nn

from autopar.capture import capture
from autopar.checks.collectives import IssuedCollective, check_collectives, exchanges
from autopar.graph import Graph
from autopar.plan import Axis
from autopar.search.manual import grid_mesh, make_mesh, manual_plan
from autopar.shard import annotate, plan_shardings
from passes.stages import cut_stages

B, SEQ, H, HEADS = 4, 4096, 1024, 16  # batch, sequence, hidden size, heads
BSH, HH = B * SEQ * H, H * H
PAGE = EVIDENCE / "volumes.md"


class Block(nn.Module):
    """The papers' transformer layer: attention and an MLP of four times the width, without biases."""

    def __init__(self) -> None:
        super().__init__()
        self.before_attention, self.before_mlp = nn.LayerNorm(H), nn.LayerNorm(H)
        self.query, self.key, self.value, self.out = (nn.Linear(H, H, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(H, 4 * H, bias=False), nn.Linear(4 * H, H, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.before_attention(x)
        q, k, v = (f(y).view(B, SEQ, HEADS, H // HEADS).transpose(1, 2) for f in (self.query, self.key, self.value))
        y = nn.functional.scaled_dot_product_attention(q, k, v)
        x = x + self.out(y.transpose(1, 2).reshape(B, SEQ, H))
        return x + self.down(nn.functional.gelu(self.up(self.before_mlp(x))))


class Pair(nn.Module):
    """The two products of an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(H, 4 * H, bias=False), nn.Linear(4 * H, H, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


@functools.cache
def captured(block: type[nn.Module]) -> Graph:
    """Three blocks and a mean squared error, on the meta device."""
    with torch.device("meta"):
        model = nn.Sequential(*(block() for _ in range(3)))
        batch = torch.empty(B, SEQ, H), torch.empty(B, SEQ, H)
    return annotate(capture(model, batch, nn.functional.mse_loss, name=block.__name__))


@dataclass(frozen=True)
class Way:
    """One way to parallelize: its mesh, what it moves by the papers (elements that a device sends, forward and backward), and why."""

    name: str
    source: str
    block: type[nn.Module]
    mesh: tuple[Axis, ...]
    formula: str
    published: Callable[[int], tuple[Fraction, Fraction]]
    n: int
    sequence: bool = False
    backward: str = ""


def ring(n: int) -> Fraction:
    """The share of a tensor that a device passes on in a ring all-gather or reduce-scatter."""
    return Fraction(n - 1, n)


WAYS = (
    Way(
        "1D (Megatron)",
        "Shoeybi et al. 2019, Megatron-LM",
        Block,
        make_mesh(("tensor", 4)),
        "2 all-reduces of bsh: 4 (n-1)/n bsh",
        lambda n: (4 * ring(n) * BSH, 4 * ring(n) * BSH),
        4,
    ),
    Way(
        "1D with sequence (Megatron-SP)",
        "Korthikanti et al. 2022, Reducing Activation Recomputation",
        Block,
        make_mesh(("tensor", 4)),
        "2 all-gathers and 2 reduce-scatters of bsh: 4 (n-1)/n bsh",
        lambda n: (4 * ring(n) * BSH, 4 * ring(n) * BSH),
        4,
        sequence=True,
    ),
    Way(
        "Ulysses",
        "Jacobs et al. 2023, DeepSpeed Ulysses",
        Block,
        make_mesh(("ulysses", 4)),
        "4 all-to-alls of bsh/n: 4 (n-1)/n bsh/n",
        lambda n: (4 * ring(n) * BSH / n, 4 * ring(n) * BSH / n),
        4,
    ),
    Way(
        "ring attention",
        "Liu et al. 2023, Ring Attention",
        Block,
        make_mesh(("ring", 4)),
        "keys and values go round: 2 (n-1)/n bsh",
        lambda n: (2 * ring(n) * BSH, 4 * ring(n) * BSH + Fraction(2 * BSH, n)),
        4,
        backward="keys, values and their gradients go round, and the gradients one hop home: 4 (n-1)/n bsh + 2 bsh/n",
    ),
    Way(
        "2D",
        "Xu et al. 2021, An Efficient 2D Method (SUMMA)",
        Block,
        grid_mesh(2, 2),
        "panels of 7 bsh + 12 h^2, of which a device has 1/q: (n-1)/n (7 bsh + 12 h^2)/n, n = q",
        lambda q: (ring(q) * (7 * BSH + 12 * HH) / q, ring(q) * (7 * BSH + 12 * HH) / q),
        2,
    ),
    Way(
        "2.5D, depth 2",
        "Wang et al. 2021, Tesseract",
        Block,
        grid_mesh(2, 2, 2),
        "as 2D on 1/d of the batch: (n-1)/n (7 bsh/d + 12 h^2)/n, n = q",
        lambda q: (ring(q) * (7 * BSH // 2 + 12 * HH) / q, ring(q) * (7 * BSH // 2 + 12 * HH) / q),
        2,
    ),
    Way(
        "3D, the two products of an MLP",
        "Bian et al. 2021, Maximizing Parallelism",
        Pair,
        grid_mesh(3, 2),
        "x, w and y of both products: (n-1)/n (bsh + 4 h^2 + 4 bsh)/n^2 twice, n = l",
        lambda l: (2 * ring(l) * (5 * BSH + 4 * HH) / l**2, 2 * ring(l) * (5 * BSH + 4 * HH) / l**2),  # noqa: E741
        2,
    ),
)


@dataclass(frozen=True)
class Volume:
    """Elements that a device sends for one block: forward, backward, and for the gradients of norms' parameters."""

    forward: Fraction
    backward: Fraction
    norms: Fraction
    collectives: int


def sent(one: IssuedCollective, sizes: dict[str, int]) -> Fraction:
    """Elements (of float32) that one device sends in a collective, by its bandwidth-optimal algorithm."""
    n = 1
    for axis in one.axes:
        n *= sizes[axis]
    share = {
        "all_reduce": 2 * ring(n),
        "all_gather": ring(n),
        "reduce_scatter": ring(n),
        "all_to_all": ring(n) / n,
        "rotate": ring(n),
        "shift": Fraction(1, n),
    }[one.collective]
    return share * one.bytes / 4


@functools.cache
def emitted(way: Way) -> Volume:
    """Of the middle block of three."""
    graph = captured(way.block)
    plan = manual_plan(graph, mesh=way.mesh, sequence=way.sequence, precision="float32")
    program = cut_stages(graph, plan, plan_shardings(graph, plan))
    check_collectives(program)
    block = next(
        layer for i, layer in enumerate(program.layers) if graph.layers[i].name == "1" or len(graph.layers) == 1
    )
    sizes = {axis.name: axis.size for axis in way.mesh}
    found = list(exchanges(block))
    norms = [one for one in found if one.value.startswith("before_")]
    rest = [one for one in found if one not in norms]
    return Volume(
        sum((sent(one, sizes) for one in rest if not one.backward), Fraction()),
        sum((sent(one, sizes) for one in rest if one.backward), Fraction()),
        sum((sent(one, sizes) for one in norms), Fraction()),
        len(rest),
    )


def page() -> str:
    """``docs/evidence/volumes.md``."""
    rows = []
    for way in WAYS:
        volume, (forward, backward) = emitted(way), way.published(way.n)
        formula = way.formula + (f"; backward: {way.backward}" if way.backward else ", and the same backward")
        mesh = " x ".join(f"{axis.name} {axis.size}" for axis in way.mesh)
        rows.append(
            f"| {way.name} | {mesh} | {_millions(volume.forward)} | {_millions(forward)} | {_millions(volume.backward)} "
            f"| {_millions(backward)} | {volume.collectives} | {formula} | {way.source} |"
        )
    table = "\n".join(rows)
    return f"""# Communication volumes

Millions of elements that one device sends for one layer, forward and backward, compared with published formulas. They are counted from the
collectives of the emitted graphs, with bandwidth-optimal algorithms: an all-gather or reduce-scatter sends (n-1)/n of the tensor, an
all-reduce twice that, an all-to-all (n-1)/n of a device's slice. The structural check compares the same collectives with the priced ones.

The layer is that of the papers: attention and an MLP of four times the width, no biases, not causal; b = {B}, s = {SEQ}, h = {H}, {HEADS}
heads.

| method | mesh | forward | by formula | backward | by formula | collectives | formula | source |
|---|---|---|---|---|---|---|---|---|
{table}

Differences from the papers:

- *2D, 2.5D*: panels are gathered once and kept for the backward pass, which only reduce-scatters gradients, so it sends as much as the
  forward pass. SUMMA broadcasts panels step by step, and again in the backward pass, which is more.
- *3D*: "rows" are the batch and the sequence: one axis shards the batch and gathers parameters, one shards the sequence. A full transformer
  layer has norms and attention between its matmuls, for which Bian et al. give no volume.
- *Ring attention*: with a causal mask, the balanced order moves each of q, k, v and the result one more time, bsh/n in each direction.
- The gradients of the norms' parameters (2h each) are counted neither here nor in the papers.

Made by `make report NAME=volumes`. Do not edit.
"""


def _millions(elements: Fraction) -> str:
    return f"{float(elements) / 1e6:.4f}"


if __name__ == "__main__":
    PAGE.write_text(page())
