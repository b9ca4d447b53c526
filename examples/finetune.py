"""Fine-tuning from safetensors: the model is on meta, and each process reads its own shards of the files.

``save_pretrained`` writes the folder here, so that the example needs no network; a folder that was downloaded is read alike.
The embeddings are frozen, and the weights that come out are safetensors again, which ``from_pretrained`` reads.

    python examples/finetune.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from eager import compared, train_on_one_device, windows
from llama import CONFIG
from torch import nn
from transformers import LlamaForCausalLM

import autopar

LR = 3e-4


def frozen(module: nn.Module) -> nn.Module:
    module.get_input_embeddings().requires_grad_(False)  # type: ignore[operator]
    return module


def main() -> tuple[list[float], list[float], float]:
    data = windows(48, 32)
    batches = [{name: tensor[i : i + 8] for name, tensor in data.items()} for i in range(0, 48, 8)]
    with tempfile.TemporaryDirectory() as temporary:
        pretrained, tuned = Path(temporary, "pretrained"), Path(temporary, "tuned")
        torch.manual_seed(7)
        LlamaForCausalLM(CONFIG).double().save_pretrained(pretrained)

        with torch.device("meta"):
            model = frozen(LlamaForCausalLM(CONFIG).double())
        with autopar.compile(model, 2, batches[0], init=pretrained, zero=3, lr=LR) as program:
            losses = program.train(batches)
            program.save_weights(tuned)
        CONFIG.save_pretrained(tuned)

        one = frozen(LlamaForCausalLM.from_pretrained(pretrained, dtype=torch.float64))
        alone = train_on_one_device(one, batches, LR)
        found = LlamaForCausalLM.from_pretrained(tuned, dtype=torch.float64).state_dict()
        weights = max(float((found[name] - tensor).abs().max()) for name, tensor in one.state_dict().items())
    print(f"{compared(losses, alone)}, its weights by {weights:.0e}")
    return losses, alone, weights


if __name__ == "__main__":
    main()
