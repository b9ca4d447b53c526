"""Writes in place as people write them: each a function of a small model and its activations, which has to be right or is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Write = Callable[[Any, Tensor], Tensor]

ROWS, PLACES, WIDTH = 4, 6, 6


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(ROWS, PLACES, WIDTH, generator=generator, dtype=torch.float64) for _ in range(2))
    return x, y


class Model(nn.Module):
    """Two linear layers around a write; ``mean``, ``count`` and ``table`` are buffers."""

    mean: Tensor
    count: Tensor
    table: Tensor

    def __init__(self, write: Write) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.weight = nn.Parameter(torch.randn(WIDTH))
        self.frozen = nn.Parameter(torch.randn(WIDTH), requires_grad=False)
        self.register_buffer("mean", torch.randn(WIDTH))
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("table", torch.randn(WIDTH, WIDTH))
        self.plain = torch.ones(WIDTH)
        self.kept = [torch.ones(WIDTH)]
        self.write = write

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.write(self, self.first(x)))


PATTERNS: dict[str, Write] = {}
REFUSED: dict[str, tuple[Write, str]] = {}


def right(write: Write) -> Write:
    assert write.__name__ not in PATTERNS
    PATTERNS[write.__name__] = write
    return write


def refused(words: str) -> Callable[[Write], Write]:
    def keep(write: Write) -> Write:
        assert write.__name__ not in REFUSED
        REFUSED[write.__name__] = (write, words)
        return write

    return keep


# -- through views ----------------------------------------------------------------------------------------------------


@right
def narrow_add(m: Any, y: Tensor) -> Tensor:
    y = y * 1.0
    z = y.narrow(1, 1, 3)
    z += m.weight
    return y


@right
def flatten_mul(m: Any, y: Tensor) -> Tensor:
    y = y * 1.0
    y.flatten(1)[:, 3:20].mul_(2.0)
    return y


@right
def diagonal_fill(m: Any, y: Tensor) -> Tensor:
    scores = y @ y.transpose(1, 2)
    scores.diagonal(dim1=-2, dim2=-1).fill_(-1e3)
    return scores.softmax(-1) @ y


@right
def diagonal_above(m: Any, y: Tensor) -> Tensor:
    y = y * 1.0
    y.diagonal(2, 1, 2).add_(m.weight[:4])
    return y


@right
def diagonal_below(m: Any, y: Tensor) -> Tensor:
    y = y * 1.0
    y.diagonal(-1, 1, 2).mul_(m.weight[1:])
    return y


@right
def diagonal_of_exchanged_dims(m: Any, y: Tensor) -> Tensor:
    y = y * 1.0
    y.diagonal(1, 2, 0).mul_(m.weight[0])
    return y


@right
def diagonal_of_similarities(m: Any, y: Tensor) -> Tensor:
    similar = y[:, 0] @ (y[:, 1] * m.weight).T
    similar.fill_diagonal_(float("-inf"))
    wide = torch.ones(4, 6)
    wide.fill_diagonal_(3, wrap=True)
    return y + (similar.softmax(-1) @ wide)[:, None]


@right
def linalg_diagonal(m: Any, y: Tensor) -> Tensor:
    y = y * 1.0
    torch.linalg.diagonal(y, offset=-2).copy_(m.weight[2:])
    return y


@right
def transposed_matrices_mul(m: Any, y: Tensor) -> Tensor:
    y = y * 1.0
    y.mT[:, 2:].mul_(m.weight)
    return y


@right
def movedim_add(m: Any, y: Tensor) -> Tensor:
    y = torch.stack([y, y * 2], -1)
    y.movedim((3, 0), (0, 2))[1].add_(m.weight[:, None, None].expand(6, 4, 6))
    return y.sum(-1)


@right
def view_as_write(m: Any, y: Tensor) -> Tensor:
    y = y * 1.0
    y.view_as(torch.empty(4, 6, 6))[:, 1] = m.weight
    return y


@right
def reshape_as_write(m: Any, y: Tensor) -> Tensor:
    y = y * 1.0
    y.reshape_as(torch.empty(4, 36))[:, 7] = 2.0
    return y


@right
def reshape_that_views(m: Any, y: Tensor) -> Tensor:
    y = y * 1.0
    y.reshape(4, 36)[:, 5:9].zero_()
    return y


@right
def reshape_that_copies(m: Any, y: Tensor) -> Tensor:
    y = y * 1.0
    copied = y.transpose(1, 2).reshape(4, 36)
    copied.mul_(3.0)
    return y + copied.view(4, 6, 6)


@right
def contiguous_that_copies(m: Any, y: Tensor) -> Tensor:
    y = y * 1.0
    copied = y.transpose(1, 2).contiguous()
    copied[:, 0] = 1.0
    return y + copied


@right
def contiguous_that_is_the_same(m: Any, y: Tensor) -> Tensor:
    y = y * 1.0
    y.contiguous()[:, 0] = 1.0
    return y


@right
def to_that_is_the_same(m: Any, y: Tensor) -> Tensor:
    y = y * 1.0
    y.to(torch.float64).mul_(m.weight)
    y.type_as(m.weight).add_(1.0)
    return y


@right
def to_that_copies(m: Any, y: Tensor) -> Tensor:
    y = y * 1.0
    y.to(torch.float64, copy=True).mul_(m.weight)
    y.clone().zero_()
    return y


@right
def evaluated_dropout_is_the_same(m: Any, y: Tensor) -> Tensor:
    y = y * 1.0
    F.dropout(y, 0.5, training=False).mul_(m.weight)
    return y


@right
def overlapping_slices(m: Any, y: Tensor) -> Tensor:
    y = y * 1.0
    a, b = y[:, 0:4], y[:, 2:6]
    a.mul_(m.weight)
    b.add_(a[:, :1])
    a.sub_(1.0)
    return y + b.sum(1, keepdim=True)


@right
def slice_from_a_slice(m: Any, y: Tensor) -> Tensor:
    y = y * 1.0
    y[:, 1:] += y[:, :-1].clone()
    return y


@right
def halves_exchanged(m: Any, y: Tensor) -> Tensor:
    y = y * 1.0
    half = y[..., :3].clone()
    y[..., :3] = -y[..., 3:]
    y[..., 3:] = half
    return y


@right
def strided_add(m: Any, y: Tensor) -> Tensor:
    y = y * 1.0
    y[:, ::2] += m.weight
    y[..., 1::2] *= 2.0
    return y


@right
def strided_uneven(m: Any, y: Tensor) -> Tensor:
    y = y * 1.0
    y[:, 1:6:4] = m.weight
    y[..., ::5].zero_()
    return y


@right
def interleaved(m: Any, y: Tensor) -> Tensor:
    """Sines and cosines of positions are laid out so."""
    out = torch.zeros(6, 6)
    steps = torch.arange(6.0)[:, None] * torch.tensor([1.0, 0.1, 0.01])
    out[:, 0::2] = torch.sin(steps)
    out[:, 1::2] = torch.cos(steps)
    return y + out


@right
def last_place(m: Any, y: Tensor) -> Tensor:
    y = y * 1.0
    y[..., 0].add_(m.weight)
    y[:, -1] *= 0.5
    return y


@right
def transposed_copy(m: Any, y: Tensor) -> Tensor:
    square = torch.zeros(6, 6)
    square.T.copy_(m.weight * m.table)
    return y @ square


@right
def transposed_slice(m: Any, y: Tensor) -> Tensor:
    y = y * 1.0
    y.transpose(1, 2)[:, :, 2:4] = m.weight[:2]
    return y


@right
def swapped_dims(m: Any, y: Tensor) -> Tensor:
    y = y * 1.0
    y.swapdims(0, 2)[1].mul_(m.weight[:4])
    y.swapaxes(0, 1)[2].mul_(m.weight)
    return y


@right
def adjoint_write(m: Any, y: Tensor) -> Tensor:
    y = y * 1.0
    y.adjoint()[:, 1].mul_(m.weight)
    y.mH[:, 2].mul_(m.weight)
    return y


@right
def permuted_twice(m: Any, y: Tensor) -> Tensor:
    y = y * 1.0
    y.permute(2, 0, 1).permute(1, 2, 0)[:, 3].mul_(m.weight)
    return y


@right
def chunk_mul(m: Any, y: Tensor) -> Tensor:
    with torch.no_grad():
        z = torch.ones(4, 6, 6)
        a, b = z.chunk(2, -1)
        a.mul_(2.0)
        b.sub_(3.0)
    return y * z


@right
def split_write(m: Any, y: Tensor) -> Tensor:
    z = torch.ones(6, 6)
    first, _, last = z.split([1, 3, 2], 1)
    first.zero_()
    last.copy_(torch.arange(2.0))
    return y * z


@right
def unbind_write(m: Any, y: Tensor) -> Tensor:
    z = torch.ones(6, 6)
    rows = z.unbind(0)
    rows[1].zero_()
    rows[4].mul_(-1.0)
    return y * z


@right
def tensor_split_write(m: Any, y: Tensor) -> Tensor:
    z = torch.ones(6, 6)
    z.tensor_split((2, 3), 1)[1].zero_()
    return y * z


@right
def rows_in_a_loop(m: Any, y: Tensor) -> Tensor:
    y = y * 1.0
    for row in range(1, 6):
        y[:, row] = y[:, row] * 0.5 + y[:, row - 1].clone() * m.weight
    return y


@right
def collected_in_a_loop(m: Any, y: Tensor) -> Tensor:
    out = torch.empty(4, 6, 6)
    state = torch.zeros(4, 6)
    for place in range(6):
        state = torch.tanh(state + y[:, place] * m.weight)
        out[:, place] = state
    return out


@right
def older_view_reads_the_new(m: Any, y: Tensor) -> Tensor:
    y = y * 1.0
    older = y.transpose(1, 2)[:, 1:3]
    y.mul_(m.weight)
    y[:, 2] = 0.0
    return y + older.sum((1, 2))[:, None, None] + older.transpose(1, 2).sum(-1, keepdim=True)


@right
def view_of_a_view(m: Any, y: Tensor) -> Tensor:
    y = y * 1.0
    y[:, 1:5].view(4, 4, 2, 3)[:, :, 1].unsqueeze(1).squeeze(1)[..., 0].mul_(3.0)
    return y


@right
def unflatten_write(m: Any, y: Tensor) -> Tensor:
    y = y * 1.0
    y.unflatten(-1, (2, 3))[..., 1, :] = m.weight[:3]
    return y


@right
def expand_to_its_own_shape(m: Any, y: Tensor) -> Tensor:
    y = y * 1.0
    y.expand(4, 6, 6).mul_(m.weight)
    return y


@right
def select_zero(m: Any, y: Tensor) -> Tensor:
    y = y * 1.0
    y[:, 3].zero_()
    y.select(2, -1).fill_(0.25)
    return y


@right
def relu_of_a_view(m: Any, y: Tensor) -> Tensor:
    y = y * 1.0
    torch.relu_(y[:, 1:4])
    return y * m.weight


@right
def leaky_relu_of_a_column(m: Any, y: Tensor) -> Tensor:
    y = y * 1.0
    F.leaky_relu(y[..., 0], 0.1, inplace=True)
    return y


@right
def rows_of_the_batch(m: Any, y: Tensor) -> Tensor:
    y = y * 1.0
    y[0] = 0.0
    y[1:3] *= m.weight
    return y


@right
def whole_slice(m: Any, y: Tensor) -> Tensor:
    y = y * 1.0
    y[:] = y + m.weight
    y[...] = y + 1.0
    return y


@right
def empty_slice(m: Any, y: Tensor) -> Tensor:
    y = y * 1.0
    y[:, 4:2] = 7.0
    y[:, 6:].add_(1.0)
    return y


# -- masks and indices ------------------------------------------------------------------------------------------------


@right
def masked_fill_of_scores(m: Any, y: Tensor) -> Tensor:
    scores = y @ y.transpose(1, 2)
    scores.masked_fill_(torch.ones(6, 6, dtype=torch.bool).triu(1), float("-inf"))
    return scores.softmax(-1) @ y


@right
def masked_fill_through_a_view(m: Any, y: Tensor) -> Tensor:
    y = y * 1.0
    y[:, 1:].masked_fill_(y[:, 1:] > 0.3, 0.3)
    return y


@right
def mask_as_index(m: Any, y: Tensor) -> Tensor:
    y = y * 1.0
    y[y > 0.5] = 0.5
    y[y < -0.5] = m.weight[2]
    return y


@right
def mask_of_rows(m: Any, y: Tensor) -> Tensor:
    y = y * 1.0
    y[y[..., 0] > 0] = m.weight
    y[:, torch.arange(6) % 3 == 0] = 0.25
    return y


@right
def mask_through_a_view(m: Any, y: Tensor) -> Tensor:
    y = y * 1.0
    y[..., 1][y[..., 0] > 0] = m.weight[0]
    return y


@right
def index_put_rows(m: Any, y: Tensor) -> Tensor:
    y = y * 1.0
    y[:, torch.tensor([0, 4])] = m.weight
    y[:, [1, 2], [3, 3]] = 2.0
    return y


@right
def index_put_accumulates(m: Any, y: Tensor) -> Tensor:
    y = y * 1.0
    places = torch.tensor([0, 4, 4])
    y.index_put_((torch.tensor([1, 2, 2]), places), m.weight, accumulate=True)
    return y


@right
def index_put_on_a_view(m: Any, y: Tensor) -> Tensor:
    y = y * 1.0
    y.transpose(0, 1)[torch.tensor([2, 5])] = m.weight
    return y


@right
def index_add(m: Any, y: Tensor) -> Tensor:
    out = torch.zeros(4, 3, 6)
    out.index_add_(1, torch.tensor([0, 1, 1, 2, 0, 0]), y * m.weight)
    return out.repeat(1, 2, 1)


@right
def index_fill_and_copy(m: Any, y: Tensor) -> Tensor:
    y = y * 1.0
    y.index_fill_(1, torch.tensor([2]), 0.5)
    y.index_copy_(2, torch.tensor([5, 1]), y[:, :, :2] + m.weight[:2])
    return y


@right
def scatter_of_values(m: Any, y: Tensor) -> Tensor:
    out = torch.zeros_like(y)
    index = y.detach().argsort(-1)
    out.scatter_(-1, index, y * m.weight)
    return out


@right
def scatter_add_through_a_view(m: Any, y: Tensor) -> Tensor:
    out = torch.zeros(4, 7, 6)
    out[:, 1:].scatter_add_(1, torch.arange(6).flip(0)[None, :, None].expand(4, 6, 6), y * m.weight)
    return out[:, 1:]


@right
def scatter_one(m: Any, y: Tensor) -> Tensor:
    mask = torch.zeros(4, 6, 6)
    mask.scatter_(-1, y.argmax(-1, keepdim=True), 1.0)
    return y * mask


@right
def scatter_reduce(m: Any, y: Tensor) -> Tensor:
    out = y * 0.0
    out.scatter_reduce_(1, torch.zeros(4, 6, 6, dtype=torch.long), y * m.weight, "amax", include_self=False)
    return out


@right
def masked_scatter(m: Any, y: Tensor) -> Tensor:
    y = y * 1.0
    y.masked_scatter_(torch.eye(6, dtype=torch.bool), m.weight.expand(4, 6))
    return y


@right
def triangle(m: Any, y: Tensor) -> Tensor:
    scores = y @ y.transpose(1, 2)
    scores.tril_()
    return scores @ y


@right
def boolean_masks_combined(m: Any, y: Tensor) -> Tensor:
    mask = y > 0
    mask |= y < -1
    mask &= y < 2
    mask[:, 0] = False
    return y * mask


# -- arithmetic -------------------------------------------------------------------------------------------------------


@right
def activation_used_before(m: Any, y: Tensor) -> Tensor:
    before = y + m.weight
    y += 1.0
    return before * 0.5 + y


@right
def many_on_one(m: Any, y: Tensor) -> Tensor:
    y = y.clone()
    y.mul_(m.weight).add_(1.0).sub_(0.5, alpha=2.0).neg_().div_(2.0)
    y.addcmul_(m.weight, m.weight, value=0.5).lerp_(m.weight, 0.25).add_(y.detach().clone())
    y.exp_()
    return y


@right
def products_in_place(m: Any, y: Tensor) -> Tensor:
    y = y * 1.0
    y.baddbmm_(y.clone(), y.clone().mT, beta=0.5, alpha=0.25)
    square = torch.zeros(6, 6)
    square.addmm_(m.table, m.table * m.weight)
    return y @ square


@right
def copy_from_a_broadcast(m: Any, y: Tensor) -> Tensor:
    y = y * 1.0
    y[:, 2:4].copy_(m.weight)
    return y


@right
def copy_from_another_dtype(m: Any, y: Tensor) -> Tensor:
    y = y * 1.0
    y[:, 1].copy_(torch.arange(6))
    whole = torch.zeros(6, dtype=torch.long)
    y[:, 2].copy_(torch.ones(6, dtype=torch.float32))
    whole.copy_(torch.tensor([0.5, 1.5, -1.5, 2.0, 3.0, 4.9]))
    return y + whole


@right
def fill_with_a_tensor(m: Any, y: Tensor) -> Tensor:
    y = y * 1.0
    y[:, 0].fill_(m.weight.sum())
    y[:, 1] = m.weight[0]
    return y


@right
def out_of_a_sum(m: Any, y: Tensor) -> Tensor:
    out = torch.empty(4, 6, 6)
    with torch.no_grad():
        torch.add(y, m.weight, out=out)
    return y * out


@right
def out_into_a_view(m: Any, y: Tensor) -> Tensor:
    out = torch.ones(4, 7, 6)
    with torch.no_grad():
        torch.mul(y, 2, out=out[:, 1:])
    return y * out[:, :6]


@right
def two_outs(m: Any, y: Tensor) -> Tensor:
    values, places = torch.empty(4, 6), torch.empty(4, 6, dtype=torch.long)
    with torch.no_grad():
        torch.max(y, -1, out=(values, places))
    return y * values[..., None] + places[..., None]


@right
def unsqueezed_in_place(m: Any, y: Tensor) -> Tensor:
    y = y * 1.0
    z = y.unsqueeze_(1).mul_(m.weight)
    z.squeeze_(1)
    z.transpose_(1, 2)[:, 0] = 1.0
    return z.mT


@right
def detached_in_place(m: Any, y: Tensor) -> Tensor:
    z = y * m.weight
    z.detach_()
    z.mul_(2.0)
    return y + z


@right
def normalised_by_hand(m: Any, y: Tensor) -> Tensor:
    y = y.clone()
    y -= y.mean(-1, keepdim=True)
    return y / (y**2).mean(-1, keepdim=True).add_(1e-5).sqrt_()


@right
def sequential_activations(m: Any, y: Tensor) -> Tensor:
    norm = nn.LayerNorm(WIDTH, elementwise_affine=False)
    return nn.Sequential(nn.ReLU(inplace=True), nn.Dropout(0.0, inplace=True), norm, nn.ELU(inplace=True))(y * 2.0)


# -- without a gradient -----------------------------------------------------------------------------------------------


@right
def table_under_no_grad(m: Any, y: Tensor) -> Tensor:
    with torch.no_grad():
        gate = torch.zeros(4, 6, 6)
        gate[:, 1:] = y[:, 1:]
        gate.clamp_(0.0, 1.0)
    return y * gate


@right
def detached_copy(m: Any, y: Tensor) -> Tensor:
    gate = y.detach().clone()
    gate[gate < 0] = 0.0
    return y * gate


@right
def detached_without_gradient(m: Any, y: Tensor) -> Tensor:
    gate = torch.ones(6, 6)
    gate.detach()[2] = 3.0
    gate.data.mul_(0.5)
    return y * gate


@right
def read_of_data(m: Any, y: Tensor) -> Tensor:
    return y * m.weight.data + y.data


# -- buffers ----------------------------------------------------------------------------------------------------------


@right
def counter(m: Any, y: Tensor) -> Tensor:
    m.count += 1
    return y * m.weight / m.count


@right
def counter_that_nothing_reads(m: Any, y: Tensor) -> Tensor:
    m.count.add_(1)
    return y * m.weight


@right
def counter_by_assignment(m: Any, y: Tensor) -> Tensor:
    m.count.copy_(m.count + 2)
    return y * m.weight


@right
def moving_average(m: Any, y: Tensor) -> Tensor:
    with torch.no_grad():
        m.mean.mul_(0.9).add_(y.mean((0, 1)), alpha=0.1)
        m.count += 1
    return y - m.mean


@right
def corrected_moving_average(m: Any, y: Tensor) -> Tensor:
    with torch.no_grad():
        m.count.add_(1)
        steps = m.count.to(y.dtype)
        decay = torch.clamp((1.0 + steps) / (10.0 + steps), max=0.99)
        m.mean.lerp_(y.mean((0, 1)), 1 - decay)
    return y - m.mean / (1 - 0.9**steps)


@right
def moving_average_through_data(m: Any, y: Tensor) -> Tensor:
    m.mean.data.mul_(0.9).add_(0.1 * y.detach().mean((0, 1)))
    return y * m.mean


@right
def gradient_copied_through_data(m: Any, y: Tensor) -> Tensor:
    m.mean.data.copy_(y.mean((0, 1)))
    return y * m.mean


@right
def read_before_and_after(m: Any, y: Tensor) -> Tensor:
    before = m.mean * 2.0
    m.mean.copy_(y.detach().mean((0, 1)))
    return y + before + m.mean


@right
def rows_of_a_buffer(m: Any, y: Tensor) -> Tensor:
    with torch.no_grad():
        m.table[0] = y.mean((0, 1))
        m.table[:, 2:4].mul_(0.5)
        m.table.T[1].add_(1.0)
    return y @ m.table


@right
def queue(m: Any, y: Tensor) -> Tensor:
    """A memory of the last examples, as momentum contrast keeps."""
    with torch.no_grad():
        m.table[2:] = m.table[:-2].clone()
        m.table[:2] = y[:2, 0]
    return y @ m.table.T


@right
def buffer_of_another_dtype(m: Any, y: Tensor) -> Tensor:
    with torch.no_grad():
        m.count.copy_((y > 0).sum())
        m.mean.copy_((y > 0).sum((0, 1)))
    return y + m.mean / m.count


@right
def buffers_filled_with_constants(m: Any, y: Tensor) -> Tensor:
    m.table.fill_(0.5)
    m.count.fill_(3)
    return y @ m.table


@right
def buffer_takes_another(m: Any, y: Tensor) -> Tensor:
    m.mean.copy_(m.plain)
    return y * m.mean


@right
def zeroed_buffer(m: Any, y: Tensor) -> Tensor:
    out = y + m.table
    m.table.zero_()
    return out


@right
def assigned_buffer(m: Any, y: Tensor) -> Tensor:
    torch.add(m.mean, 1.0, out=m.mean)
    return y * m.mean


@right
def plain_attribute(m: Any, y: Tensor) -> Tensor:
    with torch.no_grad():
        m.plain.mul_(0.5)
    return y * m.plain


@right
def gradient_through_a_written_buffer(m: Any, y: Tensor) -> Tensor:
    state = m.mean.clone()
    state[1:] = m.weight[1:]
    return y * state


@right
def written_twice(m: Any, y: Tensor) -> Tensor:
    with torch.no_grad():
        m.mean.add_(1.0)
    y = y * m.weight + m.mean
    with torch.no_grad():
        m.mean.mul_(2.0)
    return y + m.mean


# -- refused ----------------------------------------------------------------------------------------------------------


@refused("writes under no_grad")
def clamped_under_no_grad(m: Any, y: Tensor) -> Tensor:
    y = y * m.weight
    with torch.no_grad():
        y.clamp_(-1.0, 1.0)
    return y + 1.0


@refused("writes under no_grad")
def row_under_no_grad(m: Any, y: Tensor) -> Tensor:
    y = y + m.weight
    with torch.no_grad():
        y[:, 0] = 0.0
    return y + 1.0


@refused("through detach")
def written_through_detach(m: Any, y: Tensor) -> Tensor:
    y = y + m.weight
    y.detach().mul_(2.0)
    return y + 1.0


@refused("through detach or .data")
def written_through_data(m: Any, y: Tensor) -> Tensor:
    y = y + m.weight
    y.data[:, 1:].mul_(2.0)
    return y + 1.0


@refused("assigns to .data of a tensor")
def activation_with_other_data(m: Any, y: Tensor) -> Tensor:
    y = y * m.weight
    y.data = y.data * 2.0
    return y + 1.0


@refused("assigns to .data of a tensor")
def parameter_with_other_data(m: Any, y: Tensor) -> Tensor:
    m.weight.data = m.weight.data.clamp(-1.0, 1.0)
    return y * m.weight


@refused("writes to the parameter write.weight|writes to the parameter weight")
def parameter_clamped(m: Any, y: Tensor) -> Tensor:
    with torch.no_grad():
        m.weight.clamp_(-1.0, 1.0)
    return y * m.weight


@refused("writes to the parameter weight")
def parameter_normalised_through_data(m: Any, y: Tensor) -> Tensor:
    m.weight.data.div_(m.weight.data.norm())
    return y * m.weight


@right
def momentum_teacher(m: Any, y: Tensor) -> Tensor:
    with torch.no_grad():
        m.frozen.mul_(0.9).add_(m.weight, alpha=0.1)
    return y * m.frozen * m.weight


@right
def copy_of_a_view_before_a_region(m: Any, y: Tensor) -> Tensor:
    """torch.export loses a user of zeros_like here (``autopar.capture.export._complete_users``)."""
    h = torch.zeros_like(y)
    h.transpose(1, 2).reshape(h.shape[0], -1).mul_(2.0)
    with torch.no_grad():
        m.frozen.clamp_(-1.0, 1.0)
    return h + m.last(h) * m.frozen + y * m.weight


@right
def frozen_parameter(m: Any, y: Tensor) -> Tensor:
    m.frozen += 1.0
    return y * m.frozen * m.weight


@refused("writes to the parameter weight")
def row_of_a_parameter(m: Any, y: Tensor) -> Tensor:
    with torch.no_grad():
        m.weight[0] = 0.0
    return y * m.weight


@refused("an embedding with max_norm changes its own weight")
def embedding_with_a_largest_norm(m: Any, y: Tensor) -> Tensor:
    weight = m.last.weight
    return y + F.embedding(torch.tensor([1, 2, 3, 1, 2, 0]), weight, max_norm=0.1)


@refused("through as_strided, a view of an unsupported kind")
def strides_by_hand(m: Any, y: Tensor) -> Tensor:
    y = y * 1.0
    y.as_strided((4, 6), (36, 7)).mul_(2.0)
    return y


@refused("through unfold")
def windows(m: Any, y: Tensor) -> Tensor:
    y = y * 1.0
    y.unfold(1, 2, 2).mul_(2.0)
    return y


@refused("in several places")
def expanded(m: Any, y: Tensor) -> Tensor:
    z = torch.zeros(6, 1)
    z.expand(6, 6).index_put_((torch.tensor([1]),), m.weight[0])
    return y * z


@refused("neither made in forward nor a buffer")
def tensor_in_a_list(m: Any, y: Tensor) -> Tensor:
    m.kept[0].mul_(0.5)
    return y * m.kept[0]


@refused("has read")
def data_written_after_it_was_read(m: Any, y: Tensor) -> Tensor:
    gate = torch.ones(6) * 2.0
    out = y * gate * m.weight
    gate.data.mul_(3.0)
    return out


@refused("read later, has a gradient, but its base none")
def gradient_through_data(m: Any, y: Tensor) -> Tensor:
    gate = torch.ones(6)
    alone = gate.detach()
    alone.mul_(m.weight)
    return y * alone


@refused("_foreach_mul_")
def several_at_once(m: Any, y: Tensor) -> Tensor:
    a, b = torch.ones(6), torch.ones(6)
    torch._foreach_mul_([a, b], 2.0)
    return y * a * b
