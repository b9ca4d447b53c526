"""Train the program in this folder: ``torchrun --nproc-per-node N train.py --steps 50 --data data.pt``.

Yours to edit. ``--data`` is a file of ``torch.save({"input_ids": tensor, ...})`` whose tensors hold examples along dim 0; a step takes the
next ``global_batch`` of them, from the start again at the end. ``--data synthetic`` makes some up, of the right shapes.
Standard output has one JSON object a step, standard error says the same to people.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.program.runtime import Trainer, load, start

FOLDER = Path(__file__).resolve().parent


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--data", default="synthetic", help="a file, or 'synthetic'")
    parser.add_argument("--lr", type=float, default=3e-4, help="learning rate of AdamW")
    parser.add_argument("--clip", type=float, help="largest 2-norm of the gradients")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--init", help="a torch.save of the model's state dict to start from")
    parser.add_argument("--save", help="where to save the state dict at the end")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: GPUs if there is one for every process")
    parser.add_argument("--timeout", type=float, default=600, help="seconds after which a collective gives up")
    return parser.parse_args()


def batches(data: str, rows: int) -> Iterator[dict[str, Tensor]]:
    """Global batches of ``rows`` examples for ever, the same on every rank."""
    tensors: dict[str, Tensor] = torch.load(data, weights_only=True, mmap=True)
    count = min(len(tensor) for tensor in tensors.values())
    if count < rows:
        raise SystemExit(f"{data} holds {count} examples, and one global batch takes {rows}")
    while True:
        for first in range(0, count - rows + 1, rows):
            yield {name: tensor[first : first + rows] for name, tensor in tensors.items()}


def synthetic(shapes: dict[str, tuple[tuple[int, ...], str]], seed: int) -> Iterator[dict[str, Tensor]]:
    """Normal numbers, and integers that are 0 or 1: such are tokens and labels of any vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        batch = {}
        for name, (shape, dtype) in shapes.items():
            kind = getattr(torch, dtype)
            random = torch.randn(shape, generator=generator)
            batch[name] = random.to(kind) if kind.is_floating_point else (random > 0).to(kind)
        yield batch


def main() -> None:
    args = arguments()
    program = load(FOLDER)
    world = start(program, device=args.device, timeout_s=args.timeout)
    state = torch.load(args.init, weights_only=True, mmap=True) if args.init else None
    trainer = Trainer(
        program,
        world,
        optimizer=lambda params: torch.optim.AdamW(params, lr=args.lr),
        state=state,
        seed=args.seed,
        max_norm=args.clip,
    )
    if args.data == "synthetic":
        data = synthetic(
            {name: shape for stage in program.model.STAGES for name, shape in stage.SHAPES.items()}, args.seed
        )
    else:
        data = batches(args.data, int(program.plan["global_batch"]))
    for step in range(args.steps):
        began = time.perf_counter()
        loss = trainer.step(next(data))
        seconds = time.perf_counter() - began
        if dist.get_rank() == 0:
            print(json.dumps({"step": step, "loss": loss, "step_time_s": seconds}), flush=True)
            print(f"step {step:4d}  loss {loss:.4f}  {seconds:.3f} s", file=sys.stderr, flush=True)
    if args.save:
        state = trainer.state_dict()
        if dist.get_rank() == 0:
            torch.save(state, args.save)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    # all is said and saved; taking gloo's threads down with the interpreter has aborted one exit in thirty on a busy machine
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
