"""What the comparison of the captured graph with the model costs (``make report NAME=capture-check``).

Of each model the seconds of ``autopar.compile(model, 2, batch)``, and of the capture and the comparison inside it, in this process, after a
first compile of a small model (which pays for imports).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch
from places import EVIDENCE
from planning import machine_words
from text_models import plain_mlp, t5
from torch import nn
from torch.utils._pytree import tree_map
from vision_models import resnet

import autopar
from autopar import planning, workload
from autopar.capture import NOT_COMPARED
from autopar.capture.check import CaptureCheck

RESULTS = EVIDENCE / "capture-check.jsonl"
ROWS, SEQUENCE, VOCABULARY = 16, 128, 1024


def _tokens() -> dict[str, Any]:
    ids = torch.randint(VOCABULARY, (ROWS, SEQUENCE), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids.clone()}


def gpt2() -> tuple[nn.Module, Any, Any]:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=VOCABULARY, n_embd=192, n_layer=12, n_head=6, n_positions=SEQUENCE)
    return GPT2LMHeadModel(config), _tokens(), None


def llama() -> tuple[nn.Module, Any, Any]:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 8, "num_attention_heads": 8}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, num_key_value_heads=4, **sizes)), _tokens(), None


def mixtral() -> tuple[nn.Module, Any, Any]:
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8}
    config = MixtralConfig(vocab_size=VOCABULARY, num_key_value_heads=4, num_local_experts=4, **sizes)
    return MixtralForCausalLM(config), _tokens(), None


MODELS: dict[str, Callable[[], tuple[nn.Module, Any, Any]]] = {
    "an MLP": plain_mlp,
    "GPT-2, 12 layers, width 192": gpt2,
    "Llama, 8 layers, width 256": llama,
    "Mixtral, 4 layers, 4 experts": mixtral,
    "a residual network": resnet,
    "T5, small": t5,
}


def measured(name: str) -> dict[str, Any]:
    """Seconds of one ``compile``, of the capture and of the comparison in it, and what the comparison says of the model."""
    torch.manual_seed(0)
    model, batch, loss_fn = _narrow(MODELS[name]())
    seconds = {"capture": 0.0, "check_capture": 0.0}
    said = []
    stages = {"capture": workload, "check_capture": planning}

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            start_s = time.perf_counter()
            result = function(*args, **kwargs)
            seconds[function.__name__] += time.perf_counter() - start_s
            said.append(result)
            return result

        return call

    with ExitStack() as patched:
        for stage, module in stages.items():
            patched.enter_context(mock.patch.object(module, stage, timed(getattr(module, stage))))
        start_s = time.perf_counter()
        autopar.compile(model, 2, batch, loss_fn)
        whole_s = time.perf_counter() - start_s
    words = next(each.note for each in said if isinstance(each, CaptureCheck))
    return {
        "model": name,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "said": words.rpartition(" (")[0] or words,
        "capture_s": round(seconds["capture"], 2),
        "check_s": round(seconds["check_capture"], 2),
        "compile_s": round(whole_s, 2),
    }


def _narrow(subject: tuple[nn.Module, Any, Any]) -> tuple[nn.Module, Any, Any]:
    """In float32, as models are trained: those of the exactness runs have batches in float64."""
    model, batch, loss_fn = subject
    return model.float(), tree_map(lambda t: t.float() if torch.is_floating_point(t) else t, batch), loss_fn


def page(lines: list[dict[str, Any]], machine: str) -> str:
    """``docs/evidence/capture-check.md``."""
    rows = "".join(
        f"| {line['model']} | {line['parameters'] / 1e6:.2f} M | {line['capture_s']:.1f} | {line['check_s']:.1f} "
        f"| {line['compile_s']:.1f} | {line['check_s'] / line['compile_s']:.0%} |\n"
        for line in lines
    )
    return f"""# The captured graph against the model

A plan never changes what is computed, provided that the captured graph equals the model. So `compile`, `plan`, `emit` and `run` compare the
graph with the model before planning, if the model's parameters have values, and note the result in the plan.

**What is compared.** A copy of the model exactly as given (each module in its `train` or `eval` mode, with the same shared memory) runs
two steps in eager PyTorch, in float64, on 2 rows of the batch, with a parameter update between them. The model is captured for these
rows, and the graph runs the same two steps. The loss, the gradient of every parameter (or its absence), and every buffer after each step
must agree to 1e-9. A third step has 3 rows, and permutes the values of each tensor. Then both graphs are compared with the graph of the
full batch, node by node: numbers may differ only where they depend on the number of rows. Dropout has probability 0 in both runs, and
other random numbers are replaced by a fixed pattern; a separate check finds dropout in the graph that the model does not have. Some
models have another graph for few rows, or run only with their own number of rows. They are compared on the full batch, if it has at most
64 rows; otherwise the note names the first node that differs.

**If they differ.** A `CaptureError` names the gradient (or the loss, or a buffer) that differs and by how much, the first value in the
graph that the model does not compute, and its line in the model. `autopar.opaque(module)` runs that module as one opaque op.

**Models that are not compared:**

- buffers are on the meta device, or parameters are and take more than 64 MiB in float64;
- the model takes more than 16 GB with its gradients in float64, or more than 10^14 operations;
- the batch has more than 64 rows, and the model does not run with fewer.

The plan then has a note that begins with "{NOT_COMPARED}", and gives the reason.

**Models that are refused:**

- the model could be compared, but raises an error on the CPU, returns a loss that is not a number, or cannot be copied;
- it leaves state for its next call (in a global, a class attribute, a closure, a default argument), and that call needs the state, or
  nothing can be compared.

A model that does not run in float64 is compared in its own precision, with a tolerance for rounding. Casts to float32 inside the model
are part of the program and not compared.

**To turn it off:** `capture_check=False` in Python, `--no-capture-check` on the command line. The plan notes that.

## What it costs

{machine}
Seconds: *capture* of the model, *comparison* (which captures it two more times), and *compile*, the whole call `autopar.compile(model, 2,
batch)` with capture, comparison, search and emission.

| model | parameters | capture | comparison | compile | share of compile |
|---|---|---|---|---|---|
{rows}
Which faults the comparison detects is tested by [injecting faults into capture](mutations.md).

Made by `make report NAME=capture-check`. Do not edit.
"""


def main() -> None:
    autopar.compile(*_first())
    lines = [measured(name) for name in MODELS]
    RESULTS.write_text("".join(json.dumps(line) + "\n" for line in lines))
    RESULTS.with_suffix(".md").write_text(page(lines, machine_words(lines)))
    for line in lines:
        print(line)


def _first() -> tuple[nn.Module, int, Any, Any]:
    model, batch, loss_fn = _narrow(plain_mlp())
    return model, 2, batch, loss_fn


if __name__ == "__main__":
    main()
