"""Mixtures of experts as other code bases write them, each in a small language model whose blocks are attention and a mixture."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812  torch's own convention
from survey_text import SEQUENCE, VOCABULARY, Factory, ids, labels
from torch import Tensor, nn

WIDTH, INNER, COUNT, CHOSEN = 32, 32, 4, 2


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class GatedMlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Linear(WIDTH, INNER, bias=False)
        self.w2 = nn.Linear(INNER, WIDTH, bias=False)
        self.w3 = nn.Linear(WIDTH, INNER, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class FusedMlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up, self.down = nn.Linear(WIDTH, 2 * INNER, bias=False), nn.Linear(INNER, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


# -- torchtitan: tokens sorted by expert, stacked matrices ---------------------------------------------------------------


class TokenChoiceRouter(nn.Module):
    """Sigmoid scores; the choice is by scores with a bias that no gradient reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, COUNT, bias=False)

    def forward(self, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        scores = torch.sigmoid(self.gate(x))
        _, chosen = torch.topk(scores + bias, k=CHOSEN, dim=1)
        top = scores.gather(dim=1, index=chosen)
        top = top / (top.sum(dim=-1, keepdim=True) + 1e-20)
        counts = torch.histc(chosen.view(-1).to(top.dtype), bins=COUNT, min=0, max=COUNT)
        return top, chosen, counts


class StackedExperts(nn.Module):
    """``for_loop`` as torchtitan computes without grouped products, which its CPU path does."""

    def __init__(self, *, grouped: bool) -> None:
        super().__init__()
        self.grouped = grouped
        self.w1 = nn.Parameter(torch.randn(COUNT, INNER, WIDTH) * 0.1)
        self.w2 = nn.Parameter(torch.randn(COUNT, WIDTH, INNER) * 0.1)
        self.w3 = nn.Parameter(torch.randn(COUNT, INNER, WIDTH) * 0.1)

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        if self.grouped:
            ends = torch.cumsum(counts, dim=0, dtype=torch.int32)
            w1, w2, w3 = (w.bfloat16().transpose(-2, -1) for w in (self.w1, self.w2, self.w3))
            h = F.silu(torch._grouped_mm(x.bfloat16(), w1, offs=ends))
            h = h * torch._grouped_mm(x.bfloat16(), w3, offs=ends)
            return torch._grouped_mm(h, w2, offs=ends).type_as(x)
        parts = torch.split(x, counts.long().tolist(), dim=0)
        out = []
        for i, part in enumerate(parts):
            h = F.silu(part @ self.w1[i].transpose(-2, -1)) * (part @ self.w3[i].transpose(-2, -1))
            out.append(h @ self.w2[i].transpose(-2, -1))
        return torch.cat(out, dim=0)


class TitanMixture(nn.Module):
    """``before``: rows are weighted before their experts (as for Llama 4), else after."""

    def __init__(self, *, grouped: bool = True, before: bool = False) -> None:
        super().__init__()
        self.router, self.experts, self.shared = TokenChoiceRouter(), StackedExperts(grouped=grouped), GatedMlp()
        self.before = before
        self.register_buffer("expert_bias", torch.linspace(0.0, 0.1, COUNT))

    def forward(self, x: Tensor) -> Tensor:
        shape = x.shape
        x = x.view(-1, WIDTH)
        top, chosen, counts = self.router(x, self.expert_bias)
        order = torch.argsort(chosen.view(-1), stable=True)
        sorted_scores = top.view(-1)[order]
        tokens = (order // CHOSEN).reshape(-1, 1).expand(-1, WIDTH)
        rows = torch.gather(x, dim=0, index=tokens)
        if self.before:
            rows = rows * sorted_scores.reshape(-1, 1)
        routed = self.experts(rows, counts)
        if not self.before:
            routed = routed * sorted_scores.reshape(-1, 1)
        out = self.shared(x)
        return out.scatter_add(dim=0, index=tokens, src=routed).reshape(shape)


class UnsortedMixture(nn.Module):
    """As torchtitan of 2026: results are put back into the order of the choices and summed there, by a batched product with the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = TokenChoiceRouter(), StackedExperts(grouped=True)
        self.register_buffer("expert_bias", torch.linspace(0.0, 0.1, COUNT))

    def forward(self, x: Tensor) -> Tensor:
        shape = x.shape
        x = x.view(-1, WIDTH)
        top, chosen, counts = self.router(x, self.expert_bias)
        order = torch.argsort(chosen.view(-1), stable=True)
        routed = self.experts(x[order // CHOSEN], counts)
        unsorted = torch.zeros_like(routed)
        unsorted[order] = routed
        unsorted = unsorted.reshape(-1, CHOSEN, WIDTH)
        return torch.bmm(top.reshape(-1, 1, CHOSEN), unsorted).squeeze(1).reshape(shape)


# -- a list of modules, and a loop over it -------------------------------------------------------------------------------


class NanoMixture(nn.Module):
    """nanoGPT's relatives: the rows of an expert by ``torch.where``, added where they came from."""

    def __init__(self, expert: Callable[[], nn.Module] = Mlp) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, COUNT, bias=False)
        self.experts = nn.ModuleList(expert() for _ in range(COUNT))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.view(-1, WIDTH)
        weights, chosen = torch.topk(F.softmax(self.router(flat), dim=-1), CHOSEN)
        out = torch.zeros_like(flat)
        for i, expert in enumerate(self.experts):
            token, choice = torch.where(chosen == i)
            out.index_add_(0, token, expert(flat[token]) * weights[token, choice, None])
        return out.view_as(x)


class SkippingMixture(NanoMixture):
    """A loop that skips experts without tokens."""

    def forward(self, x: Tensor) -> Tensor:
        flat = x.view(-1, WIDTH)
        weights, chosen = torch.topk(F.softmax(self.router(flat), dim=-1), CHOSEN)
        out = torch.zeros_like(flat)
        for i, expert in enumerate(self.experts):
            token, choice = torch.where(chosen == i)
            if token.numel() == 0:
                continue
            out[token] += expert(flat[token]) * weights[token, choice, None]
        return out.view_as(x)


class MistralMixture(nn.Module):
    """mistral-inference's: weights are a softmax of the chosen logits, results are added by an indexed sum in place."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, COUNT, bias=False)
        self.experts = nn.ModuleList(GatedMlp() for _ in range(COUNT))

    def forward(self, x: Tensor) -> Tensor:
        inputs = x.view(-1, WIDTH)
        weights, selected = torch.topk(self.gate(inputs), CHOSEN)
        weights = F.softmax(weights, dim=1)
        results = torch.zeros_like(inputs)
        for i, expert in enumerate(self.experts):
            row, nth = torch.where(selected == i)
            results[row] += weights[row, nth, None] * expert(inputs[row])
        return results.view_as(x)


class HitMixture(nn.Module):
    """The first Mixtral of transformers: one-hot masks, and a loop over the experts that were hit."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, COUNT, bias=False)
        self.experts = nn.ModuleList(GatedMlp() for _ in range(COUNT))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.view(-1, WIDTH)
        weights, chosen = torch.topk(F.softmax(self.gate(flat), dim=1), CHOSEN, dim=-1)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        out = torch.zeros_like(flat)
        mask = F.one_hot(chosen, num_classes=COUNT).permute(2, 1, 0)
        for i in range(COUNT):
            nth, row = torch.where(mask[i])
            current = self.experts[i](flat[None, row].reshape(-1, WIDTH)) * weights[row, nth, None]
            out.index_add_(0, row, current.to(x.dtype))
        return out.view_as(x)


class SwitchMixture(nn.Module):
    """One expert a token, its rows by a mask of booleans."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, COUNT)
        self.experts = nn.ModuleList(Mlp() for _ in range(COUNT))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, WIDTH)
        weight, chosen = F.softmax(self.router(flat), dim=-1).max(dim=-1)
        out = torch.zeros_like(flat)
        for i, expert in enumerate(self.experts):
            mask = chosen == i
            out[mask] = expert(flat[mask])
        return (out * weight.unsqueeze(-1)).view_as(x)


# -- every expert sees every token, or as many as it has room for --------------------------------------------------------


class MaskedMixture(nn.Module):
    """Every expert computes every token; what was not chosen has weight zero."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, COUNT)
        self.experts = nn.ModuleList(Mlp() for _ in range(COUNT))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = torch.topk(F.softmax(self.gate(x), dim=-1), CHOSEN, dim=-1)
        of_all = torch.zeros(*x.shape[:-1], COUNT, dtype=x.dtype).scatter(-1, chosen, weights)
        return sum(of_all[..., i : i + 1] * expert(x) for i, expert in enumerate(self.experts))


class SoftMixture(nn.Module):
    """Every expert on every token, a weighted sum by an einsum over stacked matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, COUNT)
        self.up = nn.Parameter(torch.randn(COUNT, WIDTH, INNER) * 0.1)
        self.down = nn.Parameter(torch.randn(COUNT, INNER, WIDTH) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        weights = F.softmax(self.gate(x), dim=-1)
        hidden = F.gelu(torch.einsum("bsd,edf->besf", x, self.up))
        return torch.einsum("bse,besd->bsd", weights, torch.einsum("besf,efd->besd", hidden, self.down))


class SlotMixture(nn.Module):
    """Soft MoE (Puigcerver et al.), as lucidrains writes it: slots are mixtures of a sequence's tokens, and tokens mixtures of slots. It
    reads the whole sequence, so it is no causal model; that does not matter here."""

    slots = 4

    def __init__(self) -> None:
        super().__init__()
        self.phi = nn.Parameter(torch.randn(COUNT, self.slots, WIDTH) * 0.1)
        self.up = nn.Parameter(torch.randn(COUNT, WIDTH, INNER) * 0.1)
        self.down = nn.Parameter(torch.randn(COUNT, INNER, WIDTH) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        logits = torch.einsum("bnd,esd->bnes", x, self.phi)
        slots = torch.einsum("bnd,bnes->besd", x, logits.softmax(dim=1))
        hidden = F.gelu(torch.einsum("besd,edf->besf", slots, self.up))
        out = torch.einsum("besf,efd->besd", hidden, self.down)
        return torch.einsum("besd,bnes->bnd", out, logits.flatten(2).softmax(dim=-1).view_as(logits))


class CapacityMixture(nn.Module):
    """mixture-of-experts and x-transformers' relatives (and GShard's, Mesh TensorFlow's): one-hot places of limited capacity, einsums that
    dispatch and combine."""

    def __init__(self, *, capacity: int = 8) -> None:
        super().__init__()
        self.capacity = capacity
        self.gate = nn.Linear(WIDTH, COUNT, bias=False)
        self.w1 = nn.Parameter(torch.randn(COUNT, WIDTH, INNER) * 0.1)
        self.w2 = nn.Parameter(torch.randn(COUNT, INNER, WIDTH) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        gates = F.softmax(self.gate(x), dim=-1)
        weights, chosen = gates.topk(CHOSEN, dim=-1)
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-9)
        dispatch = torch.zeros(*x.shape[:2], COUNT, self.capacity, dtype=x.dtype)
        combine = torch.zeros_like(dispatch)
        taken = torch.zeros(x.shape[0], 1, COUNT, dtype=x.dtype)
        for k in range(CHOSEN):
            mask = F.one_hot(chosen[..., k], COUNT).to(x.dtype)
            place = (mask.cumsum(dim=1) - mask + taken) * mask
            mask = mask * (place < self.capacity)
            taken = taken + mask.sum(dim=1, keepdim=True)
            slot = F.one_hot(place.sum(dim=-1).long().clamp(max=self.capacity - 1), self.capacity).to(x.dtype)
            here = mask.unsqueeze(-1) * slot.unsqueeze(-2)
            dispatch, combine = dispatch + here, combine + here * weights[..., k, None, None]
        inputs = torch.einsum("bnd,bnec->ebcd", x, dispatch)
        hidden = F.gelu(torch.einsum("ebcd,edf->ebcf", inputs, self.w1))
        outputs = torch.einsum("ebcf,efd->ebcd", hidden, self.w2)
        return torch.einsum("ebcd,bnec->bnd", outputs, combine)


# -- the language model around them --------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, mixture: nn.Module) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.mixture = mixture

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        q, k, v = (of(y).unflatten(-1, (4, -1)).transpose(1, 2) for of in (self.q, self.k, self.v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mixture(self.norm2(x))


class Language(nn.Module):
    def __init__(self, mixture: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(SEQUENCE, WIDTH)
        self.blocks = nn.ModuleList(Block(mixture()) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.tokens(input_ids) + self.places(torch.arange(input_ids.shape[1], device=input_ids.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def language(mixture: Callable[[], nn.Module]) -> Factory:
    def make() -> tuple[nn.Module, dict[str, Tensor], None]:
        torch.manual_seed(0)
        return Language(mixture), {"input_ids": ids(), "labels": labels()}, None

    return make


STYLES: dict[str, Factory] = {
    "torchtitan": language(TitanMixture),
    "torchtitan_weights_first": language(lambda: TitanMixture(before=True)),
    "torchtitan_loop": language(lambda: TitanMixture(grouped=False)),
    "torchtitan_unsorted": language(UnsortedMixture),
    "nanogpt": language(NanoMixture),
    "nanogpt_fused": language(lambda: NanoMixture(FusedMlp)),
    "nanogpt_skipping": language(SkippingMixture),
    "mistral_inference": language(MistralMixture),
    "first_mixtral": language(HitMixture),
    "switch_masks": language(SwitchMixture),
    "masked_dense": language(MaskedMixture),
    "soft": language(SoftMixture),
    "soft_slots": language(SlotMixture),
    "capacity": language(CapacityMixture),
}
