"""``transformers.Trainer`` with an autopar program: data set, collator, TrainingArguments and callbacks are unchanged.

``AutoparTrainer`` is the adapter, to be copied. Trainer keeps its loop: batches, learning rates, logs, callbacks, evaluation, saving.
The step itself, which is forward, backward, clipping and the update, runs in the processes of the program; the model of this process is
refreshed when it is evaluated or saved. ``per_device_train_batch_size`` is the global batch, of which the plan makes microbatches, so
``gradient_accumulation_steps`` stays 1. Shorter batches, the last one of an epoch among them, are padded (``lengths.py`` says when that
is exact). Trainer's own checkpoints have the weights; for the optimizer's state, ``program.save`` in a callback writes one.

    python examples/hf_trainer.py
"""

from __future__ import annotations

import json
import os
import tempfile
from typing import Any

import torch
from eager import compared, windows
from lengths import padded
from llama import build
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainingArguments, get_scheduler

import autopar

SETTINGS = "AUTOPAR_TRAINER"  # the name of the environment's variable that takes Trainer's settings to the processes


def optimizer(named_parameters: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """AdamW with Trainer's groups: biases and norms do not decay."""
    given = json.loads(os.environ[SETTINGS])
    groups = [[p for n, p in named_parameters if (n in given["decay"]) == decays] for decays in (True, False)]
    decays = zip(groups, (given["weight_decay"], 0.0), strict=True)
    return torch.optim.AdamW([{"params": p, "weight_decay": d} for p, d in decays if p], **given["adamw"])


def scheduler(of: torch.optim.Optimizer) -> Any:
    return get_scheduler(optimizer=of, **json.loads(os.environ[SETTINGS])["schedule"])


class AutoparTrainer(Trainer):
    """Trainer whose steps run under a plan for ``devices``, with ``pins`` if there are any."""

    def __init__(self, *args: Any, devices: Any, pins: dict[str, Any] | None = None, **options: Any) -> None:
        super().__init__(*args, **options)
        if self.args.gradient_accumulation_steps != 1 or self.args.optim not in ("adamw_torch", "adamw_torch_fused"):
            raise ValueError(
                "a plan makes its own microbatches, of AdamW: gradient_accumulation_steps=1, optim='adamw_torch'"
            )
        self.devices, self.pins = devices, pins
        self.whole: Any = self.model  # on this process
        self.program: Any = None  # from the first batch on
        self.norm = float("nan")  # of the gradients of the last step
        self.rows = self.args.per_device_train_batch_size

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Trainer's own optimizer and schedule, which log learning rates here and get no gradients; and the settings of the real ones."""
        args, decay = self.args, set(self.get_decay_parameter_names(self.whole))
        betas, warmup = (args.adam_beta1, args.adam_beta2), args.get_warmup_steps(num_training_steps)
        settings = {
            "decay": [name for name, parameter in self.whole.named_parameters() if name in decay],
            "weight_decay": args.weight_decay,
            "adamw": {"lr": args.learning_rate, "betas": betas, "eps": args.adam_epsilon},
            "schedule": {
                "name": args.lr_scheduler_type,
                "num_warmup_steps": warmup,
                "num_training_steps": num_training_steps,
            },
        }
        os.environ[SETTINGS] = json.dumps(settings)
        return super().create_scheduler(num_training_steps, optimizer)

    def training_step(self, model: nn.Module, inputs: dict[str, Tensor], num_items_in_batch: Any = None) -> Tensor:
        if self.program is None:
            self.length = max(tensor.shape[1] for tensor in inputs.values())  # later batches are padded up to it
            makers: Any = {"optimizer": "hf_trainer:optimizer", "scheduler": "hf_trainer:scheduler"}
            example, norm = padded(inputs, self.rows, self.length), self.args.max_grad_norm or None
            self.program = autopar.compile(self.whole, self.devices, example, pin=self.pins, max_norm=norm, **makers)
        losses = self.program.train([padded(inputs, self.rows, self.length)], on_step=self.note)
        return torch.tensor(losses[0], dtype=torch.float64)

    def note(self, step: int, loss: float, record: dict[str, Any]) -> None:
        self.norm = record.get("gradient_norm", self.norm)

    def log(self, logs: dict[str, float], *args: Any) -> None:
        super().log(logs | {"grad_norm": self.norm} if "grad_norm" in logs else logs, *args)

    def refresh(self) -> None:
        if self.program is not None:
            self.whole.load_state_dict(self.program.state_dict())

    def evaluate(self, *args: Any, **options: Any) -> dict[str, float]:
        self.refresh()
        return super().evaluate(*args, **options)

    def save_model(self, *args: Any, **options: Any) -> None:
        self.refresh()
        super().save_model(*args, **options)


class Losses(TrainerCallback):
    """A user's callback: it has what Trainer logs."""

    def __init__(self) -> None:
        self.logs: list[dict[str, float]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **others: Any) -> None:
        self.logs.append(logs)

    def all(self, name: str) -> list[float]:
        return [logs[name] for logs in self.logs if name in logs]


def main() -> tuple[Losses, Losses]:
    ids = windows(44, 32)["input_ids"]
    data = [{"input_ids": row, "labels": row} for row in ids]  # 36 to train on: the last batch of an epoch has 4 rows
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            output_dir=folder, per_device_train_batch_size=8, num_train_epochs=2, learning_rate=2e-3, weight_decay=0.1,
            lr_scheduler_type="cosine", warmup_steps=2, max_grad_norm=1.0, logging_steps=1, eval_strategy="epoch",
            save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True, seed=3,
        )  # fmt: skip
        common: dict[str, Any] = {"args": args, "train_dataset": data[:36], "eval_dataset": data[36:]}
        ours, plain = found = Losses(), Losses()
        trainer = AutoparTrainer(build(), devices=2, pins={"tensor": 2}, callbacks=[ours], **common)
        trainer.train()
        trainer.program.close()
        Trainer(build(), callbacks=[plain], **common).train()
    last = [each.all("eval_loss")[-1] for each in found]
    print(f"{compared(ours.all('loss'), plain.all('loss'))}; evaluation {last[0]:.4f}, plain Trainer {last[1]:.4f}")
    return ours, plain


if __name__ == "__main__":
    main()
