"""The dataclasses with which ``model.py`` describes its layers, its stages and the program to the runtime.

Types are those of ``spmd_types``, by axis of a stage's mesh: ``S(d)`` is a slice of dim d, ``R`` the same values on all ranks with a
term of the gradient on each, ``I`` the same values and the same gradient, ``P`` a term of a sum.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .spmd import spmd

Tensors = dict[str, Tensor]
Total = Callable[[Tensor], Tensor]
Types = Mapping[str, Any]
"""For each axis of a stage's mesh, a type of ``spmd_types``."""


@dataclass(frozen=True)
class TensorSpec:
    """A tensor that enters or leaves a stage. A floating-point or complex tensor gets a gradient back, unless ``gradient`` is false."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    types: Types
    gradient: bool = True

    @property
    def sharded(self) -> dict[str, int]:
        """The axes that slice the tensor, each with its dim."""
        return {axis: type_.dim for axis, type_ in self.types.items() if isinstance(type_, spmd.S)}

    def on_meta(self) -> Tensor:
        """Return a tensor of this shape and dtype on the meta device."""
        wanted = self.gradient and (self.dtype.is_floating_point or self.dtype.is_complex)
        return torch.empty(self.shape, dtype=self.dtype, device="meta", requires_grad=wanted)


@dataclass(frozen=True)
class LayerSpec:
    """How a layer's parameters are stored, and its gradients reduced."""

    zero: int  # the ZeRO stage
    data_axes: tuple[str, ...]  # the axes that divide the batch
    replicate_axes: tuple[str, ...] = ()  # the data axes over which ZeRO does not shard
    segment: int = 1  # the number of layers that are recomputed together, with this one
    backward: bool = True  # whether gradients flow through the layer
    opaque: bool = False  # parameters may get no gradient on some ranks
    updates: tuple[str, ...] = ()  # buffers whose new values forward returns after its outputs
    options: Mapping[str, str] = field(default_factory=dict)  # the layer's values that aren't the default, by technique


@dataclass(frozen=True)
class StageSpec:
    """The inputs and outputs of a pipeline stage. A stage also receives the tensors that the previous stage ``sends``."""

    inputs: Mapping[str, TensorSpec] = field(default_factory=dict)  # by name, with the shapes of the global batch
    scalars: tuple[str, ...] = ()  # results of the prelude that the stage reads
    sends: Mapping[str, TensorSpec] = field(default_factory=dict)  # this rank's part of one microbatch, by value name
    loss: Types = field(default_factory=dict)  # the types of the loss, in the last stage
    random: bool = (
        False  # whether a layer draws random numbers, seeded by the argument ``key`` (``None`` in evaluation mode)
    )
    own: LayerSpec | None = None  # for parameters that several layers of the stage share


@dataclass(frozen=True)
class Prelude:
    """Computes scalars from the batch before a step, such as the number of valid labels, and checks the batch's values.

    ``compute`` takes the batch's tensors and the folded constants, by name, and ``total``, which turns a sum over the rows in these tensors
    into the sum over all rows.
    """

    compute: Callable[[Mapping[str, Tensor], Mapping[str, Tensor], Total], Tensors]
    reads: tuple[str, ...]  # the inputs that it reads
    by_rows: bool  # whether ``compute`` works with a part of the rows, or needs the full batch


@dataclass(frozen=True)
class ProgramSpec:
    """The program, and the parts of the runtime that only some programs need."""

    mesh: Mapping[str, int]  # the axes of a stage's mesh, outermost first
    stages: tuple[Any, ...]  # the classes of the stages, in order
    schedule: Any  # runs a step's microbatches: ``Microbatches``, or a pipeline
    prelude: Prelude | None = None
    # a sample's structure, nested tuples and dicts with input names as leaves and ``None`` for other parts; ``None``: a dict by input name
    sample: Any = None
    ignored: Mapping[str, int] = field(default_factory=dict)  # by input: the label that the loss ignores
    flattened: tuple[tuple[str, ...], ...] = ()  # groups of axes over which one collective runs, outermost first
    no_evaluation: str = ""  # why the program can't evaluate the model, if it can't
    late: int = 0  # the staleness of gradients, in updates
    apart: int = 0  # local SGD: the steps between two averages of the replicas' parameters; 0 without local SGD
    served: bool = (
        False  # whether one rank of each group of replicas, its server, updates the parameters and broadcasts them
    )
    reductions: Any = None  # starts and awaits the reductions of stale gradients, instead of ``Reductions``
    places: Any = None  # stores and updates masters and optimizer states that are not on the device
    fsdp: Any = None  # stores parameters under ZeRO 2 and 3
    whole_tensors: Any = None  # gathers full tensors for optimizers that are not elementwise
    chunked_updates: Any = None  # updates masters with gradients or moments in bfloat16
    loss_scale: Any = None  # scales the loss in float16
    buffers: Any = None  # writes the buffers that the forward pass computes


class Layer(nn.Module):
    """The base of the layer classes in ``model.py``; ``SPEC`` says how a layer's parameters are stored."""

    def __init__(self, spec: LayerSpec, **factory: object) -> None:
        super().__init__()
        self.SPEC = spec


def layers_of(stage: nn.Module) -> dict[str, nn.Module]:
    """Return the layers of a stage by their paths, in order: its modules that have a ``SPEC``."""
    return {path: module for path, module in stage.named_modules() if path and hasattr(module, "SPEC")}
