"""``autopar doctor``: a table of the findings about this machine, each problem with a hint."""

from __future__ import annotations

import json

from rich.text import Text

import autopar
from autopar.cli.console import Messages, console, plain_table
from autopar.doctor import BROKEN, Finding, examine

_STYLES = {"ok": "green", "absent": "dim", "warning": "yellow", "broken": "bold red"}


def doctor_command(quick: bool, as_json: bool) -> None:
    """Prints every finding; ends with status 1 if something that every run needs is broken."""
    with Messages() as messages:
        found = list(examine(lambda text: messages("doctor", text), trials=not quick))
    broken = [finding.name for finding in found if finding.status == BROKEN]
    if as_json:
        findings = [finding.to_json() for finding in found]
        print(json.dumps({"version": autopar.__version__, "works": not broken, "findings": findings}, indent=1))
    else:
        _print(found, broken)
    if broken:
        raise SystemExit(1)


def _print(found: list[Finding], broken: list[str]) -> None:
    out = console()
    table = plain_table(None, ("part", "name", "status"), show_header=False)
    table.add_column("value", overflow="fold")
    part = ""
    for finding in found:
        shown = finding.part if finding.part != part else ""
        part = finding.part
        style = _STYLES[finding.status]
        table.add_row(Text(shown, "bold"), Text(finding.name), Text(finding.status, style), Text(finding.value))
        if finding.hint:
            table.add_row("", "", Text("hint", "cyan"), Text(finding.hint))
    out.print(table)
    words = (
        f"broken, and needed by every run: {', '.join(broken)}" if broken else "everything that every run needs works"
    )
    out.print(f"autopar {autopar.__version__}: {words}")
