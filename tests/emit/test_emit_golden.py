"""Golden programs: a refactoring emits the same text, and a change of text shows in the diff.

``pytest tests/emit/test_emit_golden.py --update-golden`` rewrites the files under ``tests/emit/golden``; read their diff before committing.
"""

from __future__ import annotations

import ast
import builtins
import difflib
import keyword
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from exactness import KINDS, subject
from sketch import Sketch, use, whole
from torch import nn

from autopar.capture import capture
from autopar.checks.types import check_program
from autopar.emit import emit, layouts, model_source
from autopar.emit.names import Names, identifier
from autopar.graph import Graph
from autopar.plan import Plan
from autopar.search.manual import manual_plan
from autopar.shard import plan_shardings
from passes.stages import LocalProgram, cut_stages

GOLDEN = Path(__file__).parent / "golden"

CASES: dict[str, tuple[str, Any]] = {
    "mlp_data": ("mlp", {"data": 2}),
    "llama_pipeline_data_tensor": ("llama", {"pipeline": 2, "data": 2, "tensor": 2, "microbatches": 2}),
    "gpt2_tied_on_one_stage": ("gpt2", {"tensor": 2}),
    "llama_mixed": ("llama", "mixed: tensor 1, 2 and 4"),
    "llama_selective": ("llama", {"tensor": 2, "sequence": True, "recompute": "selective"}),
    "mixtral_expert": ("mixtral", {"expert": 2}),
    "bert_recompute": ("bert", {"data": 2, "zero": 3, "recompute": True, "microbatches": 2}),
}


def plan_of(graph: Graph, how: Any) -> Plan:
    if isinstance(how, str):
        return next(kind for kind in KINDS if kind.name == how).plan(graph)
    return manual_plan(graph, **how)


def local(graph: Graph, plan: Plan) -> LocalProgram:
    return cut_stages(graph, plan, plan_shardings(graph, plan))


def source(name: str) -> str:
    model, how = CASES[name]
    graph = replace(subject(model).graph, no_evaluation="")  # as after a comparison with the model
    return model_source(local(graph, plan_of(graph, how)))


@pytest.mark.parametrize("name", CASES)
def test_golden(name: str, update_golden: bool) -> None:
    path = GOLDEN / f"{name}.py"
    text = source(name)
    if update_golden:
        path.write_text(text)
    before = path.read_text().splitlines(keepends=True)
    difference = "".join(difflib.unified_diff(before, text.splitlines(keepends=True), f"golden/{path.name}", "emitted"))
    if difference:
        pytest.fail(
            f"{difference}\nIf this is what you meant: pytest {Path(__file__).name} --update-golden", pytrace=False
        )


def test_every_golden_file_is_of_a_case() -> None:
    assert {path.stem for path in GOLDEN.glob("*.py")} == set(CASES)


@pytest.mark.parametrize("name", CASES)
def test_emitting_twice_gives_the_same_text(name: str) -> None:
    assert source(name) == source(name)


@pytest.mark.parametrize("name", CASES)
def test_the_text_stands_alone(name: str) -> None:
    """It parses, and imports torch, spmd_types and its runtime alone."""
    tree = ast.parse((GOLDEN / f"{name}.py").read_text())
    imported = {a.name.split(".")[0] for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    imported |= {(n.module or "").split(".")[0] for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    assert {"__future__", "spmd_types", "torch", "runtime"} <= imported
    assert imported <= {"__future__", "collections", "spmd_types", "torch", "runtime"}
    assert ast.get_docstring(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            assert ast.get_docstring(node), node.name


@pytest.mark.parametrize("name", CASES)
def test_no_line_needs_scrolling_sideways(name: str) -> None:
    long = [line for line in (GOLDEN / f"{name}.py").read_text().splitlines() if len(line) > 240]
    assert not long, long[0]


@pytest.mark.parametrize("name", CASES)
def test_every_name_is_bound_once_in_its_scope(name: str) -> None:
    """Names in a layer's body are assigned once: nothing is shadowed by accident (a stage's running value is meant to be)."""
    for cls in ast.parse((GOLDEN / f"{name}.py").read_text()).body:
        if not isinstance(cls, ast.ClassDef) or cls.name.startswith("Stage"):
            continue
        for function in cls.body:
            if isinstance(function, ast.FunctionDef):
                bound = [argument.arg for argument in function.args.args]
                bound += [
                    t.id
                    for s in function.body
                    if isinstance(s, ast.Assign)
                    for t in s.targets
                    if isinstance(t, ast.Name)
                ]
                assert len(bound) == len(set(bound)), (cls.name, bound)
                assert not set(bound) & {"torch", "nn", "F", "spmd", "kernels", "checkpoint"}


def test_layouts_describe_every_parameter_of_every_stage() -> None:
    graph = subject("gpt2").graph
    program = local(graph, manual_plan(graph, pipeline=2, tensor=2, microbatches=2))
    records = layouts(program)
    by_original: dict[Any, list[dict[str, Any]]] = {}
    for record in records:
        by_original.setdefault(record["original"], []).append(record)
    assert set(by_original) == {p.original for p in graph.parameters.values()}
    (tied,) = graph.shared_parameters
    shared = [record for record in records if record["shared"]]
    assert [(r["stage"], r["shared"], r["types"]) for r in shared] == [
        (0, tied, {"tensor": "S(0)"}),
        (1, tied, {"tensor": "S(0)"}),
    ]
    fused = sorted(by_original["transformer.h.0.attn.c_attn.weight"], key=lambda r: r["part"]["start"])
    assert [(r["part"]["dim"], r["part"]["start"], r["part"]["length"]) for r in fused] == [
        (1, 0, 32),
        (1, 32, 32),
        (1, 64, 32),
    ]


# -- names ------------------------------------------------------------------------------------------------------------

HOSTILE = [
    "class", "import", "None", "async", "match", "0", "1.weight", "layers.0.0", "a.b", "a..b", "", ".", "..", "_", "__", "self",
    "torch", "F", "spmd", "größe", "αβγ", "重み", "x-y", "x y", "x\ty", 'x"y', "x'; import os; y = '", "a\nb", "é", "🙂", "ﬁ", "x" * 200,
]  # fmt: skip


class TestNames:
    @pytest.mark.parametrize("text", HOSTILE, ids=repr)
    def test_whatever_comes_in_is_an_identifier(self, text: str) -> None:
        name = identifier(text)
        assert name.isidentifier() and not keyword.iskeyword(name), (text, name)
        ast.parse(f"{name} = 1\nx.{name}(1)")

    def test_readable_names_stay(self) -> None:
        assert identifier("q_proj") == "q_proj"
        assert identifier("model.layers.0") == "model_layers_0"
        assert identifier("0.weight") == "_0_weight"

    def test_names_of_the_emitted_module_are_not_taken(self) -> None:
        for name in ("self", "torch", "nn", "F", "spmd", "kernels", "checkpoint", "key"):
            assert identifier(name) == f"{name}_"

    def test_each_name_is_handed_out_once(self) -> None:
        names = Names()
        given = [names.fresh(text) for text in ["a", "a", "a.b", "a_b", "a_2", "a", "class", "class", "class_"]]
        assert len(set(given)) == len(given) and given[:2] == ["a", "a_2"]
        assert all(name.isidentifier() and not keyword.iskeyword(name) for name in given)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(8, 16), nn.Linear(16, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.body(x)
        gate = torch.tanh(x)
        x = self.head(x * gate + gate)
        return x * x


def test_comments_and_names_are_those_of_the_users_model() -> None:
    """No module of capture's own, which calls the model and the loss; a product with a bias is no addition."""
    batch = (torch.ones(4, 8), torch.zeros(4, dtype=torch.int64))
    for loss_fn in (nn.CrossEntropyLoss(), lambda output, targets: nn.functional.cross_entropy(output, targets)):
        graph = capture(Scaled(), batch, loss_fn)
        text = model_source(local(graph, manual_plan(graph, data=2)))
        forward = [line.strip() for line in text.partition("def forward")[2].partition("return")[0].splitlines()]
        assert [line for line in forward if re.fullmatch(r"# [\w.]+", line)] == [
            "# body",
            "# Scaled",
            "# head",
            "# loss_fn",
        ], forward
        assert "self.body = nn.Linear(8, 16, **factory, dtype=torch.float32)" in text
        assert "x_2 = self.body(x)" in forward
        assert "x_3 = self.head(x_2 * gate + gate)" in forward
        assert "del x_2, gate" in forward  # at once: nothing below reads them


class Hostile(nn.Module):
    """Modules and parameters whose names a program cannot use as they are, or uses itself."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("class", "größe", "forward_", "compute", "number"):
            self.add_module(name, nn.Linear(8, 8))
        self.add_module("0", nn.Linear(8, 4))
        for name in ("lambda", "torch", "scale", "_scale", "scale_"):
            self.register_parameter(name, nn.Parameter(torch.rand(8) + 0.5))

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002  a name that Python has, too
        modules = dict(self.named_children())
        x = modules["class"](input) * getattr(self, "lambda") + self.torch
        x = modules["compute"](torch.relu(modules["größe"](x))) * self.scale
        x = modules["number"](x - self._scale) / self.scale_
        return modules["0"](modules["forward_"](x))


@pytest.mark.parametrize(
    "options", [{"tensor": 2}, {"data": 2, "recompute": True}, {"data": 2, "recompute": "selective"}], ids=str
)
def test_hostile_names_make_a_program(tmp_path: Path, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = Hostile().double()
    batch = (torch.randn(8, 2, 8, dtype=torch.float64), torch.randn(8, 2, 4, dtype=torch.float64))
    graph = capture(model, batch, nn.functional.mse_loss, precision="float64")
    program = emit(graph, manual_plan(graph, **options), tmp_path)
    ast.parse((tmp_path / "model.py").read_text())
    assert check_program(tmp_path) == 1
    records = layouts(program)
    assert {record["original"] for record in records} == set(dict(model.named_parameters()))
    assert len({record["name"] for record in records}) == len(records)


def test_a_sequence_on_two_axes_leaves_rows_on_a_third(tmp_path: Path) -> None:
    """The conversion of token ids to slices of the sequence, on two axes at once, keeps what a third axis shards."""
    graph = subject("llama").graph
    emit(graph, plan_of(graph, "data 2 x ulysses 2 x ring 2, zero 3"), tmp_path)
    assert "flattened.convert(input_ids" in (tmp_path / "model.py").read_text()
    assert check_program(tmp_path) == 1


def test_names_that_become_alike_stay_apart(tmp_path: Path) -> None:
    """``a.b`` and ``a_b`` are one identifier, but two layers, with two parameters and two values between them."""
    draw = Sketch("Same")
    h, w = draw.activation("h", 8, 4), draw.parameter("w", 4, 4)
    block = draw.layer(draw.call(torch.ops.aten.linear.default, h, w))
    draw = Sketch("First")
    x, w = draw.input("x", 8, 4, dtype=torch.float64), draw.parameter("w", 4, 4)
    first = draw.layer(draw.call(torch.ops.aten.linear.default, x, w))
    draw = Sketch("Last")
    a, b = draw.activation("p", 8, 4), draw.activation("q", 8, 4)
    last = draw.layer(draw.call(torch.ops.aten.sum.default, draw.call(torch.ops.aten.mul.Tensor, a, b)))
    layers = (
        use(first, "start", (), ("v",)),
        use(block, "a.b", ("v",), ("v.w",)),
        use(block, "a_b", ("v.w",), ("v_w",)),
        use(last, "end", ("v.w", "v_w"), ("loss",)),
    )
    graph = whole("alike", (first, block, last), layers)
    emit(graph, manual_plan(graph, data=2), tmp_path)
    text = (tmp_path / "model.py").read_text()
    names = attributes(text)
    assert len(names) == len(set(names)) == 4, names
    assert check_program(tmp_path) == 1


def attributes(text: str) -> list[str]:
    """The layers' attributes of the stage, as its constructor assigns them."""
    (stage,) = [node for node in ast.parse(text).body if isinstance(node, ast.ClassDef) and node.name == "Stage0"]
    return list(_assigned(stage))


def _assigned(stage: ast.ClassDef) -> Iterator[str]:
    for node in ast.walk(stage):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute):
            yield node.targets[0].attr


def test_emitted_names_hide_no_builtin_that_is_called() -> None:
    """A class or a function named after the user's would break the text around it."""
    for name in CASES:
        tree = ast.parse((GOLDEN / f"{name}.py").read_text())
        called = {n.func.id for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}
        defined = {n.name for n in ast.walk(tree) if isinstance(n, ast.ClassDef | ast.FunctionDef)}
        assert not {c for c in called if hasattr(builtins, c)} & defined
