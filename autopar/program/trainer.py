"""Trains a program on this rank: forward and backward passes, clipping, updates, state dicts, checkpoints.

Gradients are sums, never means: the loss that a stage returns is a term of the global batch's loss, so the gradients of all
ranks and microbatches add up to exactly those of one device. Local SGD replicas (``sync`` of the plan) are the exception: each has
the gradients of its own rows; losses, gradients and state dicts that the trainer returns are means over the replicas. If the plan
allows ``microbatch_statistics``, each microbatch is treated as a separate batch, with its own scalars: its loss is divided by the number of
microbatches, and the sum is the mean.

Microbatch ``i`` is the ``i``-th chunk of the *global* batch, and the mesh's axes divide each microbatch (outermost first). Dividing
the batch over the axes first, and then into microbatches, would be wrong if layers of one stage have different data axes.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from . import checkpoint, optimizers, weights
from .agree import same_options, same_state
from .checkpoint import has_checkpoint, lock_checkpoints
from .checkpoint_files import CheckpointError
from .finite import NonFiniteLossError, first_non_finite
from .loader import Loader, Order, Synthetic, Tensors, first_key
from .model_tensors import TrainingTensors, source_of
from .noise import NoiseError, NoiseScale
from .parameters import build_stages, norm_of
from .reductions import Publications, Reductions
from .share import Batch, DataError
from .state import initial, read_state, wrong_state
from .tracing import traced
from .world import Layout, LoadedProgram, World, load, start

T = TypeVar("T")

__all__ = [
    "CheckpointError",
    "DataError",
    "NonFiniteLossError",
    "Order",
    "Synthetic",
    "Tensors",
    "Trainer",
    "adamw",
    "has_checkpoint",
    "initial",
    "load",
    "lock_checkpoints",
    "read_state",
    "start",
    "wrong_state",
]


def adamw(params: list[nn.Parameter], lr: float, world: World) -> torch.optim.Optimizer:
    """Return the default optimizer; on GPUs it is fused: one kernel updates many tensors."""
    return torch.optim.AdamW(params, lr=lr, fused=world.device.type == "cuda" or None)


def set_tf32(allowed: bool) -> None:
    """Allow or forbid TF32 for float32 products in this process. By default cuDNN's convolutions and recurrent layers use it,
    and matmuls don't."""
    torch.set_float32_matmul_precision("high" if allowed else "highest")
    torch.backends.cudnn.allow_tf32 = allowed


class ModeError(RuntimeError):
    """Raised by ``evaluate`` if the program's evaluation mode isn't known to be the model's."""

    def __init__(self, why: str) -> None:
        self.message = f"the program cannot evaluate the model: {why}"
        self.hint = "compile model.eval() into a program of its own, and give it the state dict of this one"
        super().__init__(f"{self.message}; {self.hint}")


class Trainer:
    """This rank's share of the training: call its methods on every rank in the same order.

    ``optimizer`` (default: ``adamw``) returns an optimizer, or a list of them, over the list of the user's parameters, or over pairs with
    their names if its argument is called ``named_parameters``. These parameters are placeholders, which this rank's own tensors replace
    (see ``optimizers``). ``scheduler`` returns a scheduler of the optimizer's learning rates; it counts updates, without skipped ones.
    Initial values are those of ``state`` (a state dict of the user's model, or the path of its safetensors or of a ``torch.save`` of it),
    or else those of ``values`` (which maps a parameter's layout to its full tensor), or else drawn from ``seed``, the same under all plans.
    A checkpoint ``resume`` replaces them, as ``load`` does. ``step`` and ``advance`` clip gradients to the 2-norm ``max_norm``.
    ``loss_scale`` is the dynamic loss scale of a float16 program, otherwise ``None``; losses, gradients and norms that the trainer
    returns are unscaled.
    """

    def __init__(
        self,
        program: LoadedProgram,
        world: World,
        *,
        optimizer: optimizers.Optimizer | None = None,
        scheduler: optimizers.Scheduler | None = None,
        state: Mapping[str, Tensor] | str | os.PathLike[str] | None = None,
        values: Callable[[Layout], Tensor] | None = None,
        seed: int = 0,
        max_norm: float | None = None,
        resume: str | os.PathLike[str] | None = None,
    ) -> None:
        if max_norm is not None and not max_norm > 0:
            raise ValueError(f"max_norm is {max_norm}, but must be positive, or None for no clipping")
        self.program, self.world, self.max_norm = program, world, max_norm
        set_tf32("tf32" in program.plan.get("allow", ()))
        self._partially_loaded = False  # whether a load failed after replacing some of the values
        same_options({"the seed": seed, "max_norm": max_norm}, world.device)
        self.stages, self._by_stage, self._buffers = build_stages(program, world)
        self._groups = [group for groups in self._by_stage.values() for group in groups]
        spec = program.spec
        self._late = spec.reductions and spec.reductions(program, self._by_stage)
        self._reductions = self._late or Reductions(program, self._by_stage)
        self._publications = Publications(program, self.stages, self._by_stage)
        self._updates: optimizers.Updates | None = None
        if isinstance(state, str | os.PathLike) and weights.is_weights(Path(state)):
            self.load_weights(state)
        elif state is not None:
            self.load_state_dict(read_state(state) if isinstance(state, str | os.PathLike) else state)
        elif values is not None:
            self._set(lambda tensors: tensors.fill(values))
        elif resume is None:
            self._set(lambda tensors: tensors.draw(seed))
        self.loss_scale = spec.loss_scale and spec.loss_scale(world.device)
        scaled = self.loss_scale and self.loss_scale.scaled
        self._schedule = spec.schedule(program, world, self.stages, self._by_stage, self._reductions, scale=scaled)
        masters = [master for group in self._groups for master in group.masters]
        optimizer = optimizer or (lambda params: adamw(params, 3e-4, world))
        self._updates = optimizers.make(optimizer, program, world, masters, scheduler)
        self.optimizer, self.scheduler = self._updates.optimizer, self._updates.scheduler
        # ``steps`` counts the updates so far, skipped ones included, and ``rows`` the rows of their batches
        self._seed, self.steps, self.rows = seed, 0, 0
        self.loaders: dict[int, Loader] = {}  # kept open between the calls of a ``run.Program``
        # the epoch and the row after the last step, by ``Loader.key``
        self.positions: dict[str, tuple[int, int]] = {}
        self._from_checkpoint: tuple[str, ...] = ()  # the keys of the checkpoint's positions, until one is read
        self.gradient_norm: Tensor | None = None  # of the last step, before clipping; ``None`` if it was not computed
        self._unread: list[Tensor] = []  # this rank's terms of the losses of ``advance``
        self._background: checkpoint.Background | None = None
        if resume is not None:
            self.load(resume)

    def loader(
        self, dataset: Any, order: Order | Mapping[str, Any] | None = None, *, collate: Callable[..., Any] | None = None
    ) -> Loader:
        """Return the loader of this rank's rows of ``dataset``; ``order`` may be a dict of the fields of ``Order``."""
        order = Order(**order) if isinstance(order, Mapping) else order
        return Loader(self.program, self.world, dataset, order, collate=collate)

    def position(self, loader: Loader) -> tuple[int, int]:
        """Return the current epoch and row in a data set; all ranks call this."""
        if loader.key not in self.positions:
            if loader.order in self.positions:  # the checkpoint is from before data sets had checksums
                self.positions[loader.key] = self.positions.pop(loader.order)
            elif self._from_checkpoint and dist.get_rank() == 0:
                before = ", ".join(self._from_checkpoint)
                print(
                    f"the checkpoint was trained with {before}, and this data set is {loader.key}: reading starts at row 0",
                    file=sys.stderr,
                    flush=True,
                )
            self._from_checkpoint = ()
        return self.positions.get(loader.key, (0, 0))

    def step_from(self, loader: Loader, on_nan: str = "", *, with_norm: bool = True) -> tuple[float, bool]:
        """Update on the next global batch as ``step`` does; return the loss before the update, and whether the epoch ends with this batch.

        Raises ``DataError`` on every rank if rows can't be read: the training state is unchanged, and training can continue.
        """
        rows, after = loader.read(self.position(loader))
        loss = self.step(rows, on_nan, with_norm=with_norm)
        self.positions[loader.key] = after
        return loss, loader.ends(after)

    def advance_from(self, loader: Loader) -> None:
        """Call ``advance`` on the next global batch, and prefetch the batch after it."""
        rows, after = loader.read(self.position(loader), ahead=True)
        self.advance(rows)
        self.positions[loader.key] = after

    def step(self, batch: Batch, on_nan: str = "", *, with_norm: bool = False) -> float:
        """Update once on the global ``batch`` (the full batch on every rank, or each rank's own rows); return the loss before the update,
        on every rank.

        ``on_nan`` says what happens if the loss is NaN or infinite: ``"stop"`` raises ``NonFiniteLossError`` on every rank before
        anything is updated, ``"skip"`` updates nothing and counts the step. A float16 program ignores this: its loss scale skips such
        steps. With ``on_nan`` the losses of ``advance`` are checked too, as by ``check_unread``. ``with_norm`` sets ``gradient_norm``, also
        without clipping.
        """
        unread, self._unread = self._unread, []
        *before, loss = self._schedule.reduced(torch.stack((*unread, self._forward_backward(batch))))
        if on_nan and self.loss_scale is None:
            *values, value = torch.stack((*before, loss)).tolist()
            self._check_late_losses(values)
            if not math.isfinite(value):
                self._skip_or_stop(batch, value, on_nan)
                return float(value)
        if self.max_norm is not None:
            self.gradient_norm = self._clip(self.max_norm)
        else:
            self.gradient_norm = self._norm_of_gradients() if with_norm else None
        # the host waits for the device once per step: at its end, or before the update, to read whether it is skipped
        if self.loss_scale is None:
            self._update()
            return float(loss)
        value, overflowed = torch.stack((loss, self.loss_scale.overflowed())).tolist()
        self._update(skipped=overflowed > 0)
        return float(value)

    def advance(self, batch: Batch) -> None:
        """Update as ``step(batch)`` does, but don't return the loss: it isn't all-reduced, and the host doesn't wait for the device.

        In float16 the host does wait, to know whether the update is skipped. Otherwise ``check_unread`` checks the losses later.
        """
        loss = self._forward_backward(batch)
        self._unread.append(loss)
        if self.max_norm is not None:
            self.gradient_norm = self._clip(self.max_norm)
        self.update()

    def check_unread(self) -> None:
        """Check the losses of all calls of ``advance`` since the last check; all ranks call this.

        Raises ``NonFiniteLossError`` on every rank if one is NaN or infinite: its gradients have already updated the parameters.
        """
        unread, self._unread = self._unread, []
        if unread and self.loss_scale is None:
            self._check_late_losses(self._schedule.reduced(torch.stack(unread)).tolist())

    def _check_late_losses(self, losses: list[float]) -> None:
        """Raise ``NonFiniteLossError`` if one of the losses of the last steps is NaN or infinite."""
        first = next((i for i, loss in enumerate(losses) if not math.isfinite(loss)), None)
        if first is not None:
            step = self.steps - len(losses) + first + 1
            raise NonFiniteLossError(
                f"the loss of step {step} is {losses[first]}, which was not read before {self.steps} steps were done",
                late=True,
            )

    def trace(self, batch: Batch, path: str | os.PathLike[str]) -> float:
        """Call ``step(batch)``; rank 0 writes the actions of all ranks in Chrome's trace-event format (https://ui.perfetto.dev)."""
        return self.traced(lambda: self.step(batch), path)

    def traced(self, step: Callable[[], T], path: str | os.PathLike[str]) -> T:
        """Call ``step``, a function that runs a step of this trainer; trace it as ``trace`` does, and return its result."""
        pipeline_rank = self.world.mesh.get_local_rank("pipeline")
        return traced(step, self.finish_update, path, pipeline_rank, all_threads=self._schedule.threaded)

    def _skip_or_stop(self, batch: Batch, loss: float, on_nan: str) -> None:
        self._forget_buffers()
        self.gradient_norm = None  # the step has none
        if on_nan == "stop":
            self.finish_update()
            why = first_non_finite(self._schedule, self._groups, batch, self._key())
            self._forget_buffers()
            raise NonFiniteLossError(f"the loss of step {self.steps + 1} is {loss}; first non-finite value: {why}")
        if self._late is not None:
            self._late.discard()
        self._update(skipped=True)

    def _forget_buffers(self) -> None:
        """Drop the buffer values that the forward pass computed."""
        if self._buffers is not None:
            self._buffers.clear()

    def _key(self) -> int:
        """Return the random seed of this step's first microbatch; that of microbatch ``i`` is ``i`` larger."""
        return first_key(self._seed) + self.steps * self._schedule.microbatches

    def update(self) -> None:
        """Update the parameters with the gradients of ``forward_backward``, and the buffers with the values that it computed.

        If a float16 gradient overflowed on any rank, no rank changes parameters or optimizer states.
        """
        self._update(skipped=self.loss_scale is not None and bool(self.loss_scale.overflowed() > 0))

    def _update(self, skipped: bool = False) -> None:
        if self.loss_scale is not None:
            self.loss_scale.update(skipped)
        assert self._updates is not None
        self.finish_update()  # the previous update, if no forward pass has waited for it
        if self._late is not None:
            self._late.use_due_gradients()
        if not skipped:
            self._updates.step()
        if self._late is not None:
            self._late.advance()
        self.steps += 1
        self.rows += int(self.program.plan["global_batch"])
        local_steps = self.program.local_steps
        if local_steps and self.steps % local_steps == 0:
            for group in self._groups:
                group.average()
            self._updates.read_masters()
        self._publications.start()
        if self._buffers is not None:
            self._buffers.write()

    def finish_update(self) -> None:
        """Wait until the stages' parameters have the values of the last update. Call this before reading them outside of a step;
        the methods of this class do."""
        self._publications.finish()

    def forward_backward(self, batch: Batch) -> float:
        """Compute the global batch's gradients, summed over ranks, microbatches and tied copies; return its loss."""
        loss = self._forward_backward(batch)
        if self._late is not None:
            self._late.use_last_gradients()
        return float(self._schedule.reduced(loss))

    def _forward_backward(self, batch: Batch) -> Tensor:
        """Compute the gradients, and return the sum of this rank's terms of the loss."""
        self._check_fully_loaded()
        self._schedule.share.check(batch)
        self._reductions.clear()
        self._forget_buffers()
        losses = self._schedule.run(batch, self._key())
        self._reductions.start()
        loss = self._schedule.own_sum(losses)
        self._reductions.finish()
        if self.loss_scale is not None:
            self.loss_scale.unscale(gradient for group in self._groups for gradient in group.gradients())
        return loss

    def evaluate(self, batch: Batch) -> float:
        """Return the loss of a global batch by forward passes only, as in the model's evaluation mode; nothing is updated.

        Dropout and other random numbers are replaced by their means, and batch norm uses its running statistics. Raises ``ModeError``
        if that is not what ``model.eval()`` computes.
        """
        self.check_evaluation()
        self.finish_update()
        self._schedule.share.check(batch)
        with contextlib.nullcontext() if self._buffers is None else self._buffers.preserved():
            return float(self._schedule.sum(self._schedule.evaluate(batch)))

    def check_evaluation(self) -> None:
        """Raise ``ModeError`` if the program can't evaluate the model."""
        if why := self.program.spec.no_evaluation:
            raise ModeError(why)

    def clip_(self, max_norm: float) -> float:
        """Scale all gradients so that their 2-norm over the whole model is at most ``max_norm``; returns the norm before scaling.

        Each element counts once: only the first of the ranks with the same values counts it, and of tied copies only the first stage's
        counts. Each local SGD replica has its own norm.
        """
        return float(self._clip(max_norm))

    @torch.no_grad()
    def _clip(self, max_norm: float) -> Tensor:
        norm = self._norm_of_gradients()
        masters = [master for group in self._groups for master in group.masters]
        nn.utils.clip_grads_with_norm_([master.holder for master in masters], max_norm, norm)
        return norm

    @torch.no_grad()
    def _norm_of_gradients(self) -> Tensor:
        """Return the 2-norm that ``clip_`` describes."""
        if self._late is not None:
            self._late.use_due_gradients()
        masters = [master for group in self._groups for master in group.masters]
        first_on, is_first_copy = self.world.first_on, self.program.is_first_copy
        counted = [m for m in masters if first_on(m.replicated_axes) and is_first_copy(m.layout)]
        grads = [grad for master in counted if (grad := master.gradient) is not None]
        norms = [norm_of(grad) for grad in grads] or [torch.zeros((), dtype=torch.float64, device=self.world.device)]
        squares = torch.stack(norms).square().sum()
        if self.loss_scale is not None and self.world.replica is None:
            squares = self.loss_scale.reduce_overflow(squares)
        else:
            dist.all_reduce(squares, group=self.world.replica)
        return squares.sqrt()

    def noise_scale(self) -> NoiseScale:
        """Return the measurement of the gradient noise scale. Raises ``NoiseError`` if the plan admits none."""
        if self._late is not None or self.loss_scale is not None:
            what = "are of an earlier step than the reduced ones" if self._late is not None else "are scaled in float16"
            raise NoiseError(f"here these {what}")
        return NoiseScale(self._groups, self._schedule)

    def gradients(self) -> dict[str, Tensor]:
        """Return the full gradients of trainable parameters, by original name, on the CPU of rank 0; nothing on other ranks."""
        return self._tensors().gradients()

    def state_dict(self) -> dict[str, Tensor]:
        """Return the full parameters and written buffers by original name (a tied one under each name), on the CPU of rank 0; nothing on
        other ranks."""
        return self._tensors().state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Set parameters and buffers from a state dict of the user's model, the same on every rank. Optimizer state is unchanged.

        Raises ``ValueError`` with the name of an entry that is missing, is not in the model, or has another shape.
        """
        if wrong := wrong_state(self.program.records, state):
            raise ValueError(f"the state dict does not match the compiled model: {wrong}")
        layouts, buffers = self.program.layouts, self.program.buffers
        names = {name for layout in layouts for name in (*layout.originals, *layout.tied)}
        same_state(state, sorted(names | {record.original for record in buffers}), self.world.device)
        self._set(lambda tensors: tensors.fill(source_of(state), state))
        self._partially_loaded = False

    def save(self, folder: str | os.PathLike[str], *, keep: int | None = None, wait: bool = True) -> Path:
        """Write a checkpoint, ``folder/step-N``, that any plan of this model can load; keep only the last ``keep`` ones (``None``: all).

        Every rank writes its own parts of parameters, optimizer state and buffers; the folder gets its name when all have finished.
        Without ``wait`` this returns once the parts are copied to the host's memory, and a thread writes them. Raises ``CheckpointError``
        on every rank, also for the previous save if its thread failed; training can continue.
        """
        self.finish_saving()
        self._check_fully_loaded()
        scale = None if self.loss_scale is None else self.loss_scale.state_dict()
        counters = {
            "steps": self.steps,
            "rows": self.rows,
            "seed": self._seed,
            "loss_scale": scale,
            "data": self.positions,
        }
        with contextlib.nullcontext() if self._late is None else self._late.sums_in_state(self._updates):
            if wait:
                return checkpoint.save(self._tensors(), folder, counters, keep)
            self._background = self._background or checkpoint.Background(self.world.timeout_s)
            return self._background.save(self._tensors(), folder, counters, keep)

    def finish_saving(self) -> None:
        """Wait for a background save. Raises ``CheckpointError`` on every rank if it failed."""
        if self._background is not None:
            self._background.finish()

    def load(self, folder: str | os.PathLike[str]) -> int:
        """Resume from a checkpoint: ``folder`` itself, or the newest complete one in it. Returns its number of steps.

        Under the plan that saved it, training continues bit for bit. Raises ``CheckpointError`` on every rank.
        """
        self.finish_saving()
        self._unread.clear()  # losses of steps that this undoes
        with self._replacing():
            counters = checkpoint.load(self._tensors(), folder)
        if self._late is not None:
            self._late.take_sums_from_state(self._updates)
        self.steps, self.rows, self._seed = counters["steps"], counters["rows"], counters["seed"]
        self.positions = {key: (epoch, row) for key, (epoch, row) in counters["data"].items()}
        self._from_checkpoint = tuple(self.positions)
        if self.loss_scale is not None and counters["loss_scale"] is not None:
            self.loss_scale.load_state_dict(counters["loss_scale"])
        return self.steps

    def save_weights(self, folder: str | os.PathLike[str], *, file_bytes: int = weights.FILE_BYTES) -> None:
        """Write parameters and buffers as safetensors files of up to ``file_bytes`` each, in the model's dtypes, into a new folder.

        Every rank writes its own parts. Raises ``CheckpointError`` on every rank.
        """
        self._check_fully_loaded()
        checkpoint.save_weights(self._tensors(), folder, file_bytes)

    def load_weights(self, path: str | os.PathLike[str]) -> None:
        """Set parameters and buffers from safetensors (file or folder); every rank reads its own parts. Optimizer state is unchanged.

        Raises ``CheckpointError`` on every rank, with the names that are missing, unknown or of other shapes.
        """
        with self._replacing():
            self._set(lambda tensors: checkpoint.load_weights(tensors, path))

    def _set(self, change: Callable[[TrainingTensors], None]) -> None:
        """Let ``change`` set values of this rank's tensors, then copy them into the parameters that the stages read."""
        tensors = self._tensors()
        change(tensors)
        tensors.copy_masters_to_parameters()

    @contextlib.contextmanager
    def _replacing(self) -> Iterator[None]:
        """A context in which files replace the values. If only some files could be read, later calls refuse the mixed state."""
        try:
            yield
        except CheckpointError as error:
            self._partially_loaded = self._partially_loaded or error.partially_loaded
            raise
        self._partially_loaded = False

    def _check_fully_loaded(self) -> None:
        if self._partially_loaded:
            raise CheckpointError(
                "parameters and buffers are of two states: some files could not be read",
                "load a complete checkpoint, or complete weights",
            )

    def _tensors(self) -> TrainingTensors:
        """Return the tensors that are saved and loaded."""
        self.finish_update()
        return TrainingTensors(self.program, self.world, self._groups, self._buffers, self._updates)
