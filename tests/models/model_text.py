"""Models drawn at random, each the text of a small torch module: what fails can be read, run by itself, and made smaller line by line.

``draw(seed)`` is a function of the seed alone. A text composes parts (``model_parts``) into blocks, a list of blocks into a model, and adds
a batch, ties, modes and a loss. Sizes are drawn so that extents often coincide: sequence, heads, experts or vocabulary equal the batch.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import model_parts
from model_parts import Draft
from torch import Tensor, nn

HEADER = """import copy, math, torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)


def vary(model):
    for p in model.parameters():
        p.data.add_(0.2 * torch.randn_like(p))
"""

MOST_DRAWS = 30  # of one seed, until eager PyTorch runs what was drawn and gives finite numbers


@dataclass(frozen=True)
class Text:
    """A model as text: its lines (``HEADER`` goes before them), and what it is made of."""

    lines: tuple[str, ...]
    features: tuple[str, ...] = ()

    @property
    def source(self) -> str:
        return "\n".join(self.lines) + "\n"


@dataclass(frozen=True)
class Made:
    """What a text defines: the model in float64, the batch, the loss function."""

    model: nn.Module
    batch: Any
    loss_fn: Callable[..., Any] | None


def make(text: Text) -> Made:
    """Run the text. Raises whatever it raises."""
    names: dict[str, Any] = {}
    exec(compile(HEADER + text.source, "<model>", "exec"), names)
    model: nn.Module = names["model"].double()
    return Made(model, _double(names["batch"]), names.get("loss_fn"))


def _double(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.double() if value.is_floating_point() else value
    if isinstance(value, dict):
        return {key: _double(item) for key, item in value.items()}
    return tuple(map(_double, value)) if isinstance(value, tuple) else value


def draw(seed: int, admits: Callable[[Text], bool]) -> Text:
    """The model of a seed: the first draw that ``admits`` accepts, which should be those that eager PyTorch runs."""
    for attempt in range(MOST_DRAWS):
        text = _draw(random.Random(f"model {seed} {attempt}"))
        if admits(text):
            return text
    raise AssertionError(f"none of {MOST_DRAWS} draws of seed {seed} runs")


def _draw(rng: random.Random) -> Text:
    d = _sizes(rng)
    _batch(d)
    model_parts.mask(d)
    _block(d)
    before = [line for _ in range(rng.randrange(2)) for line in _part(d, d.model_init)]
    after = [line for _ in range(rng.randrange(3)) for line in _part(d, d.model_init)]
    stem = _stem(d)
    calls = _calls(d)
    ending = _loss(d)
    model_parts.afterwards(d)
    lines = [f"B, S, D, H, V, E = {d.B}, {d.S}, {d.D}, {d.H}, {d.V}, {d.E}", ""]
    if d.shared:
        lines += ["", *d.shared]
    lines += ["", "class Block(nn.Module):", "    def __init__(self, i, shared):", "        super().__init__()"]
    lines += [f"        {line}" for line in d.init]
    lines += ["", "    def forward(self, x, mask, keep):", *(f"        {line}" for line in d.body), "        return x"]
    lines += ["", "", "class Model(nn.Module):", "    def __init__(self):", "        super().__init__()"]
    lines += [f"        {line}" for line in d.model_init]
    lines += ["", f"    def forward(self, {', '.join(d.inputs)}):"]
    lines += [f"        {line}" for line in (*stem, *before, *calls, *after, *ending)]
    lines += ["", "", "model = Model()", "vary(model)", *d.after, *d.batch]
    return Text(tuple(lines), tuple(sorted(d.features)))


def _sizes(rng: random.Random) -> Draft:
    batch = rng.choice((4, 4, 4, 2, 6, 8))

    def often(*others: int) -> int:
        return rng.choice((batch, *others)) if rng.random() < 0.7 else rng.choice(others)

    heads, wide = often(2, 4), rng.choice((2, 4))
    if rng.random() < 0.07:  # longer than what masks are shrunk to
        batch, sequence = 2, rng.choice((72, 96))
    else:
        sequence = often(4, 5, 6, 8, 12)
    width = heads * wide
    d = Draft(rng, batch, sequence, width, heads, often(7, 11, 16, width), often(2, 3, 4))
    if batch in (sequence, heads, d.V, d.E, width):
        d.features.add("coincide")
    return d


def _batch(d: Draft) -> None:
    """The inputs, as lines that make the batch, before the loss adds its own."""
    d.tokens = d.rng.random() < 0.6
    d.batch += ["batch = {}"]
    if d.tokens:
        d.inputs.append("ids")
        d.batch.append('batch["ids"] = torch.randint(0, V, (B, S))')
    else:
        d.inputs.append("x")
        d.batch.append('batch["x"] = torch.randn(B, S, D)')
    if d.rng.random() < 0.35:
        d.inputs.append("keep")
        d.keep = True
        kind = d.rng.choice(("bool", "bool", "long"))
        d.batch.append(f'batch["keep"] = (torch.arange(S) < torch.randint(1, S + 1, (B, 1))).{kind}()')
        if d.rng.random() < 0.3:
            d.batch.append('batch["keep"][0] = 0')
            d.features.add("all-masked row")


def _stem(d: Draft) -> list[str]:
    lines = []
    if d.tokens:
        padding = ", padding_idx=0" if d.rng.random() < 0.15 else ""
        d.model_init.insert(0, f"self.embed = nn.Embedding(V, D{padding})")
        lines.append("x = self.embed(ids)")
        if d.rng.random() < 0.2:
            d.model_init.append("self.kinds = nn.Embedding(2, D)")
            lines.append("x = x + self.kinds(ids % 2)")
    else:
        d.model_init.insert(0, "self.embed = nn.Linear(D, D)")
        lines.append("x = self.embed(x)")
    place = d.rng.random()
    if place < 0.15:
        d.model_init.append("self.places = nn.Embedding(S, D)")
        lines.append("x = x + self.places(torch.arange(x.shape[1]))")
    elif place < 0.3:
        d.model_init.append("self.places = nn.Parameter(torch.zeros(S, D))")
        lines.append("x = x + self.places[: x.shape[1]]")
    keep = "keep" if d.keep else "None"
    if d.keep and d.rng.random() < 0.3:
        lines.append("keep = keep.bool()")
    mask = d.mask_lines if d.mask_in_model else ["mask = None"]
    return [*lines, *([] if d.keep else [f"keep = {keep}"]), *mask]


def _block(d: Draft) -> None:
    if d.mask_lines and not d.mask_in_model:
        d.body += d.mask_lines
    parts = d.rng.choices(*zip(*model_parts.PARTS, strict=True), k=d.rng.choice((1, 2, 2, 3)))
    for part in parts:
        d.body += part(d, d.init)
    if d.rng.random() < 0.35:
        d.body += model_parts.variation(d)
    if d.rng.random() < 0.25:
        lines = [f"x = {d.wrap('x')}"] if d.rng.random() < 0.3 else []
        d.body += lines


def _part(d: Draft, init: list[str]) -> list[str]:
    return d.rng.choices(*zip(*model_parts.PARTS, strict=True))[0](d, init, outside=True)


def _calls(d: Draft) -> list[str]:
    d.count = d.rng.choice((1, 2, 3, 3, 3, 4))
    if d.count >= 3:
        d.features.add("equal blocks")
    if d.shared:
        d.model_init.append("self.shared = Shared()")
    shared = "self.shared" if d.shared else "None"
    d.model_init.append(f"self.blocks = nn.ModuleList([Block(i, {shared}) for i in range({d.count})])")
    lines = ["for block in self.blocks:", "    x = block(x, mask, keep)"]
    if d.rng.random() < 0.12:
        lines.append(f"x = self.blocks[{d.rng.randrange(d.count)}](x, mask, keep)")
        d.features.add("reuse")
    if d.rng.random() < 0.5:
        d.model_init.append(f"self.norm = nn.{d.rng.choice(('LayerNorm', 'RMSNorm'))}(D)")
        lines.append("x = self.norm(x)")
    return lines


def _loss(d: Draft) -> list[str]:
    """The last lines of the forward pass; targets, and the loss function, at the end of the text."""
    kind = d.rng.choice(("tokens", "tokens", "rows", "labels", "values", "weighted"))
    inside = d.rng.random() < 0.5
    out = {"tokens": "V", "rows": "V", "labels": "E", "values": "D", "weighted": "V"}[kind]
    d.model_init.append(f"self.head = nn.Linear(D, {out}{d.rng.choice(('', ', bias=False'))})")
    d.head_out = out
    lines = ["x = self.head(x)" if kind in ("tokens", "values", "weighted") else "x = self.head(x.mean(1))"]
    loss, d.batch_targets = _loss_of(d, kind)
    smooth = d.rng.random() < 0.2
    d.features.add("loss inside" if inside else "loss_fn")
    if smooth and "CrossEntropyLoss" in loss:
        loss = loss.replace("CrossEntropyLoss(", "CrossEntropyLoss(label_smoothing=0.1, ").replace(", )", ")")
    d.batch += d.batch_targets
    output = "x.transpose(1, 2)" if kind == "tokens" else "x"
    if kind == "weighted":
        d.inputs.append("targets")
        d.batch.append('batch["targets"] = targets')
        return [
            *lines,
            "valid = targets >= 0",
            'losses = F.cross_entropy(x.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="none")',
            f"return (losses * valid.flatten()).sum() / {d.rng.choice(('valid.sum()', 'valid.sum().clamp(min=1)', 'valid.numel()'))}",
        ]
    if inside:
        d.inputs.append("targets")
        d.batch.append('batch["targets"] = targets')
        if d.rng.random() < 0.5:
            d.model_init.append(f"self.loss = {loss}")
            return [*lines, f"return self.loss({output}, targets)"]
        functional = {"values": "F.mse_loss(x, targets)", "labels": "F.binary_cross_entropy_with_logits(x, targets)"}
        return [*lines, f"return {functional.get(kind, f'F.cross_entropy({output}, targets)')}"]
    d.batch += [f"loss_fn = {loss}", f"batch = ({_inputs(d)}, targets)"]
    return [*lines, f"return {output}"]


def _inputs(d: Draft) -> str:
    return "batch" if d.rng.random() < 0.6 else f"({', '.join(f'batch[{name!r}]' for name in d.inputs)},)"


def _loss_of(d: Draft, kind: str) -> tuple[str, list[str]]:
    rng = d.rng
    if kind == "values":
        return rng.choice(("nn.MSELoss()", "nn.SmoothL1Loss()", "nn.L1Loss()")), ["targets = torch.randn(B, S, D)"]
    if kind == "labels":
        weight = rng.choice(("", "pos_weight=torch.linspace(0.5, 3.0, E).double()"))
        d.features |= {"class weights"} if weight else set()
        return f"nn.BCEWithLogitsLoss({weight})", ["targets = torch.randint(0, 2, (B, E)).double()"]
    weight = rng.choice(("", "weight=torch.linspace(0.5, 2.0, V).double()"))
    shape = "(B,)" if kind == "rows" else "(B, S)"
    targets = [f"targets = torch.randint(0, V, {shape})"]
    if rng.random() < 0.6:
        d.features.add("ignore_index")
        targets.append("targets[0] = -100" if kind == "rows" else "targets[0, : S // 2] = -100")
        if kind != "rows" and rng.random() < 0.5:
            targets.append("targets[-1] = -100")
    if weight:
        d.features.add("class weights")
    return f"nn.CrossEntropyLoss({weight})", targets
