"""A fast part of the tests under versions of Python and torch, each pair in an environment of its own.

``make versions`` runs the pairs whose interpreter is on this machine and whose torch pip finds as a build for CPUs; the others are named
with the reason. pip is asked before anything is installed: a build that brings CUDA libraries takes gigabytes that a CPU never uses.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from package import environment, install, outside, versions
from places import EVIDENCE, ROOT

PAGE, LINES = EVIDENCE / "versions.md", EVIDENCE / "versions.jsonl"
PYTHONS = ("3.11", "3.12", "3.13")
TORCHES = ("2.11.0", "2.12.0", "2.12.1", "2.13.0")
TESTS = (
    "tests/capture/test_capture_batch.py",
    "tests/compile/test_compile.py",
    "tests/devices",
    "tests/emit/test_custom_ops.py",
    "tests/passes",
    "tests/program/test_loader.py",
    "tests/rules",
    "tests/run/test_run_program.py",
    "tests/search/test_search_plan.py",
)
NEEDS = ("pytest", "pytest-timeout", "hypothesis", "transformers")


def interpreter(version: str) -> str | None:
    """The path of a Python of this version that starts, if there is one."""
    found = shutil.which(f"python{version}")
    candidates = [found] if found else []
    candidates += [str(path) for path in sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))]
    for path in candidates:
        asked = subprocess.run([path, "-c", "import sys, venv; print(sys.version)"], capture_output=True, text=True)
        if asked.returncode == 0 and asked.stdout.startswith(f"{version}."):
            return path
    return None


def refused(python: Path, torch: str) -> str:
    """Why a version of torch is not installed; empty where it can be."""
    asked = subprocess.run(
        [python, "-m", "pip", "install", "--dry-run", "--no-deps", "--quiet", "--report", "-", f"torch=={torch}"],
        capture_output=True, text=True,
    )  # fmt: skip
    if asked.returncode:
        last = asked.stderr.strip().splitlines() or ["pip says nothing"]
        return f"pip finds no torch {torch}: {last[-1].removeprefix('ERROR: ')}"
    (found,) = json.loads(asked.stdout)["install"]
    wanted = [each for each in found["metadata"].get("requires_dist", ()) if re.match(r"nvidia-|cuda-", each)]
    if wanted:
        return f"pip's only build of it for this machine is for CUDA, with {len(wanted)} packages of CUDA libraries"
    return ""


def constraints(folder: Path, torch: str) -> Path:
    """This project's constraints with another torch."""
    path = folder / "constraints.txt"
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    path.write_text("\n".join([*(line for line in lines if not re.match(r"torch\w*==", line)), f"torch=={torch}"]))
    return path


def tried(version: str, torch: str) -> dict[str, Any]:
    """One pair: what ran and how it ended, or why it did not run."""
    line: dict[str, Any] = {"python": version, "torch": torch}
    path = interpreter(version)
    if path is None:
        return line | {"not_run": f"there is no Python {version} on this machine"}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        python = environment(folder / "venv", path)
        subprocess.run(
            [python, "-m", "pip", "install", "-qq", "--upgrade", "pip"], check=True
        )  # one that asks without fetching
        if why := refused(python, torch):
            return line | {"not_run": why}
        install(python, ROOT, *NEEDS, constraints=constraints(folder, torch))
        line["versions"] = versions(python, ("torch", "numpy", "ortools", "spmd-types", "transformers"))
        command = [python, "-m", "pytest", "-p", "no:cacheprovider", *TESTS]
        ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=outside())
    last = ran.stdout.strip().splitlines()[-1] if ran.stdout.strip() else ran.stderr[-500:]
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", ran.stdout, re.MULTILINE)
    counts = {what: int(number) for number, what in re.findall(r"(\d+) (passed|failed|skipped|errors?)", last)}
    return line | {"status": ran.returncode, "counts": counts, "failed": failed}


def row(line: dict[str, Any]) -> str:
    if "not_run" in line:
        return f"| {line['python']} | {line['torch']} | not run: {line['not_run']} |\n"
    counts = ", ".join(f"{number} {what}" for what, number in line["counts"].items())
    found = line["versions"]
    names = "".join(f"; `{name}`" for name in line["failed"])
    return f"| {found['Python']} | {found['torch']} | {counts}{names} |\n"


def page(lines: list[dict[str, Any]]) -> str:
    ran = [line for line in lines if "not_run" not in line]
    good = sum(line["status"] == 0 for line in ran)
    return f"""# Versions of Python and torch

Each pair of Python and torch gets a new environment with this checkout installed. {good} of {len(ran)} pairs that ran pass;
{len(lines) - len(ran)} could not run on this machine. {len(TESTS)} folders or files of the tests are run:
{", ".join(f"`{test}`" for test in TESTS)}.

| Python | torch | outcome |
|---|---|---|
{"".join(map(row, lines))}
`make versions` asks pip for builds and runs all pairs that it can install, also from an index that pip is configured to use. This page is
written from its [lines](versions.jsonl).
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", nargs="+", default=PYTHONS)
    parser.add_argument("--torch", nargs="+", default=TORCHES)
    args = parser.parse_args()
    lines = []
    for version in args.python:
        for torch in args.torch:
            lines.append(tried(version, torch))
            print(row(lines[-1]), end="", flush=True)
    LINES.write_text("".join(json.dumps(line) + "\n" for line in lines))
    PAGE.write_text(page(lines))


if __name__ == "__main__":
    main()
