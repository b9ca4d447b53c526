"""``python -m autopar.checks`` executes every rule of the table on shards, and prints the counts."""

from __future__ import annotations

import sys
from pathlib import Path

from autopar.checks.dtensor import compare, page
from autopar.checks.rules import check
from autopar.checks.samples import samples
from autopar.rules.table import TABLE


def main() -> None:
    """Check the table. Raises ``RuleError`` at the first wrong rule.

    ``--dtensor FILE`` compares the table with DTensor's rules instead, and writes the comparison to FILE.
    """
    calls = samples()
    if sys.argv[1:2] == ["--dtensor"]:
        Path(sys.argv[2]).write_text(page(list(compare(calls)), len(TABLE), len(calls)))
        return
    reports = [check(call) for call in calls]
    covered = {call.name for call in calls}
    print(
        f"{len(TABLE)} ops, {len(covered & set(TABLE))} of them executed: {len(calls)} calls, "
        f"{sum(report.candidates for report in reports)} candidates, {sum(report.executions for report in reports)} executions "
        f"on 2 and 3 shards, largest difference {max(report.difference for report in reports):.1e}"
    )


if __name__ == "__main__":
    main()
