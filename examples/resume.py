"""Training resumes under other plans: data parallelism on two processes, a checkpoint, then a pipeline of two stages, then one process.

python examples/resume.py
"""

from __future__ import annotations

import tempfile

from eager import compared, train_on_one_device, windows
from llama import LR, build

import autopar


def main() -> tuple[list[float], list[float]]:
    data = windows(72, 32)
    batches = [{name: tensor[i : i + 8] for name, tensor in data.items()} for i in range(0, 72, 8)]
    losses: list[float] = []
    with tempfile.TemporaryDirectory() as saved:
        plans: list[tuple[int, dict[str, int]]] = [(2, {"data": 2, "zero": 1}), (2, {"pipeline": 2}), (1, {})]
        for devices, pins in plans:
            with autopar.compile(build(), devices, batches[0], pin=pins, lr=LR) as program:
                done = program.load(saved) if losses else 0
                losses += program.train(batches[done : done + 3])
                program.save(saved)
    alone = train_on_one_device(build(), batches, LR)
    print(compared(losses, alone))
    return losses, alone


if __name__ == "__main__":
    main()
