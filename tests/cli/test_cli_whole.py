"""All commands together: examples, names of options, JSON, widths, colours, completion."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from places import ROOT
from rich.console import Console

from autopar.cli.app import cli
from autopar.cli.console import plain_table
from autopar.pins import PINS

MLP = f"{ROOT}/examples/mlp.py:model"
NO_RESULT = {"ui"}  # which serves until it is interrupted


def options(command: click.Command) -> list[click.Option]:
    return [p for p in command.params if isinstance(p, click.Option)]


def commands(group: click.Group = cli, path: tuple[str, ...] = ()) -> dict[tuple[str, ...], click.Command]:
    """Every command, those of groups too, by the words that call it."""
    found: dict[tuple[str, ...], click.Command] = {}
    for name, command in group.commands.items():
        own = (*path, name)
        found |= commands(command, own) if isinstance(command, click.Group) else {own: command}
    return found


COMMANDS = commands()


@pytest.mark.parametrize("path", COMMANDS)
def test_every_help_has_examples_that_parse_and_fits_on_two_screens(path: tuple[str, ...]):
    command = COMMANDS[path]
    shown = CliRunner().invoke(cli, [*path, "--help"]).stdout
    _, examples = (command.epilog or "").split("Examples:\n")
    assert examples and all(f"{line}\n" in shown for line in examples.splitlines())
    for line in examples.splitlines():
        program, *words = shlex.split(line)
        assert program == "autopar" and tuple(words[: len(path)]) == path
        command.make_context(path[-1], words[len(path) :])
    assert all(option.help for option in options(command))
    assert path[-1] in NO_RESULT or any("--json" in option.opts for option in options(command))
    assert shown.count("\n") <= 100


def test_a_pin_is_said_once_and_its_former_options_are_read():
    """``--tensor 8`` of older scripts is ``--pin tensor=8``; the options are made from the table of pins."""
    assert not {f"--{name}" for name in PINS} & {name for c in COMMANDS.values() for o in options(c) for name in o.opts}
    for path, command in COMMANDS.items():
        if not any(option.name == "pins" for option in options(command)):
            continue
        required = [
            word for p in command.params if p.required for word in ([p.opts[0]] * p.opts[0].startswith("-") + ["1"])
        ]
        for pin in PINS.values():
            value = pin.example.partition("=")[2]
            for words in (["--pin", f"{pin.name}={value}"], [f"--{pin.name}", value], [f"--{pin.name}={value}"]):
                found = command.make_context(path[-1], [*required, *words]).params
                assert found["pins"] == (f"{pin.name}={value}",), (path, words)
    off = cli.commands["plan"].make_context("plan", ["gpt2", "--no-recompute", "--devices", "8", "--compile"])
    assert off.params["pins"] == ("recompute=false", "compile=true")
    with pytest.raises(click.UsageError, match="No such option"):
        cli.commands["plan"].make_context("plan", ["gpt2", "--devices", "8", "--no-tensor"])
    flags = cli.commands["price"].make_context("price", ["gpt2", "--devices", "8", "--", "--tensor", "8"]).params
    assert flags["flags"] == ("--tensor", "8") and flags["pins"] == ()


def test_the_page_of_pins_has_every_pin(plan_file: Path):
    shown = CliRunner().invoke(cli, ["help", "pins", "--json"], catch_exceptions=False).stdout
    assert [row["name"] for row in json.loads(shown)] == [name for name, pin in PINS.items() if not pin.former]
    page = CliRunner().invoke(cli, ["help", "pins"], catch_exceptions=False).stdout
    assert all(pin.former or f"\n{name} " in page for name, pin in PINS.items())


def test_options_that_mean_the_same_have_the_same_name():
    by_name, by_meaning = defaultdict(set), defaultdict(set)
    for command in COMMANDS.values():
        for option in options(command):
            by_meaning[option.help].add(tuple(sorted(name for name in option.opts if name.startswith("--"))))
            if option.name in (
                "devices",
                "global_batch",
                "seq",
                "precision",
                "time_limit",
                "memory_limit",
                "calibration",
                "output",
            ):
                by_name[option.name].add(tuple(option.opts))
            assert not {"--out", "--gpus", "--batch-size", "--sequence-length", "--verbose", "--format"} & set(
                option.opts
            )
            assert ("-o" in option.opts) == ("--output" in option.opts)
            assert ("--json" in option.opts) == (option.name == "as_json")
    assert all(len(names) == 1 for names in by_name.values()), by_name
    assert {meaning: names for meaning, names in by_meaning.items() if len(names) > 1} == {}


NUMBER = re.compile(r"(?<![\w.])[+-]?\d[\d,]*(?:\.\d+)?(?![\w.,]*\.)")


def numbers(text: str) -> set[str]:
    """The numbers of a table; those of the seconds that a command itself took are left out."""
    lines = [
        line
        for line in text.splitlines()
        if not re.match(r"(planned in|note:|explained in)|.*(free of|compared in)", line)
    ]
    return set(NUMBER.findall("\n".join(lines)))


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    words = [
        "price",
        MLP,
        "--devices",
        "2x8xH100-80GB",
        "--pin",
        "pipeline=2",
        "--pin",
        "microbatches=4",
        "--pin",
        "zero=1",
        "--json",
    ]
    path.write_text(CliRunner().invoke(cli, words, catch_exceptions=False).stdout)
    return path


TABLES = (
    ("help", "pins"),
    ("help", "models"),
    ("help", "hardware"),
    ("help", "hardware", "H100-80GB"),
    ("dev", "sync", "7B", "--devices", "64xH100-80GB"),
    ("price", MLP, "--devices", "2x8xH100-80GB", "--pipeline", "2", "--microbatches", "4", "--timeline"),
    ("plan", MLP, "--devices", "8xH100-80GB", "--tensor", "2", "--no-capture-check"),
    ("compare", "PLAN", "PLAN"),
    pytest.param(("explain", "PLAN", "--model", MLP, "--devices", "2x8xH100-80GB"), marks=pytest.mark.slow),
    ("sweep", MLP, "--devices", "8,16", "--gpu-hour", "2.5"),
    pytest.param(("dev", "validate", "ROWS"), marks=pytest.mark.slow),
)  # fmt: skip


@pytest.mark.parametrize("words", TABLES)
def test_no_number_is_cut_from_60_columns_on(words: tuple[str, ...], plan_file: Path):
    rows = plan_file.with_name("rows.jsonl")
    measured = (ROOT / "docs" / "evidence" / "groundtruth" / "published.jsonl").read_text().splitlines()
    rows.write_text("\n".join(measured[:4]))
    files = {"PLAN": str(plan_file), "ROWS": str(rows)}
    words = tuple(files.get(word, word) for word in words)
    shown = {}
    for width in (400, 60) if words[0] in ("explain", "plan", "sweep") or "validate" in words else (400, 120, 80, 60):
        done = CliRunner().invoke(cli, words, env={"COLUMNS": str(width)}, catch_exceptions=False)
        shown[width] = done.stdout
        assert max(map(len, done.stdout.splitlines())) <= width and "…" not in done.stdout
    whole = numbers(shown[400])
    assert len(whole) > 5
    for width, text in shown.items():
        assert whole <= numbers(text), (width, whole - numbers(text))


@pytest.mark.parametrize("width", [60, 80, 120])
def test_a_wide_table_is_printed_in_parts(width: int):
    table = plain_table("title")
    table.add_column("layers", no_wrap=True)
    for number in range(12):
        table.add_column(f"column {number}", justify="right")
    table.add_column("words")
    table.add_row("model.layers.0 ... model.layers.79", *(f"{72.5 + n} GB" for n in range(12)), "long words " * 9)
    out = Console(width=width, file=io.StringIO())
    out.print(table)
    text = out.file.getvalue()
    assert max(map(len, text.splitlines())) <= width and text.count("title") == 1 and "…" not in text
    assert all(f"{72.5 + n} GB" in text for n in range(12)) and text.count("model.layers.0 ...") == text.count(
        "layers  "
    )


def test_no_colour_where_none_is_wanted_and_words_complete():
    environment = os.environ | {"PYTHONPATH": str(ROOT), "FORCE_COLOR": "1"}

    def run(*words: str, **more: str) -> str:
        command = [sys.executable, "-m", "autopar", *words]
        done = subprocess.run(command, capture_output=True, text=True, env=environment | more)
        return done.stdout + done.stderr

    assert "\x1b[" in run("help", "models") and "\x1b[3" not in run("help", "models", NO_COLOR="1")
    code = "import sys; sys.argv = ['autopar']; from autopar.cli import main; main()"
    completed = environment | {
        "_AUTOPAR_COMPLETE": "bash_complete",
        "COMP_WORDS": "autopar plan gpt2 --pin sched",
        "COMP_CWORD": "4",
    }
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=completed)
    assert done.stdout == "plain,schedule=\n"
    completed |= {"COMP_WORDS": "autopar plan gpt2 --pin schedule=z"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=completed)
    assert done.stdout == "plain,schedule=zero-bubble\nplain,schedule=zbv\n"


def test_the_file_of_a_result_is_said_as_json(plan_file: Path, tmp_path: Path):
    out = tmp_path / "report.html"
    done = CliRunner().invoke(cli, ["report", str(plan_file), "-o", str(out), "--json"], catch_exceptions=False)
    assert json.loads(done.stdout) == {"page": str(out)} and out.is_file()
