"""Trains a program by its recipe, ``train.py``: the command line, the data, the steps, and what is saved.

Training starts from ``initial.safetensors``, the values of the compiled model, or from ``--init PATH``.
``--dataset`` is a file of ``torch.save({"input_ids": tensor, ...})`` whose tensors hold examples along dim 0, or ``MODULE:FUNCTION`` or
``FILE.py:FUNCTION``, a function that returns a map-style data set whose samples are dicts with these names, or have the structure of the
batch that the model was compiled with; a module is in this folder, in the working folder, or installed.
``--eval-data DATA --eval-every N`` prints the mean loss of held-out global batches, computed in evaluation mode.
A step takes the next ``global_batch`` rows; each rank reads its own. ``--dataset synthetic`` generates rows of the right shapes.
``--checkpoint DIR --every 100`` writes checkpoints, and ``--resume`` continues from the newest one, under this plan or any other.
Standard output gets one JSON object per step, standard error a readable line. Steps count from 1 and continue after a resume.
In float16 a JSON object has the loss scale of the next step.
With ``--log-every N`` only every N-th step gets these, and the first, the last of --steps, and the last before a checkpoint. The losses in
between are not all-reduced, and the host doesn't wait for the GPU: it queues the work of the next step, and checks all of these losses
when it reads the next one, and before every checkpoint.
If model.py or a module of the runtime was edited, the program is type-checked before the first step.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import math
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .expert_loads import Recorder
from .guards import GuardError
from .held_out import HeldOut
from .importing import resolve
from .loader import Loader, Order, Synthetic, Tensors
from .metrics import Meter, as_json, explaining_out_of_memory, peak_memory_bytes
from .noise import NoiseError, NoiseScale
from .optimizers import RefusedOptimizerError, Scheduler
from .processes import StartError
from .trainer import (
    CheckpointError,
    DataError,
    ModeError,
    NonFiniteLossError,
    Trainer,
    has_checkpoint,
    initial,
    load,
    lock_checkpoints,
    read_state,
    start,
    wrong_state,
)
from .type_check import IllTypedError, check_edits
from .watch import Watch
from .weights import is_weights
from .world import LoadedProgram, World

MADE_UP = "normal numbers and integers that are 0 or 1"
REFUSALS = (
    CheckpointError,
    DataError,
    IllTypedError,
    ModeError,
    NoiseError,
    NonFiniteLossError,
    RefusedOptimizerError,
    StartError,
)
"""Errors that are printed without a traceback."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """The settings in ``train.py``, which command-line options override; the comments there explain them."""

    folder: Path
    optimizer: Callable[[dict[str, nn.Parameter], float, World], Any]
    scheduler: Scheduler | None
    lr: float | None
    max_norm: float | None
    seed: int
    init: str | None = None
    draw_init: bool = False
    refused: str = ""
    steps: int = 10
    dataset: str | None = None
    checkpoint: str | None = None
    every: int = 100
    keep: int = 2


# -- the command line -------------------------------------------------------------------------------------------------


def arguments(recipe: Recipe) -> argparse.Namespace:
    """Return the options of the command line."""
    made = parser(recipe)
    return completed(recipe, made, made.parse_args())


def parser(recipe: Recipe) -> argparse.ArgumentParser:
    """Return the parser. Options can't be abbreviated: torchrun parses them first, and refuses a prefix of several of its own options."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw, allow_abbrev=False)
    parser.add_argument(
        "--steps", type=count, default=recipe.steps, help="total steps, including those before a resume"
    )
    parser.add_argument("--epochs", type=count, metavar="N", help="instead of --steps: passes over the data")
    parser.add_argument(
        "--dataset",
        metavar="DATA",
        default=recipe.dataset,
        help="a file, MODULE:FUNCTION or FILE.py:FUNCTION that returns a data set, or 'synthetic' (the default, with a message)",
    )
    parser.add_argument("--data", dest="old_data", help=argparse.SUPPRESS)
    parser.add_argument("--eval-data", metavar="DATA", help="held-out data to evaluate, like --dataset")
    parser.add_argument(
        "--eval-every", type=count, metavar="N", help="steps from one evaluation to the next; default: only at the end"
    )
    parser.add_argument(
        "--shuffle", action="store_true", help="read the rows in a random order, which --seed and the epoch determine"
    )
    parser.add_argument(
        "--last", choices=("drop", "pad"), default="drop", help="what to do with an incomplete batch at an epoch's end"
    )
    parser.add_argument("--workers", type=int, default=0, metavar="N", help="data loader processes per rank")
    parser.add_argument(
        "--on-nan", choices=("stop", "skip"), default="stop", help="what to do if a loss is NaN or infinite"
    )
    _add_logs(parser)
    parser.add_argument("--lr", type=rate, help="learning rate, if the recipe's optimizer doesn't set one")
    parser.add_argument("--clip", type=norm, default=recipe.max_norm, help="clip gradients to this 2-norm")
    parser.add_argument("--seed", type=int, default=recipe.seed)
    start = parser.add_mutually_exclusive_group()
    start.add_argument(
        "--init",
        help="a file or folder of safetensors, or a torch.save of the model's state dict, to start from; default: initial.safetensors here",
    )
    start.add_argument(
        "--draw-init",
        action="store_true",
        help="start from random values instead: matrices N(0, 0.02), vectors named ...weight ones, all others zeros",
    )
    parser.add_argument(
        "--nvme", metavar="DIR", help="a folder on the node's NVMe for optimizer states, instead of the plan's"
    )
    parser.add_argument("--save", help="where to save the state dict at the end")
    parser.add_argument("--save-weights", metavar="DIR", help="a new folder for the weights as safetensors at the end")
    parser.add_argument(
        "--checkpoint",
        metavar="DIR",
        default=recipe.checkpoint,
        help="a folder for checkpoints, shared by all machines",
    )
    parser.add_argument(
        "--every", type=count, metavar="N", help="steps from one checkpoint to the next; default: train.py's"
    )
    parser.add_argument("--keep", type=count, metavar="K", help="how many checkpoints stay; default: train.py's")
    parser.add_argument("--async-save", action="store_true", help="write checkpoints while the training goes on")
    parser.add_argument("--resume", action="store_true", help="continue from the newest checkpoint, if there is one")
    parser.add_argument(
        "--record-expert-loads",
        metavar="FILE",
        help="record how many tokens each expert gets in the last steps, for `autopar plan --expert-loads FILE`",
    )
    parser.add_argument("--trace", metavar="FILE", help="write a trace of the second step, for ui.perfetto.dev")
    _add_limits(parser)
    return parser


def _add_logs(parser: argparse.ArgumentParser) -> None:
    """Add the options for records of steps."""
    late = "read and print the loss of every N-th step; --on-nan stop then comes up to N steps late, --on-nan skip still reads each"
    parser.add_argument("--log-every", type=count, default=1, metavar="N", help=late)
    parser.add_argument("--log-file", metavar="FILE", help="also append the JSON lines to FILE")
    scale = (
        "also log the gradient noise scale, in rows: under data parallelism alone with ZeRO 0 or 1, or of one data-parallel replica with "
        "several microbatches"
    )
    parser.add_argument("--noise-scale", action="store_true", help=scale)
    parser.add_argument("--log", dest="old_log", help=argparse.SUPPRESS)
    parser.add_argument("--tensorboard", metavar="DIR", help="also write TensorBoard events into DIR")
    parser.add_argument("--wandb", metavar="PROJECT", help="also log to this project of W&B")


def _add_limits(parser: argparse.ArgumentParser) -> None:
    """Add the options for devices, time limits and the check of edits."""
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: GPUs if the node has any")
    parser.add_argument("--timeout", type=positive, default=600, metavar="S", help="seconds that a step may take")
    parser.add_argument(
        "--setup-timeout", type=positive, default=1800, metavar="S", help="... and the set-up with the first step"
    )
    parser.add_argument("--save-timeout", type=positive, default=1800, metavar="S", help="... and a checkpoint")
    parser.add_argument(
        "--lost-after", type=positive, default=60, metavar="S", help="silence after which a rank counts as lost"
    )
    parser.add_argument("--no-check", action="store_true", help="do not type-check a program whose modules were edited")


def completed(recipe: Recipe, parser: argparse.ArgumentParser, args: argparse.Namespace) -> argparse.Namespace:
    """Return the options, with the recipe's values for omitted ones; exits if they conflict, or a file can't be written."""
    for old, new in (("data", "dataset"), ("log", "log_file")):
        if (given := getattr(args, f"old_{old}")) is not None:
            hint(f"--{old} is deprecated; use --{new.replace('_', '-')}")
            setattr(args, new, given)
    if args.dataset is None:
        args.dataset = "synthetic"
        hint(f"trains on synthetic rows ({MADE_UP}): give yours with --dataset FILE")
    if args.lr is not None and recipe.lr is None:
        parser.error("--lr has no effect on an optimizer that sets its own rates: edit make_optimizer in train.py")
    args.lr = recipe.lr if args.lr is None else args.lr
    args.init = args.init or (None if args.draw_init else recipe.init)
    for option in ("resume", "every", "keep", "async_save"):
        if getattr(args, option) and not args.checkpoint:
            parser.error(f"--{option.replace('_', '-')} needs --checkpoint DIR, the folder of the checkpoints")
    if args.eval_every and not args.eval_data:
        parser.error("--eval-every needs --eval-data DATA, the data to evaluate")
    for option in ("epochs", "shuffle"):
        if getattr(args, option) and args.dataset == "synthetic":
            parser.error(f"--{option} needs --dataset FILE: synthetic rows have no end")
    for option in ("save", "log_file", "record_expert_loads"):
        given = getattr(args, option)
        if given and os.path.isdir(given):
            parser.error(f"--{option.replace('_', '-')} {given} is a folder: give the name of a file")
        if given and not (os.path.isdir(there := os.path.dirname(given) or ".") and os.access(there, os.W_OK)):
            parser.error(
                f"--{option.replace('_', '-')} {given} cannot be written: {there} is no folder that can be written to"
            )
    for package in ("tensorboard", "wandb"):
        if getattr(args, package) and importlib.util.find_spec(package) is None:
            parser.error(f"--{package} needs a package: pip install {package}, or use --log-file")
    args.every, args.keep = args.every or recipe.every, args.keep or recipe.keep
    return args


def hint(message: str) -> None:
    """Print a message on standard error, on rank 0 alone; no process group is needed."""
    if os.environ.get("RANK", "0") == "0":
        print(message, file=sys.stderr, flush=True)


def count(text: str) -> int:
    """Parse an integer of at least 1."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is too small: it must be at least 1")
    return int(text)


def positive(text: str) -> float:
    """Parse a number of seconds above 0."""
    if not float(text) > 0:
        raise argparse.ArgumentTypeError(f"{text} is not a time limit: it must be above 0")
    return float(text)


def rate(text: str) -> float:
    """Parse a learning rate of at least 0."""
    if not 0 <= float(text) < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a learning rate: it must be at least 0")
    return float(text)


def norm(text: str) -> float:
    """Parse a norm for clipping, above 0."""
    if not float(text) > 0:
        raise argparse.ArgumentTypeError(f"{text} is not a norm for clipping: it must be above 0")
    return float(text)


def dataset(option: str, source: str, program: LoadedProgram, seed: int) -> Any:
    """Return the data set that the command line's ``option`` names: synthetic rows, the result of a module's function, or the tensors of
    a file."""
    if source == "synthetic":
        return Synthetic(program.inputs, seed)
    if source.rpartition(":")[2].isidentifier() and ":" in source and not Path(source).exists():
        try:
            make = resolve(source)
        except (ModuleNotFoundError, AttributeError, AssertionError, FileNotFoundError) as error:
            raise DataError(
                f"{option} {source}: {error}", "it takes a file of tensors, MODULE:FUNCTION or FILE.py:FUNCTION"
            ) from error
        try:
            return make()
        except Exception as error:
            raise DataError(
                f"{option} {source} raised {type(error).__name__}: {error} ({line_of(error)})",
                "every rank calls it",
            ) from error
    return Tensors.read(source)


def line_of(error: Exception) -> str:
    """Return the file and line where an error was raised."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{frame.filename}:{frame.lineno}"


def open_loader(args: argparse.Namespace, trainer: Trainer) -> Loader:
    """Return a loader of this rank's rows; exit if the checkpoint's positions are all in other data or orders."""
    order = Order(args.shuffle, args.seed, args.workers, last=args.last)
    loader = trainer.loader(dataset("--dataset", args.dataset, trainer.program, args.seed), order)
    if trainer.positions and not {loader.key, loader.order} & trainer.positions.keys():
        raise SystemExit(
            f"the checkpoint was trained with {', '.join(trainer.positions)}, and this data set is {loader.key}: resume with the same "
            "--dataset, --shuffle and --seed"
        )
    return loader


def open_held_out(args: argparse.Namespace, trainer: Trainer, watch: Watch) -> HeldOut | None:
    """Return the held-out data of ``--eval-data``, if there are any."""
    if args.eval_data is None:
        return None
    if args.eval_data == "synthetic":
        raise SystemExit("--eval-data synthetic: synthetic rows have no end; give a file, or MODULE:FUNCTION")
    data = dataset("--eval-data", args.eval_data, trainer.program, args.seed)
    loader = trainer.loader(data, Order(workers=args.workers, last=args.last))

    def before_batch(number: int) -> None:
        watch.enter("step", f"batch {number} of the evaluation after step {trainer.steps}")

    return HeldOut(trainer, loader, args.eval_every, before_batch)


def start_values(
    recipe: Recipe, args: argparse.Namespace, records: Mapping[str, Any]
) -> dict[str, Tensor] | str | None:
    """Return the state dict to start from, or the path of weights; ``None`` if the values are drawn at random."""
    source = Path(args.init) if args.init else initial(recipe.folder)
    if args.draw_init or source is None and recipe.draw_init:
        hint("starts from random values, not from those of a model (--draw-init)")
        return None
    if source is None:
        raise SystemExit(
            f"{recipe.folder} has no initial.safetensors: the model that it was made of had no values; start with --init PATH, its "
            "safetensors or a torch.save of its state dict, or with --draw-init to draw values"
        )
    if is_weights(source):
        return str(source)
    try:
        state = read_state(source)
    except Exception as error:  # whatever torch.load raises
        raise SystemExit(
            f"--init {source} cannot be read: {type(error).__name__}: {str(error).strip().splitlines()[0]}"
        ) from error
    if wrong := wrong_state(records, state):
        raise SystemExit(f"{source} is no state dict of the model that was compiled: {wrong}")
    return state


def open_trainer(recipe: Recipe, args: argparse.Namespace, watch: Watch) -> tuple[Trainer, object]:
    """Return the trainer, new or resumed from the newest checkpoint, and the lock on the checkpoints' folder."""
    if recipe.refused:
        train = recipe.folder / "train.py"
        raise SystemExit(f"this folder has no recipe: {recipe.refused}; write one in {train}, and remove REFUSED there")
    if not args.no_check and os.environ.get("LOCAL_RANK", "0") == "0":
        check_edits(recipe.folder, lambda text: print(text, file=sys.stderr, flush=True))
    program = load(recipe.folder)
    if args.save_weights and (program.local_steps or Path(args.save_weights).exists()):
        why = "under local steps each replica has its own weights" if program.local_steps else "it exists"
        raise SystemExit(f"--save-weights {args.save_weights}: {why}; use --save, or the name of a new folder")
    state = None if args.resume else start_values(recipe, args, program.records)
    # longer than any limit of the watch, which then reports first: a collective's own timeout names no rank
    timeout_s = args.lost_after + max(args.timeout, args.setup_timeout, args.save_timeout)
    world = start(program, device=args.device, timeout_s=timeout_s, nvme=args.nvme)
    watch.join()
    lock = lock_checkpoints(args.checkpoint, timeout_s=args.lost_after) if args.checkpoint else None
    if args.checkpoint and not args.resume and has_checkpoint(args.checkpoint):
        raise SystemExit(
            f"{args.checkpoint} has checkpoints of another training, which this one would replace; add --resume to continue it, or give "
            "another folder"
        )
    resume = args.checkpoint if args.resume and has_checkpoint(args.checkpoint) else None
    if args.resume and resume is None:
        state = start_values(recipe, args, program.records)
        say(f"{args.checkpoint} has no checkpoint: the training starts from the beginning")
    trainer = Trainer(
        program,
        world,
        optimizer=lambda named_parameters: recipe.optimizer(dict(named_parameters), args.lr, world),
        scheduler=recipe.scheduler,
        state=state,
        seed=args.seed,
        max_norm=args.clip,
        resume=resume,
    )
    if resume is not None:
        say(f"continues after step {trainer.steps}, with the optimizer's options from the checkpoint")
    return trainer, lock


def say(message: str) -> None:
    """Print a message on standard error, on rank 0 alone; if the terminal is gone, training continues to its checkpoint."""
    if dist.get_rank() == 0:
        with contextlib.suppress(OSError):
            print(message, file=sys.stderr, flush=True)


def save(trainer: Trainer, args: argparse.Namespace, over: bool) -> None:
    """Wait for the previous checkpoint, then write one. After a failure training continues, or exits with status 1 if ``over``."""
    failed = False
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


def train(recipe: Recipe, args: argparse.Namespace, watch: Watch) -> None:
    """Train, and write the state dict and the weights at the end if the options say so. If a ``DataError`` or a non-finite
    loss ends the training before it changes parameters, save a checkpoint first."""
    trainer, _lock = open_trainer(recipe, args, watch)
    watch.follow(trainer.stages.values())
    loader, held_out = open_loader(args, trainer), open_held_out(args, trainer, watch)
    try:
        stop = run_steps(args, trainer, loader, watch, held_out)
    except (
        DataError,
        NonFiniteLossError,
    ) as error:  # raised on every rank before the update, unless it is late
        late = isinstance(error, NonFiniteLossError) and error.late
        if isinstance(error, NonFiniteLossError) and args.dataset == "synthetic":
            say(
                f"the rows are synthetic, {MADE_UP}, which may not be valid lengths or weights: give yours with --dataset FILE"
            )
        with contextlib.suppress(CheckpointError):
            watch.enter("save", "the checkpoint that is being written")
            trainer.finish_saving()
        if args.checkpoint and not late and not (Path(args.checkpoint) / f"step-{trainer.steps}").exists():
            watch.enter("save", f"the checkpoint after {trainer.steps} steps")
            save(trainer, args, over=True)
        raise SystemExit(f"{type(error).__name__}: {error}") from error
    if stop:
        then = "--resume continues from there" if args.checkpoint else "nothing is saved without --checkpoint"
        steps = f"{trainer.steps} of {args.steps} steps" if args.epochs is None else f"{trainer.steps} steps"
        say(f"{stop}: training stops after {steps}; {then}")
        if not args.checkpoint:
            raise SystemExit(1)
        return
    watch.enter("save", "the last save")
    trainer.finish_update()
    if args.save:
        state = trainer.state_dict()
        if dist.get_rank() == 0:
            torch.save(state, args.save)
    if args.save_weights:
        trainer.save_weights(args.save_weights)


def run_steps(
    args: argparse.Namespace, trainer: Trainer, loader: Loader, watch: Watch, held_out: HeldOut | None = None
) -> str | None:
    """Run the steps; return the name of the signal that stopped them early, if one did."""
    first, begun = dist.get_rank() == 0, trainer.steps
    logs = (args.log_file, args.tensorboard, args.wandb) if first else ()
    meter = Meter(trainer.program.plan, *logs)
    # the first step is slower than the rest; with --epochs the number of steps is not known
    second = begun + 1 if args.epochs else min(begun + 1, args.steps - 1)
    traced_step = second if args.trace else None
    recorder = Recorder(trainer.stages, trainer.program.plan) if args.record_expert_loads else None
    noise = trainer.noise_scale() if args.noise_scale else None
    stop, logged = None, begun
    while not stop and not is_over(args, trainer, loader):
        watch.enter("set-up" if trainer.steps == begun else "step", f"step {trainer.steps + 1}")
        if trainer.steps == logged:
            meter.begin()
        read = is_read(args, trainer.steps, begun)
        if read and noise is not None:
            noise.begin()
        if trainer.steps == traced_step:
            loss, _ = trainer.traced(partial(trainer.step_from, loader, args.on_nan, with_norm=read), args.trace)
        elif read or args.on_nan == "skip":
            loss, _ = trainer.step_from(loader, args.on_nan, with_norm=read)
        else:
            trainer.advance_from(loader)
        if recorder is not None:
            recorder.end_step()
        if read:
            log(trainer, meter, loss, trainer.steps - logged, noise)
            logged = trainer.steps
        stop = watch.stop_asked(trainer.world.device)
        over = is_over(args, trainer, loader)
        if held_out is not None and not stop and held_out.is_due(trainer.steps, over):
            log_evaluation(trainer, meter, held_out.loss())
            if recorder is not None:
                recorder.discard()
        saves = args.checkpoint and (stop or over or trainer.steps % args.every == 0)
        if saves or stop or over:
            trainer.check_unread()
        if saves:
            watch.enter("save", f"the checkpoint after {trainer.steps} steps")
            save(trainer, args, bool(stop) or over)
    meter.close()
    loader.close()
    if recorder is not None:
        record_loads(recorder, args.record_expert_loads, trainer.world.device)
    return None if is_over(args, trainer, loader) else stop


def record_loads(recorder: Recorder, path: str, device: torch.device) -> None:
    """Write the recorded loads; say why not if there are none, or the file can't be written."""
    try:
        why = recorder.write(path, device)
    except OSError as error:  # the training's result is still to be saved
        why = str(error.strerror)
    if why:
        say(f"--record-expert-loads {path}: {why}")


def is_read(args: argparse.Namespace, step: int, begun: int) -> bool:
    """Return whether to read and print the loss of a step: the first, the last (without ``--epochs``), every ``--log-every``-th, and the
    last before a periodic checkpoint or an evaluation, so that step times exclude these."""
    last = args.epochs is None and step + 1 == int(args.steps)
    periods = (args.log_every, args.checkpoint and args.every, args.eval_every)
    return step == begun or last or any((step + 1) % period == 0 for period in periods if period)


def log(trainer: Trainer, meter: Meter, loss: float, steps: int, noise: NoiseScale | None = None) -> None:
    """Print the record of the last step, with the mean time of the ``steps`` since the previous record."""
    norm, scale = trainer.gradient_norm, trainer.loss_scale
    more = {"gradient_norm": None if norm is None else float(norm), "loss_scale": scale.scale if scale else None}
    if noise is not None:
        more["noise_scale"] = noise.end(norm)
    record = meter.end(trainer.steps, loss, peak_memory_bytes(), more, steps)
    if dist.get_rank() == 0:
        with contextlib.suppress(OSError):
            print(as_json(record), flush=True)
    say(f"step {record['step']:4d}  loss {loss:.4f}  {record['step_time_s']:.3f} s")
    if table := meter.comparison(peak_memory_bytes(), trainer.program.plan["stages"][0]["memory_bytes"]):
        say(table)


def log_evaluation(trainer: Trainer, meter: Meter, loss: float) -> None:
    """Print the record of an evaluation."""
    record = meter.write({"step": trainer.steps, "eval_loss": loss})
    if dist.get_rank() == 0:
        with contextlib.suppress(OSError):
            print(as_json(record), flush=True)
    say(f"step {trainer.steps:4d}  evaluation loss {loss:.4f}")


def is_over(args: argparse.Namespace, trainer: Trainer, loader: Loader) -> bool:
    """Return whether all steps, or with ``--epochs`` all epochs, are done."""
    if args.epochs is None:
        return trainer.steps >= int(args.steps)
    return loader.epoch_of(trainer.position(loader)) >= int(args.epochs)


def main(recipe: Recipe) -> None:
    """Train with the recipe's settings and the command line's options."""
    args = arguments(recipe)
    limits_s = {"set-up": args.setup_timeout, "step": args.timeout, "save": args.save_timeout}
    try:
        with Watch(limits_s, args.lost_after) as watch, explaining_out_of_memory(recipe.folder):
            try:
                train(recipe, args, watch)
            except REFUSALS as error:
                raise SystemExit(f"{type(error).__name__}: {error}") from error
    except (
        GuardError,
        MemoryError,
        ModuleNotFoundError,
        OSError,
    ) as error:  # only on this rank: the watch has told the others
        raise SystemExit(f"{type(error).__name__}: {error}") from error
    dist.destroy_process_group()
