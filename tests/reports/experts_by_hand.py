"""Expert parallelism written by hand: Qwen3-MoE and its training step with PyTorch's own parts, as an engineer writes them for one model.

Every rank has an equal part of the rows and of each layer's experts; all other parameters are replicated. A layer of experts sorts the
rows by expert, exchanges their numbers and the rows by ``all_to_all_single`` with split sizes, runs ``grouped_mm``, and sends the results
back. Gradients of replicated parameters are averaged by DDP while the backward pass runs, or after it; those of experts are complete, for
every rank's rows are there.

Parameters have the names of transformers' model, so that its state dict loads. Everything here runs in the worker processes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  torch's own convention
from mixture import config
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from autopar.bench.models import token_loss
from autopar.timing.remote import programs

DDP, AFTER = "ddp", "after"
GROUPED, LOOPED = "grouped", "looped"


@dataclass(frozen=True, slots=True)
class Variant:
    """``reduction``: how replicated parameters' gradients are averaged: by DDP in buckets of ``bucket_mb``, or by one all-reduce after the
    backward pass. ``product``: how experts multiply: by ``grouped_mm``, or expert by expert."""

    reduction: str = DDP
    bucket_mb: int = 25  # DDP's own default
    product: str = GROUPED

    @property
    def name(self) -> str:
        how = f"DDP, {self.bucket_mb} MB buckets" if self.reduction == DDP else "one all-reduce after the backward pass"
        return f"{how}, {self.product} products"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


VARIANTS = (Variant(), Variant(bucket_mb=4), Variant(AFTER), Variant(bucket_mb=4, product=LOOPED))


# -- the model --------------------------------------------------------------------------------------------------------


class Norm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Attention(nn.Module):
    def __init__(self, c: Any) -> None:
        super().__init__()
        self.head = c.head_dim
        self.q_proj = nn.Linear(c.hidden_size, c.num_attention_heads * c.head_dim, bias=False)
        self.k_proj = nn.Linear(c.hidden_size, c.num_key_value_heads * c.head_dim, bias=False)
        self.v_proj = nn.Linear(c.hidden_size, c.num_key_value_heads * c.head_dim, bias=False)
        self.o_proj = nn.Linear(c.num_attention_heads * c.head_dim, c.hidden_size, bias=False)
        self.q_norm, self.k_norm = Norm(c.head_dim, c.rms_norm_eps), Norm(c.head_dim, c.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        rows, length = x.shape[:2]
        q, k, v = (p(x).view(rows, length, -1, self.head) for p in (self.q_proj, self.k_proj, self.v_proj))
        q, k = (rotated(norm(part).transpose(1, 2), cos, sin) for norm, part in ((self.q_norm, q), (self.k_norm, k)))
        out = F.scaled_dot_product_attention(q, k, v.transpose(1, 2), is_causal=True, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).reshape(rows, length, -1))


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


class Gate(nn.Module):
    def __init__(self, c: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(c.num_experts, c.hidden_size))
        self.choices = c.num_experts_per_tok

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The experts of each row, and their weights, which add up to one."""
        top, index = F.linear(x, self.weight).softmax(-1).topk(self.choices, -1)
        return index, top / top.sum(-1, keepdim=True)


class Experts(nn.Module):
    """This rank's experts."""

    def __init__(self, c: Any, ranks: int, product: str) -> None:
        super().__init__()
        self.count, self.product = c.num_experts // ranks, product
        self.gate_up_proj = nn.Parameter(torch.empty(self.count, 2 * c.moe_intermediate_size, c.hidden_size))
        self.down_proj = nn.Parameter(torch.empty(self.count, c.hidden_size, c.moe_intermediate_size))

    def forward(self, rows: Tensor, counts: list[int]) -> Tensor:
        """The results of ``rows``, sorted by expert; ``counts`` are the rows of each."""
        if self.product == GROUPED:
            ends = torch.tensor(counts).cumsum(0, dtype=torch.int32)
            gate, up = F.grouped_mm(rows, self.gate_up_proj.transpose(1, 2), offs=ends).chunk(2, -1)
            return F.grouped_mm(F.silu(gate) * up, self.down_proj.transpose(1, 2), offs=ends)
        found = []
        for part, gate_up, down in zip(rows.split(counts), self.gate_up_proj, self.down_proj, strict=True):
            gate, up = F.linear(part, gate_up).chunk(2, -1)
            found.append(F.linear(F.silu(gate) * up, down))
        return torch.cat(found)


class Mixture(nn.Module):
    def __init__(self, c: Any, ranks: int, product: str) -> None:
        super().__init__()
        self.ranks, self.choices = ranks, c.num_experts_per_tok
        self.gate, self.experts = Gate(c), Experts(c, ranks, product)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        index, weights = self.gate(rows)
        order = index.flatten().argsort(stable=True)
        sent = index.flatten().bincount(minlength=self.ranks * self.experts.count).view(self.ranks, -1)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent)
        to_rank, from_rank = sent.sum(1).tolist(), received.sum(1).tolist()
        arrived = Exchange.apply(rows.index_select(0, order // self.choices), to_rank, from_rank)
        number = torch.arange(self.experts.count).repeat(self.ranks)  # the expert of each group of rows
        by_expert = number.repeat_interleave(received.flatten()).argsort(stable=True)
        done = self.experts(arrived.index_select(0, by_expert), received.sum(0).tolist())
        returned = Exchange.apply(done.index_select(0, inverse(by_expert)), from_rank, to_rank)
        chosen = returned.index_select(0, inverse(order)).view(*index.shape, -1)
        return torch.bmm(weights.unsqueeze(1), chosen).view_as(x)


def inverse(order: Tensor) -> Tensor:
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))


class Exchange(torch.autograd.Function):
    """Sends the next ``sent[i]`` rows to rank ``i``; the backward pass sends their gradients back."""

    @staticmethod
    def forward(ctx, rows, sent, received):  # type: ignore[no-untyped-def]
        ctx.sent, ctx.received = sent, received
        return exchanged(rows, sent, received)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        return exchanged(grad, ctx.received, ctx.sent), None, None


def exchanged(rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
    out = rows.new_empty(sum(received), rows.shape[1])
    dist.all_to_all_single(out, rows.contiguous(), received, sent)
    return out


class Layer(nn.Module):
    def __init__(self, c: Any, ranks: int, product: str) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(c), Mixture(c, ranks, product)
        self.input_layernorm = Norm(c.hidden_size, c.rms_norm_eps)
        self.post_attention_layernorm = Norm(c.hidden_size, c.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    """transformers' ``Qwen3MoeForCausalLM`` with a rank's experts."""

    cos: Tensor
    sin: Tensor

    def __init__(self, c: Any, ranks: int, product: str) -> None:
        super().__init__()
        layers = nn.ModuleList(Layer(c, ranks, product) for _ in range(c.num_hidden_layers))
        self.model = nn.ModuleDict(
            {
                "embed_tokens": nn.Embedding(c.vocab_size, c.hidden_size),
                "layers": layers,
                "norm": Norm(c.hidden_size, c.rms_norm_eps),
            }
        )
        self.lm_head = nn.Linear(c.hidden_size, c.vocab_size, bias=False)
        places = torch.arange(0, c.head_dim, 2, dtype=torch.float32) / c.head_dim
        rates = 1.0 / c.rope_parameters["rope_theta"] ** places  # in float32 as in transformers' model
        angles = torch.outer(torch.arange(c.max_position_embeddings, dtype=torch.float64), rates.double()).repeat(1, 2)
        dtype = self.lm_head.weight.dtype
        self.register_buffer("cos", angles.cos().to(dtype), persistent=False)
        self.register_buffer("sin", angles.sin().to(dtype), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        x, length = self.model["embed_tokens"](ids), ids.shape[1]
        for layer in self.model["layers"]:
            x = layer(x, self.cos[:length], self.sin[:length])
        return self.lm_head(self.model["norm"](x))


# -- training ---------------------------------------------------------------------------------------------------------


class ByHand:
    """The program of a variant on this rank, from the values of transformers' model. ``step`` trains on a global batch and returns the loss
    of this rank's rows."""

    def __init__(self, variant: Variant, c: Any, state: dict[str, Tensor], lr: float) -> None:
        self.variant, self.rank, self.ranks = variant, dist.get_rank(), dist.get_world_size()
        self.model = Decoder(c, self.ranks, variant.product)
        self.model.load_state_dict({name: self._own(name, value) for name, value in state.items()})
        named = list(self.model.named_parameters())
        self.experts = [p for name, p in named if is_expert(name)]
        self.replicated = [p for name, p in named if not is_expert(name)]
        self.called: nn.Module = self.model
        if variant.reduction == DDP:
            ignored = [name for name, _ in named if is_expert(name)]
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(self.model, ignored)
            self.called = DistributedDataParallel(
                self.model, bucket_cap_mb=variant.bucket_mb, gradient_as_bucket_view=True, forward_sync_buffers=False
            )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr)

    def _own(self, name: str, value: Tensor) -> Tensor:
        return value.chunk(self.ranks)[self.rank] if is_expert(name) else value

    def backward(self, ids: Tensor, targets: Tensor) -> float:
        """Compute the gradients of the global batch's mean loss."""
        ids, targets = ids.chunk(self.ranks)[self.rank], targets.chunk(self.ranks)[self.rank]
        loss = token_loss(self.called(ids), targets)
        loss.backward()
        gradients = [p.grad for p in self.experts]
        if self.variant.reduction == AFTER:
            flat = torch.cat([p.grad.flatten() for p in self.replicated])
            dist.all_reduce(flat)
            own = [
                part.view_as(p)
                for part, p in zip(flat.split([p.numel() for p in self.replicated]), self.replicated, strict=True)
            ]
            for p, part in zip(self.replicated, own, strict=True):
                p.grad = part
            gradients += [flat]
        torch._foreach_div_(gradients, float(self.ranks))  # they are of the sum of the ranks' mean losses
        return float(loss.detach())

    def step(self, ids: Tensor, targets: Tensor) -> float:
        loss = self.backward(ids, targets)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """The gradients of all parameters by name, those of all ranks' experts together."""
        for name, parameter in self.model.named_parameters():
            assert parameter.grad is not None, name
            if is_expert(name):
                parts = [torch.empty_like(parameter.grad) for _ in range(self.ranks)]
                dist.all_gather(parts, parameter.grad)
                yield name, torch.cat(parts)
            else:
                yield name, parameter.grad


def is_expert(name: str) -> bool:
    return ".experts." in name


def open_by_hand(name: str, variant: dict[str, Any], lr: float, state: str) -> None:
    """In a worker: load the program of a variant, with the values in the file ``state``, as a contender of a benchmark."""
    programs[name] = ByHand(Variant(**variant), config(), torch.load(state), lr).step
