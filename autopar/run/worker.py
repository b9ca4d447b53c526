"""One worker process: reads calls from its standard input, one JSON object a line, and answers on its standard output.

A call is ``{"call": number, "target": "module:function", "args": path}``; the arguments are a ``torch.save`` file read with
``weights_only=True`` (tensors, numbers, text, lists, dicts), and so is the result: nothing is unpickled into code. What the
function prints goes to the worker's log (standard error), never into the answers. When the parent goes away the
standard input ends, and the worker ends with it, even from inside a collective.
"""

from __future__ import annotations

import importlib
import json
import os
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any, TextIO

import torch

from autopar.program.watch import SIGNALS, is_consequence


def resolve(target: str) -> Callable[..., Any]:
    """The function that ``"package.module:function"`` names."""
    module, _, name = target.partition(":")
    found = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    assert callable(found), target
    return found


def read_calls(stream: TextIO, calls: queue.Queue[dict[str, Any]]) -> None:
    """Put the calls of a parent on a queue, and end this process when the parent goes away."""
    for line in stream:
        calls.put(json.loads(line))
    os._exit(0)  # the parent closed the pipe or died; the main thread may be inside a collective that never returns


def _answer(call: dict[str, Any]) -> dict[str, Any]:
    try:
        args, kwargs = torch.load(call["args"], weights_only=True)
        result = resolve(call["target"])(*args, **kwargs)
        torch.save(result, call["result"])
    except BaseException as error:  # noqa: BLE001  whatever it was, the parent must hear of it
        traceback.print_exc()
        text = str(error).strip()
        return {
            "ok": False,
            "error": f"{type(error).__name__}: {text}" if text else type(error).__name__,
            "consequence": is_consequence(text),
        }
    return {"ok": True}


def main() -> None:
    for (
        number
    ) in SIGNALS:  # Ctrl-C and schedulers reach the whole group: the parent answers, and this process ends with it
        signal.signal(number, signal.SIG_IGN)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # prints of the called functions join the log
    # not sys.stdin, whose lock the thread below holds: a process that is forked here, to read data, closes its own and would wait for it
    commands = os.fdopen(os.dup(0))
    calls: queue.Queue[dict[str, Any]] = queue.Queue()
    threading.Thread(target=read_calls, args=(commands, calls), daemon=True).start()
    while True:
        answers.write(json.dumps(_answer(calls.get())) + "\n")
        answers.flush()
        sys.stdout.flush()


if __name__ == "__main__":
    main()
