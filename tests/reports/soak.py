"""Compile again and again in one process, and print how its memory grows: ``python tests/reports soak`` (``make report NAME=soak``).

``--compiles 300`` says how often. The command ends with status 1 where memory grows by ``--limit-mb`` or more after the first 30.
"""

from __future__ import annotations

import argparse
import gc
import sys
from pathlib import Path

import recipes
import torch

import autopar

WARM = 30
"""Compiles after which imports and caches of torch are full."""


def resident_mb() -> float:
    """Memory of this process that is in RAM."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 1e6


def compile_once() -> None:
    torch.manual_seed(0)
    pins = {"pin": {"data": 2}, "time_limit_s": 1}
    autopar.compile(recipes.Reader(), 2, recipes.batch(0), recipes.loss_of, **pins).close()  # type: ignore[arg-type]


def objects_after(compiles: int) -> int:
    """The objects of this process after so many compiles."""
    for _ in range(compiles):
        compile_once()
    gc.collect()
    return len(gc.get_objects())


def main(args: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--compiles", type=int, default=300)
    parser.add_argument("--limit-mb", type=float, default=10.0)
    given = parser.parse_args(args)
    torch.set_num_threads(1)
    objects = objects_after(WARM)
    warm = resident_mb()
    print(f"{WARM} compiles: {warm:.1f} MB, {objects} objects", flush=True)
    for done in range(2 * WARM, given.compiles + 1, WARM):
        now = objects_after(WARM)
        print(f"{done} compiles: {resident_mb():.1f} MB, {now} objects", flush=True)
    grown = resident_mb() - warm
    print(f"after the first {WARM}: {grown:+.1f} MB")
    return int(grown >= given.limit_mb)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
