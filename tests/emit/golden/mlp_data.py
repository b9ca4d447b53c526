"""mlp on 2 devices: a mesh of data 2.

A step takes 8 rows. Each device runs the layers below on its part of the rows.

On each axis of the mesh a tensor has a type, which comments and calls name: S(d) is a slice of dim d; R the same values everywhere, and
terms of the gradient; I the same values and the same gradient; P a term of the sum. A collective turns one type into another.

model.py is the model, from its layers to PROGRAM at the end; train.py trains it:

    torchrun --nproc-per-node 2 train.py --dataset FILE

runtime.py is the trainer, plan.json the plan with its prices, layouts.json says what of the original parameters each device holds.
Written by autopar; yours to edit.
"""

from __future__ import annotations

import spmd_types as spmd
import torch
import torch.nn.functional as F
from torch import nn

import microbatches
from spec import LayerSpec, ProgramSpec, StageSpec, TensorSpec


class LinearPair(nn.Module):
    """layers.0: data on data; ZeRO 0."""

    SPEC = LayerSpec(zero=0, data_axes=("data",))

    def __init__(self, **factory: object) -> None:
        super().__init__()
        self._0 = nn.Module()
        self._0.weight = nn.Parameter(torch.empty(32, 16, **factory, dtype=torch.float64))  # R on data
        self._0.bias = nn.Parameter(torch.empty(32, **factory, dtype=torch.float64))  # R on data
        self._2 = nn.Module()
        self._2.weight = nn.Parameter(torch.empty(16, 32, **factory, dtype=torch.float64))  # R on data
        self._2.bias = nn.Parameter(torch.empty(16, **factory, dtype=torch.float64))  # R on data

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # x (4, 8, 16): S(0) on data
        # 2
        linear_1 = F.linear(F.gelu(F.linear(x, self._0.weight, self._0.bias)), self._2.weight, self._2.bias)
        return linear_1


class LinearPair2(nn.Module):
    """layers.1 to layers.3 (3 layers): data on data; ZeRO 0."""

    SPEC = LayerSpec(zero=0, data_axes=("data",))

    def __init__(self, **factory: object) -> None:
        super().__init__()
        self._0 = nn.Module()
        self._0.weight = nn.Parameter(torch.empty(32, 16, **factory, dtype=torch.float64))  # R on data
        self._0.bias = nn.Parameter(torch.empty(32, **factory, dtype=torch.float64))  # R on data
        self._2 = nn.Module()
        self._2.weight = nn.Parameter(torch.empty(16, 32, **factory, dtype=torch.float64))  # R on data
        self._2.bias = nn.Parameter(torch.empty(16, **factory, dtype=torch.float64))  # R on data

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # x (4, 8, 16): S(0) on data
        # 2
        linear_1 = F.linear(F.gelu(F.linear(x, self._0.weight, self._0.bias)), self._2.weight, self._2.bias)
        return linear_1


class Linear(nn.Module):
    """out: data on data; ZeRO 0."""

    SPEC = LayerSpec(zero=0, data_axes=("data",))

    def __init__(self, **factory: object) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(8, 16, **factory, dtype=torch.float64))  # R on data
        self.bias = nn.Parameter(torch.empty(8, **factory, dtype=torch.float64))  # R on data

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        # x (4, 8, 16): S(0) on data
        # targets (4, 8, 8): S(0) on data
        # loss_fn
        mse_loss = torch.ops.aten.mse_loss.default(F.linear(x, self.weight, self.bias), targets, 2)
        mul = mse_loss * 0.001953125
        return mul


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
        self.layers_0 = LinearPair(device=device)
        self.layers_1 = LinearPair2(device=device)
        self.layers_2 = LinearPair2(device=device)
        self.layers_3 = LinearPair2(device=device)
        self.out = Linear(device=device)

    def forward(self, *, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        hidden = self.layers_0(x)
        for layer in (self.layers_1, self.layers_2, self.layers_3):
            hidden = layer(hidden)
        loss = self.out(hidden, targets)
        return loss


PROGRAM = ProgramSpec(
    mesh={"data": 2},  # of a stage, outermost axis first
    stages=(Stage0,),
    schedule=microbatches.Microbatches,
)
