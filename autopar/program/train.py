"""Train the program in this folder: ``torchrun --nproc-per-node N train.py --steps 50 --data data.pt``.

Yours to edit. Training starts from ``initial.pt``, the values of the model that was compiled, or from ``--init FILE``. ``--data`` is a
file of ``torch.save({"input_ids": tensor, ...})`` whose tensors hold examples along dim 0; a step takes the next ``global_batch`` of them,
from the start again at the end. ``--data synthetic`` makes some up, of the right shapes.
``--checkpoint DIR --every 100`` writes checkpoints, and ``--resume`` goes on from the newest one, under this plan or any other.
Standard output has one JSON object a step, standard error says the same to people. In float16 it has the loss scale of the next step.
"""

from __future__ import annotations

import argparse
import itertools
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

from autopar.program.runtime import (
    CheckpointError,
    Trainer,
    adamw,
    has_checkpoint,
    initial,
    load,
    read_state,
    start,
    wrong_state,
)
from autopar.program.weights import is_weights

FOLDER = Path(__file__).resolve().parent


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10, help="the steps of the whole training, resumed ones included")
    parser.add_argument("--data", default="synthetic", help="a file, or 'synthetic'")
    parser.add_argument("--lr", type=rate, default=3e-4, help="learning rate of AdamW")
    parser.add_argument("--clip", type=norm, help="largest 2-norm of the gradients")
    parser.add_argument("--seed", type=int, default=0)
    start = parser.add_mutually_exclusive_group()
    start.add_argument(
        "--init",
        help="a torch.save of the model's state dict, or a file or folder of safetensors, to start from; default: this folder's initial.pt",
    )
    start.add_argument(
        "--draw-init",
        action="store_true",
        help="start from drawn values instead: matrices N(0, 0.02), vectors named ...weight ones, all others zeros",
    )
    parser.add_argument("--save", help="where to save the state dict at the end")
    parser.add_argument("--save-weights", metavar="DIR", help="a new folder for the weights as safetensors at the end")
    parser.add_argument("--checkpoint", metavar="DIR", help="a folder for checkpoints, which all machines share")
    parser.add_argument("--every", type=count, metavar="N", help="steps from one checkpoint to the next; default: 100")
    parser.add_argument("--keep", type=count, metavar="K", help="how many checkpoints stay; default: 2")
    parser.add_argument("--async-save", action="store_true", help="write checkpoints while the training goes on")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint, if there is one")
    parser.add_argument("--trace", metavar="FILE", help="write what the second step did, a trace for ui.perfetto.dev")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: GPUs if there is one for every process")
    parser.add_argument("--timeout", type=float, default=600, help="seconds after which a collective gives up")
    args = parser.parse_args()
    for option in ("resume", "every", "keep", "async_save"):
        if getattr(args, option) and not args.checkpoint:
            parser.error(f"--{option.replace('_', '-')} takes --checkpoint DIR, the folder of the checkpoints")
    args.every, args.keep = args.every or 100, args.keep or 2
    return args


def count(text: str) -> int:
    """A number from 1 up."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is too few: it is a number from 1 up")
    return int(text)


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


def start_values(args: argparse.Namespace, records: Mapping[str, Any]) -> dict[str, Tensor] | str | None:
    """The state dict to start from, or the path of weights; ``None`` if the values are drawn at random."""
    if args.draw_init:
        if os.environ.get("RANK", "0") == "0":
            print("starts from drawn values, not from those of a model (--draw-init)", file=sys.stderr, flush=True)
        return None
    if args.init and is_weights(Path(args.init)):
        return str(args.init)
    state = read_state(args.init) if args.init else initial(FOLDER)
    if state is None:
        raise SystemExit(
            f"{FOLDER} has no initial.pt: the model that it was made of had no values; start with --init FILE, a torch.save of the "
            "model's state dict, or with --draw-init to draw values"
        )
    if wrong := wrong_state(records, state):
        raise SystemExit(f"{args.init or 'initial.pt'} is no state dict of the model that was compiled: {wrong}")
    return state


def open_trainer(args: argparse.Namespace) -> Trainer:
    """The trainer, at the start or where the newest checkpoint ends."""
    program = load(FOLDER)
    if args.save_weights and (program.local_steps or Path(args.save_weights).exists()):
        why = "replicas have weights of their own under local steps" if program.local_steps else "it exists"
        raise SystemExit(f"--save-weights {args.save_weights}: {why}; use --save, or the name of a new folder")
    state = None if args.resume else start_values(args, program.records)
    world = start(program, device=args.device, timeout_s=args.timeout)
    if args.checkpoint and not args.resume and has_checkpoint(args.checkpoint):
        raise SystemExit(
            f"{args.checkpoint} has checkpoints of another training, which this one would replace; add --resume to go on with it, or give "
            "another folder"
        )
    resume = args.checkpoint if args.resume and has_checkpoint(args.checkpoint) else None
    if args.resume and resume is None:
        state = start_values(args, program.records)
        say(f"{args.checkpoint} has no checkpoint: the training starts from the beginning")
    trainer = Trainer(
        program,
        world,
        optimizer=lambda params: adamw(params, args.lr, world),
        state=state,
        seed=args.seed,
        max_norm=args.clip,
        resume=resume,
    )
    if resume is not None:
        say(f"goes on at step {trainer.steps}, with the optimizer's options from the checkpoint")
    return trainer


def say(message: str) -> None:
    """Print a message once, to people."""
    if dist.get_rank() == 0:
        print(message, file=sys.stderr, flush=True)


def save(trainer: Trainer, args: argparse.Namespace) -> None:
    """Write a checkpoint, once the one before is written. Where that fails the training goes on, unless it is over."""
    over, failed = trainer.steps == args.steps, False
    wait = over or not args.async_save
    for work in (
        trainer.finish_saving,
        lambda: say(f"checkpoint {trainer.save(args.checkpoint, keep=args.keep, wait=wait)}"),
    ):
        try:
            work()
            failed = False
        except CheckpointError as error:
            say(f"no checkpoint: {error}")
            failed = True
    if over and failed:
        raise SystemExit(1)


def main() -> None:
    args = arguments()
    trainer = open_trainer(args)
    program = trainer.program
    rows = int(program.plan["global_batch"])
    if args.data == "synthetic":
        shapes = {name: shape for stage in program.model.STAGES for name, shape in stage.SHAPES.items()}
        data = synthetic(shapes, args.seed)
    else:
        data = batches(args.data, rows)
    data = itertools.islice(data, trainer.rows // rows, None)
    traced = min(trainer.steps + 1, args.steps - 1) if args.trace else None  # the first step is slower than the rest
    for step in range(trainer.steps, args.steps):
        began = time.perf_counter()
        loss = trainer.trace(next(data), args.trace) if step == traced else trainer.step(next(data))
        seconds = time.perf_counter() - began
        if dist.get_rank() == 0:
            scale = {} if trainer.loss_scale is None else {"loss_scale": trainer.loss_scale.scale}
            print(json.dumps({"step": step, "loss": loss, "step_time_s": seconds, **scale}), flush=True)
        say(f"step {step:4d}  loss {loss:.4f}  {seconds:.3f} s")
        if args.checkpoint and (trainer.steps % args.every == 0 or trainer.steps == args.steps):
            save(trainer, args)
    if args.save:
        state = trainer.state_dict()
        if dist.get_rank() == 0:
            torch.save(state, args.save)
    if args.save_weights:
        trainer.save_weights(args.save_weights)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    # all output is written and saved; normal interpreter shutdown with gloo's threads aborted one exit in thirty on a busy machine
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
