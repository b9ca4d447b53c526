"""Defines the commands and their options. Heavy modules are imported only when a command runs, so that ``--help`` is fast."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import click

import autopar
from autopar.cli.options import (
    MODEL_HELP,
    Commands,
    PinnedCommand,
    PlanRequest,
    WholeNumber,
    allow_option,
    batch_options,
    calibration_option,
    capture_check_option,
    count_option,
    devices_option,
    init_option,
    joined,
    model_options,
    option,
    pin_option,
    pin_options,
    plan_output_option,
    precision_option,
    program_options,
    size_options,
    switch,
    trainer_option,
    written_model_options,
    written_options,
)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(autopar.__version__, prog_name="autopar")
def cli() -> None:
    """Turns a single-device PyTorch model into the distributed training program an expert would have written for it.

    Start with `autopar plan llama3-70b --devices 128x8xH100-80GB`, or with the web page of `autopar ui`. `autopar doctor` checks this
    machine.
    """


@click.group(cls=Commands)
def dev() -> None:
    """Further tools: a starter script, SLURM, single ranks, predictions."""


def command(
    name: str,
    help: str,
    examples: tuple[str, ...],
    *options: Callable[[Any], Any],
    module: str = "",
    group: click.Group = cli,
    json: str = "Print the result as JSON.",
) -> None:
    """Add a command that imports ``autopar.cli.NAME`` (or ``module``) and calls its ``NAME_command`` with the options.

    The first line of ``help`` is shown in the list of commands. ``json`` is the help text of ``--json``; if it is empty, the command has no
    such option. If the function has a parameter ``request``, it gets the options that describe what to plan as one ``PlanRequest``; if
    ``--plan`` is one of them, its file completes the others.
    """

    def run(**values: Any) -> None:
        function = getattr(importlib.import_module(f"autopar.cli.{module or name}"), f"{name}_command")
        if "request" in inspect.signature(function).parameters:
            required = [name for name in ("model", "devices") if name in values]
            takes_plan = "plan_file" in values
            # without MODEL, click takes the first of the flags after -- for it
            if "flags" in values and (values["model"] or "").startswith("-"):
                values |= {"model": None, "flags": (values["model"], *values["flags"])}
            request = PlanRequest.taken_from(values)
            if takes_plan:
                request = importlib.import_module("autopar.cli.recorded").with_plan_file(request, required)
            values["request"] = request
        function(**values)

    epilog = "\b\nExamples:\n" + "\n".join(f"  autopar {line}" for line in examples)
    short = help.partition("\n")[0]
    decorate = joined(*options, *([switch("--json as_json", json)] if json else []))
    group.command(name, PinnedCommand, short_help=short, help=help, epilog=epilog)(decorate(run))


command(
    "plan",
    "Find the best plan for a model." + MODEL_HELP,
    (
        "plan llama3-70b --devices 128x8xH100-80GB",
        "plan config.json --devices cluster.toml --global-batch 512 --pin pipeline=4 -o plan.json",
        "plan model.py:factory --devices 4 --pin lm_head.zero=3",
        "plan llama3-8b --devices 64xH100-80GB --trainer megatron --export flags",
    ),
    model_options,
    pin_options,
    trainer_option,
    option("--export", "DIR", "With --trainer: also write its flags or configuration files into this folder."),
    capture_check_option,
    plan_output_option,
)

command(
    "explain",
    """Explain why a plan was chosen.

    The plan is in the file PLAN (written by `autopar plan -o FILE`), or the best one for MODEL. The explanation lists what limits the plan,
    what more memory, bandwidth or batch would save, the best plan of other kinds, and the ten best alternatives. Options that you leave out
    have the values that the plan was made with."""
    + MODEL_HELP,
    ("explain plan.json", "explain llama3-8b --devices 8xH100-80GB --global-batch 64"),
    click.argument("target", metavar="PLAN|MODEL"),
    written_options,
)

command(
    "compare",
    """Compare two plans, or your trainer's configuration with better ones.

    FIRST and SECOND are files of `autopar plan -o FILE` or `autopar price -o FILE`. Without SECOND, FIRST is a configuration file of your
    trainer (as for `autopar price --from`) for the model --model: it is compared with the fastest configuration of that trainer, with
    autopar's own program, and with the single changes that gain most.""",
    (
        "compare plan.json other.json",
        "compare pretrain.sh --model llama3-8b --devices 8xH100-80GB",
    ),
    click.argument("first"),
    click.argument("second", required=False),
    option("--model", "MODEL", "The model of the configuration FIRST."),
    devices_option(),
    batch_options,
    trainer_option,
    module="pricing",
)

command(
    "price",
    """Predict time and memory of a given plan.

    The plan for MODEL is written as pins, as --plan FILE (which names its model and devices), as a configuration file of your trainer
    (--from FILE: a shell script or YAML of Megatron-LM, flags, TOML or Python of torchtitan, DeepSpeed's JSON, Accelerate's YAML), or as
    flags of a trainer after `--`. A trainer's configuration is priced as that trainer runs it. Data parallelism uses the remaining
    devices."""
    + MODEL_HELP,
    (
        "price llama3-70b --devices 8x8xH100-80GB --pin tensor=8 --pin pipeline=2 --pin zero=1 --microbatch 1",
        "price llama3-8b --devices 8xH100-80GB --from pretrain.sh",
        "price --plan plan.json --timeline",
        "price llama3-8b --devices 8xH100-80GB -- --tensor-model-parallel-size 2 --micro-batch-size 1",
    ),
    written_model_options,
    pin_option,
    option("--from source", "FILE", "A configuration file of your trainer."),
    trainer_option,
    option("--microbatch", "N", "Sequences in one microbatch on one device.", type=WholeNumber(1)),
    switch(
        "--sequence",
        "Shard activations between tensor-parallel regions along the sequence (Megatron-LM's sequence parallelism).",
    ),
    switch("--timeline", "Also show the memory of every device through the actions of one step."),
    plan_output_option,
    click.argument("flags", nargs=-1, type=click.UNPROCESSED),
    module="pricing",
)

command(
    "emit",
    "Write the distributed program for a model into a folder." + MODEL_HELP,
    (
        "emit model.py:factory --devices 4 -o program",
        "emit --plan plan.json --init own -o program",
    ),
    program_options,
    init_option,
    option("-o --output", "DIR", "The folder to write.", required=True),
)

command(
    "run",
    """Train a model on this machine.

    Each step prints its loss. Without --dataset every step takes the example batch."""
    + MODEL_HELP,
    (
        "run model.py:factory --devices 2 --steps 20",
        "run model.py:factory --devices 8 --checkpoint saved --resume",
        "run model.py:factory --devices 8 --dataset train.pt --eval-data held_out.pt --eval-every 100",
    ),
    program_options,
    init_option,
    count_option("--steps", 10, "Number of steps."),
    option(
        "--dataset",
        "DATA",
        "Rows to train on: a file of torch.save({NAME: tensor, ...}), or MODULE:FUNCTION or FILE.py:FUNCTION that returns a data set.",
    ),
    switch("--shuffle", "Read --dataset in a random order, which --seed and the epoch determine."),
    option("--eval-data", "DATA", "Held-out rows to evaluate, like --dataset."),
    option("--eval-every", "N", "Steps between evaluations. Default: only at the end.", type=click.IntRange(1)),
    option("--log-file", "FILE", "Also append one JSON object for each step to this file."),
    option("--tensorboard", "DIR", "Also write TensorBoard events into this folder (needs the package tensorboard)."),
    option(
        "--wandb",
        "PROJECT",
        "Also log to this project of W&B (needs the package wandb; WANDB_MODE=offline: no network).",
    ),
    option("--lr", "RATE", "Learning rate of AdamW.", type=click.FloatRange(0), default=3e-4),
    count_option("--seed", 0, "Random seed of the initial parameters and of the batch.", least=0, most=2**63 - 1),
    option("-o --output", "DIR", "Write the program into this folder, and keep it."),
    option("--checkpoint", "DIR", "Write checkpoints into this folder."),
    count_option("--every", 100, "Steps between checkpoints."),
    count_option("--keep", 2, "Number of newest checkpoints to keep.", metavar="K"),
    switch("--resume", "Continue from the newest checkpoint, if there is one, until --steps steps are done in total."),
    option(
        "--elastic",
        "MIN:MAX",
        "Train on MIN to MAX nodes with --devices each. When a node fails, the remaining nodes make a plan for their number and "
        "continue from the newest checkpoint. Start the same command on every node.",
    ),
    option(
        "--meet",
        "HOST:PORT",
        "Rendezvous address for --elastic. HOST is one of the nodes, and must not fail.",
        default="localhost:29400",
    ),
    count_option("--restarts", 10, "How many times --elastic restarts after a failure.", least=0),
    json="Print one JSON object for each step.",
)

command(
    "verify",
    """Check that parallel programs compute what the model computes.

    The loss and every gradient of MODEL's distributed programs are compared with PyTorch on one device, in float64, in local processes. A
    model of the zoo or of a config.json is shrunk first; a factory's model is used as it is. The exit status is 0 only if every program is
    exact."""
    + MODEL_HELP,
    (
        "verify model.py:factory",
        "verify --plan plan.json --devices 4",
        "verify --plan plan.json --collectives",
    ),
    click.argument("model", required=False),
    count_option("--devices processes", 2, "Number of devices, each a local process.", most=64),
    option(
        "--plan plan_file",
        "FILE",
        "Check only this plan. A plan for more than N devices is shrunk to N, and type-checked at full size; with "
        "--collectives it is checked at full size.",
    ),
    *size_options,
    option("--memory-limit", "SIZE", "How much of this machine's memory the comparison may use.", default="8GB"),
    switch(
        "--collectives",
        "Check what NCCL would do instead: record every rank without communication, and look for ranks that issue different "
        "collectives, deadlocks, results that are read too early, and buffers that are written while they are sent. For a large plan, one "
        "rank of each kind is recorded at the plan's sizes.",
    ),
    allow_option,
)

command(
    "report",
    """Write a plan as a page, a figure or a trace.

    PLAN is a file of `autopar plan -o FILE`; with OTHER, the page shows two plans side by side. It is one self-contained HTML file:
    timeline, memory through the step, layers, communication, and the sources of figures. The details need the model: the plan names it, or
    --model does.""",
    (
        "report plan.json -o report.html",
        "report plan.json other.json -o both.html --explain",
        "report plan.json --trace trace.json --measured step.json",
    ),
    click.argument("plan", metavar="PLAN"),
    click.argument("other", metavar="[OTHER]", required=False),
    option("-o --output page", "FILE", "The page to write, such as report.html."),
    option("--plot figure", "FILE", "Draw the timeline and the memory as a figure (.png, .svg or .pdf)."),
    option(
        "--trace",
        "FILE",
        "Write the predicted step in Chrome's trace-event format, which https://ui.perfetto.dev opens: a process for each "
        "pipeline rank, with its actions, its sends and its memory.",
    ),
    option(
        "--measured",
        "FILE",
        "A trace that the plan's program recorded (`train.py --trace FILE`). --trace shows it below the prediction, and the "
        "seconds of each action are compared.",
    ),
    switch(
        "--explain",
        "Also search for alternatives and for changes that help, as `autopar explain` does. This takes minutes.",
    ),
    written_options,
)

command(
    "sweep",
    """Plan a model over a range of devices, lengths, batches and GPUs.

    The table has the step time, tokens/s, MFU and (with --gpu-hour) the cost of a billion tokens of each combination. A range is one
    number (8), a list (8,16,24), or 8..1024, which doubles from 8 to 1024."""
    + MODEL_HELP,
    (
        "sweep llama3-8b --devices 8..512 --gpu-hour 2.5",
        "sweep gpt2 --devices 8,16 --gpu H100-80GB,A100-80GB --seq 1024 --plot sweep.svg",
    ),
    click.argument("model"),
    option("--devices counts", "RANGE", "Numbers of GPUs, such as 8..1024.", required=True),
    option("--gpu", "KINDS", "GPU kinds, separated by commas.", default="H100-80GB"),
    option("--seq lengths", "RANGE", "Tokens in a sequence of the batch."),
    option("--global-batch batches", "RANGE", "Sequences (or images) in a batch of one step."),
    precision_option,
    option(
        "--gpu-hour",
        "PRICE",
        "Price of one GPU hour: 2.5 for every kind, or H100-80GB=2.5 for one kind. May be repeated.",
        multiple=True,
    ),
    pin_options,
    option("--plot plot_file", "FILE", "Also draw the figures (.png, .svg or .pdf)."),
)

command(
    "profile",
    """Measure this machine, so that its plans are priced with measured times.

    In under two minutes: matrix products, attention, memory bandwidth, launch time of an op, the optimizer, and collectives of several
    sizes, with 2 and with 4 processes. The command writes a calibration file, from which plans for this machine's devices are priced.""",
    ("profile", "profile --processes 1 --device cuda -o h100.json"),
    option("--processes", "N,...", "Numbers of local processes for the measurements.", default="2,4"),
    click.option(
        "--device",
        type=click.Choice(["cpu", "cuda"]),
        help="What to measure. Default: GPUs if there is one for each process.",
    ),
    option("-o --output", "FILE", "The calibration file to write. Default: the file that planning reads."),
)

command(
    "bench",
    """Measure automatic plans against hand-tuned ones on this machine.

    The benchmark's models (llama, wide-mlp, long-sequence, deep-gpt, large-vocabulary; default: all) train in local processes, with the
    automatic program and with programs written by hand from PyTorch's own parallel modules, in turns.""",
    ("bench llama --processes 2", "bench --processes 4 -o bench.jsonl --plot bench.svg"),
    click.argument("names", nargs=-1, metavar="[MODEL]..."),
    count_option("--processes", 2, "Number of local processes.", least=2),
    count_option("--rounds", 7, "How many times each program is measured.", least=2),
    count_option("--steps", 3, "Timed steps in each round."),
    count_option("--seed", 0, "Random seed of the order in which programs run.", least=0),
    calibration_option,
    option("-o --output", "FILE", "Also write the results here, one JSON object a line."),
    option("--plot plot_file", "FILE", "Also draw the step times (.png, .svg or .pdf)."),
    option(
        "--published",
        "FILE",
        "Measure nothing. Read layouts and their measured times from FILE (JSON Lines, as docs/evidence/validation.md describes), and "
        "print for each cell how much slower the automatic layout was than the best layout.",
    ),
)

command(
    "tune",
    """Measure plans on this machine or in a SLURM allocation, correct the prices, and plan again.

    The best few different plans for MODEL train in turns, in local processes, or by srun on the nodes of the SLURM allocation in which this
    command runs once. What they take corrects the measured times of this machine, or the figures of the nodes, by factors; under the
    corrected prices autopar plans again and measures what could be faster, until no plan could be or --minutes are over.
    The same command continues from --log."""
    + MODEL_HELP,
    (
        "tune model.py:factory --devices 2 -o plan.json",
        "tune model.py:factory --devices 4 --minutes 20 --save-calibration tuned.json",
    ),
    model_options,
    pin_options,
    option("--minutes", "M", "About how long to measure and plan.", type=click.FloatRange(0), default=5.0),
    count_option(
        "--rounds", 3, "How many times each plan is measured, at most; the best ones are measured more often."
    ),
    count_option("--steps", 3, "Timed steps in each round."),
    count_option("--seed", 0, "Random seed of the order in which plans run.", least=0),
    option("--log", "FILE", "The log, from which a later call continues.", default="tune.jsonl"),
    plan_output_option,
    option(
        "--save-calibration",
        "FILE",
        "Also write the corrected measurements into this file: --calibration FILE then prices other plans by them.",
    ),
)

command(
    "doctor",
    """Check what is installed and works on this machine.

    Packages, compiler, memory, ports, GPUs and their kinds, the calibration file; then what programs need: an all-reduce between processes
    (gloo, NCCL), and torch.compile. Each problem has a hint. The exit status is 1 if something that every run needs is broken.""",
    ("doctor", "doctor --quick --json"),
    switch("--quick", "Skip the checks that start processes."),
)

command(
    "ui",
    """Open a local page to plan in.

    The page is served on 127.0.0.1 until Ctrl-C. You choose a model or paste a config.json, choose devices and pin decisions; it shows the
    plan, its report, its program, and the cost of each pin. The printed address has a token, and the server refuses requests without it.
    Each MODEL (file.py:factory) is offered in addition to the built-in models.""",
    ("ui", "ui model.py:factory --port 8080"),
    click.argument("model", nargs=-1, metavar="[MODEL]..."),
    count_option("--port", 0, "TCP port; 0 takes any free port.", least=0, most=65535),
    switch("--browser", "Open the page in this machine's browser."),
    json="",
)

command(
    "help",
    """Show the pins, the built-in models, the known hardware.

    TOPIC is pins, exactness (what --allow gives up), models, or hardware; NAME is one kind of device, whose figures are shown with their
    sources.""",
    ("help pins", "help models", "help hardware H100-80GB"),
    click.argument("topic", type=click.Choice(["pins", "exactness", "models", "hardware"])),
    click.argument("name", required=False, metavar="[NAME]"),
    module="topics",
)

command(
    "init",
    """Write a cluster file and a script for your model.

    The folder DIR gets cluster.toml, and train.py, a short script that trains on it with random numbers as data. Existing files are never
    overwritten."""
    + MODEL_HELP,
    ("dev init gpt2", 'dev init llama3-8b --devices "64 H100" -o training'),
    click.argument("model"),
    option(
        "--devices", "SPEC", "8xH100-80GB, '64 H100', 4, 'this machine', or a cluster.toml.", default="this machine"
    ),
    *size_options,
    option("-o --output", "DIR", "The folder to write into.", default="."),
    group=dev,
)

command(
    "launch",
    """Write the batch file that starts a program under SLURM.

    sbatch starts the program in FOLDER (written by `autopar emit`) on the nodes of its plan. Before the time limit, the ranks save a
    checkpoint, the job is queued again, and training continues. OPTIONS, after --, are options of the program's train.py and must include
    --checkpoint DIR.""",
    ("dev launch program --slurm train.sbatch -- --checkpoint saved --dataset data.pt",),
    click.argument("folder"),
    click.argument("options", nargs=-1, type=click.UNPROCESSED),
    option("--slurm", "FILE", "The batch file to write.", required=True),
    option("--time", "H:M:S", "The time limit of one job.", default="24:00:00"),
    count_option(
        "--save-before",
        300,
        "Seconds before the time limit at which ranks save: more than one step and one checkpoint take.",
        metavar="SECONDS",
    ),
    group=dev,
)

command(
    "rehearse",
    """Run single ranks of a plan on one device.

    The ranks of MODEL's program run one at a time, before you book all devices: the real stage modules with the real local shapes, and
    collectives that return at once. The command prints peak memory and the time of a step without communication, as measured and as
    predicted. Times are comparable only if the device is of the plan's kind."""
    + MODEL_HELP,
    ("dev rehearse llama3-8b --devices 64xH100-80GB --rank 0 --rank 63",),
    program_options,
    option(
        "--rank ranks",
        "N",
        "A rank to run; may be repeated. Default: the first rank of every stage.",
        type=int,
        multiple=True,
    ),
    click.option(
        "--device", type=click.Choice(["cpu", "cuda"]), help="Where the ranks run. Default: the GPU if there is one."
    ),
    count_option("--steps", 5, "Number of timed steps."),
    json="Print one JSON object for each rank.",
    group=dev,
)

command(
    "sync",
    """Show what synchronizing replicas costs, by algorithm.

    The table has traffic and time of every method to synchronize the replicas of a model with PARAMETERS parameters (7B, 350M, 7e9), one
    replica on each device: through a parameter server that serves the ranks in turn, on a ring, by recursive halving and doubling, and by
    the cost model of plans.""",
    ("dev sync 7B --devices 64xH100-80GB",),
    click.argument("parameters"),
    devices_option(required=True),
    precision_option,
    count_option("--steps", 8, "Steps between averages of local-steps:K.", metavar="K"),
    calibration_option,
    group=dev,
)

command(
    "validate",
    """Compare predictions with published measurements.

    FILE is a JSON Lines file of measured training runs. Every row is predicted; rows that have no prediction are listed with the reason.
    docs/evidence/validation.md describes the fields of a row.""",
    ("dev validate measured.jsonl --json",),
    click.argument("file", metavar="FILE"),
    module="validation",
    group=dev,
)

cli.add_command(dev)
