"""mlp on 2 devices: a mesh of data 2.

A step takes 8 rows. Each device runs the layers below on its part of the rows.
Comments and calls name the type of a tensor on each axis of the mesh: S(d) is a slice of dim d; R the same values everywhere, and terms
of the gradient; I the same values and the same gradient; P a term of the sum. A collective turns one type into another.

    torchrun --nproc-per-node 2 train.py --dataset FILE

trains PROGRAM, at the end of this file, with the trainer in runtime/. plan.json is the plan with its prices, and layouts.json says what of
the original parameters each device holds. Written by autopar; yours to edit.
"""

from __future__ import annotations

import spmd_types as spmd
import torch
import torch.nn.functional as F
from torch import nn

from runtime import microbatches
from runtime.spec import Layer, LayerSpec, ProgramSpec, StageSpec, TensorSpec


class LinearPair(Layer):
    """layers.0 to layers.3 (4 layers): data on data; ZeRO 0."""

    def __init__(self, spec: LayerSpec, **factory: object) -> None:
        super().__init__(spec)
        # Every parameter is R on data.
        self._0 = nn.Linear(16, 32, **factory, dtype=torch.float64)
        self._2 = nn.Linear(32, 16, **factory, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # x (4, 8, 16): S(0) on data
        return self._2(F.gelu(self._0(x)))


class Linear(Layer):
    """out: data on data; ZeRO 0."""

    def __init__(self, spec: LayerSpec, **factory: object) -> None:
        super().__init__(spec)
        # Every parameter is R on data.
        self.weight = nn.Parameter(torch.empty(8, 16, **factory, dtype=torch.float64))
        self.bias = nn.Parameter(torch.empty(8, **factory, dtype=torch.float64))

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        # x (4, 8, 16): S(0) on data
        # targets (4, 8, 8): S(0) on data
        # loss_fn
        mse_loss = torch.ops.aten.mse_loss.default(F.linear(x, self.weight, self.bias), targets, 2)
        return mse_loss * 0.001953125


class Stage0(nn.Module):
    """layers.0 to out."""

    SPEC = StageSpec(
        inputs={
            "x": TensorSpec((8, 8, 16), torch.float64, {"data": spmd.S(0)}),
            "targets": TensorSpec((8, 8, 8), torch.float64, {"data": spmd.S(0)}),
        },
        loss={"data": spmd.P},
    )

    def __init__(self, device: torch.device | str, constants: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleDict()
        for i in range(4):
            self.layers[str(i)] = LinearPair(LayerSpec(zero=0, data_axes=("data",)), device=device)
        self.out = Linear(LayerSpec(zero=0, data_axes=("data",)), device=device)

    def forward(self, *, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        hidden = self.layers["0"](x)
        for layer in [self.layers[str(i)] for i in range(1, 4)]:
            hidden = layer(hidden)
        return self.out(hidden, targets)


PROGRAM = ProgramSpec(
    mesh={"data": 2},  # of a stage, outermost axis first
    stages=(Stage0,),
    sample=(("x",), "targets"),  # the structure of a data set's sample
    schedule=microbatches.Microbatches,
)
