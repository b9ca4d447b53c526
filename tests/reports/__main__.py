"""The pages of evidence: ``make report NAME=survey``, or ``python tests/reports survey [options]``.

Each report is a program that measures, keeps its results as JSON Lines in ``docs/evidence`` and writes the page of its name there. Most
resume where they were interrupted; ``--help`` lists the options of one. Without a name, the reports are listed.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

REPORTS_FOLDER = Path(__file__).resolve().parent
TESTS = REPORTS_FOLDER.parent
ROOT = TESTS.parent
PIP = ("-m", "pip", "install", "-qq", "--disable-pip-version-check", "--constraint", str(ROOT / "constraints.txt"))
FURTHER = str(Path(sys.prefix, "survey-further"))


@dataclass(frozen=True, slots=True)
class Report:
    """``about`` is its line in the list. Its ``steps`` are arguments of Python; the ``options`` that a user gives go to the last one."""

    about: str
    steps: tuple[tuple[str, ...], ...]
    options: bool = True


def program(name: str, *options: str) -> tuple[str, ...]:
    """A program of this folder."""
    return ("-W", "ignore", str(REPORTS_FOLDER / f"{name}.py"), *options)


REPORTS = {
    "bench": Report(
        "automatic programs against hand-written ones (a quiet machine, half an hour)",
        (
            ("-m", "autopar", "profile"),
            *(("-m", "autopar", "bench", "--processes", n, "--output", f"docs/evidence/bench-{n}.jsonl") for n in "24"),
            program("bench_page"),
        ),
        options=False,
    ),
    "brute-force": Report("the search against brute force on random small problems", (program("brute_force"),)),
    "capture-check": Report(
        "what the comparison of the captured graph with the model costs", (program("check_cost"),), options=False
    ),
    "checkpoints": Report(
        "training that goes on under another plan, pairs of plans drawn at random", (program("checkpoints"),)
    ),
    "checkpoint-scale": Report(
        "checkpoints of 16,384 ranks from layouts alone, damaged ones, and what checksums cost (minutes)",
        (program("checkpoint_scale"),),
    ),
    "collectives": Report(
        "every plan kind's ranks recorded, and checked under NCCL's rules (half an hour)", (program("collectives"),)
    ),
    "collective-waits": Report(
        "hangs, waits and time of programs under NCCL, before they were fixed and now (minutes)",
        (program("collective_waits"),),
    ),
    "concepts": Report("docs/concepts: their tables and pictures", (program("concepts"),)),
    "draws": Report("seconds in which a rank draws its initial values", (program("draws"),), options=False),
    "configurations": Report(
        "configurations that trainers publish, priced and compared (clones of their repositories; ten minutes)",
        (program("configurations"),),
    ),
    "dtensor-check": Report(
        "our rules against DTensor's, and which is wrong where they differ",
        (("-m", "autopar.checks", "--dtensor", "docs/evidence/dtensor-check.md"),),
    ),
    "endtoend": Report("six requests from the command line to the plan (a quiet machine)", (program("endtoend"),)),
    "examples": Report(
        "the table of examples/README.md: every example, run", (program("examples_page"),), options=False
    ),
    "exactness": Report("every plan kind against one device in float64 (half an hour)", (program("matrix"),)),
    "experts": Report(
        "expert parallelism with and without overlap and by hand, on four nodes with limited links (root, a quiet machine, 20 minutes)",
        (program("experts"),),
    ),
    "exports": Report(
        "configurations exported for other trainers: read by their parsers, and run on a CPU (installs them; half an hour)",
        (program("exports"),),
    ),
    "faults": Report("trainings that are killed, or cut off, and go on (root, half an hour)", (program("faults"),)),
    "features": Report("what each feature of emitted programs gains, as predicted", (program("features"),)),
    "fit": Report(
        "fitted constants of the price, fitted again with each source of published rows left out (15 minutes)",
        (program("fit"),),
    ),
    "growth": Report("planning time against layers and devices", (program("growth"),)),
    "house": Report("figures of the sources: lines, imports inside functions, cycles", (program("house_figures"),)),
    "infeasible": Report(
        "requests that cannot be met, and what is suggested (long); --seconds: how soon that is said",
        (program("infeasible"),),
    ),
    "int8-activations": Report("loss curves with saved activations in 8 bits (minutes)", (program("int8_curves"),)),
    "large-mixtures": Report("plans of the largest open mixtures of experts (minutes)", (program("large_mixtures"),)),
    "loader": Report("data sets: who reads which rows, under plans of every kind", (program("loader"),)),
    "measured-memory": Report("predicted against measured memory of emitted programs", (program("measured_memory"),)),
    "measured-time": Report(
        "predicted against measured step times (a quiet machine, half an hour)",
        (("-m", "autopar", "profile"), program("measured_time")),
    ),
    "mixtures": Report(
        "mixtures of experts of transformers and in other code's style, on four processes (half an hour)",
        ((*program("survey"), "--models-of", "survey_mixtures"),),
    ),
    "mutations": Report("faults put in on purpose, and what catches them", (program("mutations"),)),
    "one-device": Report(
        "emitted programs on one device against eager PyTorch and torch.compile (a quiet machine, or --device cuda)",
        (program("one_device"),),
    ),
    "optimizers": Report(
        "ten optimizers with schedules and groups, under plans of every kind against a plain loop",
        (program("optimizers"),),
    ),
    "overlap": Report(
        "communication hidden under computation, on nodes with limited links (root, a quiet machine, 25 minutes)",
        (program("overlap"),),
    ),
    "package": Report(
        "the wheel in a new environment: built, installed, plans, trains (minutes)",
        (program("package"),),
        options=False,
    ),
    "pairs": Report(
        "DualPipeV's pairs with their all-to-alls hidden and not, on four nodes with limited links (root, a quiet machine, 20 minutes)",
        (program("pairs"),),
    ),
    "pages": Report(
        "pages of plans in a browser: time to load, zoom, tooltips, keys, pictures (chromium; minutes)",
        (program("report_pages"),),
    ),
    "precision": Report(
        "loss curves of one model in every precision (a GPU: two minutes; a CPU: ten)", (program("precision_curves"),)
    ),
    "published": Report(
        "the automatic layout on every cell of the published sweep", (program("published"),), options=False
    ),
    "plan-files": Report("plan files that attack the commands that read them (half an hour)", (program("plan_files"),)),
    "quoted": Report(
        "figures of the evidence that README.md and other pages quote", (program("quoted_page"),), options=False
    ),
    "random-models": Report(
        "5,000 models drawn at random against eager PyTorch (an hour)",
        (program("random_models", "--count", "5000", "--seed", "0", "--results", "docs/evidence/random_models.jsonl"),),
    ),
    "reference": Report("docs/reference: the command line, the Python interface, the rules", (program("reference"),)),
    "rehearsal": Report(
        "ranks of large plans alone on one device: memory and time against the prediction (--device cuda on a GPU)",
        (program("rehearsals"),),
    ),
    "simpler": Report("simpler searches under the same prices", (program("simpler"),)),
    "space": Report("whether a pin beats the plan that no pin constrains (hours)", (program("space"),)),
    "soak": Report("how the memory of a process grows that compiles again and again", (program("soak"),)),
    "startup": Report(
        "memory of every process while a 7B model starts and saves (19 GB of memory, 41 GB of disk, 20 minutes)",
        (program("startup"),),
    ),
    # torchvision's wheels are built for a torch with CUDA. Where it is installed transformers imports it, and beside another torch that
    # fails: it stays in a folder of its own, with timm, which needs it. tests/models/survey_other.py finds them there.
    "survey": Report(
        "models of transformers, timm, torchvision, diffusers and peft (an hour)",
        (
            (*PIP, "--editable", f"{ROOT}[hf,dev,survey]"),
            (*PIP, "--upgrade", "--no-deps", "--target", str(Path(sys.prefix, "survey")), "timm", "torchvision"),
            program("survey"),
        ),
    ),
    "survey-further": Report(
        "models of packages that the survey lacks, vit-pytorch to torchdiffeq (an hour)",
        (
            (*PIP, "--editable", f"{ROOT}[hf,dev]"),
            # some of them ask for another torch
            (
                *PIP[:-2],
                "--upgrade",
                "--no-deps",
                "--target",
                FURTHER,
                "--requirement",
                f"{TESTS}/models/survey_further.txt",
            ),
            (*program("survey"), "--models-of", "survey_further"),
        ),
    ),
    "timelines": Report(
        "predicted against measured timelines on limited nodes (root, a quiet machine, 15 minutes)",
        (program("timelines"),),
    ),
    "tune": Report(
        "plans that are tuned from wrong calibrations, against all others, on limited nodes (root, a quiet machine, two hours)",
        (program("tune"),),
    ),
    "ui": Report(
        "the page of `autopar ui` in a browser: checks and pictures (chromium; minutes)", (program("ui_page"),)
    ),
    "validation": Report("the cost model against published measurements", (program("validation_page"),)),
    "robustness": Report(
        "plans under perturbed price tables: what they lose to the best plans there (half an hour)",
        (program("robustness"),),
    ),
    "simplicity": Report(
        "the simplest plan within 1 % of the fastest, for fifty requests (a quarter of an hour)",
        (program("simplicity"),),
    ),
    "volumes": Report("bytes per layer as emitted beside the published formulas", (program("volumes"),), options=False),
    "versions": Report("a part of the tests under versions of Python and torch", (program("versions"),)),
    "watch-load": Report(
        "requests and connections that the watch costs the ranks' store", (program("watch_load"),), options=False
    ),
}


def main(arguments: list[str]) -> int:
    if not arguments or arguments[0] not in REPORTS:
        for name, report in REPORTS.items():
            print(f"{name:16} {report.about}")
        if not arguments:
            return 0
        print(f"there is no report {arguments[0]!r}", file=sys.stderr)
        return 2
    report, given = REPORTS[arguments[0]], arguments[1:]
    if given and not report.options:
        print(f"{arguments[0]}: {report.about}; it takes no options", file=sys.stderr)
        return 2
    found = [str(path) for path in (ROOT, TESTS, TESTS / "models", REPORTS_FOLDER)]
    search_path = os.environ.get("PYTHONPATH")
    environment = {
        "OMP_NUM_THREADS": "1",
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*found, *([search_path] if search_path else [])]),
    }
    *before, last = report.steps
    if {"-h", "--help"} & set(given):
        before = []
    for step in (*before, (*last, *given)):
        status = subprocess.call([sys.executable, *step], cwd=ROOT, env=environment)
        if status:
            return status
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
