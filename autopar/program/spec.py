"""The records by which ``model.py`` describes itself to the runtime: of each layer class, each stage, and the program.

Types are those of ``spmd_types``, by axis of a stage's mesh: ``S(d)`` a slice of dim d, ``R`` the same values with terms of the gradient,
``I`` the same values and gradient, ``P`` a term of the sum.
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
    """A tensor that enters or leaves a stage. Of floating tensors a gradient comes back, unless ``gradient`` says otherwise."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    types: Types
    gradient: bool = True

    @property
    def sharded(self) -> dict[str, int]:
        """The axes that slice the tensor, each with its dim."""
        return {axis: type_.dim for axis, type_ in self.types.items() if isinstance(type_, spmd.S)}

    def on_meta(self) -> Tensor:
        """A tensor without values, of this shape and dtype."""
        wanted = self.gradient and self.dtype.is_floating_point
        return torch.empty(self.shape, dtype=self.dtype, device="meta", requires_grad=wanted)


@dataclass(frozen=True)
class LayerSpec:
    """How the parameters of a layer are kept and its gradients reduced."""

    zero: int  # the ZeRO stage
    data_axes: tuple[str, ...]  # the axes that divide the batch
    replicate_axes: tuple[str, ...] = ()  # those of them over which ZeRO does not shard
    segment: int = 1  # the number of layers that are recomputed as one with this one
    backward: bool = True  # whether gradients flow through the layer
    opaque: bool = False  # parameters may get no gradient on some ranks
    updates: tuple[str, ...] = ()  # buffers of which forward returns new values, behind its outputs
    options: Mapping[str, str] = field(default_factory=dict)  # the plan's values for the layer that are not the default


@dataclass(frozen=True)
class StageSpec:
    """The inputs and outputs of a pipeline stage. It receives what the stage before sends."""

    inputs: Mapping[str, TensorSpec] = field(default_factory=dict)  # of the global batch; whole shapes
    scalars: tuple[str, ...] = ()  # results of the prelude that the stage reads
    sends: Mapping[str, TensorSpec] = field(default_factory=dict)  # this rank's part of one microbatch, by producer
    loss: Types = field(default_factory=dict)  # the types of the loss, in the last stage
    random: bool = False  # whether a layer draws random numbers, from the argument ``key``
    own: LayerSpec | None = None  # parameters that several layers of the stage share


@dataclass(frozen=True)
class Prelude:
    """What is computed from the batch before a step: scalars such as the number of valid labels, and checks of its values.

    ``compute`` takes the batch's tensors and the folded constants, by name, and ``total``, which makes the sum over all rows from that over
    the rows that are given.
    """

    compute: Callable[[Mapping[str, Tensor], Mapping[str, Tensor], Total], Tensors]
    reads: tuple[str, ...]  # the inputs that it reads
    by_rows: bool  # whether some of the rows will do, or the whole batch is needed


@dataclass(frozen=True)
class ProgramSpec:
    """The whole program, and the parts of the runtime that only some programs need."""

    mesh: Mapping[str, int]  # the axes of a stage's mesh, outermost first
    stages: tuple[Any, ...]  # the classes of the stages, in order
    schedule: Any  # runs a step's microbatches: ``Microbatches``, or a pipeline
    prelude: Prelude | None = None
    ignored: Mapping[str, int] = field(default_factory=dict)  # labels of rows that the loss leaves out
    flattened: tuple[tuple[str, ...], ...] = ()  # axes that one collective runs over, outermost first
    late: int = 0  # by how many updates gradients are applied late
    apart: int = 0  # the steps for which replicas train apart before their parameters are averaged; 0 if they do not
    served: bool = (
        False  # whether one rank of each group of replicas, its server, updates the parameters and broadcasts them
    )
    reductions: Any = None  # starts and awaits the reductions of late gradients, in place of ``Reductions``
    places: Any = None  # keeps and updates masters and optimizer states that are not on the device
    fsdp: Any = None  # keeps parameters under ZeRO 2 and 3
    whole_tensors: Any = None  # whole parameters for optimizers that look at more than single elements
    loss_scale: Any = None  # scales the loss in float16
    buffers: Any = None  # writes the buffers that the forward pass computes


class Layer(nn.Module):
    """A layer of a stage, and how its parameters are kept: the base of the classes in ``model.py``."""

    def __init__(self, spec: LayerSpec, **factory: object) -> None:
        super().__init__()
        self.SPEC = spec


def layers_of(stage: nn.Module) -> dict[str, nn.Module]:
    """Return the layers of a stage by their paths, in order: its modules that have a ``SPEC``."""
    return {path: module for path, module in stage.named_modules() if path and hasattr(module, "SPEC")}
