"""Ten optimizers under plans of every kind against a plain PyTorch loop: ``make report NAME=optimizers``.

A case trains a model under a plan with one optimizer, with clipping, weight decay in groups by name and by number of dims, and a schedule
of warm-up and cosine. The losses and the parameters at the end are compared with a loop of eager PyTorch, torch's optimizer, clipping and
scheduler on one device, in float64.

One JSON line per case; the page is generated from them. A run does what the file lacks for this code (``--fresh``: everything). Ends with
status 1 if a case is not exact.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from exactness import subject
from optimizer_cases import NORM, OPTIMIZERS, STEPS, plain
from places import EVIDENCE
from results import Results, options, quiet
from resumed import KIND, batch_of, emitted
from workers import WorkerPool

from autopar.measure import EXACT

RESULTS = EVIDENCE / "optimizers.jsonl"
PLANS = (
    ("gpt2", "one device"),
    ("gpt2", "data 2"),
    ("gpt2", "data 2, zero 1"),
    ("gpt2", "data 2, zero 2"),
    ("gpt2", "data 2, zero 3"),
    ("gpt2", "tensor 2"),
    ("gpt2", "pipeline 2"),
    ("gpt2", "pipeline 2 x tensor 2"),
    ("gpt2", "data 2 x tensor 2, zero 3"),
    ("gpt2", "data 2 in 2 copies, zero 3"),
    ("gpt2", "data 2, parameter server"),
    ("gpt2", "pipeline 2, Chimera"),
    ("gpt2", "pipeline 2 of 2 chunks x data 2, zero 1"),
    ("odd_gpt2", "tensor 3"),
    ("mixtral", "expert 2"),
    ("mixtral", "data 2 x expert 2, zero 2"),
)
WHOLE = ("Adafactor", "Muon")
NOISES = (1e-15, 1e-7)
Case = tuple[str, str, str]


def lines_of(model: str, kind: str, names: list[str], pools: dict[int, WorkerPool]) -> list[dict[str, Any]]:
    """The results of one plan, a line for each optimizer. What goes wrong is recorded as ``failure`` and does not end the report."""
    began = time.perf_counter()
    found: list[dict[str, Any]] = []
    batches = [batch_of(model, step) for step in range(STEPS)]
    try:
        given = subject(model)
        plan = KIND[kind].plan(given.graph)
        pool = pools.setdefault(plan.device_count, WorkerPool(plan.device_count))
        with tempfile.TemporaryDirectory() as folder:
            call = (emitted(model, plan, Path(folder)), given.state, batches, names)
            ranks = pool.run("optimizer_cases:trained", *call, timeout_s=300)
        for name in names:
            losses, values, norm = plain(model, name)
            state = ranks[0][name]["state"]
            assert set(state) == set(values)
            pairs = zip(ranks[0][name]["losses"], losses, strict=True)
            found.append(
                {
                    "loss": max(abs(a - b) / max(1.0, abs(b)) for a, b in pairs),
                    "values": max(float((state[key] - values[key]).abs().max()) for key in values),
                    "moved": max(float((values[key] - given.state[key]).abs().max()) for key in values),
                    "norm": round(norm, 3),
                    "elements": [rank[name]["elements"] for rank in ranks],
                }
            )
    except Exception as error:  # noqa: BLE001  whatever it is, it is the result of these cases
        found = [{"failure": f"{type(error).__name__}: {error}".splitlines()[0]} for _ in names]
    more = {"seconds": round((time.perf_counter() - began) / len(names), 2), "torch": torch.__version__}
    return [
        {"model": model, "plan": kind, "optimizer": name, **line, **more}
        for name, line in zip(names, found, strict=True)
    ]


def noise_line(noise: float, name: str) -> dict[str, Any]:
    """How far the plain loop itself is from one whose gradients are changed a little."""
    (_, values, _), (_, other, _) = plain("gpt2", name), plain("gpt2", name, noise)
    error = max(float((values[key] - other[key]).abs().max()) for key in values)
    line = {"model": "gpt2", "plan": _noise(noise), "optimizer": name, "values": error}
    return line | {"torch": torch.__version__}


_PLAIN = "plain loop"


def _noise(noise: float) -> str:
    return f"{_PLAIN}, gradients changed by {noise:.0e} of themselves"


def passed(line: dict[str, Any]) -> bool:
    """Whether the case is exact. Lines of plain loops show what rounding does, and have no case to pass."""
    if line["plan"].startswith(_PLAIN):
        return "failure" not in line
    return "loss" in line and max(line["loss"], line["values"]) <= EXACT < line["moved"] and line["norm"] > NORM


# -- the page ---------------------------------------------------------------------------------------------------------


def page(found: dict[Case, dict[str, Any]]) -> str:
    lines = [found[model, plan, name] for model, plan in PLANS for name in OPTIMIZERS]
    ran = [line for line in lines if "failure" not in line]
    worst = max((max(line["loss"], line["values"]) for line in ran), default=0.0)
    versions = ", ".join(sorted({line["torch"] for line in lines}))
    head = f"| model | plan | {' | '.join(OPTIMIZERS)} |\n|---|---|{'---|' * len(OPTIMIZERS)}\n"
    rows = "".join(_row(model, plan, found) for model, plan in PLANS)
    noises = "".join(_row("gpt2", _noise(noise), found) for noise in NOISES)
    shares = "".join(
        f"| {model} | {plan} | {' | '.join(_shares(found[model, plan, name]) for name in WHOLE)} |\n"
        for model, plan in PLANS
    )
    norms = sorted({line["norm"] for line in ran})
    moved = min((line["moved"] for line in ran), default=0.0)
    return f"""# Optimizers

{STEPS} steps of an emitted program are compared with a plain loop of eager PyTorch with torch's optimizer, `clip_grad_norm_` and
scheduler, on one device in float64. {sum(map(passed, lines))} of {len(lines)} cases are exact. The error is the largest relative error of
any loss or final parameter. Exact means at most {EXACT:.0e}; the largest error is {worst:.1e}. In each case some parameter changes by
{moved:.1e} or more.

Every case clips gradients to a norm of {NORM} (in the first step the norm is {norms[0]} or more), has parameter groups by name
(embeddings) and by number of dims with their own weight decay, one group with its own learning rate, and a scheduler of three warm-up
steps and a cosine. Muon updates the matrices of the layers and AdamW all other parameters: the optimizer of the program is a list of
both. With its default `eps`, Adafactor also changes parameters whose gradient is zero up to rounding, such as the bias of attention's
keys; its errors are largest there.

{head}{rows}
Muon and Adafactor read full tensors. If the plan shards a parameter, one rank gathers and updates it. The number of elements that each
rank's optimizer updates:

| model | plan | {" | ".join(WHOLE)} |
|---|---|---|
{shares}
Muon computes in bfloat16 internally. In float64 the gradients under two plans agree to about 1e-15, so they round to different bfloat16
numbers only within 1e-15 of a midpoint, which did not occur. In float32 they agree to about 1e-7: some numbers round differently, and two
plans differ as much as two orders of summation in bfloat16. For comparison, the plain loop on one device was run with a random relative
change of this size in every element of every gradient. Its final values differ by:

{head}{noises}
Made by `make report NAME=optimizers` with torch {versions}, gloo, on CPUs, from the lines of [optimizers.jsonl](optimizers.jsonl). Do not
edit.
"""


def _row(model: str, plan: str, found: dict[Case, dict[str, Any]]) -> str:
    cells = [_error(found[model, plan, name]) for name in OPTIMIZERS]
    return f"| {model} | {plan} | {' | '.join(cells)} |\n"


def _error(line: dict[str, Any]) -> str:
    return line["failure"] if "failure" in line else f"{max(line.get('loss', 0.0), line['values']):.0e}"


def _shares(line: dict[str, Any]) -> str:
    return ", ".join(f"{count:,}" for count in line.get("elements", ())) or "none"


# -- the command ------------------------------------------------------------------------------------------------------


def main() -> int:
    args = options(__doc__, RESULTS).parse_args()
    quiet()
    torch.set_num_threads(1)
    results = Results(args.results, ("model", "plan", "optimizer"), passed)
    kept = results.kept(args)
    pools: dict[int, WorkerPool] = {}
    try:
        for model, plan in PLANS:
            if names := [name for name in OPTIMIZERS if (model, plan, name) not in kept]:
                for line in lines_of(model, plan, names, pools):
                    results.append(line)  # after every plan, so that an interrupted run can be resumed
                    print(json.dumps(line) if not passed(line) else f"{model} {plan}", file=sys.stderr)
    finally:
        for pool in pools.values():
            pool.close()
    for noise in NOISES:
        for name in OPTIMIZERS:
            if ("gpt2", _noise(noise), name) not in kept:
                results.append(noise_line(noise, name))
    places = (*PLANS, *(("gpt2", _noise(noise)) for noise in NOISES))
    order = [(model, plan, name) for model, plan in places for name in OPTIMIZERS]
    found = dict(zip(order, results.tidy(order), strict=True))
    args.results.with_suffix(".md").write_text(page(found))
    bad = [case for case in order if not passed(found[case])]
    print(f"{len(PLANS) * len(OPTIMIZERS)} cases, {len(bad)} not exact: {args.results}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
