"""Logits in slices of the vocabulary: what may be sliced, the kernel against torch, programs against eager PyTorch, price and search."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  torch's own convention
from exactness import ROWS, run_case
from tiers import slow
from torch import Tensor, nn
from workers import WorkerPool

from autopar.capture import capture
from autopar.devices import parse
from autopar.errors import UsageError
from autopar.graph import LayerClass
from autopar.plan import Axis, Plan, Role, Strategy
from autopar.price import Pricer
from autopar.price.table import ClassTable, build
from autopar.price.trainer import EMITTED
from autopar.program.kernels_logits import loss_in_slices
from autopar.search import SearchOptions, make_mesh, manual_plan, search
from autopar.shard import annotate, solve
from autopar.sharding import Sharding
from autopar.techniques.logits import LOGITS
from autopar.verify import check_plan, kind, make_subject
from passes.pad import pad_class
from passes.slice_logits import rewrite

CAP = (("div", 3.0), ("tanh",), ("mul", 3.0))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_the_kernel_is_the_product_and_its_cross_entropy(dtype: torch.dtype) -> None:
    """In float64 to rounding; in bfloat16 with the same rounded logits, and at most 1.5 times eager PyTorch's errors of gradients."""
    torch.manual_seed(0)
    for biased, after, smoothing, slices, vocabulary in product(
        (False, True), ((), CAP), (0.0, 0.1), (1, 3, 7), (None, 20)
    ):
        x, w, b = torch.randn(3, 5, 16).to(dtype), torch.randn(23, 16).to(dtype), torch.randn(23).to(dtype)
        labels = torch.randint(0, 20, (3, 5))
        labels[0, 1] = -100

        def eager(*given: Tensor, biased: bool = biased, after: Any = after) -> Tensor:
            z = F.linear(given[0], given[1], given[2] if biased else None)
            z = torch.tanh(z / 3.0) * 3.0 if after else z
            z = z.to(torch.promote_types(z.dtype, torch.float32))[..., :vocabulary].flatten(0, 1)  # noqa: B023
            return F.cross_entropy(z, labels.flatten(), reduction="sum", label_smoothing=smoothing)  # noqa: B023

        def sliced(*given: Tensor, biased: bool = biased, after: Any = after) -> Tensor:
            options = {"slices": slices, "after": after, "label_smoothing": smoothing, "vocabulary": vocabulary}  # noqa: B023
            return loss_in_slices(given[0], given[1], labels, given[2] if biased else None, **options)  # noqa: B023

        found = []
        for function, numbers in ((eager, torch.float64), (eager, dtype), (sliced, dtype)):
            given = [tensor.to(numbers).requires_grad_() for tensor in (x, w, b)[: 2 + biased]]
            loss = function(*given)
            found.append([loss.detach(), *torch.autograd.grad(loss, given)])
        for exact, theirs, mine in zip(*found, strict=True):
            assert mine.dtype == theirs.dtype
            errors = [float((each.double() - exact).abs().max() / exact.abs().max()) for each in (theirs, mine)]
            assert errors[1] <= (1e-13 if dtype == torch.float64 else 1.5 * errors[0] + 1e-6), (errors, slices, after)


class Head(nn.Module):
    """A language model of one layer; ``case`` is what it does with its logits."""

    def __init__(self, case: str, words: int = 40) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.norm = nn.Embedding(words, 16), nn.LayerNorm(16)
        self.mixer, self.head, self.case = nn.Linear(16, 16), nn.Linear(16, words, bias=False), case

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.norm(torch.tanh(self.mixer(self.tokens(input_ids))))
        logits = self.head(x)
        if self.case == "capped":
            logits = torch.tanh(logits / 5.0) * 5.0
        if self.case == "shifted":
            logits, labels = logits[:, :-1], labels[:, 1:]
        if self.case == "normalised":
            logits = torch.relu(logits)
        weight = torch.ones(40, dtype=x.dtype) if self.case == "weighted" else None
        loss = F.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), weight, label_smoothing=0.1 * (self.case == "capped")
        )
        return loss + 1e-4 * logits.square().mean() if self.case == "read again" else loss


def batch() -> dict[str, Tensor]:
    ids = torch.randint(0, 40, (ROWS, 8), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[0, :5] = -100
    return {"input_ids": ids, "labels": labels}


@pytest.mark.parametrize(
    ("case", "why"),
    {
        "plain": "",
        "capped": "",
        "shifted": "",
        "normalised": "has aten.relu between its last product and its cross entropy",
        "weighted": "weighs the classes of its cross entropy",
        "read again": "reads its logits more than once",
    }.items(),
)
def test_what_is_sliced_is_proved_and_what_is_not_is_refused_by_name(case: str, why: str) -> None:
    graph = annotate(capture(Head(case).double(), batch()))
    cls = rewrite(graph.classes[graph.layers[-1].cls])
    refused = graph.refused[LOGITS.name, graph.layers[-1].cls]
    assert why in refused and bool(why) == bool(refused), refused
    assert isinstance(cls, str) == bool(why)
    if why:
        with pytest.raises(UsageError, match=f"logits=sliced: .* {why}"):
            manual_plan(graph, logits="sliced")
        return
    assert isinstance(cls, LayerClass)
    (call,) = [node for node in cls.graph.graph.nodes if node.target is loss_in_slices]
    assert not any(40 in tuple(n.meta["val"].shape[1:]) for n in cls.graph.graph.nodes if n.op == "call_function")
    assert call.kwargs["slices"] == 2 and ("after" in call.kwargs) == (case == "capped")
    assert manual_plan(graph, logits="sliced").layers[-1].strategy.options.rewrites
    assert not manual_plan(graph, logits="sliced").layers[0].strategy.options.rewrites or len(graph.layers) == 1


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("llama", {"tensor": 2, "sequence": True, "microbatches": 2}),
        ("gpt2", {"data": 2, "zero": 3, "recompute": True}),  # tied
        ("bert", {"tensor": 2, "recompute": "selective"}),  # with a bias
        ("llama", {"pipeline": 2, "microbatches": 4, "schedule": "1f1b"}),
        ("llama", {"pipeline": 2, "microbatches": 4, "schedule": "zero-bubble"}),
        ("llama", {"ring": 2}),
        slow("llama", {"ring": 2, "compile": "layers"}),  # by a C++ compiler
    ],
    ids=str,
)
def test_programs_compute_what_the_model_computes(workers2: WorkerPool, model: str, options: dict[str, Any]) -> None:
    outcome = run_case(model, kind("sliced", logits="sliced", **options), workers2)
    assert outcome.error.value <= 1e-9, outcome


@pytest.mark.parametrize("case", ["capped", "shifted"])
def test_padded_vocabularies_caps_and_shifts(workers3: WorkerPool, case: str) -> None:
    """Three devices have 14 rows of the head each, of which 2 are padding."""
    given = make_subject(Head(case), batch(), None, name=case)
    outcome = check_plan(given, kind("sliced", tensor=3, logits="sliced").plan(given.graph), workers3)
    assert outcome.error.value <= 1e-9, outcome


@pytest.mark.parametrize("case", ["plain", "capped", "shifted"])
def test_a_padded_layer_saves_what_the_layer_saves(case: str) -> None:
    """What an axis divides is kept by position, once for a class at all its sizes: the padded class has the same ops, slots and saved
    values in the same order, whether it makes all logits or a slice at a time."""
    graph = annotate(capture(Head(case).double(), batch()))
    whole = graph.classes[graph.layers[-1].cls]
    for cls in (whole, rewrite(whole)):
        assert isinstance(cls, LayerClass)
        types = solve(cls, Role.TENSOR, 3)
        assert types is not None
        padded = pad_class(cls, Sharding((Axis("axis", 3, 1),), (types,)))
        assert [p.shape for p in padded.parameters] != [p.shape for p in cls.parameters]
        for trainer in (EMITTED, replace(EMITTED, fused=True)):
            kept = []
            for each in (cls, padded):
                table, rows = build(each, trainer.precision("float64"), trainer)
                saved = [(entry.node, entry.operand, entry.dtype) for entry in table.saved]
                slots = [*zip(table.slot_op.tolist(), table.slot_operand, strict=True)]
                kept.append((saved, slots, [op.name for op in table.ops], rows.names))
            assert kept[0] == kept[1]


def test_products_in_8_bits_convert_operands_and_no_logits() -> None:
    graph = annotate(capture(Head("plain").bfloat16(), batch()))
    cls = rewrite(graph.classes[graph.layers[-1].cls])
    assert isinstance(cls, LayerClass)
    tables = [build(cls, EMITTED.precision(name))[0] for name in ("bfloat16", "float8")]
    names = [op.name for op in tables[0].ops]
    (loss,) = {name for name in names if names.count(name) == 2}
    products, passes = (op for op, name in enumerate(names) if name == loss)
    assert _moved(tables[0], products) != _moved(tables[1], products)
    assert _moved(tables[0], passes) == _moved(tables[1], passes)


def _moved(table: ClassTable, op: int) -> list[tuple[float, float]]:
    """Bytes that each operand of an op moves, forward and backward."""
    chosen = table.slot_op == op
    return list(zip(table.slot_forward[chosen].tolist(), table.slot_backward[chosen].tolist(), strict=True))


def test_the_price_of_slices_and_the_search() -> None:
    """A head of 131,072 words: slices take a sixth of the memory and one more product; the search takes them where memory asks."""
    model = Head("plain", 131072).bfloat16()
    ids = torch.zeros(8, 512, dtype=torch.int64)
    graph = annotate(capture(model, {"input_ids": ids, "labels": ids}))
    pricer, head = Pricer(graph, parse("1xH100-80GB"), "bfloat16"), graph.layers[-1].cls
    whole, sliced = (
        pricer.layer(head, make_mesh(("axis", 1)), Strategy((Role.DATA,), logits=logits), 1)
        for logits in ("whole", "sliced")
    )
    assert whole is not None and sliced is not None
    assert 6 * (sliced.saved_bytes + sliced.transient_bytes) < whole.saved_bytes + whole.transient_bytes
    assert (
        sliced.forward_s > whole.forward_s and sliced.backward_s > whole.backward_s + 2 * 8 * 512 * 16 * 131072 / 1e15
    )
    assert sliced.flops == whole.flops and sliced.step_s == whole.step_s
    found = {}
    for limit in (None, 1_000_000_000):
        plan = search(graph, parse("1xH100-80GB"), pricer, SearchOptions(memory_limit_bytes=limit, microbatches=1))
        found[limit] = plan.layers[-1].strategy.options.by_name["logits"]
        assert any("in slices of the vocabulary" in note for note in plan.notes) == (found[limit] == "sliced")
        assert Plan.from_json(plan.to_json()).layers == plan.layers
    assert found == {None: "whole", 1_000_000_000: "sliced"}
    pinned = search(graph, parse("1xH100-80GB"), pricer, SearchOptions(pin={"logits": "sliced"}))
    assert pinned.layers[-1].strategy.options.rewrites and not pinned.layers[0].strategy.options.rewrites
