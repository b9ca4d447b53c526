"""Modules that write in their forward: norms with running statistics, momentum teachers, codebooks, and buffers that share memory."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

ROWS, WIDTH, OUT = 8, 6, 4


def batch(*sizes: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(ROWS, *(sizes or (WIDTH,)), generator=generator, dtype=torch.float64)
    return x, torch.randn(ROWS, OUT, generator=generator, dtype=torch.float64)


class Twice(nn.Module):
    """One batch norm before and after a product."""

    def __init__(self, momentum: float | None) -> None:
        super().__init__()
        self.inner, self.norm, self.out = (
            nn.Linear(WIDTH, WIDTH),
            nn.BatchNorm1d(WIDTH, momentum=momentum),
            nn.Linear(WIDTH, OUT),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(self.inner(self.norm(x))))


class Shared(nn.Module):
    """One batch norm that two modules hold."""

    def __init__(self) -> None:
        super().__init__()
        norm = nn.BatchNorm1d(WIDTH)
        self.a, self.b = (nn.Sequential(nn.Linear(WIDTH, WIDTH), norm) for _ in range(2))
        self.out = nn.Linear(WIDTH, OUT)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.b(self.a(x)))


class Teacher(nn.Module):
    """A copy of a layer that follows it by a decay that a counter warms up; its tensors are buffers."""

    step: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.student, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, OUT)
        self.teacher = nn.Linear(WIDTH, WIDTH)
        for name, parameter in list(self.teacher.named_parameters()):
            delattr(self.teacher, name)
            self.teacher.register_buffer(name, parameter.detach().clone())
        self.register_buffer("step", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.step += 1
            decay = torch.clamp((1 + self.step) / (10 + self.step), max=0.99)
            for new, old in zip(self.student.parameters(), self.teacher.buffers(), strict=True):
                old.mul_(decay).add_(new * (1 - decay))
            wanted = F.linear(x, self.teacher.weight, self.teacher.bias)
        return self.out(self.student(x) + 0.1 * wanted)


class ParameterTeacher(nn.Module):
    """The same with frozen parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, OUT)
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for new, old in zip(self.student.parameters(), self.teacher.parameters(), strict=True):
                old.lerp_(new, 0.1)
        return self.out(self.student(x) + 0.1 * self.teacher(x))


class Watched(nn.Module):
    """A branch of which a buffer alone is left: its last layer has no outputs."""

    level: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, OUT)
        self.first.requires_grad_(False)
        self.second.requires_grad_(False)
        self.register_buffer("level", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.level.copy_(self.second(self.first(x)).detach().amax(0))
        return self.out(x)


class Codebook(nn.Module):
    """Vector quantisation whose codes are moving averages, written through ``.data`` as most implementations do."""

    codes: Tensor
    sizes: Tensor
    sums: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = nn.Linear(WIDTH, 5), nn.Linear(5, OUT)
        self.register_buffer("codes", torch.randn(5, 7))
        self.register_buffer("sizes", torch.ones(7))
        self.register_buffer("sums", torch.randn(5, 7))

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        distance = y.pow(2).sum(1, keepdim=True) - 2 * y @ self.codes + self.codes.pow(2).sum(0, keepdim=True)
        nearest = (-distance).max(1)[1]
        chosen = F.one_hot(nearest, 7).type(y.dtype)
        quantised = F.embedding(nearest, self.codes.transpose(0, 1))
        if self.training:
            self.sizes.data.mul_(0.9).add_(chosen.sum(0), alpha=0.1)
            self.sums.data.mul_(0.9).add_(y.transpose(0, 1).detach() @ chosen, alpha=0.1)
            count = self.sizes.sum()
            self.codes.data.copy_(self.sums / ((self.sizes + 1e-5) / (count + 7e-5) * count).unsqueeze(0))
        return self.out(y + (quantised - y).detach())


class Block(nn.Module):
    seen: Tensor
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("seen", torch.tensor(0))
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        y = self.linear(x)
        with torch.no_grad():
            self.mean.lerp_(y.mean(0), 0.1)
        y[:, ::2] += x[:, ::2]
        return y + self.mean


class Literal(nn.Module):
    """A tensor made of numbers, and a batch that is written, which eager's caller sees."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(WIDTH, OUT)

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
        scale[0] = 5
        scale += 1
        x[:, 0] = 0
        x.mul_(scale)
        return self.out(x)


class TwoBuffers(nn.Module):
    """The buffers that ``held`` makes, on two modules; the one is written, the other read."""

    def __init__(self, held: Callable[[nn.Module], tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self.a, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, OUT)
        written, read = held(self)
        self.a.register_buffer("written", written)
        self.out.register_buffer("read", read)

    def forward(self, x: Tensor) -> Tensor:
        self.a.get_buffer("written").add_(1.0)
        return self.out(self.a(x) + self.out.get_buffer("read"))


def _one(model: nn.Module) -> tuple[Tensor, Tensor]:
    tensor = torch.zeros(WIDTH)
    return tensor, tensor


def _row(model: nn.Module) -> tuple[Tensor, Tensor]:
    table = torch.zeros(3, WIDTH)
    return table, table[1]


class Looked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(9, WIDTH, max_norm=0.1), nn.Linear(WIDTH, OUT)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.table((x[:, 0] > 0).long()))


def _normed(norm: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 8), norm, nn.Linear(8, OUT))


def _images() -> nn.Module:
    norm = nn.InstanceNorm2d(OUT, affine=True, track_running_stats=True)
    return nn.Sequential(nn.Conv2d(3, OUT, 3), norm, nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1), nn.Flatten())


def _constrained(kind: Callable[..., nn.Module]) -> nn.Module:
    return nn.Sequential(kind(nn.Linear(WIDTH, 8)), nn.ReLU(), kind(nn.Linear(8, OUT)))


RIGHT: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {
    # model, sizes of an example (none: a row), written buffers
    "batch norm": (lambda: _normed(nn.BatchNorm1d(8)), (), 3),
    "batch norm without momentum": (lambda: _normed(nn.BatchNorm1d(8, momentum=None)), (), 3),
    "batch norm without statistics": (lambda: _normed(nn.BatchNorm1d(8, track_running_stats=False)), (), 0),
    "batch norm used twice": (lambda: Twice(0.1), (), 3),
    "batch norm without momentum used twice": (lambda: Twice(None), (), 3),
    "batch norm of two modules": (Shared, (), 3),
    "instance norm": (_images, (3, 6, 6), 2),
    "spectral norm": (lambda: _constrained(parametrizations.spectral_norm), (), 4),
    "spectral norm by hooks": (lambda: _constrained(nn.utils.spectral_norm), (), 4),
    "weight norm": (lambda: _constrained(parametrizations.weight_norm), (), 0),
    "momentum teacher of buffers": (Teacher, (), 3),
    "momentum teacher of frozen parameters": (ParameterTeacher, (), 2),
    "codebook": (Codebook, (), 3),
    "branch for a buffer": (Watched, (), 1),
    "blocks": (lambda: nn.Sequential(*(Block() for _ in range(4)), nn.Linear(WIDTH, OUT)), (), 8),
    "literal and batch": (Literal, (), 0),
    "one buffer of two names": (lambda: TwoBuffers(_one), (), 1),
}

REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "embedding with a largest norm": (Looked, "an embedding with max_norm changes its own weight"),
    "buffer that is a row of another": (lambda: TwoBuffers(_row), "writes to a.written, whose memory out.read shares"),
}
