"""The exactness matrix: models, kinds of plans, and one case of it on real gloo processes.

A case captures a model, lays a plan over it by hand, emits the program, type-checks it, runs it, and compares the loss and
every gradient with eager PyTorch on one device, in float64. ``tests/reports/matrix.py`` runs all of it; the default tests run pairs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import expert_models
import torch
import vision_models
from odd_models import ODD
from text_models import TEXT
from torch import Tensor, nn
from workers import WorkerPool
from written_models import WRITTEN

from autopar.graph import Graph
from autopar.plan import Plan, Role, Strategy
from autopar.search.manual import make_mesh, manual_plan
from autopar.verify import PlanKind, PlanOutcome, Subject, alternating, check_plan, ends, kind, kinds, make_subject

ROWS = 8


# -- models -----------------------------------------------------------------------------------------------------------


class MLP(nn.Module):
    """Four layers with biases and a mean squared error, as a person would write it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(4)))
        self.out = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.layers(x))


def _tokens(vocabulary: int, sequence: int = 16) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, vocabulary, (ROWS, sequence), generator=generator)
    labels = ids.clone()
    labels[0, :9] = -100  # microbatches and slices with different numbers of valid tokens
    labels[3, 2:5] = -100
    return {"input_ids": ids, "labels": labels}


def mlp() -> tuple[nn.Module, Any, Any]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(ROWS, 8, 16, generator=generator, dtype=torch.float64)
    y = torch.randn(ROWS, 8, 8, generator=generator, dtype=torch.float64)
    return MLP(), (x, y), nn.functional.mse_loss


def gpt2() -> tuple[nn.Module, Any, Any]:
    from transformers import GPT2Config, GPT2LMHeadModel

    none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = GPT2Config(n_embd=32, n_layer=4, n_head=4, n_positions=32, vocab_size=96, use_cache=False, **none)
    return GPT2LMHeadModel(config), _tokens(96), None


def llama() -> tuple[nn.Module, Any, Any]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=96,
        use_cache=False,
    )
    return LlamaForCausalLM(config), _tokens(96), None


def _packed() -> dict[str, Tensor]:
    """Rows of several documents, of different lengths in different rows: positions start again, labels do not cross over."""
    batch = _tokens(96)
    batch["position_ids"] = torch.stack(
        [torch.cat([torch.arange(n) for n in (3 + row % 4, 6, 7 - row % 4)]) for row in range(ROWS)]
    )
    batch["labels"] = batch["labels"].masked_fill(batch["position_ids"] == 0, -100)
    return batch


def packed() -> tuple[nn.Module, Any, Any]:
    """Llama on packed documents: transformers makes the block-diagonal mask from the positions."""
    return llama()[0], _packed(), None


def masked() -> tuple[nn.Module, Any, Any]:
    """Llama on packed documents, whose block-diagonal causal mask is an input."""
    batch = _packed()
    document = (batch["position_ids"] == 0).cumsum(1)
    causal = torch.ones(16, 16, dtype=torch.bool).tril()
    batch["attention_mask"] = (causal & (document[:, :, None] == document[:, None, :])).unsqueeze(1)
    return llama()[0], batch, None


class Pair(nn.Module):
    """Two products and a residual: the unit in which grids of devices are described."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


class Pairs(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Pair(width) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def pairs() -> tuple[nn.Module, Any, Any]:
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(ROWS, 8, 16, generator=generator, dtype=torch.float64) for _ in range(2))
    return Pairs(), (x, y), nn.functional.mse_loss


def bert() -> tuple[nn.Module, Any, Any]:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        vocab_size=96,
        max_position_embeddings=32,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    batch = _tokens(96)
    batch["attention_mask"] = torch.ones(ROWS, 16, dtype=torch.long)
    batch["attention_mask"][1, 11:] = 0
    batch["attention_mask"][6, 5:] = 0
    return BertForMaskedLM(config), batch, None


MODELS: dict[str, Callable[[], tuple[nn.Module, Any, Any]]] = {
    "mlp": mlp,
    "pairs": pairs,
    "gpt2": gpt2,
    "llama": llama,
    "packed": packed,
    "masked": masked,
    "bert": bert,
    **TEXT,
    **vision_models.MODELS,
    **expert_models.MODELS,
    **ODD,
    # two microbatches, each a batch of its own, against one device that accumulates over them
    "mixtral balanced by microbatch": expert_models.mixtral_balanced,
    "resnet by microbatch": vision_models.resnet,
}


@functools.cache
def subject(name: str) -> Subject:
    """Capture the model and run it eagerly, once."""
    torch.manual_seed(0)
    model, batch, loss_fn = (MODELS | WRITTEN)[name]()
    return make_subject(model, batch, loss_fn, name=name, microbatches=2 if name.endswith(" by microbatch") else 1)


# -- kinds of plans ---------------------------------------------------------------------------------------------------


def _three_degrees(graph: Graph) -> Plan:
    """Tensor 1, 2 and 4 in one model, sequence parallelism in some, recomputation in others."""
    mesh = make_mesh(("outer", 2), ("inner", 2))
    cycle = [
        Strategy((Role.DATA, Role.DATA), zero=1),
        Strategy((Role.DATA, Role.TENSOR), zero=3, activations="full"),
        Strategy((Role.TENSOR, Role.TENSOR)),
        Strategy((Role.DATA, Role.TENSOR_SEQUENCE), zero=2),
    ]
    outer = ends(graph)
    strategies = {i: cycle[0] if i in outer else cycle[i % len(cycle)] for i in range(len(graph.layers))}
    return manual_plan(graph, mesh=mesh, strategies=strategies)


def _sequence_roles(graph: Graph) -> Plan:
    """Ring, Ulysses, data and tensor+sequence parallelism in one model, on two axes."""
    mesh = make_mesh(("outer", 2), ("inner", 2))
    cycle = [
        Strategy((Role.DATA, Role.DATA), zero=3),
        Strategy((Role.RING, Role.ULYSSES), zero=2),
        Strategy((Role.RING, Role.RING), zero=1, activations="full"),
        Strategy((Role.RING, Role.TENSOR_SEQUENCE)),
        Strategy((Role.DATA, Role.RING), zero=3),
    ]
    outer = ends(graph)
    strategies = {i: cycle[1] if i in outer else cycle[i % len(cycle)] for i in range(len(graph.layers))}
    return manual_plan(graph, mesh=mesh, strategies=strategies)


KINDS: tuple[PlanKind, ...] = (
    *kinds(2),
    *kinds(4),
    kind("pipeline 4, gpipe, 8 microbatches", pipeline=4, microbatches=8, schedule="gpipe"),
    kind("recompute, data 2", data=2, recompute=True),
    kind(
        "pipeline 2 x tensor+sequence 2, recompute",
        pipeline=2,
        tensor=2,
        sequence=True,
        recompute=True,
        microbatches=2,
        schedule="gpipe",
    ),
    kind("segments of 2, data 2, zero 3", data=2, zero=3, segment=2, microbatches=2),
    kind("segments of 3, tensor+sequence 2", tensor=2, sequence=True, segment=3, microbatches=2),
    kind("segments of 2, data 2 x tensor 2, zero 2", data=2, tensor=2, zero=2, segment=2),
    kind("segments of 2, pipeline 2 x data 2, zero 3", pipeline=2, data=2, zero=3, segment=2, microbatches=4),
    kind("offload, data 2, zero 3", data=2, zero=3, offload="activations", microbatches=2),
    kind(
        "offload, tensor+sequence 2, recompute in part",
        tensor=2,
        sequence=True,
        offload="activations",
        recompute="selective",
    ),
    kind("offload, pipeline 2 x data 2, zero 1", pipeline=2, data=2, zero=1, offload="activations", microbatches=4),
    kind("states in the host's memory, data 2, zero 3", data=2, zero=3, states="host", microbatches=2),
    kind("states in the host's memory, tensor+sequence 2", tensor=2, sequence=True, states="host"),
    kind("states on NVMe, data 2, zero 2", data=2, zero=2, states="nvme", microbatches=2),
    kind("states on NVMe, pipeline 2 x data 2, zero 1", pipeline=2, data=2, zero=1, states="nvme", microbatches=4),
    PlanKind("mixed: tensor 1, 2 and 4", 4, mixed=_three_degrees),
    PlanKind("mixed: ring, ulysses, data and tensor+sequence", 4, mixed=_sequence_roles),
    # torch.compile for each class of layers
    *(
        kind(f"compiled, {name}", compile="layers", **options)
        for name, options in {
            "data 2, zero 3, recompute in part": {"data": 2, "zero": 3, "recompute": "selective"},
            "tensor+sequence 2": {"tensor": 2, "sequence": True, "microbatches": 2},
            "ring 2, recompute": {"ring": 2, "recompute": True},
            "expert 2, zero 1": {"expert": 2, "zero": 1},
            "pipeline 2 of 2 chunks": {"pipeline": 2, "chunks": 2, "microbatches": 4},
            "pipeline 2 x data 2, zero 2": {
                "pipeline": 2,
                "data": 2,
                "zero": 2,
                "microbatches": 4,
                "schedule": "1f1b",
            },
        }.items()
    ),
    # numbers of devices that divide little
    *kinds(1),
    kind("data 3, zero 3", data=3, zero=3, microbatches=2),
    kind("tensor 3", tensor=3),
    kind("tensor+sequence 3", tensor=3, sequence=True),
    kind("pipeline 3", pipeline=3, microbatches=3, schedule="1f1b"),
    kind("pipeline 3 of 2 chunks", pipeline=3, chunks=2, microbatches=4),  # one round of more microbatches than devices
    kind("pipeline 2 of 3 chunks, 8 microbatches", pipeline=2, chunks=3, microbatches=8),
    kind("tensor 5", tensor=5),
    kind("pipeline 5", pipeline=5, microbatches=8, schedule="1f1b"),
    kind("pipeline 3 x tensor 2", pipeline=3, tensor=2, microbatches=4, schedule="1f1b"),
    kind("tensor 2 x 3", mesh=make_mesh(("tensor0", 2), ("tensor1", 3)), microbatches=2),
    kind("data 2 x tensor 3, zero 3", data=2, tensor=3, zero=3, microbatches=2),
    kind("tensor 7", tensor=7),
    # eight processes
    *(each for each in kinds(8) if "D " in each.name),
    kind("tensor 8", tensor=8),
    kind("pipeline 2 x data 2 x tensor 2", pipeline=2, data=2, tensor=2, microbatches=2, schedule="1f1b"),
    kind("data 2 x ulysses 2 x ring 2, zero 3", data=2, ulysses=2, ring=2, zero=3),
    kind("data 2 x expert 4, zero 1", data=2, expert=4, zero=1),
    PlanKind("mixed on 8: zero-3 ends, tensor blocks", 8, mixed=lambda graph: alternating(graph, 8)),
)


# -- one case ---------------------------------------------------------------------------------------------------------


def run_case(model: str, kind: PlanKind, pool: WorkerPool, *, typed: bool = True) -> PlanOutcome:
    """Emit, type-check and run one case. Raises what the product raises."""
    given = subject(model)
    return check_plan(given, kind.plan(given.graph), pool, typed=typed)
