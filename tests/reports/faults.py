"""Trainings that are interrupted at random times, and go on: ``make report NAME=faults``.

A chain is one training of a small model under one plan, killed again and again: a rank in a step, a rank in a save, a rank while a thread
writes, the launcher. Every start goes on from the newest complete checkpoint. A case is one such end and the start after it, and holds that

- every process ends within the limit, of itself, and says in one sentence why (where torchrun's ranks can: not the killed launcher's own);
- no checkpoint with a final name is damaged;
- no more steps are lost than those since the last save;
- all losses, before and after, are bit for bit those of the same training without a pause.

Other chains run on two nodes (network namespaces with a switch between, which needs root), and the link of one is cut. The report's
last part takes nodes away from ``autopar run --elastic``. One JSON line per case; a run does what the file lacks (``--fresh``: everything).
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from elastic_model import STEPS, asked
from elastic_model import straight as one_device
from fault_runs import Run, Server, alive, children
from limited_nodes import limited_nodes, missing
from places import EVIDENCE
from programs import Shape, mlp_model, write_mlp
from results import Results, options

from autopar.cli.elastic import write_program
from autopar.measure import EXACT
from autopar.program.checkpoint_files import open_or_reason
from autopar.program.state import INITIAL
from autopar.program.weights import write_file

RESULTS = EVIDENCE / "faults.jsonl"
KILLS, CUTS, LOST_NODES, SEED = 100, 20, 5, 1
EVERY = 5  # steps from one checkpoint to the next
STRAIGHT = 1200  # steps of the training without a pause: more than a chain gets to
LOST_AFTER_S, SECTION_S = 3.0, 20.0
LIMIT_S = LOST_AFTER_S + SECTION_S + 40  # torchrun gives ranks 30 s to end after the first failure
PLANS = {
    "data 2, ZeRO 1 and 3": Shape(data=2, zero=(1, 3)),
    "tensor 2": Shape(tensor=2),
    "pipeline 2, 1F1B": Shape(pipeline=2, microbatches=2, schedule="1f1b"),
    "data 2 x tensor 2": Shape(data=2, tensor=2, zero=(2, 3)),
}
IN_STEP, IN_SAVE, IN_ASYNC_SAVE, LAUNCHER, SETUP = (
    "a rank in a step",
    "a rank in a save",
    "a rank while a thread saves",
    "the launcher",
    "a rank in the set-up",
)
KILLED = (IN_STEP, IN_SAVE, IN_STEP, IN_ASYNC_SAVE, LAUNCHER, IN_STEP, IN_SAVE, IN_ASYNC_SAVE, LAUNCHER, SETUP)
CUT = "the link of a node"
ELASTIC, NODES = "a node of four, elastic", 4

Line = dict[str, Any]


@dataclass
class Chain:
    """One training under one plan and the run that is alive."""

    plan: str
    servers: Sequence[Server]
    folder: Path
    straight: dict[int, float]
    address: str = "127.0.0.1"
    count: int = 0
    run: Run | None = None
    reached: int = 0

    @property
    def shape(self) -> Shape:
        return PLANS[self.plan]

    @property
    def saved(self) -> Path:
        return self.folder / "saved"

    def start(self, asynchronous: bool = False, command: bool = False) -> Run:
        self.count += 1
        options = ["--device", "cpu", "--steps", str(10 * STRAIGHT), "--checkpoint", str(self.saved), "--resume"]
        options += [
            "--every",
            str(EVERY),
            "--lost-after",
            str(LOST_AFTER_S),
            *(["--async-save"] if asynchronous else []),
        ]
        for name in ("--timeout", "--setup-timeout", "--save-timeout"):
            options += [name, str(SECTION_S)]
        ranks = self.shape.devices // len(self.servers)
        program, place = self.folder / "program", self.folder / f"run{self.count}"
        self.run = Run(program, ranks, options, self.servers, place, self.address, command)
        return self.run.start()

    def wrong(self) -> list[str]:
        """What of the last run's output is not as it should be."""
        assert self.run is not None
        losses, begun = self.run.losses(), self.run.begun()
        found = []
        if list(losses) != list(range(begun + 1, begun + 1 + len(losses))):
            found.append(f"steps {list(losses)[:3]}... after {begun}")
        different = [step for step, loss in losses.items() if self.straight[step] != loss]
        if different:
            found.append(f"{len(different)} losses differ, the first in step {different[0]}")
        damaged = [
            path.name
            for path in self.saved.glob("step-*")
            if "." not in path.name and isinstance(open_or_reason(path), str)
        ]
        return found + ([f"damaged: {', '.join(damaged)}"] if damaged else [])

    def completed(self) -> int:
        """The steps of the last save that is known to have ended."""
        assert self.run is not None
        told = [int(line.rpartition("-")[2]) for line in self.run.talk().splitlines() if line.startswith("checkpoint ")]
        ended = told[:-1] if "--async-save" in self.run.options else told
        return max([self.run.begun(), *ended])


def case(chain: Chain, kind: str, rng: random.Random, cut: tuple[str, ...] = (), command: bool = False) -> Line:
    """End the chain's training in this way, and let it go on."""
    began = time.monotonic()
    run = chain.start(kind == IN_ASYNC_SAVE, command)
    line: Line = {"plan": chain.plan, "kind": kind, "started by": "torchrun" if command else "a fork of it"}
    problems: list[str] = []
    if kind == SETUP:
        if not run.wait(lambda: len(run.workers()) == chain.shape.devices, SECTION_S + 30):
            problems.append("the ranks did not start")
        time.sleep(rng.uniform(0, 1.0))
    else:
        least = rng.randrange(1, 2 * EVERY)
        if not run.wait(lambda: len(run.losses()) >= least, SECTION_S + 30):
            problems.append("no step was made")
        if kind in (IN_SAVE, IN_ASYNC_SAVE):
            run.wait(lambda: any(chain.saved.glob("*.partial")), 20)
            time.sleep(rng.uniform(0, 0.04))
        else:
            time.sleep(rng.uniform(0, 0.3))
    workers, agents = run.workers(), list(run.agents)
    if cut:
        subprocess.run([*cut, "ip", "link", "set", "eth0", "down"], check=True)
    else:
        line["killed"] = "launcher" if kind == LAUNCHER else f"rank {(place := rng.randrange(len(workers)))}"
        with contextlib.suppress(ProcessLookupError):
            os.kill(agents[0] if kind == LAUNCHER else workers[place], signal.SIGKILL)
    struck = time.monotonic()
    everyone = [*workers, *agents]
    while any(map(alive, everyone)) and time.monotonic() - struck < LIMIT_S:
        time.sleep(0.02)
    line["ended_s"] = round(time.monotonic() - struck, 2)
    if left := [pid for pid in everyone if alive(pid)]:
        problems.append(f"{len(left)} processes were left after {LIMIT_S:g} s")
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    if cut:
        subprocess.run([*cut, "ip", "link", "set", "eth0", "up"], check=True)
    line["said"] = run.said()
    if not line["said"] and kind != SETUP:
        problems.append("nobody said why")
    line["partial"] = any(chain.saved.glob("*.partial"))
    line["steps"], completed = max(run.losses(), default=run.begun()), chain.completed()
    problems += chain.wrong()
    line |= went_on(chain, problems, line["steps"], completed)
    if problems:
        line["failure"] = "; ".join(problems)
    return line | {"seconds": round(time.monotonic() - began, 1), "torch": torch.__version__}


def went_on(chain: Chain, problems: list[str], steps: int, completed: int) -> Line:
    """Start again, make some steps, and stop by SIGUSR1, which saves; what was lost."""
    run = chain.start()
    if not run.wait(lambda: len(run.losses()) >= 3, SECTION_S + 30):
        problems.append(f"it did not go on, and said {run.talk()[-600:]!r}")
    begun = run.begun()
    if begun < completed:
        problems.append(f"it went on at {begun}, and the checkpoint after {completed} steps had been written")
    workers = run.workers()
    for pid in workers[-1:]:
        os.kill(pid, signal.SIGUSR1)
    run.wait(lambda: False, LIMIT_S)
    if any(map(alive, [*workers, *run.agents])):
        problems.append("SIGUSR1 did not end it")
    if "SIGUSR1: training stops after" not in run.talk():
        problems.append("SIGUSR1 was not answered")
    problems += chain.wrong()
    if chain.completed() != max(run.losses(), default=0):
        problems.append("SIGUSR1 did not save")
    return {"went on at": begun, "lost": max(0, steps - begun), "compared": len(run.losses())}


# -- chains -----------------------------------------------------------------------------------------------------------


def straight(plan: str, program: Path, server: Server, place: Path) -> dict[int, float]:
    """The losses of the training without a pause."""
    options = ["--device", "cpu", "--steps", str(STRAIGHT)]
    run = Run(program, PLANS[plan].devices, options, [server], place).start()
    run.wait(lambda: len(run.losses()) == STRAIGHT, 600)
    losses = run.losses()
    assert len(losses) == STRAIGHT, run.talk()[-2000:]
    return losses


@dataclass
class Chains:
    """A chain for each plan, made when it is first asked for."""

    folder: Path
    local: Server
    servers: Sequence[Server]
    straight: dict[str, dict[int, float]]  # by plan
    address: str = "127.0.0.1"
    made: dict[str, Chain] = field(default_factory=dict)

    def __getitem__(self, plan: str) -> Chain:
        old = self.made.get(plan)
        if old is not None and old.run is not None and max(old.run.losses(), default=0) < STRAIGHT - 300:
            return old
        folder = self.folder / f"{len(list(self.folder.iterdir()))}"
        program = write_mlp(folder / "program", PLANS[plan])
        write_file(program / INITIAL, mlp_model().state_dict())
        if plan not in self.straight:
            self.straight[plan] = straight(plan, program, self.local, folder / "straight")
        self.made[plan] = Chain(plan, self.servers, folder, self.straight[plan], self.address)
        return self.made[plan]


def kills(wanted: Sequence[int], seed: int, local: Server, known: dict[str, dict[int, float]]) -> Iterator[Line]:
    with tempfile.TemporaryDirectory() as folder:
        chains, plans = Chains(Path(folder), local, [local], known), list(PLANS)
        for number in wanted:
            rng = random.Random(f"{seed} kill {number}")
            kind, plan = KILLED[number % len(KILLED)], plans[number // len(KILLED) % len(plans)]
            found = case(chains[plan], kind, rng, command=number % len(KILLED) == number // len(KILLED))
            yield {"case": f"kill {seed}.{number}", **found}


def cuts(wanted: Sequence[int], seed: int, local: Server, known: dict[str, dict[int, float]]) -> Iterator[Line]:
    with limited_nodes(2, "1gbit") as netns, tempfile.TemporaryDirectory() as folder:
        env = {"GLOO_SOCKET_IFNAME": netns.env["GLOO_SOCKET_IFNAME"]}
        address = f"{netns.env['MASTER_ADDR'].rpartition('.')[0]}.1"
        nodes = [Server(prefix, env) for prefix in netns.prefixes]
        try:
            chains = Chains(Path(folder), local, nodes, known, address)
            for number in wanted:
                rng = random.Random(f"{seed} cut {number}")
                plan = list(PLANS)[number % len(PLANS)]
                found = case(chains[plan], CUT, rng, netns.prefixes[1])
                yield {"case": f"cut {seed}.{number}", **found}
        finally:
            for server in nodes:
                server.close()


def elastic(number: int, seed: int, local: Server, folder: Path) -> Line:
    """One of four nodes, with one rank each, is killed with its agent; ``autopar run --elastic`` goes on with three."""
    began, rng = time.monotonic(), random.Random(f"{seed} elastic {number}")
    given = asked(folder)
    given.write()
    for nodes in (NODES, NODES - 1):
        write_program(given, nodes)
    run = Run(Path(given.programs), 1, (), [local] * NODES, folder / "run", least=2).start()
    least = rng.randrange(10, 200)
    problems = [] if run.wait(lambda: len(run.losses()) >= least, 120) else ["it did not start"]
    agent = rng.choice(run.agents[1:])
    reached = max(run.losses(), default=0)
    for pid in (*children(agent), agent):
        os.kill(pid, signal.SIGKILL)
    struck = time.monotonic()
    problems += [] if run.wait(lambda: run.begun() > 0, 120) else ["it did not go on"]
    went_on_s = round(time.monotonic() - struck, 2)
    problems += [] if run.wait(lambda: len(run.losses()) == STEPS, 120) else ["it did not end"]
    run.wait(lambda: False, 60)
    if left := [pid for pid in run.agents if alive(pid)]:
        problems.append(f"{len(left)} agents were left")
        for pid in left:
            os.kill(pid, signal.SIGKILL)
    if f"training on {NODES - 1} devices" not in run.talk():
        problems.append("no plan for the nodes that were left")
    losses = run.losses()
    error = max(abs(losses.get(step, 0.0) - loss) / abs(loss) for step, loss in enumerate(one_device(), 1))
    if error > EXACT:
        problems.append(f"losses differ from those of one device by {error:.1e}")
    line: Line = {"plan": "", "kind": ELASTIC, "started by": "a fork of it", "said": run.said(), "steps": reached}
    line |= {"partial": any(folder.glob("saved/*.partial")), "error": error, "went on at": run.begun()}
    line |= {"lost": max(0, reached - run.begun()), "ended_s": went_on_s, "compared": STEPS}
    line |= {"failure": "; ".join(problems)} if problems else {}
    return line | {"seconds": round(time.monotonic() - began, 1), "torch": torch.__version__}


# -- the page ---------------------------------------------------------------------------------------------------------


def page(lines: Sequence[Line]) -> str:
    codes = {line.get("code") for line in lines}
    bad = [line for line in lines if "failure" in line]
    shrunk = [line for line in lines if line["kind"] == ELASTIC]
    same = [line for line in lines if line["kind"] != ELASTIC]
    alike, good = (sum("failure" not in line for line in found) for found in (same, shrunk))
    error = max((line["error"] for line in shrunk), default=0.0)
    rows = "".join(_row(kind, lines) for kind in dict.fromkeys(line["kind"] for line in lines))
    commands = sum(line["started by"] == "torchrun" for line in lines)
    examples = "".join(f"- {kind}: {said}\n" for kind, said in _examples(lines).items())
    failures = "".join(f"- {line['case']}, {line['plan']}, {line['kind']}: {line['failure']}\n" for line in bad)
    return f"""# Faults

In each case a fault is injected into a training run at a random time. The run is restarted with `--resume`, and stopped by SIGUSR1, which
saves a checkpoint after the current step. {alike} of {len(same)} runs under one plan exited by themselves and resumed from their newest
complete checkpoint, with bitwise the losses of an uninterrupted run. {good} of {len(shrunk)} runs that lost a node resumed under another
plan, with the losses of one device. Checkpoints are written every {EVERY} steps, and a rank that is silent for {LOST_AFTER_S:g} s counts
as lost.

| fault in | cases | passed | most steps lost | half-written checkpoints left | longest time to exit |
|---|---|---|---|---|---|
{rows}
A case passes if all of this holds:

- every process exits by itself within {LIMIT_S:g} s, and a rank reports the reason (except during set-up, when ranks may not know each
  other yet);
- no checkpoint with a final name is damaged, and the restart resumes from the last completed save or a later one;
- every loss, before and after the restart, is bitwise that of the uninterrupted run;
- SIGUSR1 to one rank makes all ranks save a checkpoint.

The time to exit is from the fault until the last process has exited.

In the {len(shrunk)} elastic cases one of four nodes is killed with its agent, and training resumes under a plan for the three others. The
losses of all {STEPS} steps are compared with those of one device in eager PyTorch, in float64: the largest relative error is {error:.1e}.
In these cases the last column is the time until the new ranks have loaded the checkpoint.

Plans: {"; ".join(PLANS)}. torchrun's agent started the
runs, {commands} of them by the `torchrun` command, the others in forks of a process that had imported torch. Links are between two network
namespaces of one machine.

The error message of the last case of each kind ("last seen" is a rank's last report, at most half a second old):

{examples}
{"Failures:" if bad else "No case failed."}

{failures}
Made by `make report NAME=faults` with torch {", ".join(sorted({line["torch"] for line in lines}))}, gloo, on CPUs, from the lines of
[faults.jsonl](faults.jsonl), measured with {len(codes)} version{"s" * (len(codes) > 1)} of the code. Do not edit.
"""


def _row(kind: str, lines: Sequence[Line]) -> str:
    own = [line for line in lines if line["kind"] == kind]
    good = sum("failure" not in line for line in own)
    lost, left = max(line["lost"] for line in own), sum(line["partial"] for line in own)
    return f"| {kind} | {len(own)} | {good} | {lost} | {left} | {max(line['ended_s'] for line in own):.1f} s |\n"


def _examples(lines: Sequence[Line]) -> dict[str, str]:
    return {line["kind"]: line["said"][0] for line in lines if line["said"]}


# -- the command ------------------------------------------------------------------------------------------------------


def record(results: Results, line: Line) -> None:
    results.append(line)
    print(
        f"{line['case']} {line['kind']}: {line.get('failure', 'as it should be')} ({line['seconds']} s)",
        file=sys.stderr,
    )


def arguments() -> argparse.Namespace:
    parser = options(__doc__, RESULTS)
    parser.add_argument("--kills", type=int, default=KILLS, metavar="N", help="how many processes are killed")
    parser.add_argument("--cuts", type=int, default=CUTS, metavar="N", help="how many links are cut (root)")
    parser.add_argument(
        "--nodes", type=int, default=LOST_NODES, metavar="N", help="how many elastic trainings lose a node"
    )
    parser.add_argument("--seed", type=int, default=SEED, help="of the draws")
    return parser.parse_args()


def main() -> int:
    args = arguments()
    results = Results(args.results, ("case",), lambda line: "failure" not in line)
    done = results.kept(args)
    cut = 0 if missing() else args.cuts
    if cut < args.cuts:
        print(f"no links are cut: {missing()}", file=sys.stderr)
    counts = {"kill": args.kills, "cut": cut, "elastic": args.nodes}
    todo = {
        name: [i for i in range(count) if (f"{name} {args.seed}.{i}",) not in done] for name, count in counts.items()
    }
    local, known = Server(), dict[str, dict[int, float]]()
    ends = kills(todo["kill"], args.seed, local, known)
    for line in itertools.chain(ends, cuts(todo["cut"], args.seed, local, known) if todo["cut"] else ()):
        record(results, line)
    with tempfile.TemporaryDirectory() as folder:
        for number in todo["elastic"]:
            line = elastic(number, args.seed, local, Path(folder) / str(number))
            record(results, {"case": f"elastic {args.seed}.{number}", **line})
    local.close()
    lines = results.tidy((f"{name} {args.seed}.{i}",) for name, count in counts.items() for i in range(count))
    args.results.with_suffix(".md").write_text(page(lines))
    bad = sum("failure" in line for line in lines)
    print(f"{len(lines)} cases, {bad} not as they should be: {args.results}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
