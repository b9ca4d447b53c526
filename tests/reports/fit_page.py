"""The page of the report ``fit``."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from fit_constants import FITTED, LIMITS, FittedConstant
from fit_switches import switches
from leave_out import HUBER_DELTA, Bools, Observation, PriceTable, Values, left_out_one, spread
from results import Line
from validation_page import percent, records, table

Errors = Mapping[Observation, float]
QUANTITIES = ("time", "memory")
LIMIT_VALUES = (0.76, 0.80, 0.84, 0.88, 0.92)

HEAD = """# Fitted constants, with each source left out

Some constants of the cost model are *fitted* to published measurements. ([Validation](validation.md) lists all constants with their
sources; the others come from papers, data sheets, code or measurements, and are not changed here.) This page fits them again by
cross-validation over sources: all constants are fitted on the rows of all sources but one, and predict the rows of the source that was
left out. A constant that affects no row of the other sources gets its neutral value, at which it has no effect.

Rows are those of [published.jsonl](groundtruth/published.jsonl), [records.jsonl](groundtruth/records.jsonl) and
[layout_sweep.jsonl](groundtruth/layout_sweep.jsonl) (every fourth layout of up to 16 nodes). Sources whose titles begin with the same
word (one publisher, or one trainer) count as one source. The objective is the Huber loss of the log errors of time and memory, with delta
{delta}; time and memory of each source have equal weight, whatever the number of rows. The code that prices plans computes every
prediction, with the constant replaced in the cluster, the trainer's cost model or the setting (`tests/reports/fit_constants.py`). All
rows are priced with the neutral and the extreme values of a constant, and with its other values those rows that change. The fit assumes
that the effects of several constants on log errors add up; the rows are then priced with the chosen values.
"""


@dataclass(frozen=True)
class Fit:
    """What the page shows: the log errors (``table``), those of all rows with each set of constants, the constants fitted on all rows and
    with each source left out, the rows and their ``base`` lines by source, and for each fact which rows state it, and their line without
    it. ``seconds`` is the processor time of all prices."""

    table: PriceTable
    sets: Mapping[str, Errors]
    every: Values
    chosen: Mapping[str, Values]
    rows: Mapping[str, Sequence[Mapping[str, Any]]]
    base: Mapping[str, Line]
    facts: Mapping[str, Mapping[str, tuple[Sequence[int], Line]]]
    seconds: float


def page(fit: Fit) -> str:
    sections = {
        "": HEAD.format(delta=HUBER_DELTA),
        "Errors by source": f"{ERRORS}\n\n{errors_table(fit.sets, tuple(fit.rows))}",
        "Constants": f"{CONSTANTS}\n\n{constants_table(fit.table)}",
        "Fitted together": f"{TOGETHER}\n\n{together_table(fit.every, fit.chosen)}\n\n{additive(fit)}",
        "Memory that a plan may use": limits(fit.base),
        "Rows": f"{rows_table(fit.rows, fit.base)}\n\n{refusals(fit.base)}",
        "Options": switches_text(fit),
    }
    text = "\n\n".join(f"## {title}\n\n{part}" if title else part.strip() for title, part in sections.items())
    took = f"Pricing took {fit.seconds / 60:.0f} minutes of processor time."
    return f"{text}\n\n{took}\n\nMade by `make report NAME=fit`. Do not edit.\n"


ERRORS = """Relative errors, median / 90th percentile: *committed*, with the product's constants, which were fitted to these rows;
*refitted*, with all constants fitted together on all rows; *left out*, with all constants fitted together on the rows of the other
sources."""


def errors_table(sets: Mapping[str, Errors], sources: Sequence[str]) -> str:
    """Errors of each source, of all rows, and the median of the sources' medians."""
    header = ["source", *(f"{quantity}, {name}" for quantity in QUANTITIES for name in sets)]
    groups: list[tuple[str, tuple[str, ...]]] = [(name, (name,)) for name in sources]
    lines = []
    for title, names in [*groups, ("all rows", tuple(sources)), ("all but HF's sweep", tuple(set(sources) - {"HF"}))]:
        cells = [
            _spread([error for one, error in errors.items() if one.source in names and one.quantity == quantity])
            for quantity in QUANTITIES
            for errors in sets.values()
        ]
        if any(cell != "-" for cell in cells):
            lines.append((title, *cells))
    return table(header, lines)


def _spread(errors: Sequence[float]) -> str:
    found = spread(errors)
    return "-" if found is None else f"{100 * found.median:.1f} / {100 * found.p90:.1f} %"


CONSTANTS = """Each constant is fitted alone, while the others have the product's values. *Left out*: the range of its fitted values when
each source that it affects is left out in turn. Losses are means over these sources: without the constant, with the product's value, and
with the value fitted on the other sources. *Others fitted*: the losses without and with the constant if all other constants are also
fitted on the other sources; constants that affect only the left-out source keep their values. A constant *helps* if the left-out loss is
lower with it, both alone and with the others fitted (other constants have coarse values, so single steps of these matter, too), and
*helps alone* if only the former holds. A constant that affects a single source cannot be fitted without it."""


def constants_table(found: PriceTable) -> str:
    header = ("constant", "value", "refitted", "left out", "rows", "sources", "loss without", "committed", "left out",
              "better on", "others fitted: without", "with", "")  # fmt: skip
    return table(header, [_constant_row(found, one) for one in FITTED])


def _constant_row(found: PriceTable, constant: FittedConstant) -> tuple[str, ...]:
    name, everything = constant.name, np.ones(len(found.observations), dtype=bool)
    touched = found.touched(name)
    values = left_out_one(found, name)
    rows = {one.row for one, is_touched in zip(found.observations, touched, strict=True) if is_touched}
    where = {source: touched & ~found.without(source) for source in values}
    best = found.fit_one(name, everything)
    shown = [f"`{name}`", f"{constant.committed:.4g}", "-" if best is None else f"{best:.4g}"]
    if len(values) < 2:
        without, with_it = (_mean(found.loss({name: v}, seen) for seen in where.values())
                            for v in (constant.neutral, constant.committed))  # fmt: skip
        return (
            *shown,
            "-",
            str(len(rows)),
            ", ".join(values) or "none",
            without,
            with_it,
            "-",
            "-",
            "-",
            "-",
            "one source",
        )
    fitted = {source: value for source, value in values.items() if value is not None}
    losses = {
        source: (found.loss({name: constant.neutral}, where[source]), found.loss({name: value}, where[source]))
        for source, value in fitted.items()
    }
    together = {source: _together(found, name, constant.neutral, source, where[source]) for source in fitted}
    alone, also = (sum(pair[1] - pair[0] for pair in pairs.values()) < 0 for pairs in (losses, together))
    return (
        *shown,
        " to ".join(f"{v:.4g}" for v in dict.fromkeys((min(fitted.values()), max(fitted.values())))),
        str(len(rows)),
        str(len(values)),
        _mean(pair[0] for pair in losses.values()),
        _mean(found.loss({}, where[source]) for source in fitted),
        _mean(pair[1] for pair in losses.values()),
        f"{sum(pair[1] < pair[0] for pair in losses.values())} of {len(losses)}",
        _mean(pair[0] for pair in together.values()),
        _mean(pair[1] for pair in together.values()),
        ("helps" if also else "helps alone") if alone else "does not help",
    )


def _together(found: PriceTable, name: str, neutral: float, source: str, where: Bools) -> tuple[float, float]:
    """Return the losses without and with the constant on a source, with all others fitted on the other sources."""
    others = found.without(source)
    only_here = {one: found.committed[one] for one in found.changed if not (found.touched(one) & others).any()}
    without, with_it = found.fit(others, only_here | {name: neutral}), found.fit(others, only_here)
    return found.loss(without, where), found.loss(with_it, where)


def _mean(values: Iterable[float]) -> str:
    known = list(values)
    return f"{sum(known) / len(known):.4f}" if known else "-"


TOGETHER = "All constants fitted together: on all rows, and with each source left out (values, each with its number of left-out sources)."


def together_table(every: Values, chosen: Mapping[str, Values]) -> str:
    lines = []
    for constant in FITTED:
        counts: dict[float, int] = {}
        for values in chosen.values():
            counts[values[constant.name]] = counts.get(values[constant.name], 0) + 1
        shown = ", ".join(f"{value:.4g} ({count})" for value, count in sorted(counts.items()))
        lines.append(
            (f"`{constant.name}`", f"{constant.committed:.4g}", f"{every[constant.name]:.4g}", shown, constant.without)
        )
    return table(("constant", "value", "all rows", "a source left out", "neutral"), lines)


def additive(fit: Fit) -> str:
    """How far the sum of effects is from the price."""
    added = dict(zip(fit.table.observations, fit.table.errors(fit.every), strict=True))
    apart = [abs(added[one] - error) for one, error in fit.sets["refitted"].items() if one in added]
    return (
        f"The sum of effects differs from the prediction by {percent(float(np.quantile(apart, 0.5)))} in the median and "
        f"{percent(float(np.quantile(apart, 0.9)))} at the 90th percentile, for the values fitted on all rows."
    )


def limits(base: Mapping[str, Line]) -> str:
    """Layouts that ran and are refused, and that failed and are admitted, by the fraction of memory that a plan may use."""
    (name,) = LIMITS
    committed = next(record.value for record in records() if record.name == name)
    lines = []
    for source, line in base.items():
        shares = list(zip(line["share"], line["failed"], strict=True)) if any(line["failed"]) else []
        known = [(share, failed) for share, failed in shares if share is not None]
        for value in LIMIT_VALUES if known else ():
            ran = [share > value for share, failed in known if not failed]
            lost = [share <= value for share, failed in known if failed]
            lines.append((source, f"{value:.2f}", f"{sum(ran)} of {len(ran)}", f"{sum(lost)} of {len(lost)}"))
    text = (
        f"No prediction depends on `{name}` ({committed:g}): it is the limit that keeps plans from running out of memory. By source and "
        "value: layouts that ran but are above the limit, and layouts that failed (some for other reasons) but are below it:"
    )
    return text + "\n\n" + table(("source", "value", "ran, above the limit", "failed, below the limit"), lines)


def rows_table(rows: Mapping[str, Sequence[Any]], base: Mapping[str, Line]) -> str:
    lines = []
    for source, line in base.items():
        ran = [i for i, failed in enumerate(line["failed"]) if not failed]
        infeasible = sum(line["infeasible"][i] for i in ran)
        failed = [i for i, is_failed in enumerate(line["failed"]) if is_failed]
        called = sum(line["infeasible"][i] for i in failed)
        priced = len(rows[source]) - len(line["refused"])
        lines.append((source, str(len(rows[source])), str(priced), str(len(line["refused"])),
                      f"{infeasible} of {len(ran)}", f"{called} of {len(failed)}"))  # fmt: skip
    return table(("source", "rows", "priced", "refused", "ran, called infeasible", "failed, called infeasible"), lines)


def refusals(base: Mapping[str, Line]) -> str:
    lines = []
    for source, line in base.items():
        reasons: dict[str, int] = {}
        for reason in line["refused"].values():
            reasons[reason] = reasons.get(reason, 0) + 1
        lines += [(source, str(count), reason.replace("|", "/")) for reason, count in reasons.items()]
    return "Refused rows:\n\n" + table(("source", "rows", "reason"), lines)


def switches_text(fit: Fit) -> str:
    """Switches with their sources, and what the facts among them do to the errors of the rows that state them."""
    found = switches(fit.rows)
    single = [name for name, sources in found.items() if len(sources) == 1]
    none = [name for name, sources in found.items() if not sources]
    text = (
        f"Keywords in the text of a row turn on {len(found)} options of the cost model (`autopar/validate/words.py`). "
        f"{len(single)} options occur in "
        f"one source only, so no other source tests them; {len(none)} occur in no row. Errors are those of the rows with "
        "the keyword, with and "
        "without the option, median / 90th percentile."
    )
    lines = []
    for name, sources in sorted(found.items(), key=lambda item: len(item[1])):
        effect = _effect(fit.facts.get(name, {}), fit.base)
        lines.append((name, str(len(sources)), ", ".join(sources), *effect))
    header = ("option", "sources", "", "rows", "time", "without", "memory", "without")
    return text + "\n\n" + table(header, lines)


def _effect(stated: Mapping[str, tuple[Sequence[int], Line]], base: Mapping[str, Line]) -> tuple[str, ...]:
    """Return the number of rows that state a fact, and their errors with and without it, of time and of memory."""
    if not stated:
        return ("", "", "", "", "")
    cells = [
        _spread([math.log(ratio) for source, (rows, line) in stated.items() for i in rows
                 if (ratio := (base[source] if with_it else line)[quantity][i]) is not None])
        for quantity in QUANTITIES
        for with_it in (True, False)
    ]  # fmt: skip
    return (str(sum(len(rows) for rows, _ in stated.values())), *cells)
