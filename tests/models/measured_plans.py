"""Models and hand-made plans for the programs that hold predictions against measurements (``measured_memory``, ``measured_time``)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  torch's own convention
from torch import Tensor, nn

from autopar.bench.models import MODELS, BenchModel, _decoder, _wide
from autopar.verify import PlanKind, kind


class Classifier(nn.Module):
    """A post-norm encoder as PyTorch ships it, with learned positions, over the tokens of a text."""

    def __init__(self, width: int, layers: int, length: int, vocabulary: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Parameter(torch.zeros(length, width))
        blocks = [nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, "gelu", batch_first=True) for _ in range(layers)]
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(width, 16)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


def _classifier() -> BenchModel:
    rows, length, vocabulary = 16, 64, 512

    def batch(seed: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(0, vocabulary, (rows, length), generator=generator)
        return ids, torch.randint(0, 16, (rows,), generator=generator)

    build: Any = lambda: Classifier(128, 4, length, vocabulary)  # noqa: E731  a Subject wants a function
    return BenchModel("encoder", build, batch, F.cross_entropy, rows, rows * length, 4)


SMALL: dict[str, BenchModel] = {
    "decoder": _decoder("decoder", width=128, layers=4, length=128, rows=16, vocabulary=512),
    "encoder": _classifier(),
    "wide-mlp": _wide("wide-mlp", width=128, inner=2048, layers=4, rows=64),
}
"""For memory: small, because bytes do not depend on how busy the machine is."""
LARGE: dict[str, BenchModel] = {name: MODELS[name] for name in ("llama", "wide-mlp")}
"""For time: a step takes a tenth of a second or more, so that arithmetic and communication count."""


def memory_kinds() -> tuple[PlanKind, ...]:
    """Each way to parallelize and their mixtures, on 1, 2 and 4 processes."""
    return (
        kind("one device"),
        kind("one device, 4 microbatches", microbatches=4),
        kind("one device, recompute", recompute=True),
        *(kind(f"data 2, ZeRO {z}", data=2, zero=z) for z in range(4)),
        kind("data 2, ZeRO 3, recompute, 2 microbatches", data=2, zero=3, recompute=True, microbatches=2),
        kind("tensor 2", tensor=2),
        kind("tensor 2, sequence", tensor=2, sequence=True),
        kind("pipeline 2, 4 microbatches", pipeline=2, microbatches=4),
        kind("pipeline 2, gpipe, recompute", pipeline=2, microbatches=4, schedule="gpipe", recompute=True),
        kind("pipeline 2 of 2 chunks, 4 microbatches", pipeline=2, chunks=2, microbatches=4),
        kind("one device, segments of 2", segment=2),
        kind("one device, logits in slices", logits="sliced"),
        kind("tensor 2, sequence, logits in slices", tensor=2, sequence=True, logits="sliced"),
        kind("pipeline 2, logits in slices, 4 microbatches", pipeline=2, microbatches=4, logits="sliced"),
        kind("data 2, ZeRO 3, segments of 2, 2 microbatches", data=2, zero=3, segment=2, microbatches=2),
        kind("one device, recompute in part", recompute="selective"),
        kind("tensor 2, sequence, recompute in part", tensor=2, sequence=True, recompute="selective"),
        kind("data 2, ZeRO 3, recompute in part", data=2, zero=3, recompute="selective", microbatches=2),
        *(
            kind(f"data 2, ZeRO {z}, reduced once a step", data=2, zero=z, reduce="step", microbatches=4)
            for z in (2, 3)
        ),
        kind("data 2, ZeRO 3, gathered 2 layers ahead", data=2, zero=3, prefetch=2),
        kind("data 2, parameter server", data=2, sync="parameter-server"),
        kind("data 2, local steps", data=2, sync="local-steps:1", allow=("local_steps",), microbatches=2),
        kind("data 4, ZeRO 1", data=4, zero=1),
        kind("data 4, ZeRO 3", data=4, zero=3),
        kind("data 2 x tensor 2", data=2, tensor=2),
        kind("data 2 x tensor 2, ZeRO 3", data=2, tensor=2, zero=3),
        kind(
            "pipeline 2 x data 2, ZeRO 3, recompute, reduced once a step",
            pipeline=2,
            data=2,
            zero=3,
            recompute=True,
            reduce="step",
            microbatches=4,
        ),
        kind("pipeline 2 x data 2, ZeRO 1", pipeline=2, data=2, zero=1, microbatches=4),
        kind("pipeline 2 x tensor 2, 4 microbatches", pipeline=2, tensor=2, microbatches=4),
        kind("pipeline 4, 4 microbatches", pipeline=4, microbatches=4),
        kind("pipeline 2, zero bubble, 8 microbatches", pipeline=2, microbatches=8, schedule="zero-bubble"),
        kind("pipeline 4, zero bubble, 8 microbatches", pipeline=4, microbatches=8, schedule="zero-bubble"),
        kind("pipeline 2, ZBV, 4 microbatches", pipeline=2, chunks=2, microbatches=4, schedule="zbv"),
        kind(
            "pipeline 3 of 2 chunks, zero bubble, 8 microbatches",
            pipeline=3,
            chunks=2,
            microbatches=8,
            schedule="zero-bubble",
        ),
        *(
            kind(
                f"pipeline 2 of 2 chunks, {name}, 16 microbatches", pipeline=2, chunks=2, microbatches=16, schedule=name
            )
            for name in ("interleaved-1f1b", "zbv", "dualpipev")
        ),
        kind(
            "pipeline 2, zero bubble, recompute, 8 microbatches",
            pipeline=2,
            microbatches=8,
            schedule="zero-bubble",
            recompute=True,
        ),
        kind(
            "pipeline 2 x data 2, DualPipeV, ZeRO 3",
            pipeline=2,
            chunks=2,
            data=2,
            zero=3,
            microbatches=4,
            schedule="dualpipev",
        ),
        kind("pipeline 2 x data 2, ZBV, ZeRO 2", pipeline=2, chunks=2, data=2, zero=2, microbatches=4, schedule="zbv"),
        kind("pipeline 2, Chimera, 4 microbatches", pipeline=2, microbatches=4, schedule="chimera"),
        kind("pipeline 4, Chimera, 8 microbatches", pipeline=4, microbatches=8, schedule="chimera"),
        kind("pipeline 2 x data 2, Chimera, ZeRO 1", pipeline=2, data=2, zero=1, microbatches=4, schedule="chimera"),
        kind("pipeline 2 x data 2, Chimera, ZeRO 3", pipeline=2, data=2, zero=3, microbatches=4, schedule="chimera"),
        kind("one device, compiled", compile="layers"),
        kind("one device, compiled, recompute, 2 microbatches", compile="layers", recompute=True, microbatches=2),
        kind("data 2, ZeRO 3, compiled", data=2, zero=3, compile="layers"),
        kind("tensor 2, sequence, compiled", tensor=2, sequence=True, compile="layers"),
    )


def time_kinds(processes: int) -> tuple[PlanKind, ...]:
    """Plans that a person would try on so many processes."""
    two = (
        *(kind(f"data 2, ZeRO {z}", data=2, zero=z) for z in range(4)),
        kind("data 2, 4 microbatches", data=2, microbatches=4),
        kind("data 2, ZeRO 3, 4 microbatches", data=2, zero=3, microbatches=4),
        kind("data 2, recompute", data=2, recompute=True),
        kind("tensor 2", tensor=2),
        kind("tensor 2, sequence", tensor=2, sequence=True),
        kind("tensor 2, 4 microbatches", tensor=2, microbatches=4),
        kind("pipeline 2, 2 microbatches", pipeline=2, microbatches=2),
        kind("pipeline 2, 4 microbatches", pipeline=2, microbatches=4),
        kind("pipeline 2, 8 microbatches", pipeline=2, microbatches=8),
        kind("pipeline 2, gpipe, 4 microbatches", pipeline=2, microbatches=4, schedule="gpipe"),
        kind("pipeline 2, recompute, 4 microbatches", pipeline=2, microbatches=4, recompute=True),
        kind("tensor 2, recompute", tensor=2, recompute=True),
    )
    four = (
        *(kind(f"data 4, ZeRO {z}", data=4, zero=z) for z in range(4)),
        kind("data 4, 2 microbatches", data=4, microbatches=2),
        kind("tensor 4", tensor=4),
        kind("tensor 4, 2 microbatches", tensor=4, microbatches=2),
        kind("pipeline 4, 4 microbatches", pipeline=4, microbatches=4),
        kind("pipeline 4, 8 microbatches", pipeline=4, microbatches=8),
        kind("data 2 x tensor 2", data=2, tensor=2),
        kind("data 2 x tensor 2, ZeRO 1", data=2, tensor=2, zero=1),
        kind("data 2 x tensor 2, ZeRO 3", data=2, tensor=2, zero=3),
        kind("pipeline 2 x data 2, 4 microbatches", pipeline=2, data=2, microbatches=4),
        kind("pipeline 2 x data 2, ZeRO 1, 2 microbatches", pipeline=2, data=2, zero=1, microbatches=2),
        kind("pipeline 2 x tensor 2, 2 microbatches", pipeline=2, tensor=2, microbatches=2),
        kind("pipeline 2 x tensor 2, 8 microbatches", pipeline=2, tensor=2, microbatches=8),
    )
    return {2: two, 4: four}[processes]
