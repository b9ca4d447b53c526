"""A worker process: reads calls from standard input, one JSON object per line, and replies on standard output.

A call is ``{"call": number, "target": "module:function", "args": path, "result": path}``; arguments and result are ``torch.save`` files
that are read with ``weights_only=True`` (tensors, numbers, text, lists, dicts), so that no code is unpickled. The function's output goes
to the worker's log (standard error), never into the replies. When the parent dies, standard input ends and the worker exits, even from
inside a collective.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import threading
import traceback
from typing import Any, TextIO

import torch

from autopar.program.importing import resolve
from autopar.program.watch import SIGNALS, is_consequence


def read_calls(stream: TextIO, calls: queue.Queue[dict[str, Any]]) -> None:
    """Put the parent's calls on a queue; exit the process when the parent is gone."""
    for line in stream:
        calls.put(json.loads(line))
    os._exit(0)  # the parent closed the pipe or died; the main thread may be blocked in a collective


def _reply(call: dict[str, Any]) -> dict[str, Any]:
    try:
        args, kwargs = torch.load(call["args"], weights_only=True)
        result = resolve(call["target"])(*args, **kwargs)
        torch.save(result, call["result"])
    except BaseException as error:  # noqa: BLE001  the parent must learn of any error
        traceback.print_exc()
        text = str(error).strip()
        return {
            "ok": False,
            "error": f"{type(error).__name__}: {text}" if text else type(error).__name__,
            "consequence": is_consequence(text),
            "out_of_memory": _is_out_of_memory(error),
        }
    return {"ok": True}


def _is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether memory ran out. Torch's pipelines raise another error from the one of a stage."""
    if error is None or isinstance(error, MemoryError | torch.OutOfMemoryError):
        return error is not None
    return _is_out_of_memory(error.__cause__ or error.__context__)


def main() -> None:
    # Ctrl-C and schedulers send these signals to all processes of the group: the parent handles them and ends this process
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of the called functions goes to the log
    # not sys.stdin: the thread below would hold its lock, and a forked data loader, which closes its copy, would wait for that lock forever
    commands = os.fdopen(os.dup(0))
    calls: queue.Queue[dict[str, Any]] = queue.Queue()
    threading.Thread(target=read_calls, args=(commands, calls), daemon=True).start()
    while True:
        replies.write(json.dumps(_reply(calls.get())) + "\n")
        replies.flush()
        sys.stdout.flush()


if __name__ == "__main__":
    main()
