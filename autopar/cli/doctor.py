"""``autopar doctor`` prints the findings about this machine, each problem with a hint."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

import autopar
from autopar.cli.console import Messages, plain_table, show
from autopar.doctor import BROKEN, Finding, examine

_STYLES = {"ok": "green", "absent": "dim", "warning": "yellow", "broken": "bold red"}


def doctor_command(quick: bool, as_json: bool) -> None:
    """Print every finding; the status is 1 if something that every run needs is broken."""
    with Messages() as messages:
        found = list(examine(lambda text: messages("doctor", text), trials=not quick))
    broken = [finding.name for finding in found if finding.status == BROKEN]
    data = {"version": autopar.__version__, "works": not broken, "findings": [finding.to_json() for finding in found]}
    verdict = (
        f"broken, and needed by every run: {', '.join(broken)}" if broken else "everything that every run needs works"
    )
    show(as_json, data, _table(found), f"autopar {autopar.__version__}: {verdict}")
    if broken:
        raise SystemExit(1)


def _table(found: list[Finding]) -> Table:
    table = plain_table(None, ("part", "name", "status"), texts=("value",), show_header=False)
    part = ""
    for finding in found:
        shown = finding.part if finding.part != part else ""
        part = finding.part
        style = _STYLES[finding.status]
        table.add_row(Text(shown, "bold"), Text(finding.name), Text(finding.status, style), Text(finding.value))
        if finding.hint:
            table.add_row("", "", Text("hint", "cyan"), Text(finding.hint))
    return table
