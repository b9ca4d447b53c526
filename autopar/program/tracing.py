"""Writes a trace of a step in Chrome's trace-event format, for https://ui.perfetto.dev.

Every rank is a process with two tracks: its actions (forward and backward passes of a microbatch through a stage), and its
communication. Actions are named by torch's ``record_function``; times come from ``torch.profiler``. On a GPU an action lasts from the first
to the last of its kernels. Passes of a pair (``pairs``) overlap, so its backward pass has a third track, and both are marked as ``paired``.
"""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, _ExperimentalConfig, profile, record_function

WORDS = {"F": "forward", "B": "backward", "I": "input gradients", "W": "weight gradients"}
STEP = "step"
COMPUTATION, COMMUNICATION, PAIRED = 0, 1, 2
_TRACKS = ("computation", "communication")
_PAIRED_TRACK = "paired backward passes"
PAIRED_KEY = "paired"
"""The key, in an action's ``args``, of whether it overlaps the other pass of its pair: its seconds then include turns of the other pass."""

_ACTION = re.compile(f"({'|'.join(WORDS.values())}), stage \\d+, microbatch \\d+")
_COLLECTIVES = re.compile(r"(gloo|nccl):(?!barrier|recv)|nccl(Dev)?Kernel")

Event = dict[str, Any]
T = TypeVar("T")


def action_name(kind: str, stage: int, microbatch: int) -> str:
    """Return an action's name, such as ``"forward, stage 2, microbatch 5"``."""
    return f"{WORDS[kind]}, stage {stage}, microbatch {microbatch}"


def action(kind: str, stage: int, microbatch: int) -> AbstractContextManager[Any]:
    """Return a context that names an action in a profile; ``kind`` is a key of ``WORDS``."""
    return record_function(action_name(kind, stage, microbatch))


def traced(
    step: Callable[[], T],
    finish: Callable[[], None],
    path: str | os.PathLike[str],
    pipeline_rank: int,
    all_threads: bool = False,
) -> T:
    """Run ``step()`` under the profiler, and return its result; rank 0 writes the events of all ranks to ``path``.

    Every rank's times start at a barrier. ``finish`` waits for the collectives that are still running after the step: if a profiler stops
    while one runs, the next profiler crashes the process (signal 11). ``all_threads`` records the actions of other threads, too.
    """
    on_gpu = torch.cuda.is_available()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    config = _ExperimentalConfig(
        profile_all_threads=all_threads
    )  # the documented type of the argument has no other name
    with profile(activities=activities, experimental_config=config) as found:
        dist.barrier()
        with record_function(STEP):
            result = step()
        finish()
        if on_gpu:
            torch.cuda.synchronize()
    spans = [(e.name, e.time_range.start, e.time_range.end, "CUDA" in str(e.device_type)) for e in found.events()]
    own = measured(spans, dist.get_rank(), pipeline_rank)
    every: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(own, every)
    if every is not None:
        write(path, [event for events in every for event in events])
    return result


def measured(spans: Iterable[tuple[str, float, float, bool]], rank: int, pipeline_rank: int) -> list[Event]:
    """Return a rank's events, from a profile's spans: name, start and end in microseconds, and whether it is on a GPU."""
    spans = list(spans)
    begin = min(start for name, start, _, on_gpu in spans if name == STEP and not on_gpu)
    events = process(1 + rank, f"rank {rank} of pipeline rank {pipeline_rank}, measured", pipeline_rank, 1 + rank)
    paired = _overlapping(span for span in spans if _ACTION.match(span[0]) and not span[3])
    if paired:
        events.append(_metadata_event("thread_name", 1 + rank, PAIRED, {"name": _PAIRED_TRACK}))
    for track, names in ((COMPUTATION, _ACTION), (COMMUNICATION, _COLLECTIVES)):
        mine = [span for span in spans if names.match(span[0])]
        device = any(span[3] for span in mine)  # then the spans on the CPU are only launches
        for name, start, stop, on_gpu in mine:
            if on_gpu == device and start >= begin:
                other = PAIRED if name in paired and name.startswith(WORDS["B"]) else track
                args = {PAIRED_KEY: True} if name in paired else {}
                events.append(event(1 + rank, other, name, (start - begin) / 1e6, (stop - start) / 1e6, args))
    return events


def _overlapping(actions: Iterable[tuple[str, float, float, bool]]) -> set[str]:
    """Return the names of actions on the CPU that overlap each other. Only the two passes of a pair do."""
    in_order = itertools.pairwise(sorted(actions, key=lambda span: span[1]))
    return {name for one, other in in_order if other[1] < one[2] for name in (one[0], other[0])}


def process(number: int, name: str, pipeline_rank: int, order: int) -> list[Event]:
    """Return the events that name a process and its tracks. Processes are sorted by pipeline rank, then by ``order``."""
    found = [_metadata_event("process_name", number, 0, {"name": name})]
    found.append(_metadata_event("process_sort_index", number, 0, {"sort_index": 100_000 * pipeline_rank + order}))
    return found + [_metadata_event("thread_name", number, track, {"name": text}) for track, text in enumerate(_TRACKS)]


def _metadata_event(what: str, number: int, track: int, args: Mapping[str, Any]) -> Event:
    return {"ph": "M", "name": what, "pid": number, "tid": track, "args": args}


def event(number: int, track: int, name: str, start_s: float, seconds: float, args: Mapping[str, Any]) -> Event:
    """Return a span on a track of a process."""
    times = {"ts": round(start_s * 1e6, 3), "dur": round(seconds * 1e6, 3)}
    return {"ph": "X", "name": name, "pid": number, "tid": track, **times, "args": {"seconds": seconds, **args}}


def write(path: str | os.PathLike[str], events: Iterable[Event]) -> None:
    """Write the file of a trace."""
    Path(path).write_text(json.dumps({"displayTimeUnit": "ms", "traceEvents": list(events)}))
