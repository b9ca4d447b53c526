"""What a process of the start-up report does; it imports no more than a rank of a training does, and the process that initialises."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from peaks import grown_by
from torch import Tensor, nn

from autopar.program.state import INITIAL
from autopar.program.weights import bytes_of
from autopar.run import remote
from autopar.run.folder import import_runtime, program_modules

TIMEOUT_S = 1800


def measured(work: Callable[[], object]) -> dict[str, float]:
    """The peak of memory beyond that before the work, and the work's seconds."""
    began = time.perf_counter()
    return {"added_bytes": grown_by(work), "seconds": time.perf_counter() - began}


def model(layers: int) -> nn.Module:
    """Llama-2-7B, or one with fewer layers, in bfloat16 on meta."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        return LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, use_cache=False)).bfloat16()


def initialised(layers: int, folder: str) -> dict[str, float]:
    """Write the initial values of the folder, alone."""
    from autopar.run.initialise import OWN, with_buffer_values, write_initial_values

    planned = with_buffer_values(model(layers), OWN)
    return measured(lambda: write_initial_values(planned, OWN, 0, Path(folder)))


def rank(folder: str, saved: str) -> dict[str, Any]:
    """Start from the folder's initial values, write weights and a checkpoint, and read each of them into parameters that were zeroed."""
    with program_modules(folder):
        import_runtime(folder)
    options = {"optimizer": None, "lr": 1e-3, "seed": 0, "max_norm": None, "state": f"{folder}/{INITIAL}"}
    opened: list[Any] = []
    found: dict[str, Any] = {
        "start": measured(
            lambda: opened.append(remote.open_trainer(folder, options, device="cpu", timeout_s=TIMEOUT_S))
        )
    }
    (trainer,) = opened
    first = digest(trainer)
    weights, checkpoints = f"{saved}/weights", f"{saved}/checkpoints"
    for name, kind, save, load in (
        ("weights", "safetensors", lambda: trainer.save_weights(weights), lambda: trainer.load_weights(weights)),
        ("checkpoint", "checkpoint", lambda: trainer.save(checkpoints), lambda: trainer.load(checkpoints)),
    ):
        found[f"save {name}"] = measured(save)
        for tensor in own(trainer):
            tensor.zero_()
        found[f"load {kind}"] = measured(load)
        assert digest(trainer) == first
    return {"share_bytes": sum(tensor.nbytes for tensor in own(trainer)), **found}


def own(trainer: Any) -> list[Tensor]:
    """The parameters, master copies and gradient buffers of this rank, each memory once."""
    found: list[Tensor] = []
    for group in trainer._groups:
        if hasattr(group, "_values"):  # flat buffers
            found += [group._values, group._grads, *([group._master_values] if group._separate else [])]
        else:
            found += [master.tensor.detach() for master in (*group.masters, *group.frozen)]
    return list({tensor.data_ptr(): tensor for tensor in found if tensor.numel()}.values())


def digest(trainer: Any) -> list[int]:
    """Of all bytes of this rank's parameters, master copies and gradient buffers."""
    return [zlib.crc32(bytes_of(tensor)) for tensor in own(trainer)]
