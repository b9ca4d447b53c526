"""Plan files from elsewhere: ``python tests/reports plan-files --count 300 --seed 0``.

The file of each seed (``plan_attacks.draw``) is given to every command that reads plans, as one would give it a plan that was sent by
mail. A command may refuse it with a sentence, or use it, where what was drawn is a plan after all. It may not run anything of it
(``executed``), end with a fault of autopar's own (``fault``), or go on for more than five minutes of a busy machine (``hang``); a
refusal takes at most two processor seconds (``late``). All is done twice, with assertions and without (``python -O``).

The results have a line for each kind of file and each command, with counts. Ends with status 1 if anything else than ``refused`` and
``used`` is among them.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any

from places import EVIDENCE, TESTS

RESULTS = EVIDENCE / "plan_files.jsonl"
SOON_S = 2.0  # processor seconds
HANG_S = 300
GOOD = ("refused", "used")

COMMANDS: dict[str, tuple[str, ...]] = {
    "compare": ("compare", "FILE", "base.json"),
    "price": ("price", "victim.py:model", "--devices", "2", "--plan", "FILE"),
    "report": ("report", "FILE", "-o", "page.html"),
    "report of a model": ("report", "FILE", "-o", "page.html", "--model", "victim.py:model"),
    "explain": ("explain", "FILE", "--time-limit", "1"),
    "explain a model": ("explain", "FILE", "--time-limit", "1", "--model", "victim.py:model"),
    "trace": ("trace", "FILE", "-o", "trace.json"),
    "trace of a model": ("trace", "FILE", "-o", "trace.json", "--model", "victim.py:model"),
    "emit": ("emit", "victim.py:model", "--devices", "2", "--plan", "FILE", "-o", "program"),
    "verify": ("verify", "victim.py:model", "--devices", "2", "--plan", "FILE"),
    "run": ("run", "victim.py:model", "--devices", "2", "--steps", "1", "--plan", "FILE"),
    "launch": ("launch", "folder", "--slurm", "job.sh", "--", "--checkpoint", "kept"),
}
"""The commands that read plans: arguments, in a folder with the model ``victim.py``, its plan ``base.json``, and ``evil.py``."""


class HangError(BaseException):
    """Too much time has passed: a ``BaseException``, so that nothing takes it for an error of the user's model."""


def _hang(number: int, frame: FrameType | None) -> None:
    raise HangError


@contextlib.contextmanager
def folder() -> Iterator[Path]:
    """A folder to attack, as the working folder."""
    from plan_attacks import EVIL, FACTORY, MARK

    before = Path.cwd()
    with tempfile.TemporaryDirectory() as name:
        here = Path(name)
        (here / "victim.py").write_text(FACTORY)
        (here / "evil.py").write_text(EVIL)
        os.environ[MARK] = str(here / "attacked")
        os.chdir(here)
        try:
            status, said = invoke(("plan", "victim.py:model", "--devices", "2", "--time-limit", "5", "-o", "base.json"))
            if status != 0:
                raise RuntimeError(f"there is no plan to attack: {status} {said}")
            yield here
        finally:
            os.chdir(before)


def invoke(arguments: tuple[str, ...]) -> tuple[int | str, str]:
    """The exit status of a command, run in this process, and what it printed; in place of a status ``hang``."""
    from autopar.cli import main

    said = io.StringIO()
    signal.alarm(HANG_S)
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            main(arguments)
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else 1, said.getvalue()
    except HangError:
        return "hang", said.getvalue()
    except BaseException:  # noqa: BLE001  the command line lets nothing through
        return 1, said.getvalue() + traceback.format_exc()
    finally:
        signal.alarm(0)
    return 0, said.getvalue()


def outcome(arguments: tuple[str, ...], mark: Path) -> tuple[str, str]:
    """What became of a command, and what it said."""
    started = time.process_time()
    status, said = invoke(arguments)
    took_s = time.process_time() - started
    if mark.exists():
        mark.unlink()
        return "executed", said
    if status == "hang":
        return "hang", said
    if status not in (0, 1, 2) or "Traceback" in said or "fault in autopar" in said:
        return "fault", said
    if "holds no plan" in said and took_s > SOON_S:
        return "late", f"{took_s:.1f} s: {said}"
    return "refused" if status else "used", said


def attack(seeds: range, commands: dict[str, tuple[str, ...]]) -> Iterator[dict[str, Any]]:
    """A line for every seed and command."""
    from plan_attacks import draw

    signal.signal(signal.SIGALRM, _hang)
    with folder() as here:
        plan = json.loads((here / "base.json").read_text())
        for seed in seeds:
            kind, text = draw(seed, plan)
            file = here / f"plan-{seed}.json"
            file.write_text(text, "utf-8", errors="surrogatepass")
            (here / "folder").mkdir(exist_ok=True)
            (here / "folder" / "plan.json").write_bytes(file.read_bytes())
            for name, words in commands.items():
                faulthandler.dump_traceback_later(2 * HANG_S, exit=True)
                what, said = outcome(tuple(file.name if word == "FILE" else word for word in words), here / "attacked")
                faulthandler.cancel_dump_traceback_later()
                yield {"seed": seed, "kind": kind, "command": name, "outcome": what, "said": said[-600:]}
            file.unlink()


def work(first: int, count: int) -> None:
    """Print the line of every seed and command, without the words where all is well."""
    out = os.fdopen(os.dup(1), "w")
    for line in attack(range(first, first + count), COMMANDS):
        out.write(json.dumps(line if line["outcome"] not in GOOD else line | {"said": ""}) + "\n")
        out.flush()


MODES = {"with assertions": (), "python -O": ("-O",)}


def in_mode(mode: str, args: argparse.Namespace, counts: dict[tuple[str, str, str], Counter[str]]) -> int:
    """Give all files to all commands in a process of their own, and count the outcomes; how many are bad."""
    command = [sys.executable, *MODES[mode], "-W", "ignore", __file__, "--work", "--seed", str(args.seed)]
    paths = os.pathsep.join([str(TESTS), str(TESTS / "models"), str(TESTS.parent)])
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    bad = 0
    with subprocess.Popen(
        [*command, "--count", str(args.count)], stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        for text in process.stdout:
            line = json.loads(text)
            counts.setdefault((mode, line["kind"], line["command"]), Counter())[line["outcome"]] += 1
            if line["outcome"] not in GOOD:
                bad += 1
                print(mode, json.dumps(line), flush=True)
    if process.returncode:
        bad += 1
        print(f"{mode}: the process of the commands ended with status {process.returncode}", flush=True)
    return bad


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        work(args.seed, args.count)
        return
    counts: dict[tuple[str, str, str], Counter[str]] = {}
    with ThreadPoolExecutor(len(MODES)) as pool:
        bad = sum(pool.map(lambda mode: in_mode(mode, args, counts), MODES))
    lines = [
        {"mode": mode, "kind": kind, "command": command, "seed": args.seed, **found}
        for (mode, kind, command), found in counts.items()
    ]
    args.results.write_text("".join(json.dumps(line) + "\n" for line in lines))
    total = sum(map(Counter, counts.values()), Counter())
    print(f"{args.count} files from seed {args.seed}: {dict(total)}")
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
