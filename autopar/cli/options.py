"""Options and arguments that several commands have."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from autopar.errors import ModelError
from autopar.pins import PINS
from autopar.plan import ALLOWED
from autopar.techniques.technique import ANY, Pin

F = TypeVar("F", bound=Callable[..., Any])

MODEL_HELP = """

    MODEL is file.py:factory or package.module:factory (the factory returns a module, or (module, batch), or
    (module, batch, loss_fn)), a transformers config.json, a folder that transformers saved, or a name of the zoo (`autopar models`).
    """


class WholeNumber(click.IntRange):
    """``click.IntRange`` that calls itself what it is where a value is refused."""

    name = "whole number"


def joined(*options: Callable[[Any], Any]) -> Callable[[F], F]:
    """One decorator for several options."""

    def decorate(function: F) -> F:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


DEVICES_HELP = "4 (of this machine), 8xH100-80GB, 128x8xH100-80GB (nodes x GPUs x kind), or a cluster.toml."
calibration_option = click.option(
    "--calibration",
    metavar="FILE",
    help="A file that `autopar profile` wrote. Default: the file that it writes by default, if there is one.",
)
precision_option = click.option(
    "--precision", metavar="NAME", help="Dtype of parameters and activations: bfloat16, float16, float32 or float64."
)
batch_options = (
    calibration_option,
    click.option("--seq", type=int, metavar="N", help="Tokens in a sequence of the batch."),
    click.option("--global-batch", type=int, metavar="N", help="Sequences (or images) in a batch of one step."),
    precision_option,
)
allow_option = click.option(
    "--allow",
    multiple=True,
    type=click.Choice([name.replace("_", "-") for name in ALLOWED]),
    help="Allow plans that give up exactness, where they are faster or fit. microbatch-statistics: several microbatches even if the loss "
    "couples the examples of a batch, each microbatch with its own statistics and loss; bfloat16-gradients, bfloat16-moments: gradients, "
    "or Adam's moments, in 16 bits; fp8: products with weights in 8-bit floating point; tf32: float32 products in TF32; "
    "int8-activations: activations saved for the backward in 8 bits; local-steps: replicas that train apart, with --sync local-steps:K.",
)
size_options = (click.option("--devices", metavar="SPEC", help=DEVICES_HELP), *batch_options)
model_options = joined(
    click.argument("model"),
    click.option("--devices", required=True, metavar="SPEC", help=DEVICES_HELP),
    *batch_options,
    allow_option,
)


def json_option(help: str) -> Callable[[Any], Any]:
    """The option that prints a command's result as JSON."""
    return click.option("--json", "as_json", is_flag=True, help=help)


def count_option(name: str, default: int, help: str, least: int = 1, metavar: str = "N") -> Callable[[Any], Any]:
    """A whole number that has a default."""
    kind = WholeNumber(least)
    return click.option(name, type=kind, default=default, show_default=True, metavar=metavar, help=help)


def pin_option(pin: Pin, sentence: str, without: tuple[str, ...] = ()) -> Callable[[Any], Any]:
    """The option ``--NAME`` of a pin, with the values that it has in the table except those in ``without``."""
    names = [name for name in pin.names if name not in without]
    kind: click.ParamType = click.Choice(names) if names else WholeNumber(pin.least, pin.most)
    metavar = None if names else "N" if pin.most is None else f"{pin.least}-{pin.most}"
    if pin.counted:  # checked with the other pins
        kind, metavar = click.STRING, f"[{'|'.join(names)}]"
    meaning = sentence.format(pin.meaning)
    text = f"{meaning[0].upper()}{meaning[1:]}."
    if ANY in names:
        text += f" {ANY}: the fastest choice; without the option, {names[0]}."
    if not pin.switch:
        return click.option(f"--{pin.name}", type=kind, metavar=metavar, help=text, hidden=pin.former)
    text += f" Without a value, {names[-1]}."
    how: dict[str, Any] = {"is_flag": False, "flag_value": names[-1], "hidden": pin.former}
    return click.option(f"--{pin.name}", type=kind, metavar=metavar, help=text, **how)


pin_options = joined(
    click.option(
        "--pin",
        "pins",
        multiple=True,
        metavar="KEY=VALUE",
        help="Pin a decision of the plan, of every layer, or of named layers: schedule=1f1b, tensor=8, layers.0-7.tensor=8, "
        "lm_head.zero=3. May be repeated. The options below are short forms for the whole plan and for every layer.",
    ),
    *(pin_option(pin, "pin {}") for pin in PINS.values()),
    click.option("--no-recompute", "recompute", flag_value="none", help="The same as --recompute none."),
    click.option(
        "--memory-limit", metavar="SIZE", help="Most memory that a plan may use on one device, such as 40GB or 37GiB."
    ),
    click.option(
        "--local-batch-norm",
        is_flag=True,
        help="Let batch norm use the statistics of each device's part of the batch, not of the whole batch.",
    ),
    click.option(
        "--time-limit",
        type=click.FloatRange(0),
        default=20.0,
        show_default=True,
        metavar="SECONDS",
        help="Time limit of the search.",
    ),
)
plan_file_option = click.option(
    "--plan", "plan_file", metavar="FILE", help="Use the plan in this file (of `autopar plan -o FILE`)."
)
plan_output_option = click.option(
    "-o", "--output", metavar="FILE", help="Also write the plan into this file, as JSON: other commands read it."
)


init_option = click.option(
    "--init",
    metavar="own|PATH",
    help="Initial values of a model on the meta device. own: the model's own initialisers, tensor by tensor, written into the program's "
    "folder. PATH: safetensors, a file or a folder, from which each process reads its shards; the default if MODEL is such a folder of "
    "transformers.",
)


capture_check_option = click.option(
    "--no-capture-check",
    "capture_check",
    is_flag=True,
    default=True,
    flag_value=False,
    help="Do not compare the captured graph with the model. The plan notes that the check was skipped.",
)


type_check_option = click.option(
    "--no-type-check",
    "type_check",
    is_flag=True,
    default=True,
    flag_value=False,
    help="Do not type-check the program. The plan notes that the check was skipped.",
)

program_options = joined(model_options, pin_options, plan_file_option, capture_check_option, type_check_option)
model_of_plan_option = click.option("--model", metavar="MODEL", help="The model of PLAN, if the plan does not name it.")
again_options = joined(
    model_of_plan_option,
    *size_options,
    allow_option,
    pin_options,
)


def check_file(model: str) -> None:
    """Raise ``ModelError`` where MODEL is a factory and there is no file before its colon."""
    source = model.rpartition(":")[0] if ":" in model else model
    if not source or (source.endswith(".py") and not Path(source).is_file()):
        raise ModelError(
            f"there is no file {source or 'before the colon of ' + model}",
            "MODEL is file.py:factory, package.module:factory, a config or a zoo name",
        )
