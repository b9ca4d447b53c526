"""Configurations exported for four other trainers, each through the trainer's own parser, and small ones run on a CPU.

The trainers are installed in an environment of their own: a new one, or that of ``--environment FOLDER``, which keeps it. With
``--megatron-lm FOLDER``, a clone of Megatron-LM, its argument parser reads the flags too, at the tags of ``--megatron-tags``.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from exports_cases import FAULTS, cases
from exports_page import page
from exports_runs import runs
from package import environment, install, outside, versions
from places import EVIDENCE, ROOT
from results import without_docstrings

from autopar.trainers import TRAINERS

PAGE, LINES = EVIDENCE / "exports.md", EVIDENCE / "exports.jsonl"
PACKAGES = (
    "torch==2.13.0", "megatron-core==0.16.0", "torchtitan==0.3.0", "deepspeed==0.19.0", "accelerate==1.15.0",
    "transformers>=5", "triton", "torchao", "six",
)  # fmt: skip
SHOWN = ("torch", "megatron-core", "torchtitan", "deepspeed", "accelerate", "transformers")
TARGETS = Path(__file__).with_name("exports_targets.py")

Line = dict[str, Any]


def code() -> str:
    """A fingerprint of what writes the configurations and checks them, without comments and docstrings."""
    files = [*(ROOT / "autopar" / "trainers").glob("*.py"), *Path(__file__).parent.glob("exports*.py")]
    text = "".join(without_docstrings(path.read_text()) for path in sorted(files) if path.name != "exports_page.py")
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def checked(python: Path, target: str, found: Sequence[Line], path: str = "") -> Iterator[Line]:
    """Lines of ``exports_targets.py`` for these cases, by the trainer's environment."""
    more = {"DS_ACCELERATOR": "cpu", "NO_VCS_VERSION": "1"} | ({"PYTHONPATH": path} if path else {})
    command = [str(python), "-W", "ignore", str(TARGETS), target]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            command,
            input=json.dumps(found),
            capture_output=True,
            text=True,
            env=outside() | more,
            cwd=folder,
            timeout=1800,
        )
    lines = [json.loads(text) for text in done.stdout.splitlines()]
    if len(lines) != len(found):
        sys.exit(
            f"{target} ended with status {done.returncode} after {len(lines)} of {len(found)}:\n{done.stderr[-4000:]}"
        )
    yield from lines


def exported_plans(file: Path | None) -> list[Line]:
    """The plans, of ``file`` if it has them; otherwise they are made, and written there."""
    found = json.loads(file.read_text()) if file and file.exists() else list(cases())
    if file:
        file.write_text(json.dumps(found))
    return found


def by_megatron_lm(python: Path, repository: Path, tag: str, exported: Sequence[Line]) -> Iterator[Line]:
    """What Megatron-LM's own parser says, at a tag of a clone."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["git", "-C", str(repository), "archive", tag, "megatron"]
        archive = subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout
        subprocess.run(["tar", "x", "-C", folder], input=archive, check=True)
        yield from checked(python, "megatron-lm", exported, folder)


def of_plans(python: Path, found: Sequence[Line], args: argparse.Namespace) -> Iterator[Line]:
    """A line for every plan and trainer."""
    for trainer in TRAINERS:
        own = [case for case in found if case["trainer"] == trainer]
        exported = [case for case in own if "files" in case]
        outcomes = list(checked(python, trainer, exported))
        for tag in args.megatron_tags if trainer == "megatron" and args.megatron_lm else ():
            for outcome, more in zip(outcomes, by_megatron_lm(python, args.megatron_lm, tag, exported), strict=True):
                outcome["accepted"] = [*outcome.get("accepted", ()), *more.get("accepted", ())]
                outcome |= {"refused": f"{tag}: {more['refused']}"} if "refused" in more else {}
        by_case = {(line["model"], line["devices"]): line for line in outcomes}
        for case in own:
            kept = ("part", "trainer", "model", "devices", "no_plan", "notes", "wanted")
            line = {name: case[name] for name in kept if name in case}
            yield line | by_case.get((case["model"], case["devices"]), {})


def of_faults(python: Path, found: Sequence[Line]) -> Iterator[Line]:
    """A line for every changed word, which is refused if nothing notices it."""
    for trainer, model, file, old, new in FAULTS:
        case = next(each for each in found if (each["trainer"], each["model"]) == (trainer, model))
        text = case["files"][file]
        assert old in text, f"{model} for {trainer} has no {old!r}"
        (outcome,) = checked(python, trainer, [case | {"files": case["files"] | {file: text.replace(old, new, 1)}}])
        line = {"part": "faults", "trainer": trainer, "model": model, "devices": f"{old.strip()!r} -> {new!r}"}
        yield line | ({"noticed": outcome["refused"]} if "refused" in outcome else {"refused": "not noticed"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--environment", type=Path, help="a virtual environment with the trainers; made where it is missing"
    )
    parser.add_argument("--megatron-lm", type=Path, help="a clone of Megatron-LM")
    parser.add_argument("--megatron-tags", nargs="+", default=["core_v0.16.0", "core_v0.19.0"])
    parser.add_argument("--cases", type=Path, help="a file that keeps the exported plans")
    parser.add_argument("--part", choices=("plans", "faults", "runs"), help="that part alone; the others' lines stay")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.environment or Path(temporary, "trainers")
        python = folder / "bin" / "python"
        if not python.exists():
            environment(folder)
            install(python, *PACKAGES, constraints=Path(os.devnull))  # this project's versions are not theirs
        head = {"part": "versions", "code": code(), "versions": versions(python, SHOWN)}
        kept = [json.loads(text) for text in LINES.read_text().splitlines()] if args.part else []
        lines: list[Line] = []
        found = exported_plans(args.cases) if args.part != "runs" else []
        parts = {
            "plans": lambda: of_plans(python, found, args),
            "faults": lambda: of_faults(python, found),
            "runs": lambda: runs(python),
        }
        for part, of_part in parts.items():
            chosen = args.part in (None, part)
            for line in of_part() if chosen else (line for line in kept if line["part"] == part):
                lines.append(line)
                if chosen:
                    print(
                        line["trainer"],
                        line["model"],
                        line["devices"],
                        line.get("refused", line.get("no_plan", "passed")),
                        flush=True,
                    )
    LINES.write_text("".join(json.dumps(line) + "\n" for line in (head, *lines)))
    PAGE.write_text(page([head, *lines]))


if __name__ == "__main__":
    main()
