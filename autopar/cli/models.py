"""``autopar models``: the zoo."""

from __future__ import annotations

import json

from autopar.cli.console import console, plain_table
from autopar.zoo import CATALOGUE


def models_command(as_json: bool) -> None:
    """Prints every model of the zoo."""
    if as_json:
        keys = ("name", "kind", "parameters", "source", "seq", "global_batch")
        print(json.dumps([{key: getattr(entry, key) for key in keys} for entry in CATALOGUE], indent=1))
        return
    table = plain_table(None, ("model", "kind"), ("parameters", "--seq", "--global-batch"))
    table.add_column("published in", no_wrap=True)
    for entry in CATALOGUE:
        size = f"{entry.parameters / 1e9:,.1f} B" if entry.parameters >= 1e9 else f"{entry.parameters / 1e6:,.1f} M"
        seq = f"{entry.seq:,}" if entry.seq else "-"
        table.add_row(entry.name, entry.kind, size, seq, f"{entry.global_batch:,}", entry.source)
    console(width=150).print(table)
