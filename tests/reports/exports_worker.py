"""One process of a training under an exported configuration, on a CPU: ``exports_runs.py`` starts it in the trainers' environment.

``exports_worker.py TRAINER FOLDER`` trains three steps as ``FOLDER/case.json`` says, and rank 0 writes the loss of every step to
``FOLDER/losses.json``. ``alone`` and ``alone_titan`` are plain PyTorch on one device: transformers' Llama, and torchtitan's.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

STEPS, VOCAB, RATE = 3, 256, 1e-2
BETAS, EPSILON, DECAY = (0.9, 0.95), 1e-4, 0.1
"""AdamW with an epsilon so large that the scale of gradients matters."""

Case = dict[str, Any]


def tokens(case: Case) -> torch.Tensor:
    """The data, equal for all, with a token more than a sequence has. Steps have the same sequences, so that updates show in the losses."""
    drawn = torch.Generator().manual_seed(1)
    rows = torch.randint(VOCAB, (case["wanted"]["global_batch"], case["wanted"]["seq"] + 1), generator=drawn)
    return rows.expand(STEPS, *rows.shape)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=RATE, betas=BETAS, eps=EPSILON, weight_decay=DECAY)


def llama(case: Case) -> torch.nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**case["config"])).float()


def alone(case: Case) -> list[float]:
    model = llama(case)
    optimizer, losses = adamw(model.parameters()), []
    for rows in tokens(case)[..., :-1]:
        loss = model(input_ids=rows, labels=rows).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def microbatches(rows: torch.Tensor, case: Case, rank: int) -> Iterator[torch.Tensor]:
    """What a data-parallel rank reads of a step."""
    s = case["wanted"]
    yield from rows.chunk(s["data"])[rank].split(s["microbatch"])


def mean(losses: list[torch.Tensor]) -> float:
    """The mean over microbatches and ranks."""
    total = torch.stack([loss.detach().float().reshape(()) for loss in losses]).mean()
    torch.distributed.all_reduce(total)
    return float(total / torch.distributed.get_world_size())


def accelerate(case: Case) -> list[float]:
    from accelerate import Accelerator, PartialState
    from accelerate.utils import DistributedType

    # Accelerate takes processes on CPUs as plain data parallelism, whatever the configuration says: these say that they are on GPUs
    PartialState(cpu=True)
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    trainer = Accelerator(cpu=True, gradient_accumulation_steps=case["wanted"]["microbatches"])
    assert trainer.is_fsdp2, trainer.distributed_type
    model = llama(case)
    model, optimizer = trainer.prepare(model, adamw(model.parameters()))
    assert {"FSDP" in type(m).__name__ for m in model.model.layers} == {True}, model
    losses = []
    for rows in tokens(case)[..., :-1]:
        parts = []
        for ids in microbatches(rows, case, trainer.process_index):
            with trainer.accumulate(model):
                loss = model(input_ids=ids, labels=ids).loss
                trainer.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                parts.append(loss)
        losses.append(mean(parts))
    return losses


class LossAlone(torch.nn.Module):
    """A model that returns its loss and nothing else: DeepSpeed 0.19.0 divides gradients by the accumulation steps at every output."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=ids, labels=ids).loss


def deepspeed(case: Case) -> list[float]:
    import deepspeed as ds

    ds.init_distributed(dist_backend="gloo")
    model = LossAlone(llama(case))
    config = json.loads(case["files"]["ds_config.json"])
    engine, *_ = ds.initialize(model=model, optimizer=adamw(model.parameters()), config=config)
    assert engine.zero_optimization_stage() == case["wanted"]["zero"]
    losses = []
    for rows in tokens(case)[..., :-1]:
        parts = []
        for ids in microbatches(rows, case, torch.distributed.get_rank()):
            loss = engine(ids)
            parts.append(loss)
            engine.backward(loss)
            engine.step()
        losses.append(mean(parts))
    return losses


# torchtitan: its trainer asks for a CUDA device where torch sees no accelerator, so this process says that the CPU is one


def _titan_on_cpu() -> None:
    from torchtitan.distributed import utils as distributed
    from torchtitan.tools import utils

    count = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    properties = SimpleNamespace(total_memory=2**34, name="CPU")
    shim = {
        "get_device_name": lambda *_: "CPU", "get_device_properties": lambda *_: properties, "device_count": lambda: count,
        "reset_peak_memory_stats": lambda *_: None, "empty_cache": lambda: None, "memory_stats": lambda *_: {},
        "set_device": lambda *_: None, "current_device": lambda: 0, "synchronize": lambda *_: None,
    }  # fmt: skip
    utils.device_type, utils.device_module = "cpu", SimpleNamespace(**shim)
    for module in (distributed, sys.modules["torchtitan.distributed.parallel_dims"]):
        module.device_type, module.device_module = "cpu", utils.device_module
    distributed.set_pg_timeouts = lambda **_: None  # its barrier names devices, which gloo refuses


def titan_config() -> Any:
    """A small Llama of torchtitan with plain attention: its others need a GPU for the backward pass."""
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3.config_registry import llama3_debugmodel

    config = llama3_debugmodel()
    model = config.model_spec.model
    model.layers = model.layers[:4]
    for layer in model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    config.optimizer.param_groups[0].optimizer_kwargs |= {"lr": RATE, "eps": EPSILON}
    config.lr_scheduler.warmup_steps, config.lr_scheduler.min_lr_factor = 0, 1.0
    config.training.steps, config.training.max_norm = STEPS, 1e9  # without clipping
    return config


def _titan_model(config: Any) -> torch.nn.Module:
    torch.manual_seed(0)
    model = config.model_spec.model.build()
    with torch.no_grad():
        model.init_weights(buffer_device=torch.device("cpu"))
    return model


def alone_titan(case: Case) -> list[float]:
    _titan_on_cpu()
    config = titan_config()
    config.training.seq_len = case["wanted"]["seq"]
    config.model_spec.model.update_from_config(config=config)
    model = _titan_model(config)
    optimizer, losses = adamw(model.parameters()), []
    for rows in tokens(case):
        predicted = model(rows[:, :-1], positions=positions(rows)).flatten(0, 1).float()
        loss = torch.nn.functional.cross_entropy(predicted, rows[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


@torch.no_grad()
def _loaded(part: torch.nn.Module, whole: dict[str, torch.nn.Parameter]) -> None:
    """Give every parameter its shard of the reference's value."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    for name, parameter in part.named_parameters():
        value = whole[name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "")]
        if isinstance(parameter, DTensor):
            value = distribute_tensor(value.detach(), parameter.device_mesh, parameter.placements, src_data_rank=None)
        parameter.copy_(value)


def _microbatched(schedule: Any) -> None:
    """Let a schedule take microbatches, as those of later versions of torch do: torch 2.13's cut a whole batch."""
    stages = schedule._stages if hasattr(schedule, "_stages") else [schedule._stage]

    def step(
        *, arg_mbs: Any, kwarg_mbs: Any, target_mbs: Any, losses: Any, loss_kwargs: Any, return_outputs: bool
    ) -> None:
        for stage in stages:
            stage.has_backward = True
            stage.clear_runtime_states()
        schedule._step_microbatches(arg_mbs, kwarg_mbs, target_mbs, losses, return_outputs, loss_kwargs=loss_kwargs)

    schedule.step = step


class Built:
    """In a configuration of torchtitan, what ``build`` makes."""

    def __init__(self, build: Any) -> None:
        self.build = build

    def to_dict(self) -> dict[str, Any]:
        return {}


class Rows:
    """torchtitan's data loader of a rank."""

    def __init__(self, case: Case, dp_rank: int, local_batch_size: int, **_: Any) -> None:
        self.case, self.rank, self.size = case, dp_rank, local_batch_size

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        for step in tokens(self.case):
            for rows in step.chunk(self.case["wanted"]["data"])[self.rank].split(self.size):
                yield {"input": rows[:, :-1], "positions": positions(rows)}, rows[:, 1:]


def positions(rows: torch.Tensor) -> torch.Tensor:
    return torch.arange(rows.shape[1] - 1).expand(len(rows), -1)


def torchtitan(case: Case) -> list[float]:
    from torch.distributed.fsdp import FSDPModule

    _titan_on_cpu()
    from exports_targets import words_of
    from torchtitan.config import ConfigManager

    words = words_of(case["files"]["torchtitan_args.sh"])
    switches = ["--training.disable_cuda_graphs", "--parallelism.spmd_backend", "partial_dtensor"]
    switches = [word for word in switches if word not in words]
    config = ConfigManager().parse_args(["--module", "exports_worker", "--config", "titan_config", *switches, *words])
    config.dataloader, config.tokenizer = Built(lambda **kw: Rows(case, **kw)), Built(lambda **_: None)
    trainer = config.build()
    whole = dict(_titan_model(config).named_parameters())
    for part in trainer.model_parts:
        _loaded(part, whole)
        for module in part.modules():
            if isinstance(module, FSDPModule):  # its other reductions scale sums, which gloo cannot
                module.set_force_sum_reduction_for_comms(True)
    if case["wanted"]["pipeline"] > 1:
        _microbatched(trainer.pp_schedule)
    losses: list[float] = []
    trainer.metrics_processor.log = lambda step, loss, *_, **__: losses.append(float(loss))
    trainer.train()
    trainer.close()
    if case["wanted"]["pipeline"] > 1:  # the last stage has the loss
        found = [losses]
        torch.distributed.broadcast_object_list(found, src=torch.distributed.get_world_size() - 1)
        losses = found[0]
    return losses


def main() -> None:
    name, folder = sys.argv[1], Path(sys.argv[2])
    case = json.loads((folder / "case.json").read_text())
    programs = (alone, alone_titan, accelerate, deepspeed, torchtitan)
    losses = {each.__name__: each for each in programs}[name](case)
    if os.environ.get("RANK", "0") == "0":
        (folder / "losses.json").write_text(json.dumps(losses))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
