"""Random models against eager PyTorch: ``python tests/reports random-models --count 5000 --seed 0`` (``make report NAME=random-models``).

The model of each seed (``model_text.draw``) is captured; its graph on one device is compared with eager PyTorch as the model is, over
two steps, in float64; a random plan of it on two processes is emitted, type-checked, run and compared. The outcome is ``exact``,
``refused`` (an error of autopar's own), ``wrong`` or ``crash``.

The results have one line for every hundred seeds, with counts by outcome and by feature, and one for every seed that is not exact. A
run does what the file lacks for this code (``--fresh``: everything; ``--keep``: what no code has passed; each line names its code);
``--processes 2`` does two hundreds at a time, each with two warm processes of its own. ``--show 17`` prints the model of a seed and its
outcome; ``--shrink 17`` makes it smaller for as long as it fails
alike. Ends with status 1 if anything is wrong or crashed.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import multiprocessing
import re
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch
from model_outcome import KINDS, InvalidError, Outcome, outcome, runs
from model_shrink import shrink
from model_text import HEADER, Text, draw
from places import EVIDENCE, ROOT, TESTS
from results import fingerprint as code_of_autopar
from workers import WorkerPool

RESULTS = EVIDENCE / "random_models.jsonl"
HUNDRED = 100

_pool: list[WorkerPool] = []  # of this process


def pool() -> WorkerPool:
    """Two warm processes, which end with this one."""
    if not _pool:
        _pool.append(WorkerPool(2))
    return _pool[0]


def one(seed: int) -> tuple[Text, Outcome]:
    """The model of a seed and what becomes of it."""
    text = draw(seed, runs)
    return text, outcome(text, seed, pool())


def hundred(first: int, count: int) -> list[dict[str, Any]]:
    """The lines of the seeds ``first`` to ``first + count - 1``: their counts, then those that are not exact."""
    quiet()
    start_s = time.perf_counter()
    kinds: Counter[str] = Counter()
    planned: Counter[str] = Counter()
    features: dict[str, Counter[str]] = {}
    lines = []
    for seed in range(first, first + count):
        text, found = one(seed)
        kinds[found.kind] += 1
        planned["run" if found.plan else "no plan"] += 1
        for feature in text.features:
            features.setdefault(feature, Counter())[found.kind] += 1
        if found.kind != "exact":
            message = found.message.replace(f"{ROOT}/", "")  # where a machine keeps the checkout is no result
            lines.append(
                {"seed": seed, "outcome": found.kind, "stage": found.stage, "message": message}
                | ({"plan": found.plan} if found.plan else {})
                | {"features": list(text.features)}
            )
    summary = {"seeds": [first, first + count - 1], "outcomes": _ordered(kinds), "planned": planned["run"]}
    by_feature = {name: _ordered(features[name]) for name in sorted(features)}
    seconds = round(time.perf_counter() - start_s, 1)
    return [summary | {"features": by_feature, "seconds": seconds, "torch": torch.__version__, "code": code()}, *lines]


def _ordered(counts: Counter[str]) -> dict[str, int]:
    return {kind: counts[kind] for kind in KINDS if counts[kind]}


@functools.cache
def code() -> str:
    """Of what the results depend on: autopar and the generator."""
    files = (TESTS / name for name in ("models/model_text.py", "models/model_parts.py", "reports/model_outcome.py"))
    own = b"".join(path.read_bytes() for path in files)
    return hashlib.sha256(code_of_autopar().encode() + own).hexdigest()[:12]


# -- the results ------------------------------------------------------------------------------------------------------


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in path.read_text().splitlines()] if path.exists() else []


def kept(
    lines: Iterable[dict[str, Any]], wanted: list[tuple[int, int]], *, of_any_code: bool = False
) -> dict[tuple[int, int], list[dict[str, Any]]]:
    """The lines that need not be made again, by their hundred.

    With ``of_any_code``, a hundred of earlier code is among them if nothing in it was wrong and nothing crashed.
    """
    found: dict[tuple[int, int], list[dict[str, Any]]] = {}
    current: tuple[int, int] | None = None
    for line in lines:
        if "seeds" in line:
            first, last = line["seeds"]
            key = (first, last - first + 1)
            current = key if key in wanted and (line["code"] == code() or (of_any_code and _sound(line))) else None
        if current is not None:
            found.setdefault(current, []).append(line)
    return found


def _sound(line: dict[str, Any]) -> bool:
    return line["outcomes"].keys() <= {"exact", "refused"}


def write(path: Path, found: dict[tuple[int, int], list[dict[str, Any]]]) -> None:
    """Write the lines; files of packages are named without the folder in which they are installed."""
    text = "".join(json.dumps(line) + "\n" for key in sorted(found) for line in found[key])
    path.write_text(re.sub(r'[^\s"]*/site-packages/', "", text))


def summary(lines: Iterable[dict[str, Any]]) -> str:
    """All lines in words: outcomes, features of interest, refusals by reason, what is wrong or crashed."""
    outcomes: Counter[str] = Counter()
    features: dict[str, Counter[str]] = {}
    reasons: Counter[str] = Counter()
    bad, planned = [], 0
    for line in lines:
        if "seeds" in line:
            outcomes.update(line["outcomes"])
            planned += line["planned"]
            for name, counts in line["features"].items():
                features.setdefault(name, Counter()).update(counts)
        elif line["outcome"] == "refused":
            reasons[reason(line["message"])] += 1
        else:
            bad.append(f"{line['outcome']}: seed {line['seed']} ({line['stage']}): {line['message']}")
    parts = [
        f"{sum(outcomes.values())} models: {_words(outcomes)}; {planned} of them run on two processes",
        *(f"{name}: {_words(features[name])}" for name in sorted(features)),
        *(f"refused {count}: {text}" for text, count in reasons.most_common()),
        *bad,
    ]
    return "\n".join(parts)


def _words(counts: Counter[str]) -> str:
    return ", ".join(f"{counts[kind]} {kind}" for kind in KINDS if counts[kind])


def reason(message: str) -> str:
    """A message without what differs from model to model: paths, names of modules, numbers."""
    text = re.sub(r"`.*?`", "`...`", message.split("\n")[0])
    text = re.sub(r"\S*[./]\w+\.py:\d+|<\w+>:\d+", "...", text)
    return re.sub(r"\d+", "N", re.sub(r"\b(\w+\.)+\w*\d\w*", "...", text))[:160]


# -- the command ------------------------------------------------------------------------------------------------------


def show(seed: int, smaller: bool) -> int:
    text, found = one(seed)
    if smaller and found.kind != "exact":

        def fails(candidate: Text) -> bool:
            try:
                return runs(candidate) and outcome(candidate, seed, pool()).like == found.like
            except InvalidError:
                return False

        text = shrink(text, fails)
        found = outcome(text, seed, pool())
    print(HEADER + text.source)
    print(f"# seed {seed}: {found.kind} ({found.stage}) {found.message} {found.plan}")
    return 0 if found.kind in ("exact", "refused") else 1


def quiet() -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=5000, help="how many models")
    parser.add_argument("--seed", type=int, default=0, help="the first")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--fresh", action="store_true", help="do every hundred anew")
    parser.add_argument("--keep", action="store_true", help="keep what passed, whatever code it was of")
    parser.add_argument("--processes", type=int, default=1, help="how many hundreds at a time")
    parser.add_argument("--show", type=int, metavar="SEED", help="print the model of a seed and its outcome")
    parser.add_argument("--shrink", type=int, metavar="SEED", help="the same of a model that is made smaller")
    return parser.parse_args(argv)


def main() -> int:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    args = arguments()
    quiet()
    try:
        if args.show is not None or args.shrink is not None:
            return show(args.show if args.show is not None else args.shrink, args.shrink is not None)
        last = args.seed + args.count
        wanted = [(first, min(HUNDRED, last - first)) for first in range(args.seed, last, HUNDRED)]
        found = {} if args.fresh else kept(read(args.results), wanted, of_any_code=args.keep)
        columns = (TextColumn("{task.description:40}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=Console(stderr=True)) as progress:
            task = progress.add_task("random models", total=args.count, completed=sum(key[1] for key in found))
            for key, lines in _made([key for key in wanted if key not in found], args.processes):
                found[key] = lines
                write(args.results, found)
                progress.update(task, advance=key[1])
                for line in lines[1:]:
                    if line["outcome"] != "refused":
                        progress.console.print(json.dumps(line), markup=False)
    finally:
        for each in _pool:
            each.close()
    print(summary(line for key in sorted(found) for line in found[key]))
    everything: Counter[str] = Counter()
    for lines in found.values():
        everything.update(lines[0]["outcomes"])
    return 1 if everything["wrong"] or everything["crash"] else 0


def _made(keys: list[tuple[int, int]], processes: int) -> Iterable[tuple[tuple[int, int], list[dict[str, Any]]]]:
    if processes == 1:
        for key in keys:
            yield key, hundred(*key)
        return
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as executor:
        running = {executor.submit(hundred, *key): key for key in keys}
        for future in as_completed(running):
            yield running[future], future.result()


if __name__ == "__main__":
    sys.exit(main())
