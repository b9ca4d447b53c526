"""mlp on 2: 2 device(s).

1 stage(s), 1 microbatch(es) of 8 rows, schedule none; mesh of a stage: data 2.
Types: I same value and gradient, R same value and terms of the gradient, S(d) a slice of dim d, P a term of the sum.
Collectives are calls of spmd_types that name the axis and both types. Written by autopar; yours to edit.
"""

from __future__ import annotations

import spmd_types as spmd
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import kernels

MESH = {"data": 2}  # axes of a stage's mesh, outermost first


class LinearPair(nn.Module):
    """layers.0: data on data; ZeRO 0."""

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
        add_1 = F.linear(F.gelu(F.linear(x, self._0.weight, self._0.bias)), self._2.weight, self._2.bias)
        return add_1


class LinearPair2(nn.Module):
    """layers.1 to layers.3 (3 layers): data on data; ZeRO 0."""

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
        add_1 = F.linear(F.gelu(F.linear(x, self._0.weight, self._0.bias)), self._2.weight, self._2.bias)
        return add_1


class Linear(nn.Module):
    """out: data on data; ZeRO 0."""

    def __init__(self, **factory: object) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(8, 16, **factory, dtype=torch.float64))  # R on data
        self.bias = nn.Parameter(torch.empty(8, **factory, dtype=torch.float64))  # R on data

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        # x (4, 8, 16): S(0) on data
        # targets (4, 8, 8): S(0) on data
        mse_loss = torch.ops.aten.mse_loss.default(F.linear(x, self.weight, self.bias), targets, 2)
        mul = mse_loss * 0.001953125
        return mul


class Stage0(nn.Module):
    """layers.0 to out."""

    INPUTS = {"x": {"data": 0}, "targets": {"data": 0}}
    SHAPES = {"x": ((8, 8, 16), "float64"), "targets": ((8, 8, 8), "float64")}
    TYPES = {"x": {"data": "S(0)"}, "targets": {"data": "S(0)"}}
    RANDOM = False
    SCALARS = ()
    RECEIVES = ()
    SENDS = ()
    BORDERS = {}
    LOSS = {"data": "P"}
    GROUPS = {
        "layers_0": {"zero": 0, "data_axes": ("data",)},
        "layers_1": {"zero": 0, "data_axes": ("data",)},
        "layers_2": {"zero": 0, "data_axes": ("data",)},
        "layers_3": {"zero": 0, "data_axes": ("data",)},
        "out": {"zero": 0, "data_axes": ("data",)},
    }

    def __init__(self, device=None, dtype=None, constants=None) -> None:
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


PRELUDE = None


IGNORED = {}  # labels of rows that the loss leaves out

STAGES = (Stage0,)
