"""Queues planning jobs for one worker process, with progress and cancellation."""

from __future__ import annotations

import collections
import contextlib
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autopar.errors import UsageError

WAITING, RUNNING, DONE, FAILED, CANCELLED = "waiting", "running", "done", "failed", "cancelled"
MAX_JOBS = 60
"""The oldest jobs that have ended are deleted with their files above this number, and so are cancelled ones, which are counted apart."""
MAX_WAITING = 16
PATIENCE_S = 1.0  # a search that does not end after this time when it is cancelled is killed with its process


@dataclass
class Job:
    """One job: its ``kind`` is ``plan`` or ``program``, and its results are files in ``folder``. ``stages`` has each stage of planning so
    far, with its latest text."""

    number: str
    kind: str
    arguments: list[str]
    folder: Path
    state: str = WAITING
    stages: list[dict[str, str]] = field(default_factory=list)
    error: dict[str, Any] | None = None
    begun_s: float | None = None
    took_s: float | None = None

    def to_json(self) -> dict[str, Any]:
        running = None if self.begun_s is None else time.monotonic() - self.begun_s
        return {
            "id": self.number,
            "kind": self.kind,
            "state": self.state,
            "stages": self.stages,
            "seconds": self.took_s if self.took_s is not None else running,
            "error": self.error,
        }


class Jobs:
    """A queue of jobs. ``command`` starts the worker, which reads jobs from standard input and writes their progress to standard output,
    both as JSON lines."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = list(command)
        self.folder = Path(tempfile.mkdtemp(prefix="autopar-ui-"))
        self._jobs: dict[str, Job] = {}
        self._queue: collections.deque[Job] = collections.deque()
        self._changed = threading.Condition()
        self._closed = False
        self._running: Job | None = None  # the job that the worker has
        self._killed = False
        self._worker = self._start()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def _start(self) -> subprocess.Popen[str]:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path)}
        environment["HF_HUB_OFFLINE"] = "1"  # a configuration must not fetch anything
        self._killed = False
        return subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=os.getcwd()
        )

    def new_folder(self) -> Path:
        return Path(tempfile.mkdtemp(dir=self.folder))

    def submit(self, kind: str, arguments: list[str], folder: Path) -> Job:
        """Add a job to the queue, and delete old jobs. Raises ``UsageError`` if ``MAX_WAITING`` jobs wait already."""
        job = Job(secrets.token_hex(8), kind, arguments, folder)
        with self._changed:
            if len(self._queue) >= MAX_WAITING:
                raise UsageError(f"{len(self._queue)} plans wait already", "cancel some, or wait until they are done")
            self._jobs[job.number] = job
            self._queue.append(job)
            for states in ((DONE, FAILED), (CANCELLED,)):
                for old in [old for old in self._jobs.values() if old.state in states][:-MAX_JOBS]:
                    del self._jobs[old.number]
                    if old.kind == "plan":
                        shutil.rmtree(old.folder, ignore_errors=True)
            self._changed.notify_all()
        return job

    def find(self, number: str) -> Job:
        """Return the job with this id. Raises ``UsageError`` if it doesn't exist, or was deleted."""
        with self._changed:
            if number not in self._jobs:
                raise UsageError("there is no such plan (any more)", "plan again")
            return self._jobs[number]

    def cancel(self, number: str) -> Job:
        """Cancel a job that waits or runs; a job that has ended keeps its state.

        A search ends, and the worker keeps the model's graph; in other stages, or after ``PATIENCE_S``, the worker is killed.
        """
        job = self.find(number)
        with self._changed:
            if job.state == WAITING:
                self._queue.remove(job)
                job.state = CANCELLED
            elif job.state == RUNNING:
                job.state = CANCELLED
                if job.stages and job.stages[-1]["stage"] == "search":
                    self._send({"cancel": job.number})
                    timer = threading.Timer(PATIENCE_S, self._kill, (job,))
                    timer.daemon = True
                    timer.start()
                else:
                    self._kill(job)
        return job

    def _kill(self, job: Job) -> None:
        """Kill the worker if it still has the job."""
        with self._changed:
            if self._running is job:
                self._killed = True
                self._worker.kill()

    def _send(self, line: dict[str, Any]) -> None:
        assert self._worker.stdin is not None
        with contextlib.suppress(OSError):  # the worker has ended, which the reader of its output sees
            self._worker.stdin.write(json.dumps(line) + "\n")
            self._worker.stdin.flush()

    def close(self) -> None:
        """End the worker and remove all files."""
        with self._changed:
            self._closed = True
            self._worker.kill()
            self._changed.notify_all()
        self._thread.join(10)
        self._end_worker()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _end_worker(self) -> None:
        self._worker.kill()
        self._worker.wait()
        for stream in (self._worker.stdin, self._worker.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):  # a call that the worker never read is still in the buffer
                    stream.close()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._queue)
                if self._closed:
                    return
                job = self._queue.popleft()
                job.state, job.begun_s, self._running = RUNNING, time.monotonic(), job
                self._restart_if_ended()  # in the lock: what `cancel` kills from now on is the job's own worker
            self._run(job)
            job.took_s = time.monotonic() - job.begun_s
            self._restart_if_ended()

    def _restart_if_ended(self) -> None:
        """Start a new worker if the last one has ended."""
        with self._changed:
            if self._worker.poll() is not None and not self._closed:
                self._end_worker()
                self._worker = self._start()

    def _run(self, job: Job) -> None:
        assert self._worker.stdout is not None
        with self._changed:
            self._send({"number": job.number, "kind": job.kind, "arguments": job.arguments, "folder": str(job.folder)})
        for line in self._worker.stdout:
            with self._changed:
                if self._killed:
                    continue  # the worker's output ends soon, maybe inside a line
                update = json.loads(line)
                if "stage" in update:
                    self._stage(job, update)
                    continue
                if job.state == RUNNING:
                    job.state, job.error = (FAILED if update.get("error") else DONE), update.get("error")
                self._running = None
                return
        self._worker.wait()
        with self._changed:
            self._running = None
            if job.state == RUNNING:
                job.state = FAILED
                how = f"signal {-code}" if (code := self._worker.returncode) < 0 else f"status {code}"
                job.error = {
                    "message": f"the planning process ended with {how}",
                    "hint": "signal 9 usually means that the machine ran out of memory; the terminal of `autopar ui` has the last output",
                }

    @staticmethod
    def _stage(job: Job, update: dict[str, str]) -> None:
        if not job.stages or job.stages[-1]["stage"] != update["stage"]:
            job.stages.append({"stage": update["stage"], "text": update["text"]})
        elif update["text"]:
            job.stages[-1]["text"] = update["text"]
