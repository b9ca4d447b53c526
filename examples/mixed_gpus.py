"""A plan for a cluster with two kinds of GPUs: pipeline stages on the faster ones get more layers. Planning needs no GPU.

python examples/mixed_gpus.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import autopar

CLUSTER = """
name = "two generations"

[[group]]
nodes = 1
gpu = "H100-80GB"

[[group]]
nodes = 1
gpu = "A100-80GB-SXM"
"""


def main() -> autopar.Plan:
    with torch.device("meta"):
        config = LlamaConfig(num_hidden_layers=24, hidden_size=4096, intermediate_size=11008, use_cache=False)
        model = LlamaForCausalLM(config).bfloat16()
        ids = torch.empty(64, 4096, dtype=torch.int64)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "cluster.toml")
        path.write_text(CLUSTER)
        program = autopar.compile(model, path, {"input_ids": ids, "labels": ids}, pipeline=2, capture_check=False)
    plan = program.plan
    step_s, (fast, slow) = plan.prediction.step_time_s, layers(plan)
    print(f"{fast} layers on 8 x H100, {slow} on 8 x A100: one step {step_s:.2f} s, gap {plan.gap:.1%}")
    return plan


def layers(plan: autopar.Plan) -> list[int]:
    """The layers of each of the two devices of a pipeline; stages are placed in turn."""
    return [sum(stage.stop - stage.start for stage in plan.stages[device::2]) for device in range(2)]


if __name__ == "__main__":
    main()
