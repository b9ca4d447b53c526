"""Converts a predicted step to Chrome's trace-event format, and compares it with a measured trace."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from autopar.data_files import MalformedFileError, read_json
from autopar.errors import UsageError
from autopar.program.tracing import COMMUNICATION, COMPUTATION, PAIRED_KEY, WORDS, Event, action_name, event, process
from autopar.report.step import ONCE, PredictedStep

_MAX_BYTES = 512 * 2**20
_FIRST_PREDICTED = 1_000_000
"""The process id of the first predicted pipeline rank in a trace. The process ids of measured ranks are rank + 1."""


def predicted_events(step: PredictedStep) -> Iterator[Event]:
    """Yield the events of a step. Each pipeline rank is a process with its actions on the compute track (including the collectives inside
    of them), its sends on the communication track, and a counter of memory by part."""
    for rank, actions in enumerate(step.actions):
        first, count = step.devices[rank]
        number = _FIRST_PREDICTED + rank
        yield from process(number, f"pipeline rank {rank} (devices {first} to {first + count - 1}), predicted", rank, 0)
        for a in actions:
            sent_s = 0.0 if a.send is None else a.send.seconds
            name = "once a step" if a.kind == ONCE else action_name(a.kind, a.stage, a.microbatch)
            where = {} if a.kind == ONCE else {"stage": a.stage, "microbatch": a.microbatch}
            yield event(number, COMPUTATION, name, a.start_s, a.stop_s - a.start_s - sent_s, where)
            if a.send is not None:
                sent = {"bytes": a.send.bytes, "microbatch": a.microbatch}
                yield event(number, COMMUNICATION, f"send to stage {a.send.to}", a.stop_s - sent_s, sent_s, sent)
            counter = {"ph": "C", "name": "memory, bytes", "pid": number, "ts": round(a.start_s * 1e6, 3)}
            yield counter | {"args": asdict(a.memory)}


def read_trace(path: str | Path) -> list[Event]:
    """Read the events of a trace that an emitted program wrote. Raises ``UsageError`` if the file has none."""
    hint = "`train.py --trace FILE` of an emitted program writes one"
    try:
        data = read_json(path, _MAX_BYTES)
        events = data.get("traceEvents") if isinstance(data, dict) else None
        if not isinstance(events, list) or not all(map(_is_event, events)):
            raise MalformedFileError("it has no list of traceEvents")
        found: list[Event] = [one for one in events if one["pid"] < _FIRST_PREDICTED]
        if not any(_is_action(one) for one in found):
            raise MalformedFileError("it has no actions")
    except OSError as error:
        raise UsageError(f"the trace {path} cannot be read: {error.strerror}", hint) from error
    except MalformedFileError as error:
        raise UsageError(f"{path} holds no trace of a program ({error})", hint) from error
    return found


def _is_event(one: Any) -> bool:
    """Return whether the value is an event; an action must have its seconds, too."""
    named = isinstance(one, dict) and isinstance(one.get("name"), str) and isinstance(one.get("ph"), str)
    if not named or not isinstance(one.get("pid"), int):
        return False
    args = one.get("args", {})
    return isinstance(args, dict) and (not _is_action(one) or isinstance(args.get("seconds"), int | float))


def _is_action(one: Event) -> bool:
    return one["ph"] == "X" and _ACTION.match(one["name"]) is not None


@dataclass(frozen=True, slots=True)
class ActionSeconds:
    """Mean seconds of the actions of one kind and stage, predicted (without sends) and measured."""

    name: str
    predicted_s: float
    measured_s: float


_ACTION = re.compile(f"({'|'.join(WORDS.values())}), stage (\\d+)")


def compare_actions(step: PredictedStep, events: Sequence[Event]) -> list[ActionSeconds]:
    """Return the predicted and measured seconds of the actions that the step and ``events`` have in common, by kind and stage. Passes of
    pairs are left out: the seconds of each include turns of the other one."""
    seen: dict[str, list[float]] = {}
    for one in events:
        if one["ph"] == "X" and (match := _ACTION.match(one["name"])) and not one["args"].get(PAIRED_KEY):
            seen.setdefault(match[0], []).append(one["args"]["seconds"])
    found: dict[str, float] = {}
    for actions in step.actions:
        for a in actions:
            if a.kind != ONCE:
                sent_s = 0.0 if a.send is None else a.send.seconds
                name = f"{WORDS[a.kind]}, stage {a.stage}"  # a pair's backward is shorter by what the pair saves
                found[name] = max(found.get(name, 0.0), a.stop_s - a.start_s - sent_s)
    return [
        ActionSeconds(name, found[name], sum(seen[name]) / len(seen[name])) for name in sorted(found) if name in seen
    ]
