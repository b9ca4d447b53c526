"""A LightningModule with an autopar program: the module, data loaders, callbacks, loggers and ``Trainer.fit`` are unchanged.

``Parallel`` is the adapter, to be copied. It wraps the user's module: ``training_step`` is captured and planned with the first batch, and
each step runs in the processes of the program. Lightning's own optimizer gets no gradients and counts steps. The user's module is refreshed
before it is validated and saved. What it logs inside of ``training_step`` is left out; the loss is logged as ``train_loss``.

    python examples/with_lightning.py
"""

from __future__ import annotations

from typing import Any

import pytorch_lightning as pl
import torch
from eager import compared, library_bytes
from gpt import GPT
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import autopar

Batch = list[Tensor]


def optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.1)


class LitGPT(pl.LightningModule):
    """The user's module. Its optimizer is made by a function at the top of a module, which processes can import."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gpt = GPT().double()

    def training_step(self, batch: Batch, index: int) -> Tensor:
        loss = self.gpt(*batch)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Batch, index: int) -> None:
        self.log("val_loss", self.gpt(*batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return optimizer(list(self.parameters()))


class Step(nn.Module):
    """What is captured: a batch in, the loss of the user's ``training_step`` out."""

    def __init__(self, module: pl.LightningModule) -> None:
        super().__init__()
        self.module = module

    def forward(self, *batch: Tensor) -> Any:
        return self.module.training_step(list(batch), 0)


class Parallel(pl.LightningModule):
    """``module`` under a plan for ``devices``. Every batch has the rows of the first one: ``drop_last=True``."""

    def __init__(self, module: pl.LightningModule, devices: Any, optimizer: str, **options: Any) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.module = module
        self.program: Any = None  # from the first batch on
        self.devices, self.options = devices, {"optimizer": optimizer, **options}

    def training_step(self, batch: Batch, index: int) -> None:
        if self.program is None:
            self.module.trainer = None  # what is captured is the module alone
            self.program = autopar.compile(Step(self.module), self.devices, tuple(batch), **self.options)
            self.module.trainer = self.trainer
            self.module.log = self.log  # type: ignore[method-assign]  # of validation_step
        self.log("train_loss", self.program.step(tuple(batch)))
        self.optimizers().step()  # type: ignore[union-attr]  # without gradients: Lightning counts the step

    def refresh(self) -> None:
        if self.program is not None:
            state = self.program.state_dict()
            self.module.load_state_dict({name.removeprefix("module."): tensor for name, tensor in state.items()})

    def on_validation_start(self) -> None:
        self.refresh()

    def validation_step(self, batch: Batch, index: int) -> Any:
        return self.module.validation_step(batch, index)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.refresh()
        checkpoint["state_dict"] = self.state_dict()

    def configure_optimizers(self) -> Any:
        return self.module.configure_optimizers()


class Losses(pl.Callback):
    """A user's callback."""

    def __init__(self) -> None:
        self.train: list[float] = []
        self.validation: list[float] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.train.append(float(trainer.callback_metrics["train_loss"]))

    def on_validation_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.validation.append(float(trainer.callback_metrics.get("val_loss", float("nan"))))


def main() -> tuple[Losses, Losses]:
    text = library_bytes(56 * 32 + 1)
    rows = TensorDataset(text[:-1].view(-1, 32), text[1:].view(-1, 32))
    train, held_out = torch.utils.data.Subset(rows, range(48)), torch.utils.data.Subset(rows, range(48, 56))
    found = []
    for module in (Parallel(LitGPT(), 2, "with_lightning:optimizer"), LitGPT()):
        losses = Losses()
        trainer = pl.Trainer(
            max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, callbacks=[losses], num_sanity_val_steps=0,
        )  # fmt: skip
        pl.seed_everything(1, verbose=False)
        loader = DataLoader(train, batch_size=8, shuffle=True, drop_last=True)
        trainer.fit(module, loader, DataLoader(held_out, batch_size=8))
        assert trainer.global_step == len(losses.train)
        found.append(losses)
        if isinstance(module, Parallel):
            module.program.close()
    ours, plain = found
    print(
        f"{compared(ours.train, plain.train)}; validation {ours.validation[-1]:.4f}, plain {plain.validation[-1]:.4f}"
    )
    return ours, plain


if __name__ == "__main__":
    main()
