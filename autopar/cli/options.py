"""Options and arguments that several commands share."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

import click
from click.shell_completion import CompletionItem

from autopar.errors import ModelError, UsageError
from autopar.pins import PINS, SHORT
from autopar.plan import ALLOWED

TIME_LIMIT_S = 20.0
"""The time limit of a search without ``--time-limit``."""

WITHIN = 0.01
"""How much longer than the fastest plan's a step may take without ``--within``, if that makes the plan simpler."""

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class PlanRequest:
    """The options that describe what to plan, and how; ``pins`` are strings KEY=VALUE. Options that a command lacks have defaults."""

    model: str = ""
    devices: str = ""
    calibration: str | None = None
    expert_loads: str | None = None
    seq: int | None = None
    global_batch: int | None = None
    precision: str | None = None
    allow: Sequence[str] = ()
    pins: Sequence[str] = ()
    memory_limit: str | None = None
    local_batch_norm: bool = False
    time_limit: float | None = None
    within: float | None = None
    plan_file: str | None = None
    capture_check: bool = True
    type_check: bool = True
    init: str | None = None
    trainer: str | None = None

    @classmethod
    def taken_from(cls, values: dict[str, Any]) -> PlanRequest:
        """Remove the request's fields from the values of a command's options, and return them as a request."""
        taken = {field.name: values.pop(field.name) for field in fields(cls) if field.name in values}
        return cls(**{name: value for name, value in taken.items() if value is not None})


MODEL_HELP = """

    MODEL is file.py:factory or package.module:factory (the factory returns a module, or (module, batch), or (module, batch, loss_fn)), a
    transformers config.json, a folder that transformers saved, or a model of `autopar help models`."""

MOVED = {"trace": "report PLAN --trace FILE", "models": "help models", "hardware": "help hardware"}
"""The replacements of former commands, except those that moved to the group ``dev``."""

ANSWERED_BY = {
    "memory": "`plan` prints the memory of each stage, `price MODEL --devices SPEC --plan FILE --timeline` that of a device through a step",
    "train": "`run` trains in local processes, and `emit` writes a folder whose train.py runs under torchrun",
    "estimate": "`price` predicts time and memory of a given plan, and `plan` finds the best one",
    "search": "`plan` searches for the best plan",
    "export": "`plan --trainer NAME --export DIR` writes a trainer's configuration, and `emit` the program of a plan",
}
"""Hints for words that are no commands, but that users of other tools try."""


class Commands(click.Group):
    """A group that lists its commands in the order in which they were added, and suggests the new name for a former one."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names in the order in which they were added."""
        return list(self.commands)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command that the first argument names, or raise ``UsageError`` with its new name or a similar one."""
        name, path = args[0], ctx.command_path
        if name in self.commands or name.startswith("-"):
            return super().resolve_command(ctx, args)
        groups = {group: command for group, command in self.commands.items() if isinstance(command, click.Group)}
        moved = {inner: f"{group} {inner}" for group, command in groups.items() for inner in command.commands}
        moved |= MOVED if groups else {}
        if name in moved:
            raise UsageError(f"`{path} {name}` has another name now", f"write `{path} {moved[name]}`")
        if groups and name in ANSWERED_BY:
            raise UsageError(f"there is no command `{path} {name}`", ANSWERED_BY[name])
        near = difflib.get_close_matches(name, [*self.commands, *moved], n=1)
        hint = f"did you mean `{path} {moved.get(near[0], near[0])}`?" if near else f"`{path} --help` lists them"
        raise UsageError(f"there is no command `{path} {name}`", hint)


class WholeNumber(click.IntRange):
    """``click.IntRange`` with a readable name in messages."""

    name = "whole number"


class Share(click.ParamType):
    """A share, written as a percentage (1%) or as a fraction (0.01)."""

    name = "percentage"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the share as a fraction."""
        if isinstance(value, float):
            return value
        text = str(value)
        number = text.removesuffix("%")
        try:
            found = float(number) / (100 if text != number else 1)
        except ValueError:
            found = math.nan
        if not 0 <= found <= 1 or (found == 1 and text == number):  # "1" may be meant as 1 %
            self.fail(f"{text} is not a percentage from 0% to 100%: write 1% or 0.01", param, ctx)
        return found


def joined(*options: Callable[[Any], Any]) -> Callable[[F], F]:
    """Return one decorator for several options."""

    def decorate(function: F) -> F:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


def option(names: str, metavar: str, help: str, **settings: Any) -> Callable[[Any], Any]:
    """Return an option with a value; ``names`` has the option's names and, if it differs, the parameter's name, separated by spaces."""
    if settings.get("default") is not None:
        settings["show_default"] = True
    return click.option(*names.split(), metavar=metavar, help=help, **settings)


def switch(names: str, help: str, value: bool = True) -> Callable[[Any], Any]:
    """Return a flag: its parameter is ``value`` if the user sets the flag, otherwise ``not value``."""
    return click.option(*names.split(), is_flag=True, default=not value, flag_value=value, help=help)


class DevicesText(click.ParamType):
    """A description of devices. A wrong one is refused before the command imports torch, which takes seconds."""

    name = "devices"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the text unchanged, or raise ``DeviceError``."""
        from autopar.devices import check_text

        check_text(value)
        return str(value)


DEVICES_HELP = "4 (of this machine), 8xH100-80GB, 128x8xH100-80GB (nodes x GPUs x kind), or a cluster.toml."


def devices_option(required: bool = False) -> Callable[[Any], Any]:
    """Return the option ``--devices``."""
    return option("--devices", "SPEC", DEVICES_HELP, required=required, type=DevicesText())


calibration_option = option(
    "--calibration",
    "FILE",
    "A file that `autopar profile` wrote. Default: the file that it writes by default, if there is one.",
)
expert_loads_option = option(
    "--expert-loads",
    "FILE",
    "The loads of experts that prices assume: a file of `train.py --record-expert-loads`, or the load of the busiest expert-parallel "
    "rank divided by the mean, such as 1.2. Default: balanced.",
)
precision_option = option(
    "--precision", "NAME", "Dtype of parameters and activations: bfloat16, float16, float32 or float64."
)
size_options = (
    option("--seq", "N", "Tokens in a sequence of the batch.", type=int),
    option("--global-batch", "N", "Sequences (or images) in a batch of one step.", type=int),
)
allow_option = option(
    "--allow",
    "NAME",
    "Allow this deviation from exact training, if it makes the plan faster or nothing else fits. May be repeated; "
    "`autopar help exactness` lists the names.",
    multiple=True,
    type=click.Choice([name.replace("_", "-") for name in ALLOWED]),
)
batch_options = joined(calibration_option, expert_loads_option, *size_options, precision_option, allow_option)
model_options = joined(click.argument("model"), devices_option(required=True), batch_options)


def count_option(
    names: str, default: int, help: str, least: int = 1, most: int | None = None, metavar: str = "N"
) -> Callable[[Any], Any]:
    """Return an integer option with a default."""
    return option(names, metavar, help, type=WholeNumber(least, most), default=default)


class PinText(click.ParamType):
    """A pin ``KEY=VALUE``, with shell completion of keys and values."""

    name = "pin"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Return the pins that begin with ``incomplete``."""
        key, equals, _ = incomplete.partition("=")
        pins = [pin for pin in PINS.values() if not pin.former and (not equals or pin.name == key)]
        texts = [f"{pin.name}={value}" for pin in pins for value in (pin.values if equals else ("",))]
        return [CompletionItem(text) for text in texts if text.startswith(incomplete)]


OTHER_NAMES = {
    **dict.fromkeys(("dtype", "mixed-precision", "param-dtype"), "--precision bfloat16"),
    **dict.fromkeys(("bf16", "bfloat16"), "--precision bfloat16"),
    **dict.fromkeys(("batch-size", "global-batch-size", "gbs"), "--global-batch N"),
    **dict.fromkeys(("seq-length", "seq-len", "sequence-length"), "--seq N"),
    **dict.fromkeys(("nproc-per-node", "nnodes", "gpus", "world-size"), "--devices SPEC, such as 4 or 2x8xH100-80GB"),
    **dict.fromkeys(("data", "data-path"), "--dataset DATA"),
    **dict.fromkeys(("save", "save-interval", "load"), "--checkpoint DIR, with --every N and --resume"),
    "learning-rate": "--lr RATE",
    **{name: f"--pin {pin}=N" for name, pin in SHORT.items()},
    "tensor-model-parallel-size": "--pin tensor=N",
    "pipeline-model-parallel-size": "--pin pipeline=N",
}
"""What other trainers and torchrun call the options, for the hint of an error."""


class PinnedCommand(click.Command):
    """A command that also accepts ``--NAME VALUE`` for ``--pin NAME=VALUE``, for scripts that are older than ``--pin``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Rewrite every pin as ``--pin``, then parse the arguments."""
        has_pins = any(param.name == "pins" for param in self.params)
        ctx.obj = tuple(args)  # hints repeat the command
        try:
            return super().parse_args(ctx, list(_with_pins(args)) if has_pins else args)
        except click.NoSuchOption as error:
            meant = OTHER_NAMES.get(error.option_name.lstrip("-"), "")
            if not any(meant.split(" ")[0] in param.opts for param in self.params):
                raise
            raise UsageError(f"`{ctx.command_path}` has no option {error.option_name}", f"write {meant}") from error


def _with_pins(words: Sequence[str]) -> Iterator[str]:
    """Rewrite ``--tensor 8`` as ``--pin tensor=8``; a switch may have no value, or be ``--no-NAME``."""
    rest = list(words)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.removeprefix("--").partition("=")
        off = name.startswith("no-") and not equals
        pin = PINS.get(name.removeprefix("no-") if off else name) if word.startswith("--") else None
        if word == "--":
            yield from (word, *rest)
            return
        given = value if equals else rest[0] if rest else ""
        other = name in OTHER_NAMES and not given.lstrip("-").isdecimal()  # --data FILE
        if pin is None or other or (off and not pin.switch):
            yield word
        elif off or (pin.switch and not equals and (not rest or rest[0].startswith("-"))):
            yield from ("--pin", f"{pin.name}={'false' if off else 'true'}")
        else:
            del rest[: not equals]
            yield from ("--pin", f"{pin.name}={given}")


pin_option = option(
    "--pin pins",
    "KEY=VALUE",
    "Pin a decision: schedule=1f1b, tensor=8, or layers.0-7.tensor=8 for some layers. May be repeated; `autopar help pins` lists "
    "all pins.",
    multiple=True,
    type=PinText(),
)
pin_options = joined(
    pin_option,
    option("--memory-limit", "SIZE", "Maximum memory that a plan may use on one device, such as 40GB or 37GiB."),
    switch(
        "--local-batch-norm",
        "Let batch norm use the statistics of each device's part of the batch, not of the whole batch.",
    ),
    option(
        "--time-limit",
        "SECONDS",
        f"Processor time that the search may take. Default: {TIME_LIMIT_S:g}, or no limit for another trainer's plans.",
        type=click.FloatRange(0),
    ),
    option(
        "--within",
        "SHARE",
        "Choose the simplest plan whose step takes at most this much longer than the fastest plan's; 0 chooses the fastest plan. "
        f"Default: {WITHIN:.0%}.",
        type=Share(),
    ),
)
TRAINER_NAMES = ("megatron", "torchtitan", "deepspeed", "accelerate")
"""The names of ``autopar.trainers.TRAINERS``: ``--help`` does not import that package."""

trainer_option = click.option(
    "--trainer",
    type=click.Choice(TRAINER_NAMES),
    help="Plan for this trainer instead of an emitted program: only what it can run, priced as it runs it.",
)
plan_file_option = option(
    "--plan plan_file",
    "FILE",
    "Use the plan in this file (of `autopar plan -o FILE`). MODEL, --devices and sizes that you leave out are those that it records.",
)
written_model_options = joined(
    click.argument("model", required=False), devices_option(), batch_options, plan_file_option
)
plan_output_option = option(
    "-o --output", "FILE", "Also write the plan into this file, as JSON: other commands read it."
)


init_option = option(
    "--init",
    "own|PATH",
    "Initial values of a model on the meta device. own: the model's own initialisers, tensor by tensor, written into the program's "
    "folder. PATH: safetensors, a file or a folder, from which each process reads its shards; the default if MODEL is such a folder of "
    "transformers.",
)


capture_check_option = switch(
    "--no-capture-check capture_check",
    "Do not compare the captured graph with the model. The plan notes that the check was skipped.",
    value=False,
)
type_check_option = switch(
    "--no-type-check type_check",
    "Do not type-check the program. The plan notes that the check was skipped.",
    value=False,
)
program_options = joined(written_model_options, pin_options, capture_check_option, type_check_option)
written_options = joined(
    option("--model", "MODEL", "The model of PLAN, if the plan does not name it."),
    devices_option(),
    batch_options,
    pin_options,
)


def check_file(model: str) -> None:
    """Raise ``ModelError`` if MODEL names a Python file that doesn't exist, or nothing before its colon."""
    source = model.rpartition(":")[0] if ":" in model else model
    if not source or (source.endswith(".py") and not Path(source).is_file()):
        raise ModelError(
            f"there is no file {source or 'before the colon of ' + model}",
            "MODEL is file.py:factory, package.module:factory, a config or a zoo name",
        )
