"""Train the program in this folder: ``torchrun --nproc-per-node N train.py --steps 50 --data data.pt``.

Yours to edit. Training starts from ``initial.pt``, the values of the model that was compiled, or from ``--init FILE``. ``--data`` is a
file of ``torch.save({"input_ids": tensor, ...})`` whose tensors hold examples along dim 0; a step takes the next ``global_batch`` of them,
from the start again at the end. ``--data synthetic`` makes some up, of the right shapes.
Standard output has one JSON object a step, standard error says the same to people. In float16 it has the loss scale of the next step.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.program.runtime import Trainer, adamw, initial, load, read_state, start, wrong_state

FOLDER = Path(__file__).resolve().parent


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--data", default="synthetic", help="a file, or 'synthetic'")
    parser.add_argument("--lr", type=rate, default=3e-4, help="learning rate of AdamW")
    parser.add_argument("--clip", type=norm, help="largest 2-norm of the gradients")
    parser.add_argument("--seed", type=int, default=0)
    start = parser.add_mutually_exclusive_group()
    start.add_argument(
        "--init", help="a torch.save of the model's state dict to start from; default: initial.pt of this folder"
    )
    start.add_argument(
        "--draw-init",
        action="store_true",
        help="start from drawn values instead: matrices N(0, 0.02), vectors named ...weight ones, all others zeros",
    )
    parser.add_argument("--save", help="where to save the state dict at the end")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: GPUs if there is one for every process")
    parser.add_argument("--timeout", type=float, default=600, help="seconds after which a collective gives up")
    return parser.parse_args()


def rate(text: str) -> float:
    """A learning rate: not negative."""
    if not 0 <= float(text) < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is no learning rate: it is a number from 0 up")
    return float(text)


def norm(text: str) -> float:
    """The largest norm of gradients: above 0."""
    if not float(text) > 0:
        raise argparse.ArgumentTypeError(f"{text} is no norm to clip to: it is a number above 0")
    return float(text)


def batches(data: str, rows: int) -> Iterator[dict[str, Tensor]]:
    """Global batches of ``rows`` examples without end, the same on every rank."""
    tensors: dict[str, Tensor] = torch.load(data, weights_only=True, mmap=True)
    count = min(len(tensor) for tensor in tensors.values())
    if count < rows:
        raise SystemExit(f"{data} holds {count} examples, and one global batch takes {rows}")
    while True:
        for first in range(0, count - rows + 1, rows):
            yield {name: tensor[first : first + rows] for name, tensor in tensors.items()}


def synthetic(shapes: dict[str, tuple[tuple[int, ...], str]], seed: int) -> Iterator[dict[str, Tensor]]:
    """Normal numbers, and integers that are 0 or 1, which are valid tokens and labels for any vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        batch = {}
        for name, (shape, dtype) in shapes.items():
            kind = getattr(torch, dtype)
            random = torch.randn(shape, generator=generator)
            batch[name] = random.to(kind) if kind.is_floating_point else (random > 0).to(kind)
        yield batch


def start_values(args: argparse.Namespace, records: Mapping[str, Any]) -> dict[str, Tensor] | None:
    """The state dict to start from; ``None`` if the values are drawn at random."""
    if args.draw_init:
        if os.environ.get("RANK", "0") == "0":
            print("starts from drawn values, not from those of a model (--draw-init)", file=sys.stderr, flush=True)
        return None
    state = read_state(args.init) if args.init else initial(FOLDER)
    if state is None:
        raise SystemExit(
            f"{FOLDER} has no initial.pt: the model that it was made of had no values; start with --init FILE, a torch.save of the "
            "model's state dict, or with --draw-init to draw values"
        )
    if wrong := wrong_state(records, state):
        raise SystemExit(f"{args.init or 'initial.pt'} is no state dict of the model that was compiled: {wrong}")
    return state


def main() -> None:
    args = arguments()
    program = load(FOLDER)
    state = start_values(args, program.records)
    world = start(program, device=args.device, timeout_s=args.timeout)
    trainer = Trainer(
        program,
        world,
        optimizer=lambda params: adamw(params, args.lr, world),
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
            scale = {} if trainer.loss_scale is None else {"loss_scale": trainer.loss_scale.scale}
            print(json.dumps({"step": step, "loss": loss, "step_time_s": seconds, **scale}), flush=True)
            print(f"step {step:4d}  loss {loss:.4f}  {seconds:.3f} s", file=sys.stderr, flush=True)
    if args.save:
        state = trainer.state_dict()
        if dist.get_rank() == 0:
            torch.save(state, args.save)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    # all output is written and saved; normal interpreter shutdown with gloo's threads aborted one exit in thirty on a busy machine
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
