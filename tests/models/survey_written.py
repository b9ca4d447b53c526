"""Models for the survey as people write them: a shared rotary module, forces, a gradient penalty, a momentum teacher."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from survey_text import ROWS, VOCABULARY, Factory, draws, ids, labels
from torch import Tensor, nn


def floats(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=draws(seed))


# -- a Llama as torchtune writes it -----------------------------------------------------------------------------------


class Rotary(nn.Module):
    """Cosines and sines of all positions as a buffer that is not in the state dict; one module is shared by all layers."""

    def __init__(self, width: int, length: int = 64, base: int = 10_000) -> None:
        super().__init__()
        theta = 1.0 / (base ** (torch.arange(0, width, 2)[: width // 2].float() / width))
        angles = torch.einsum("i, j -> ij", torch.arange(length, dtype=theta.dtype), theta).float()
        self.register_buffer("cache", torch.stack([angles.cos(), angles.sin()], dim=-1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        cache = self.cache[: x.shape[1]].view(-1, x.shape[1], 1, x.shape[-1] // 2, 2)
        pairs = x.float().reshape(*x.shape[:-1], -1, 2)
        turned = torch.stack(
            [
                pairs[..., 0] * cache[..., 0] - pairs[..., 1] * cache[..., 1],
                pairs[..., 1] * cache[..., 0] + pairs[..., 0] * cache[..., 1],
            ],
            -1,
        )
        return turned.flatten(3).type_as(x)


class SelfAttention(nn.Module):
    def __init__(self, width: int, heads: int, key_heads: int, rotary: Rotary) -> None:
        super().__init__()
        self.heads, self.key_heads, self.head = heads, key_heads, width // heads
        self.q_proj = nn.Linear(width, heads * self.head, bias=False)
        self.k_proj = nn.Linear(width, key_heads * self.head, bias=False)
        self.v_proj = nn.Linear(width, key_heads * self.head, bias=False)
        self.output_proj = nn.Linear(width, width, bias=False)
        self.pos_embeddings = rotary

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        q = self.pos_embeddings(self.q_proj(x).view(rows, length, self.heads, self.head)).transpose(1, 2)
        k = self.pos_embeddings(self.k_proj(x).view(rows, length, self.key_heads, self.head))
        v = self.v_proj(x).view(rows, length, self.key_heads, self.head)
        shape = (rows, length, self.key_heads, self.heads // self.key_heads, self.head)
        k, v = (t.unsqueeze(3).expand(shape).flatten(2, 3).transpose(1, 2) for t in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.output_proj(out.transpose(1, 2).contiguous().view(rows, length, -1))


class Block(nn.Module):
    def __init__(self, width: int, rotary: Rotary) -> None:
        super().__init__()
        self.attn = SelfAttention(width, 4, 2, rotary)
        self.sa_norm, self.mlp_norm = nn.RMSNorm(width, eps=1e-5), nn.RMSNorm(width, eps=1e-5)
        self.w1, self.w2, self.w3 = (
            nn.Linear(width, 64, bias=False),
            nn.Linear(64, width, bias=False),
            nn.Linear(width, 64, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        h = x + self.attn(self.sa_norm(x))
        y = self.mlp_norm(h)
        return h + self.w2(F.silu(self.w1(y)) * self.w3(y))


class TunedLlama(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        rotary = Rotary(width // 4)
        self.tok_embeddings = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(Block(width, rotary) for _ in range(2))
        self.norm, self.output = nn.RMSNorm(width, eps=1e-5), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.tok_embeddings(tokens)
        for layer in self.layers:
            h = layer(h)
        return self.output(self.norm(h)).float()


def tuned_llama() -> tuple[nn.Module, Any, Any]:
    torch.manual_seed(0)
    return TunedLlama(), (ids(), labels()), lambda out, target: F.cross_entropy(out.flatten(0, 1), target.flatten())


# -- an interatomic potential -----------------------------------------------------------------------------------------


class Potential(nn.Module):
    """Energies of atoms from the distances to all others, and forces as their gradient: what SchNet and its kin do."""

    def __init__(self, width: int = 16, waves: int = 8) -> None:
        super().__init__()
        self.species = nn.Embedding(5, width)
        self.register_buffer("centres", torch.linspace(0.5, 4.0, waves))
        self.filters = nn.ModuleList(
            nn.Sequential(nn.Linear(waves, width), nn.SiLU(), nn.Linear(width, width)) for _ in range(2)
        )
        self.mixes = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.energy = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 1))

    def forward(self, numbers: Tensor, positions: Tensor, energy: Tensor, forces: Tensor) -> Tensor:
        positions = positions.detach().requires_grad_(True)
        between = positions[:, :, None] - positions[:, None]
        distance = (between.square().sum(-1) + 1e-3).sqrt()
        basis = torch.exp(-(distance[..., None] - self.centres).square())
        h = self.species(numbers)
        others = 1 - torch.eye(numbers.shape[1], dtype=h.dtype)
        for filters, mix in zip(self.filters, self.mixes, strict=True):
            weights = filters(basis) * others[..., None]
            h = h + torch.tanh(mix(torch.einsum("bijf,bjf->bif", weights, h)))
        predicted = self.energy(h).sum((1, 2))
        (gradient,) = torch.autograd.grad(predicted.sum(), positions, create_graph=True)
        return F.mse_loss(predicted, energy) + 10 * F.mse_loss(-gradient, forces)


def potential() -> tuple[nn.Module, Any, Any]:
    torch.manual_seed(0)
    numbers = torch.randint(0, 5, (ROWS, 6), generator=draws(2))
    batch = {
        "numbers": numbers,
        "positions": floats(ROWS, 6, 3),
        "energy": floats(ROWS, seed=3),
        "forces": floats(ROWS, 6, 3, seed=4),
    }
    return Potential(), batch, None


# -- a step of a GAN --------------------------------------------------------------------------------------------------


class Critic(nn.Module):
    """WGAN-GP's critic step: the generator is held, the gradient at points between is driven to length one."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 16)).requires_grad_(False)
        self.critic = nn.Sequential(
            nn.Linear(16, 32), nn.LeakyReLU(0.2), nn.Linear(32, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1)
        )

    def forward(self, real: Tensor, noise: Tensor, share: Tensor) -> Tensor:
        fake = self.generator(noise).detach()
        between = (share * real + (1 - share) * fake).requires_grad_(True)
        out = self.critic(between)
        (gradient,) = torch.autograd.grad(out, between, torch.ones_like(out), create_graph=True, retain_graph=True)
        penalty = ((gradient.norm(2, dim=1) - 1) ** 2).mean()
        return self.critic(fake).mean() - self.critic(real).mean() + 10 * penalty


def critic() -> tuple[nn.Module, Any, Any]:
    torch.manual_seed(0)
    share = torch.rand(ROWS, 1, generator=draws(5))
    return Critic(), {"real": floats(ROWS, 16), "noise": floats(ROWS, 8, seed=3), "share": share}, None


# -- distillation with a momentum teacher -----------------------------------------------------------------------------


class Distilled(nn.Module):
    """BYOL's half: a teacher that follows the student by a moving average, updated in forward."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.student = nn.Sequential(nn.Linear(12, width), nn.GELU(), nn.Linear(width, width))
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.predictor = nn.Linear(width, width)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            for new, old in zip(self.student.parameters(), self.teacher.parameters(), strict=True):
                old.mul_(0.9).add_(new, alpha=0.1)
            target = F.normalize(self.teacher(y), dim=-1)
        guess = F.normalize(self.predictor(self.student(x)), dim=-1)
        return (2 - 2 * (guess * target).sum(-1)).mean()


def distilled() -> tuple[nn.Module, Any, Any]:
    torch.manual_seed(0)
    model = Distilled()
    with torch.no_grad():
        for parameter in model.teacher.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=draws(6)) * 0.1)
    return model, {"x": floats(ROWS, 12), "y": floats(ROWS, 12, seed=2)}, None


# -- smaller things that many models have -----------------------------------------------------------------------------


class Bags(nn.Module):
    """Sums and means of embeddings by offsets-free bags, as recommenders have."""

    def __init__(self) -> None:
        super().__init__()
        self.sums = nn.EmbeddingBag(VOCABULARY, 16, mode="sum")
        self.means = nn.EmbeddingBag(VOCABULARY, 16, mode="mean")
        self.head = nn.Linear(32, 1)

    def forward(self, users: Tensor, items: Tensor, clicked: Tensor) -> Tensor:
        both = torch.cat([self.sums(users), self.means(items)], -1)
        return F.binary_cross_entropy_with_logits(self.head(both).squeeze(-1), clicked)


def bags() -> tuple[nn.Module, Any, Any]:
    torch.manual_seed(0)
    return Bags(), {"users": ids(sequence=5), "items": ids(3, 4), "clicked": torch.tensor([0.0, 1.0, 1.0, 0.0])}, None


class Speech(nn.Module):
    """Convolutions, a recurrent layer and the CTC loss over labels of uneven lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(8, 16, 3, stride=2, padding=1)
        self.rnn = nn.GRU(16, 16, batch_first=True)
        self.out = nn.Linear(16, 12)

    def forward(self, sound: Tensor, labels: Tensor, frames: Tensor, lengths: Tensor) -> Tensor:
        h, _ = self.rnn(F.relu(self.conv(sound)).transpose(1, 2))
        scores = F.log_softmax(self.out(h), -1).transpose(0, 1)
        return F.ctc_loss(scores, labels, frames, lengths, blank=0, reduction="mean", zero_infinity=True)


def speech() -> tuple[nn.Module, Any, Any]:
    torch.manual_seed(0)
    marks = torch.randint(1, 12, (ROWS, 6), generator=draws(2))
    batch = {
        "sound": floats(ROWS, 8, 48),
        "labels": marks,
        "frames": torch.tensor([24, 20, 24, 22]),
        "lengths": torch.tensor([6, 3, 5, 4]),
    }
    return Speech(), batch, None


class SoftExperts(nn.Module):
    """A soft mixture of experts: every slot is a weighted mean of all tokens."""

    def __init__(self, width: int = 16, experts: int = 4, slots: int = 2) -> None:
        super().__init__()
        self.phi = nn.Parameter(torch.randn(width, experts, slots, generator=draws(9)) * 0.3)
        self.first = nn.Parameter(torch.randn(experts, width, 32, generator=draws(10)) * 0.2)
        self.second = nn.Parameter(torch.randn(experts, 32, width, generator=draws(11)) * 0.2)
        self.head = nn.Linear(width, 8)

    def forward(self, x: Tensor) -> Tensor:
        scores = torch.einsum("bnd,des->bnes", x, self.phi)
        dispatch = scores.softmax(1)
        combine = scores.flatten(2).softmax(-1).view_as(scores)
        slots = torch.einsum("bnd,bnes->besd", x, dispatch)
        done = torch.einsum("besh,ehd->besd", F.gelu(torch.einsum("besd,edh->besh", slots, self.first)), self.second)
        return self.head(x + torch.einsum("besd,bnes->bnd", done, combine))


def soft_experts() -> tuple[nn.Module, Any, Any]:
    torch.manual_seed(0)
    return SoftExperts(), (floats(ROWS, 12, 16), floats(ROWS, 12, 8, seed=2)), F.mse_loss


class Padded(nn.Module):
    """Convolutions with reflected and with circular padding, and one batch norm at two places."""

    def __init__(self) -> None:
        super().__init__()
        self.reflect = nn.Conv2d(3, 8, 3, padding=1, padding_mode="reflect")
        self.circular = nn.Conv2d(8, 8, 3, padding=1, padding_mode="circular")
        self.norm = nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.norm(self.reflect(x)))
        h = F.relu(self.norm(self.circular(h)))
        return self.head(h.mean((2, 3)))


def padded_convolutions() -> tuple[nn.Module, Any, Any]:
    torch.manual_seed(0)
    return Padded(), (floats(ROWS, 3, 12, 12), torch.arange(ROWS)), F.cross_entropy


class Upsampled(nn.Module):
    """Down and up again, with every way to interpolate that takes gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.mid = nn.Conv2d(8, 8, 3, padding=1)
        self.up = nn.Sequential(
            nn.Upsample(scale_factor=2, mode="bilinear", align_corners=False), nn.Conv2d(8, 3, 3, padding=1)
        )
        self.line = nn.Conv1d(3, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        h = F.silu(self.mid(F.silu(self.down(x))))
        y = F.interpolate(self.up(h), size=(20, 20), mode="bicubic")
        z = F.interpolate(y.mean(2), scale_factor=2, mode="linear")
        return self.line(z).mean(-1) + F.interpolate(y, scale_factor=2, mode="nearest").mean((2, 3))


def upsampled() -> tuple[nn.Module, Any, Any]:
    torch.manual_seed(0)
    return Upsampled(), (floats(ROWS, 3, 16, 16), torch.arange(ROWS) % 3), F.cross_entropy


WRITTEN: dict[str, Factory] = {
    "shared_rotary_llama": tuned_llama,
    "potential_with_forces": potential,
    "wgan_gp_critic": critic,
    "momentum_teacher": distilled,
    "embedding_bags": bags,
    "gru_ctc": speech,
    "soft_experts": soft_experts,
    "padded_convolutions": padded_convolutions,
    "upsampled": upsampled,
}
