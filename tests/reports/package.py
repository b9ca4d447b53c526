"""The distribution as users get it: wheel and sdist are built, and the wheel, in a new environment, plans and trains.

``make package`` runs it and writes ``docs/evidence/package.md``; torch is the version of ``constraints.txt``. The environment is in a
folder of its own, without the checkout on any path.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from places import EVIDENCE, ROOT

PAGE, LINES = EVIDENCE / "package.md", EVIDENCE / "package.jsonl"
CONSTRAINTS = ROOT / "constraints.txt"
SHOWN = ("torch", "numpy", "ortools", "networkx", "spmd-types", "safetensors", "rich", "click")
CFFCONVERT = "cffconvert==2.0.0"
CHECKOUT_ONLY = ("tests/", "examples/", "docs/", "autopar/report/web/node_modules/")
"""What the wheel must not have."""

TRAIN = """
import autopar, torch
from mine import model
module, batch, loss_fn = model()
alone = float(loss_fn(module(batch[0]), batch[1]).detach())
with autopar.compile(module, 2, batch, loss_fn) as program:
    loss = program.step(batch)
assert "site-packages" in autopar.__file__, autopar.__file__
print(loss, alone)
"""

MODEL = """
import torch
from torch import nn


def model():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 4)).double()
    return module, (torch.randn(8, 16, dtype=torch.float64), torch.randint(4, (8,))), nn.functional.cross_entropy
"""


def call(*command: str | Path, cwd: Path | None = None) -> str:
    """What a command prints. Ends this program with its output where it fails."""
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, cwd=cwd, env=outside())
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))} ended with status {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def outside() -> dict[str, str]:
    """The environment without this process's search path."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def environment(folder: Path, python: str = sys.executable) -> Path:
    """The Python of a new environment in ``folder``, with pip."""
    call(python, "-m", "venv", folder)
    return folder / "bin" / "python"


def install(python: Path, *what: str | Path, constraints: Path = CONSTRAINTS) -> None:
    call(python, "-m", "pip", "install", "-qq", "--disable-pip-version-check", "--constraint", constraints, *what)


def versions(python: Path, names: Sequence[str]) -> dict[str, str]:
    """The installed versions of ``names``, and of Python."""
    code = "import sys, json, platform; from importlib.metadata import version"
    code += "; print(json.dumps({'Python': platform.python_version()} | {n: version(n) for n in sys.argv[1:]}))"
    found: dict[str, str] = json.loads(call(python, "-c", code, *names))
    return found


def build(folder: Path) -> tuple[Path, Path]:
    """The wheel and the sdist, of which the wheel is built."""
    call(sys.executable, "-m", "build", "--outdir", folder, ROOT)
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return wheel, sdist


def contents(wheel: Path, sdist: Path) -> dict[str, Any]:
    """What is in them, which is checked: types, device files and the page's script in the wheel; tests and licence in the sdist."""
    inside = zipfile.ZipFile(wheel).namelist()
    with tarfile.open(sdist) as opened:
        packed = [name.partition("/")[2] for name in opened.getnames()]
    wanted = ("autopar/py.typed", "passes/py.typed", "autopar/devices/kinds/", "autopar/program/train.py")
    missing = [name for name in wanted if not any(path.startswith(name) for path in inside)]
    missing += [name for name in ("LICENSE", "README.md", "tests/conftest.py", "CITATION.cff") if name not in packed]
    extra = [path for path in inside if path.startswith(CHECKOUT_ONLY)]
    if missing or extra:
        sys.exit(f"the distribution lacks {missing} and has {extra}")
    sizes = {"wheel_bytes": wheel.stat().st_size, "sdist_bytes": sdist.stat().st_size}
    return {"wheel": wheel.name, "sdist": sdist.name, "wheel_files": len(inside), "sdist_files": len(packed), **sizes}


def used(python: Path, folder: Path) -> dict[str, Any]:
    """A plan by the command line and one step by the library, from a folder that has a model alone."""
    (folder / "mine.py").write_text(MODEL)
    (folder / "train.py").write_text(TRAIN)
    command = python.parent / "autopar"
    plan = json.loads(call(command, "plan", "mine.py:model", "--devices", "2", "--json", cwd=folder))
    loss, alone = map(float, call(python, folder / "train.py", cwd=folder).split())
    if abs(loss - alone) > 1e-12:
        sys.exit(f"the loss of the program is {loss}, and that of one device {alone}")
    return {
        "planned": plan["devices"],
        "loss": loss,
        "difference": abs(loss - alone),
        "version": call(command, "--version").strip(),
    }


def citation(folder: Path) -> str:
    """Validate CITATION.cff by the schema of its format."""
    python = environment(folder / "cff")
    install(python, CFFCONVERT)
    return call(python.parent / "cffconvert", "--validate", "-i", ROOT / "CITATION.cff").strip()


def page(line: dict[str, Any]) -> str:
    installed = "".join(f"| {name} | {version} |\n" for name, version in line["versions"].items())
    return f"""# The distribution

`make package` builds `{line["sdist"]}` ({line["sdist_files"]} files, {line["sdist_bytes"] / 1e6:.1f} MB), and from it `{line["wheel"]}`
({line["wheel_files"]} files, {line["wheel_bytes"] / 1e6:.1f} MB). The wheel is installed in a new environment. In a folder outside of the
checkout with only a model file, `autopar plan` plans the model for 2 processes, and `autopar.compile` trains one step on them: the loss,
{line["loss"]:.6f}, differs from eager PyTorch by {line["difference"]:.0e}. `autopar --version` prints `{line["version"]}`. Result of
`{CFFCONVERT.replace("==", " ")}` for `CITATION.cff`: "{line["citation"].rstrip(".")}".

| installed | version |
|---|---|
{installed}
`make package` repeats all of this, and writes this page from [its line](package.jsonl).
"""


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        wheel, sdist = build(folder / "dist")
        line = contents(wheel, sdist)
        python = environment(folder / "venv")
        install(python, wheel)
        (folder / "mine").mkdir()
        line |= used(python, folder / "mine") | {"versions": versions(python, SHOWN), "citation": citation(folder)}
    LINES.write_text(json.dumps(line) + "\n")
    PAGE.write_text(page(line))
    print(f"{line['wheel']}: planned and trained, {line['citation']}")


if __name__ == "__main__":
    main()
