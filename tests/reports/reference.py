"""The pages of ``docs/reference`` that the code writes (``make report NAME=reference``): command line, Python interface, rules."""

from __future__ import annotations

import argparse
import inspect
import sys
from collections.abc import Callable, Iterator

import click
import pins_page
from places import DOCS

import autopar
from autopar.cli.app import cli as command_line
from autopar.rules import notation
from autopar.rules.table import TABLE
from passes import rewrite  # noqa: F401  registers the ops that passes make

FOLDER = DOCS / "reference"
_MADE = "\nMade by `make report NAME=reference`. Do not edit.\n"


def cli() -> str:
    """Every command with its help, its arguments and its options."""
    context = click.Context(command_line, info_name="autopar")
    lines = ["# Command line", "", "`autopar COMMAND --help` prints the same. Every command has it.", ""]
    for name in command_line.list_commands(context):
        command = command_line.get_command(context, name)
        assert command is not None
        own = click.Context(command, parent=context, info_name=name)
        lines += [f"## autopar {name}", "", f"    autopar {name} {' '.join(command.collect_usage_pieces(own))}", ""]
        lines += _paragraphs(command.help or "")
        lines += [*(f"    {line.strip()}" for line in (command.epilog or "").splitlines()[2:]), ""]
        records = [record for p in command.params if (record := p.get_help_record(own)) is not None]
        if records:
            lines += ["| option | meaning |", "|---|---|"]
            lines += [f"| `{_cell(option)}` | {_cell(meaning)} |" for option, meaning in records]
            lines.append("")
    return "\n".join(lines) + _MADE


def _paragraphs(text: str) -> Iterator[str]:
    for paragraph in inspect.cleandoc(text).replace("\b\n", "").split("\n\n"):
        yield paragraph
        yield ""


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def api() -> str:
    """Every public name with its signature and its docstring."""
    lines = ["# Python interface", "", "The public names of `autopar`; everything else may change.", ""]
    for name in sorted(n for n in autopar.__all__ if not n.startswith("_")):
        thing = getattr(autopar, name)
        lines += [f"## autopar.{name}", ""]
        lines += _documented(thing, name)
        if inspect.isclass(thing) and not issubclass(thing, Exception):
            for key, member in vars(thing).items():
                if not key.startswith("_") and callable(member) or isinstance(member, property | classmethod):
                    inner = member.fget if isinstance(member, property) else getattr(thing, key)
                    lines += [f"### {name}.{key}", ""]
                    lines += _documented(inner, f"{name}.{key}", signature=not isinstance(member, property))
    return "\n".join(lines) + _MADE


def _documented(thing: Callable[..., object], name: str, *, signature: bool = True) -> Iterator[str]:
    if signature and not (inspect.isclass(thing) and issubclass(thing, Exception)):
        yield f"```text\n{_signature(thing, name)}\n```\n"
    if text := inspect.getdoc(thing):
        yield f"```text\n{text}\n```\n"


def _signature(thing: Callable[..., object], name: str) -> str:
    """The call, on one line where it fits, else with a line for each parameter."""
    parts: list[str] = []
    for p in inspect.signature(thing).parameters.values():
        if p.name == "self":
            continue
        if p.kind is p.KEYWORD_ONLY and "*" not in parts:
            parts.append("*")
        kind = "" if p.annotation is p.empty else f": {p.annotation}"
        stars = {p.VAR_POSITIONAL: "*", p.VAR_KEYWORD: "**"}.get(p.kind, "")
        default = "" if p.default is p.empty else f" = {p.default!r}"
        parts.append(f"{stars}{p.name}{kind}{default}")
    line = f"{name}({', '.join(parts)})"
    return line if len(line) <= 120 else "\n".join([f"{name}(", *(f"    {part}," for part in parts), ")"])


def rules() -> str:
    """Every op that a rule covers, ops of one rule together."""
    by_text: dict[str, list[str]] = {}
    for op, entry in TABLE.items():
        by_text.setdefault(f"`{_cell(entry)}`" if isinstance(entry, str) else _cell(_written_by(entry)), []).append(op)
    lines = [
        "# Sharding rules",
        "",
        "An op without a rule is replicated, and the plan names it. `autopar.register_rule` adds a rule for an op of your own.",
        "Every rule is executed on shards, forward and gradient. This is the notation:",
        "",
        f"```text\n{inspect.getdoc(notation)}\n```",
        "",
        "A rule that a function writes from the op's arguments is described by the function's docstring.",
        "",
        "| rule | ops |",
        "|---|---|",
        *(f"| {text} | {', '.join(f'`{op}`' for op in sorted(ops))} |" for text, ops in sorted(by_text.items())),
    ]
    return "\n".join(lines) + "\n" + _MADE


def _written_by(entry: Callable[..., object]) -> str:
    """The first paragraph about the function that writes a rule, or about the function that made it."""
    outer = entry.__qualname__.partition(".<locals>")[0]
    return (inspect.getdoc(getattr(sys.modules[entry.__module__], outer)) or outer).split("\n\n")[0]


PAGES = {"cli.md": cli, "api.md": api, "rules.md": rules}


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    for page, text in PAGES.items():
        (FOLDER / page).write_text(text())
    for path in (pins_page.PAGE, pins_page.FIELDS):
        path.write_text(pins_page.page(path.read_text()))
