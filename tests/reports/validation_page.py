"""The tables of docs/evidence/validation.md: every chosen figure, the scores on the rows that ship, and a peer's predictions beside ours.

    python tests/reports validation            # prices all rows: a minute or two
    python tests/reports validation constants  # the figures alone

A table stands between ``<!-- NAME -->`` and ``<!-- end NAME -->``.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from places import EVIDENCE, GROUNDTRUTH

from autopar.devices import Constant, hardware
from autopar.devices import constants as figures_of_devices
from autopar.techniques import activations as figures_of_activations
from autopar.trainers import figures as figures_of_trainers
from autopar.trainers.errors import FILE
from autopar.validate import Score, ValidationReport, score, scores, validate
from autopar.validate.run import of_groups
from passes import slice_logits as figures_of_logits

PAGE = EVIDENCE / "validation.md"
ROWS = GROUNDTRUTH
SMALL_CLUSTER = 128  # GPUs: 16 nodes
_UNITS = {"sustained": ("sustained_matmul_bf16_tflops", "TFLOP/s, bfloat16 products in training")}


@dataclass(frozen=True, slots=True)
class Record:
    """A named figure. ``where`` is the module or file that it stands in."""

    name: str
    value: float
    unit: str
    source: str
    where: str

    @property
    def kind(self) -> str:
        """*measured*, *library*, *published*, *vendor*, *assumed* or *fitted*, see ``devices.constants``."""
        return self.source.split(":")[0].split()[0]

    @property
    def fitted(self) -> bool:
        """Whether it was chosen with published measurements in view."""
        return self.kind == "fitted"


def records() -> tuple[Record, ...]:
    """Every figure that was chosen rather than given by a data sheet. One figure that several files share is one record."""
    found = [
        Record(name, figure.value, figure.unit, figure.source, where)
        for where, module in (
            ("devices.constants", figures_of_devices),
            ("techniques.activations", figures_of_activations),
            ("passes.slice_logits", figures_of_logits),
            ("trainers.figures", figures_of_trainers),
        )
        for name, figure in vars(module).items()
        if isinstance(figure, Constant)
    ]
    for name, entry in hardware.table().items():
        found += _of_file(f"kinds/{name}.toml", entry)
    once: dict[tuple[str, float, str], Record] = {}
    for record in found:
        once.setdefault((record.unit, record.value, record.source), record)
    return tuple(once.values())


def _of_file(where: str, entry: Mapping[str, Any]) -> list[Record]:
    """The figures of a file that are no data sheet's: a fraction reached in training."""
    found = []
    for key, source in entry.get("sources", {}).items():
        if key in _UNITS:
            field, unit = _UNITS[key]
            found.append(Record(f"{entry['name']}: {field}", float(entry[field]), unit, source, where))
    return found


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in (header, ["---"] * len(header), *rows))


def constants() -> str:
    """Every figure that is no data sheet's, the fitted ones first."""
    found = sorted(records(), key=lambda record: not record.fitted)
    return table(
        ("figure", "value", "unit", "source", "where"),
        [(f"`{r.name}`", f"{r.value:.6g}", r.unit, r.source.replace("|", "/"), f"`{r.where}`") for r in found],
    )


def percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def cells(name: str, found: Score) -> tuple[str, ...]:
    return (
        name,
        f"{found.n_priced} of {found.n_rows}",
        "-" if found.spearman is None else f"{found.spearman:.2f}",
        percent(found.regret),
        percent(found.worst_regret),
        f"{found.ran_called_infeasible} of {found.n_ran}",
        f"{found.failed_called_infeasible} of {found.n_failed}",
        percent(found.time_median_error),
        percent(found.time_p90_error),
        percent(found.memory_median_error),
        percent(found.memory_p90_error),
    )


HEADER = ("rows", "priced", "Spearman", "regret", "worst", "ran, refused", "failed, refused", "time median", "90th percentile",
          "memory median", "90th percentile")  # fmt: skip


def published(report: ValidationReport) -> str:
    found = scores(report)
    rows = [cells(name, one) for name, one in found["sources"].items()]
    return table(("source", *HEADER[1:]), [*rows, cells("all", found["overall"])])


def sweep(report: ValidationReport, data: Sequence[dict[str, Any]]) -> str:
    """Cells up to 16 nodes, then the larger ones, then every cell."""
    small = [o for o, row in zip(report.outcomes, data, strict=True) if row["n_gpus"] <= SMALL_CLUSTER]
    large = [o for o, row in zip(report.outcomes, data, strict=True) if row["n_gpus"] > SMALL_CLUSTER]
    rows = [cells("all cells up to 16 nodes", score(small)), cells("all cells of 32 and 64 nodes", score(large))]
    return table(("cells", *HEADER[1:]), rows + [cells(name, one) for name, one in scores(report)["groups"].items()])


def peers(report: ValidationReport, data: Sequence[dict[str, Any]]) -> str:
    """Rows that carry another model's prediction: its errors beside ours."""
    rows, errors = [], []
    for o, row in zip(report.outcomes, data, strict=True):
        derived = row.get("derived") or {}
        if (
            "simumax_predicted_ms" not in derived
            or o.step_s is None
            or o.measured.step_s is None
            or o.memory_bytes is None
        ):
            continue
        assert o.measured.memory_bytes is not None
        times = (derived["simumax_predicted_ms"] / 1e3 / o.measured.step_s - 1, o.step_s / o.measured.step_s - 1)
        memories = (
            derived["simumax_predicted_alloc_gib"] * 2**30 / o.measured.memory_bytes - 1,
            o.memory_bytes / o.measured.memory_bytes - 1,
        )
        errors.append((*times, *memories))
        name = o.id.removeprefix("simumax-b200-")
        sizes = (f"{o.measured.step_s:.3f} s", *(f"{100 * e:+.1f} %" for e in times))
        held = (f"{o.measured.memory_bytes / 2**30:.1f} GiB", *(f"{100 * e:+.1f} %" for e in memories))
        rows.append((name, *sizes, *held))
    worst = [max((e[k] for e in errors), key=abs) for k in range(4)]
    middle = [statistics.median(abs(e[k]) for e in errors) for k in range(4)]
    rows.append(
        ("median of the errors' size", "", *(percent(m) for m in middle[:2]), "", *(percent(m) for m in middle[2:]))
    )
    rows.append(
        ("largest error", "", *(f"{100 * w:+.1f} %" for w in worst[:2]), "", *(f"{100 * w:+.1f} %" for w in worst[2:]))
    )
    return table(("run", "step", "SimuMax", "autopar", "memory", "SimuMax", "autopar"), rows)


def written(text: str, name: str, made: str) -> str:
    """``text`` with the table of that name replaced."""
    pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end {name} -->)", re.DOTALL)
    assert pattern.search(text), name
    return pattern.sub(lambda m: f"{m[1]}\n{made}\n\n{m[2]}", text)


def read(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (ROWS / name).read_text("utf-8").splitlines() if line.strip()]


def errors_by_trainer(reports: Sequence[ValidationReport]) -> str:
    """The text of ``autopar/trainers/errors.toml``."""
    lines = [
        "# How far prices of published runs were off, by trainer. Made by `make report NAME=validation`; do not edit."
    ]
    outcomes = [o for report in reports for o in report.outcomes if o.priced and o.evidence]
    for name, rows in sorted(of_groups(outcomes, lambda o: o.evidence).items()):
        found = score(rows)
        if found.time_median_error is None or found.time_p90_error is None:
            continue
        timed = sum(o.step_s is not None and o.measured.step_s is not None for o in rows)
        sized = sum(o.memory_bytes is not None and o.measured.memory_bytes is not None for o in rows)
        lines += ["", f"[{name}]", f"runs = {timed}", f"time_median = {found.time_median_error:.4f}"]
        lines += [f"time_p90 = {found.time_p90_error:.4f}"]
        if found.memory_median_error is not None and found.memory_p90_error is not None:
            lines += [f"memory_runs = {sized}", f"memory_median = {found.memory_median_error:.4f}"]
            lines += [f"memory_p90 = {found.memory_p90_error:.4f}"]
    return "\n".join(lines) + "\n"


def main(only: Sequence[str]) -> None:
    makers: dict[str, Callable[[], str]] = {"constants": constants}
    if not only or set(only) - {"constants"}:
        ours = validate(ROWS / "published.jsonl")
        recorded = validate(ROWS / "records.jsonl")
        swept = validate(ROWS / "layout_sweep.jsonl")
        FILE.write_text(errors_by_trainer([ours, recorded, swept]), "utf-8")
        makers |= {
            "published": lambda: published(ours),
            "records": lambda: published(recorded),
            "peers": lambda: peers(ours, read("published.jsonl")),
            "sweep": lambda: sweep(swept, read("layout_sweep.jsonl")),
        }
    text = PAGE.read_text("utf-8")
    for name in only or makers:
        text = written(text, name, makers[name]())
    PAGE.write_text(text, "utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("only", nargs="*", choices=[[], "constants"], help="these tables alone")
    main(parser.parse_args().only)
