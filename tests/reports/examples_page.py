"""The table of ``examples/README.md``: what every example shows, and the last line that it prints, as it was run.

``python tests/reports/examples_page.py`` runs them all, each as a script of its own.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys

from places import ROOT

EXAMPLES = ROOT / "examples"
PAGE = EXAMPLES / "README.md"
PARTS = ("eager", "soft_cap", "classifier", "train_llama_stdlib")
"""Files that are not run here: what others import, a factory, and ``make demo``."""

_HEAD = """# Examples

Short programs that train (or plan) and compare the result with one device. `make install` installs their dependencies: transformers,
scikit-learn for `vit.py`, accelerate for `hf_trainer.py`, pytorch-lightning for `with_lightning.py`. Models are in float64. Differences of
about 1e-7 remain where transformers computes the loss, or Lightning logs it, in float32.

| example | command | last line of its output |
|---|---|---|
"""

_TAIL = """
[`train_llama_stdlib.py`](train_llama_stdlib.py) is `make demo`: a Llama with 9.9 M parameters on 4 processes and on 1.
[`classifier.py`](classifier.py) is the model of the [guide](../docs/guide/start.md), [`eager.py`](eager.py) the plain PyTorch loop for the
comparisons, [`soft_cap.py`](soft_cap.py) the op of `custom_op.py`. `python tests/reports examples` runs the examples and writes this page.
"""


def names() -> list[str]:
    """The examples that are run, in the order of their names."""
    return sorted(path.stem for path in EXAMPLES.glob("*.py") if path.stem not in PARTS)


def purpose(name: str) -> str:
    """The first sentence of an example's docstring."""
    text = ast.get_docstring(ast.parse((EXAMPLES / f"{name}.py").read_text())) or ""
    first = " ".join(text.partition("\n\n")[0].split()).replace("``", "`")
    return first.partition(": `python ")[0].rstrip(".")


def printed(name: str) -> str:
    """The last line that an example prints."""
    path = os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / f"{name}.py")],
        stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT, env=os.environ | {"PYTHONPATH": path},
    )  # fmt: skip
    return done.stdout.strip().splitlines()[-1]


def main() -> None:
    rows = [f"| {purpose(name)} | `python examples/{name}.py` | {printed(name)} |\n" for name in names()]
    PAGE.write_text(_HEAD + "".join(rows) + _TAIL)


if __name__ == "__main__":
    main()
