"""Pins fix two decisions, two pipeline stages and ZeRO 3 for the output layer, and the search completes the plan.

python examples/pins.py
"""

from __future__ import annotations

from eager import compared, train_on_one_device, windows
from llama import LR, build

import autopar


def main() -> tuple[list[float], list[float], autopar.Plan]:
    data = windows(64, 32)
    batches = [{name: tensor[i : i + 8] for name, tensor in data.items()} for i in range(0, 32, 8)]
    decisions: dict[str, int | str | bool] = {"lm_head.zero": 3, "layers.*.recompute": "full", "schedule": "1f1b"}
    with autopar.compile(build(), 4, batches[0], pipeline=2, data=2, microbatches=4, pin=decisions, lr=LR) as program:
        losses, plan = program.train(batches), program.plan
    alone = train_on_one_device(build(), batches, LR)
    zero = {layer.name: layer.strategy.zero for layer in plan.layers}
    print(f"{plan.pipeline} stages, {plan.schedule}, ZeRO {zero['lm_head']} at lm_head; {compared(losses, alone)}")
    return losses, alone, plan


if __name__ == "__main__":
    main()
