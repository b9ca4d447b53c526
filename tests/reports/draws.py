"""Seconds in which a rank draws its initial values, beside those in which it would draw whole tensors: Llama 405B in two stages.

python tests/reports draws
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from autopar.program.boxes import Box, Piece
from autopar.program.model_tensors import _fill

LAYERS = 63
TENSOR = 16
MATRICES = {  # of a layer: the shape, and the dim that tensor parallelism shards
    "q_proj": ((16384, 16384), 0),
    "k_proj": ((1024, 16384), 0),
    "v_proj": ((1024, 16384), 0),
    "o_proj": ((16384, 16384), 1),
    "gate_proj": ((53248, 16384), 0),
    "up_proj": ((53248, 16384), 0),
    "down_proj": ((16384, 53248), 1),
}


def seconds(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def own(data: int) -> None:
    """Draw the last rank's part of a layer, of which ZeRO shards the rows over ``data`` ranks."""
    for name, (shape, dim) in MATRICES.items():
        sizes = list(shape)
        sizes[dim] //= TENSOR
        offsets = [0, 0]
        offsets[dim] = shape[dim] - sizes[dim]
        rows = -(-sizes[0] // data)
        offsets[0] += sizes[0] - rows
        sizes[0] = rows
        box = Box((offsets[0], offsets[1]), (sizes[0], sizes[1]))
        _fill(Piece(("model", name), shape, box, torch.empty(sizes, dtype=torch.bfloat16)), seed=0)


def whole() -> None:
    """Draw whole matrices with torch's generator, as ranks did before."""
    for shape, _ in MATRICES.values():
        torch.empty(shape, dtype=torch.bfloat16).normal_(0, 0.02)


def main() -> None:
    torch.set_num_threads(1)
    print(f"processor seconds of one rank for {LAYERS} layers (one layer, times {LAYERS})")
    for data in (512, 8, 1):
        print(
            f"own rows, tensor {TENSOR}, ZeRO 3 over {data:3}: {LAYERS * seconds(lambda data=data: own(data)):8.1f} s"
        )
    print(f"whole matrices:                     {LAYERS * seconds(whole):8.1f} s")


if __name__ == "__main__":
    main()
