"""A workload: the training step to plan, its capture, and its capture with other sizes.

For other sizes, a ``Recapture`` creates model and batch again, or slices and repeats the example batch (``Workload.resized``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from autopar.capture import capture, deepen, in_float8, separate_microbatches
from autopar.capture.batch import BatchStructure, count_tokens, describe_batch, flatten_batch
from autopar.errors import AutoparError, BatchError, ModelError, UsageError
from autopar.expert_loads import ExpertLoads
from autopar.graph import Graph
from autopar.plan import Plan
from autopar.plan_files import check_modules
from autopar.precision import FP8_RECIPES, normalise
from autopar.search.numerics import Numerics
from autopar.shard import annotate
from autopar.techniques import LAYER_DEVIATIONS


@dataclass(frozen=True)
class FewBlocks:
    """The model of a workload has few of its equal blocks: its graph gets ``more`` copies of block ``number`` (``capture.deepen``).
    ``full`` is the workload with all blocks, for a graph in which that one can't be repeated."""

    number: int
    more: int
    full: Callable[[], Workload]


@dataclass(frozen=True)
class Workload:
    """A model with an example of a global batch.

    With ``loss_fn`` the batch is the pair (inputs, targets). ``precision`` applies to parameters and activations; by default it is the
    model's. With ``local_batch_norm`` batch norm uses the statistics of each rank's part of a microbatch. Prices assume
    ``expert_loads``, or even loads.
    """

    model: nn.Module
    batch: Any
    loss_fn: Callable[..., Any] | None = None
    name: str | None = None
    precision: str | torch.dtype | None = None
    local_batch_norm: bool = False
    expert_loads: ExpertLoads | None = None
    few_blocks: FewBlocks | None = None

    def capture(self) -> Graph:
        """Return the graph of layers, completed by ``shard.annotate``. Raises as ``captured_as_built`` does."""
        return self.with_all_blocks()[-1]

    def with_all_blocks(self) -> tuple[Workload, Graph, Graph]:
        """Return the graph of ``captured_as_built``, and that graph with the blocks that the model lacks (``few_blocks``) and with
        ``expert_loads``; also the workload of both, which is ``few_blocks.full`` if its block can't be repeated."""
        built = graph = self.captured_as_built()
        if self.few_blocks is not None:
            deeper = deepen(built, self.few_blocks.number, self.few_blocks.more)
            if deeper is None:
                return self.few_blocks.full().with_all_blocks()
            graph = deeper
        return self, built, graph if self.expert_loads is None else self.expert_loads.on(graph)

    def captured_as_built(self) -> Graph:
        """Return the graph of the model as it is, even if it has few blocks.

        Raises:
            ModelError: the model isn't a module, or has parameters made under ``torch.inference_mode``.
            UsageError: an unknown precision, or a loss that isn't callable.
            CaptureError: the model can't be exported.
        """
        if isinstance(self.model, type):
            name = self.model.__name__
            raise ModelError(f"the model is the class {name}, not a torch.nn.Module", f"give an instance: {name}(...)")
        if not isinstance(self.model, nn.Module):
            raise ModelError(
                f"the model is {type(self.model).__name__}, not a torch.nn.Module", "wrap a function in a module"
            )
        if made := [name for name, parameter in self.model.named_parameters() if parameter.is_inference()]:
            raise ModelError(
                f"{made[0]} was made under torch.inference_mode, and such a parameter cannot be trained",
                "build the model outside of torch.inference_mode",
            )
        if self.loss_fn is not None and not callable(self.loss_fn):
            raise UsageError(
                f"loss_fn is {self.loss_fn!r}, which cannot be called",
                "give a function of the model's output and the targets, such as torch.nn.functional.cross_entropy",
            )
        precision = None if self.precision is None else normalise(self.precision)
        return annotate(
            capture(
                self.model,
                self.batch,
                self.loss_fn,
                precision=precision,
                name=self.name,
                local_batch_norm=self.local_batch_norm,
            )
        )

    def batch_sizes(self) -> tuple[int, int]:
        """Return the rows of the batch, and its tokens."""
        leaves = describe_batch(self.model, self.batch, self.loss_fn).leaves
        return leaves[0].shape[0], count_tokens(leaves)

    def check_plan(self, plan: Plan) -> None:
        """Raise ``UsageError`` if the plan is for other modules or another batch size, before the capture, which may take minutes."""
        if self.few_blocks is None and isinstance(self.model, nn.Module):
            check_modules(plan, self.model, self.batch_sizes()[0])

    def inputs(self, graph: Graph) -> dict[str, Tensor]:
        """Return the batch's tensors by the names of the graph's inputs."""
        assert isinstance(graph.structure, BatchStructure)
        return flatten_batch(graph.structure, self.batch)

    def resized(
        self, *, seq: int | None = None, global_batch: int | None = None, precision: str | None = None
    ) -> Graph:
        """Capture the model with the example batch sliced or repeated. Raises ``BatchError`` if it or the batch doesn't allow the sizes."""
        batch = resize_batch(self.batch, seq, global_batch)
        try:
            return dataclasses.replace(self, batch=batch, precision=precision or self.precision).capture()
        except AutoparError:
            raise
        except Exception as error:  # the user's model may not support batches of other sizes
            raise BatchError(
                f"the model does not take a batch of other sizes: {type(error).__name__}: {error}"
            ) from error


class Recapture(Protocol):
    """Captures a workload with another sequence length, global batch size or precision; ``None`` keeps the current one."""

    def __call__(
        self, *, seq: int | None = None, global_batch: int | None = None, precision: str | None = None
    ) -> Graph:
        """Raise ``AutoparError`` if the model doesn't support that size."""
        ...


def with_numerics(graph: Graph, recapture: Recapture, numerics: Numerics) -> Graph:
    """Return the graph for plans with ``numerics``: the graph of one microbatch if microbatches count as separate batches, and with FP8
    products if they are allowed."""
    part = separate_microbatches(graph, lambda rows: recapture(global_batch=rows), numerics.microbatches)
    narrow = tuple(name for name in numerics.narrow if name not in (*FP8_RECIPES, *LAYER_DEVIATIONS))
    part = part if part.narrow == narrow else dataclasses.replace(part, narrow=narrow)
    recipe = next((FP8_RECIPES[name] for name in numerics.narrow if name in FP8_RECIPES), None)
    return part if recipe is None else in_float8(part, recipe)


def sequence_length(graph: Graph) -> int | None:
    """Return the sequence length: dim 1 of two-dimensional integer inputs; ``None`` if there are none, or they differ."""
    lengths = {v.shape[1] for v in graph.inputs if len(v.shape) == 2 and not v.dtype.is_floating_point}
    return lengths.pop() if len(lengths) == 1 else None


def resize_batch(batch: Any, seq: int | None, rows: int | None) -> Any:
    """Resize tensors of ``batch`` to ``rows`` along dim 0, and to ``seq`` along dim 1 if that is the sequence dim.

    Raises ``BatchError`` if no dim can be identified as the sequence dim, or if it would have to grow.
    """
    lengths = {t.shape[1] for t in _tensors(batch) if t.dim() == 2 and not t.is_floating_point()}
    if seq is not None and (len(lengths) != 1 or seq > max(lengths)):
        raise BatchError(f"the batch has no single sequence dim that could be shortened to {seq}")
    length = lengths.pop() if seq is not None else None
    most = max((t.shape[0] for t in _tensors(batch) if t.dim()), default=0)

    def resized(tensor: Tensor) -> Tensor:
        if rows is not None and tensor.dim() and tensor.shape[0] == most:  # but not tensors that all samples share
            tensor = tensor.index_select(0, torch.arange(rows, device=tensor.device) % tensor.shape[0])
        if seq is not None and tensor.dim() > 1 and tensor.shape[1] == length:
            tensor = tensor.narrow(1, 0, seq).contiguous()
        return tensor

    return _mapped(batch, resized)


def without_inference(batch: Any) -> Any:
    """Copy inference tensors of the batch, which autograd doesn't accept."""
    if not any(tensor.is_inference() for tensor in _tensors(batch)):
        return batch
    return _mapped(batch, lambda tensor: tensor.clone() if tensor.is_inference() else tensor)


def _mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return {key: _mapped(inner, change) for key, inner in value.items()}
    if isinstance(value, (tuple, list)):
        items = [_mapped(inner, change) for inner in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)  # a NamedTuple, or not
    return value


def _tensors(value: Any) -> list[Tensor]:
    found: list[Tensor] = []

    def collect(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    _mapped(value, collect)
    return found
