"""The exactness matrix: models, kinds of plans, and one case of it on real gloo processes.

A case captures a model, lays a plan over it by hand, emits the program, type-checks it, runs it, and compares the loss and
every gradient with eager PyTorch on one device, in float64. ``tests/matrix.py`` runs all of it; the default tests run pairs.
"""

from __future__ import annotations

import functools
import math
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from workers import WorkerPool

from autopar.capture import BatchStructure, WholeFloat64, capture, flatten_batch
from autopar.check import check_program
from autopar.emit import emit
from autopar.graph import Graph
from autopar.measure import Error, compare
from autopar.plan import Plan, Role, Strategy
from autopar.run import remote
from autopar.search.hand import hand_plan, make_mesh

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


MODELS: dict[str, Callable[[], tuple[nn.Module, Any, Any]]] = {"mlp": mlp, "gpt2": gpt2, "llama": llama, "bert": bert}


@dataclass(frozen=True)
class Subject:
    """A captured model with what one device computes for its batch."""

    graph: Graph
    state: dict[str, Tensor]
    batch: dict[str, Tensor]
    loss: float
    gradients: dict[str, Tensor]


@functools.cache
def subject(name: str) -> Subject:
    """Capture the model and run it eagerly, once."""
    torch.manual_seed(0)
    model, batch, loss_fn = MODELS[name]()
    model = model.double().train()
    with WholeFloat64():
        graph = capture(model, batch, loss_fn, precision="float64", name=name)
        if loss_fn is not None:
            loss = loss_fn(model(batch[0]), batch[1])
        else:
            loss = model(**batch).loss
    loss.backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert isinstance(graph.structure, BatchStructure)
    flat = flatten_batch(graph.structure, batch)
    state = {n: t.detach() for n, t in model.state_dict().items()}
    return Subject(graph, state, flat, float(loss.detach()), gradients)


# -- kinds of plans ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kind:
    """A kind of plan: ``options`` for ``hand_plan``, or ``mixed``, which makes a plan of layers with different strategies."""

    name: str
    devices: int
    options: dict[str, Any]
    mixed: Callable[[Graph], Plan] | None = None

    def plan(self, graph: Graph) -> Plan:
        return self.mixed(graph) if self.mixed is not None else hand_plan(graph, **self.options)


def _kind(name: str, **options: Any) -> Kind:
    if "mesh" in options:
        return Kind(name, math.prod(axis.size for axis in options["mesh"]) * options.get("pipeline", 1), options)
    devices = math.prod(options.get(k, 1) for k in ("pipeline", "data", "tensor", "expert", "ring", "ulysses"))
    return Kind(name, devices, options)


def _alternating(graph: Graph) -> Plan:
    """Embedding and head data-parallel under ZeRO-3 on both axes; blocks tensor-parallel on the inner one under ZeRO-2."""
    mesh = make_mesh(("outer", 2), ("inner", 2))
    data = Strategy((Role.DATA, Role.DATA), zero=3)
    tensor = Strategy((Role.DATA, Role.TENSOR), zero=2)
    strategies = {i: data if i in _tied_or_odd(graph) else tensor for i in range(len(graph.layers))}
    return hand_plan(graph, mesh=mesh, strategies=strategies, microbatches=2)


def _three_degrees(graph: Graph) -> Plan:
    """Tensor 1, 2 and 4 in one model, sequence parallelism in some, recomputation in others."""
    mesh = make_mesh(("outer", 2), ("inner", 2))
    cycle = [
        Strategy((Role.DATA, Role.DATA), zero=1),
        Strategy((Role.DATA, Role.TENSOR), zero=3, recompute=True),
        Strategy((Role.TENSOR, Role.TENSOR)),
        Strategy((Role.DATA, Role.TENSOR_SEQUENCE), zero=2),
    ]
    ends = _tied_or_odd(graph)
    strategies = {i: cycle[0] if i in ends else cycle[i % len(cycle)] for i in range(len(graph.layers))}
    return hand_plan(graph, mesh=mesh, strategies=strategies)


def _tied_or_odd(graph: Graph) -> set[int]:
    """The layers that share a parameter, and the first and the last."""
    return {0, len(graph.layers) - 1} | {i for uses in graph.shared_parameters.values() for i in uses}


KINDS: tuple[Kind, ...] = (
    _kind("data 2", data=2),
    _kind("data 4", data=4, microbatches=2),
    _kind("data 2, zero 1", data=2, zero=1, microbatches=2),
    _kind("data 2, zero 2", data=2, zero=2, microbatches=2),
    _kind("data 2, zero 3", data=2, zero=3, microbatches=2),
    _kind("data 4, zero 1", data=4, zero=1),
    _kind("data 4, zero 2", data=4, zero=2),
    _kind("data 4, zero 3", data=4, zero=3),
    _kind("tensor 2", tensor=2),
    _kind("tensor 4", tensor=4),
    _kind("tensor+sequence 2", tensor=2, sequence=True),
    _kind("tensor+sequence 4", tensor=4, sequence=True),
    _kind("pipeline 2", pipeline=2, microbatches=4, schedule="1f1b"),
    _kind("pipeline 4", pipeline=4, microbatches=4, schedule="1f1b"),
    _kind("pipeline 2, gpipe", pipeline=2, microbatches=2, schedule="gpipe"),
    _kind("pipeline 4, gpipe", pipeline=4, microbatches=8, schedule="gpipe"),
    _kind("recompute, data 2", data=2, recompute=True),
    _kind("recompute, tensor 2", tensor=2, recompute=True, microbatches=2),
    _kind("recompute, data 4, zero 3", data=4, zero=3, recompute=True),
    _kind("pipeline 2 x tensor 2", pipeline=2, tensor=2, microbatches=2, schedule="1f1b"),
    _kind("pipeline 2 x data 2, zero 2", pipeline=2, data=2, zero=2, microbatches=4, schedule="1f1b"),
    _kind(
        "pipeline 2 x data 2, zero 3, recompute",
        pipeline=2,
        data=2,
        zero=3,
        recompute=True,
        microbatches=2,
        schedule="1f1b",
    ),
    _kind("data 2 x tensor 2, zero 3", data=2, tensor=2, zero=3),
    _kind("data 2 x tensor+sequence 2, zero 1", data=2, tensor=2, sequence=True, zero=1, microbatches=2),
    _kind(
        "pipeline 2 x tensor+sequence 2, recompute",
        pipeline=2,
        tensor=2,
        sequence=True,
        recompute=True,
        microbatches=2,
        schedule="gpipe",
    ),
    _kind("tensor 2 x 2", mesh=make_mesh(("tensor0", 2), ("tensor1", 2)), microbatches=2),
    _kind("tensor+sequence 2 x 2", mesh=make_mesh(("tensor0", 2), ("tensor1", 2)), sequence=True),
    Kind("mixed: zero-3 ends, tensor blocks", 4, {}, _alternating),
    Kind("mixed: tensor 1, 2 and 4", 4, {}, _three_degrees),
)


# -- one case ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """Of one case: the error, the number of stages that type-check, and the number of devices of the 64-rank check."""

    error: Error
    stages_typed: int


def run_case(model: str, kind: Kind, pool: WorkerPool, *, typed: bool = True) -> Outcome:
    """Emit, type-check and run one case. Raises what the product raises."""
    given = subject(model)
    plan = kind.plan(given.graph)
    assert plan.device_count == kind.devices == pool.count, (kind, plan.device_count, pool.count)
    with tempfile.TemporaryDirectory() as folder:
        emit(given.graph, plan, folder)
        stages = check_program(folder) if typed else 0
        state = Path(folder) / "initial.pt"
        torch.save(given.state, state)
        loss, gradients = pool.run("exactness:gradients", folder, str(state), given.batch)[0]
    return Outcome(compare(loss, gradients, given.loss, given.gradients), stages)


def gradients(folder: str, state: str, batch: dict[str, Tensor]) -> tuple[float, dict[str, Tensor]]:
    """In a worker: the loss and the whole gradients of the program."""
    options = {
        "optimizer": functools.partial(torch.optim.SGD, lr=0.0),
        "lr": 0.0,
        "seed": 0,
        "max_norm": None,
        "state": state,
    }
    trainer = remote.open_trainer(folder, options, device="cpu", timeout_s=60)
    return remote.perform(trainer, "gradients", batch)
