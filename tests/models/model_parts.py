"""What random models are made of: parts that take ``x`` of ``[batch, sequence, width]`` and give it back, masks, and what comes after."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

Lines = list[str]


@dataclass
class Draft:
    """A text in the making. ``init`` and ``body`` are the block's; ``after`` follows the model; ``batch`` is the end of the text."""

    rng: random.Random
    B: int
    S: int
    D: int
    H: int
    V: int
    E: int
    tokens: bool = True
    keep: bool = False
    count: int = 0
    head_out: str = ""
    mask_kind: str = ""  # "", "bool" or "float"
    mask_in_model: bool = False
    mask_lines: Lines = field(default_factory=list)
    init: Lines = field(default_factory=list)
    body: Lines = field(default_factory=list)
    shared: Lines = field(default_factory=list)
    model_init: Lines = field(default_factory=list)
    after: Lines = field(default_factory=list)
    batch: Lines = field(default_factory=list)
    batch_targets: Lines = field(default_factory=list)
    inputs: Lines = field(default_factory=list)
    features: set[str] = field(default_factory=set)
    linears: Lines = field(default_factory=list)  # of a block: Linear(D, D) with a bias
    norms: Lines = field(default_factory=list)
    number: int = 0

    def name(self, stem: str) -> str:
        self.number += 1
        return f"{stem}{self.number}"

    def linear(self, init: Lines, inner: str = "D", outer: str = "D", stem: str = "fc") -> str:
        name = self.name(stem)
        init.append(f"self.{name} = nn.Linear({inner}, {outer})")
        if init is self.init:
            self.linears.append(name)
        return f"self.{name}"

    def norm(self, init: Lines) -> str:
        """A norm's call of ``x``; or ``x`` itself."""
        kind = self.rng.choice(("LayerNorm", "LayerNorm", "RMSNorm", "", "manual", "plain"))
        if not kind:
            return "x"
        if kind == "manual":
            return "x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)"
        name = self.name("norm")
        init.append(
            f"self.{name} = nn." + ("LayerNorm(D, elementwise_affine=False)" if kind == "plain" else f"{kind}(D)")
        )
        if init is self.init and kind != "plain":
            self.norms.append(name)
        return f"self.{name}(x)"

    def wrap(self, value: str) -> str:
        return self.rng.choice((f"torch.tanh({value})", f"0.5 * {value}", f"{value}.clamp(-2.0, 2.0)"))


# -- masks ------------------------------------------------------------------------------------------------------------

CAUSAL = (
    "j <= i",
    "(i - j) >= 0",
    "torch.ones(n, n, dtype=torch.bool).tril()",
    "~torch.ones(n, n, dtype=torch.bool).triu(1)",
)
NEAR = (
    "i - j < {w}",
    "(i - j) * (i - j) < {w} * {w}",
    "(i - j) ** 2 < {w2}",
    "(i - j).abs().float().add(1.0).log2() < {log}",
    "(i - j).abs() * 0.5 < {half}",
    "torch.exp(-(i - j).abs().double() / {w}) > 0.4",
    "(i - j).abs().double().sqrt() < {root}",
    "i // {w} == j // {w}",
    "(torch.searchsorted(torch.tensor([{w}, {w} + 2]), i, right=True) == torch.searchsorted(torch.tensor([{w}, {w} + 2]), j, right=True))",
    "((torch.arange(n) % {w} == 0).cumsum(0)[:, None] == (torch.arange(n) % {w} == 0).cumsum(0)[None, :])",
    "j < {w}",
    "i >= {w}",
)
OF_INPUTS = (
    "((ids == 1).cumsum(1)[:, None, :, None] == (ids == 1).cumsum(1)[:, None, None, :])",
    "((ids != 0)[:, None, None, :] | (i == j))",
)
OF_BATCH = (
    "((torch.arange(x.shape[0]) < x.shape[0] // 2)[:, None, None, None] | (i == j))",
    "((torch.arange(x.shape[0]) >= 1)[:, None, None, None] | (i == j))",
)
OF_HEADS = (
    "((torch.arange(H) >= H // 2)[:, None, None] | (i == j))",
    "((i - j).abs() <= torch.arange(H).clamp(max=3)[:, None, None])",
)
FLOATS = (
    "-(i - j).abs() * 0.3",
    "2.0 ** -torch.arange(1, H + 1)[:, None, None] * (j - i)",
    "-torch.log1p((i - j).abs().double())",
    "torch.where(j <= i, 0.0, -1e9) - 0.1 * (i - j).abs()",
    "(i == j) * 0.5",
)


def mask(d: Draft) -> None:
    """A mask that broadcasts to ``[batch, heads, sequence, sequence]``, as lines that define ``mask``; maybe none."""
    rng = d.rng
    if rng.random() < 0.35:
        return
    d.features.add("mask")
    d.mask_in_model = rng.random() < 0.6
    w = rng.randrange(1, max(2, d.S))
    if d.S > 64 and rng.random() < 0.8:
        w = rng.randrange(65, d.S)
    near = {"w": w, "w2": w * w, "log": f"math.log2({w} + 1.5)", "half": w / 2, "root": f"math.sqrt({w})"}
    lines = ["n = x.shape[1]", "i, j = torch.arange(n)[:, None], torch.arange(n)[None, :]"]
    if rng.random() < 0.2:
        d.mask_kind = "float"
        d.mask_lines = [*lines, f"mask = ({rng.choice(FLOATS)}).to(x.dtype)"]
        if rng.random() < 0.4:
            d.mask_lines.append(f"mask = mask.masked_fill(~({rng.choice(CAUSAL)}), torch.finfo(x.dtype).min)")
        return
    choices: list[str] = []
    if rng.random() < 0.7:
        choices.append(f"({rng.choice(CAUSAL)})")
    if rng.random() < 0.5:
        choices.append(f"({rng.choice(NEAR).format(**near)})")
    if rng.random() < 0.2:
        choices.append(rng.choice((*OF_HEADS, *OF_BATCH)))
    if d.tokens and d.mask_in_model and rng.random() < 0.2:
        choices.append(rng.choice(OF_INPUTS))
    if not choices:
        choices.append(f"({CAUSAL[0]})")
    lines.append(f"mask = {choices[0]}")
    for choice in choices[1:]:
        lines.append(f"mask = mask {rng.choice('&&&|')} {choice}")
    if d.keep and rng.random() < 0.7:
        lines.append("mask = mask & keep.bool()[:, None, None, :]")
        d.features.add("padding mask")
    d.mask_kind = "bool"
    if rng.random() < 0.3:
        d.mask_kind = "float"
        low = rng.choice(("-1e9", "-1e4", "torch.finfo(x.dtype).min"))
        lines.append(
            rng.choice(
                (
                    f"mask = torch.where(mask, 0.0, {low}).to(x.dtype)",
                    f"mask = torch.zeros(mask.shape, dtype=x.dtype).masked_fill(~mask, {low})",
                    f"mask = (1.0 - mask.to(x.dtype)) * {low}",
                )
            )
        )
    d.mask_lines = lines


# -- parts ------------------------------------------------------------------------------------------------------------


def attention(d: Draft, init: Lines, outside: bool = False) -> Lines:
    rng = d.rng
    given = d.mask_kind if not outside or d.mask_in_model else ""
    lines = [f"h = {d.norm(init)}"]
    heads = "view(x.shape[0], x.shape[1], H, -1).transpose(1, 2)"
    if rng.random() < 0.4:
        fused = d.linear(init, "D", "3 * D", "qkv")
        if init is d.init:
            d.linears.remove(fused.removeprefix("self."))
        lines += [
            f"q, k, v = {fused}(h).chunk(3, -1)",
            "q, k, v = (t.reshape(x.shape[0], x.shape[1], H, -1).transpose(1, 2) for t in (q, k, v))",
        ]
    else:
        for letter in "qkv":
            lines.append(f"{letter} = {d.linear(init, stem=letter)}(h).{heads}")
    if rng.random() < 0.15:
        d.features.add("constant")
        lines.append("q = q * (1.0 + torch.arange(H) // 2)[:, None, None]")
    if rng.random() < 0.15:
        lines += ["half = torch.cat([-q[..., 1::2], q[..., ::2]], -1)", "q = q * 0.8 + half * 0.6"]
    if rng.random() < 0.5:
        causal = ", is_causal=True" if not given and rng.random() < 0.5 else ""
        lines.append(f"a = F.scaled_dot_product_attention(q, k, v{', mask' if given else causal})")
    else:
        lines.append("s = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])")
        lines += _scores(d, given)
        lines += ["a = s.softmax(-1) @ v"]
    out = d.linear(init, stem="o")
    lines += [f"x = x + {out}(a.transpose(1, 2).reshape(x.shape))"]
    return lines


def _scores(d: Draft, given: str) -> Lines:
    rng, lines = d.rng, []
    if given == "float":
        lines.append(rng.choice(("s = s + mask", "s += mask", "s.add_(mask)")))
    elif given == "bool":
        low = rng.choice(("-1e9", "torch.finfo(s.dtype).min"))
        lines.append(
            rng.choice(
                (
                    f"s = s.masked_fill(~mask, {low})",
                    f"s = torch.where(mask, s, {low})",
                    f"s.masked_fill_(~mask, {low})",
                )
            )
        )
    if rng.random() < 0.15:
        lines.append(
            rng.choice(
                ("s.diagonal(dim1=-2, dim2=-1).fill_(-1e4)", "s[..., 0] = 0.5", "s[:, :, 0, :].mul_(0.5)", "s.tril_()")
            )
        )
    if any("_(" in line or "+=" in line or "] =" in line for line in lines):
        d.features.add("in-place")
    return lines


def many_headed(d: Draft, init: Lines, outside: bool = False) -> Lines:
    name = d.name("mha")
    init.append(f"self.{name} = nn.MultiheadAttention(D, H, batch_first=True)")
    padding = ", key_padding_mask=~keep.bool()" if d.keep and d.rng.random() < 0.5 else ""
    return [f"h = {d.norm(init)}", f"x = x + self.{name}(h, h, h, need_weights={d.rng.random() < 0.5}{padding})[0]"]


def gated(d: Draft, init: Lines, outside: bool = False) -> Lines:
    act = d.rng.choice(("F.silu", "F.gelu", "torch.sigmoid", "F.relu"))
    lines = [f"h = {d.norm(init)}"]
    if d.rng.random() < 0.4:
        up = d.linear(init, "D", "4 * D", "up")
        if init is d.init:
            d.linears.remove(up.removeprefix("self."))
        lines += [f"g, u = {up}(h).chunk(2, -1)"]
    else:
        gate, up = d.linear(init, "D", "2 * D", "gate"), d.linear(init, "D", "2 * D", "up")
        lines += [f"g, u = {gate}(h), {up}(h)"]
    down = d.linear(init, "2 * D", "D", "down")
    return [*lines, f"x = x + {down}({act}(g) * u)"]


def plain(d: Draft, init: Lines, outside: bool = False) -> Lines:
    up, down = d.linear(init, "D", "2 * D", "up"), d.linear(init, "2 * D", "D", "down")
    act = d.rng.choice(("F.gelu", "F.relu", "torch.tanh"))
    return [f"x = x + {down}({act}({up}({d.norm(init)})))"]


def convolution(d: Draft, init: Lines, outside: bool = False) -> Lines:
    d.features.add("convolution")
    name = d.name("conv")
    groups = d.rng.choice(("", ", groups=D"))
    init.append(f"self.{name} = nn.Conv1d(D, D, 3, padding=2{groups})")
    return [f"x = x + self.{name}(x.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2)"]


def mixture(d: Draft, init: Lines, outside: bool = False) -> Lines:
    rng, name = d.rng, d.name("experts")
    d.features.add("mixture")
    router = d.linear(init, "D", "E", "router")
    if init is d.init:
        d.linears.remove(router.removeprefix("self."))
    lines = [f"w = {router}(x).softmax(-1)"]
    if rng.random() < 0.3:
        d.features.add("constant")
        lines.append(
            rng.choice(
                (
                    "w = w * (torch.arange(E) >= 1)",
                    "w = w * (1.0 + torch.arange(E) // 2)",
                    "w = w + 0.1 * torch.arange(E).clamp(max=1)",
                )
            )
        )
    if rng.random() < 0.4:
        lines += ["top, place = w.topk(min(2, E), -1)", "w = torch.zeros_like(w).scatter(-1, place, top)"]
    if rng.random() < 0.5:
        init.append(f"self.{name} = nn.ModuleList([nn.Linear(D, D) for _ in range(E)])")
        if rng.random() < 0.3:
            init.append(f"self.{name}[-1].weight = self.{name}[0].weight")
            d.features.add("tie")
        lines += [f"y = torch.stack([expert(x) for expert in self.{name}], 2)", "x = x + (y * w[..., None]).sum(2)"]
    else:
        init.append(f"self.{name} = nn.Parameter(torch.zeros(E, D, D))")
        lines += [f'y = torch.einsum("bsd,edf->bsef", x, self.{name})', "x = x + (y * w[..., None]).sum(2)"]
    return lines


CONSTANTS = (
    "x = x * (torch.arange(x.shape[1]) >= 2)[:, None]",
    "x = x * (torch.arange(x.shape[0]) < x.shape[0] // 2)[:, None, None]",
    "x = x * (1.0 + torch.arange(x.shape[0]) // 2)[:, None, None]",
    "x = x * (1.0 + torch.arange(D) // 3)",
    "x = x + 0.1 * torch.arange(x.shape[1]).clamp(max=3)[:, None]",
    "x = x + 0.1 * (torch.arange(S) % 3)[:, None]",
    "x = x * torch.linspace(0.5, 1.5, S)[:, None].double()",
    "x = x * torch.where(torch.arange(x.shape[1]) // 2 == 1, 2.0, 1.0)[:, None]",
    "x = x + 0.1 * torch.eye(x.shape[1], D)",
    "x = x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]",
    "x = x + torch.sin(torch.arange(x.shape[1]).double())[:, None]",
    "x = x + torch.outer(torch.arange(B), torch.ones(D))[:, None, :] * 0.1",
    "x = x * torch.tensor([0.5] + [1.0] * (D - 1))",
    "x = torch.where((torch.arange(x.shape[1]) < 3)[:, None], x, 0.5 * x)",
    "x = x * (torch.ones(S, S).tril().sum(1) / S)[:, None].double()",
    "x = x + 0.1 * torch.full((S, D), 2.0).cumsum(0)",
)


def constant(d: Draft, init: Lines, outside: bool = False) -> Lines:
    d.features.add("constant")
    return [d.rng.choice(CONSTANTS)]


WRITES = (
    "h[:, 0] = 0.0",
    "h[:, 1:] += 0.5 * x[:, :-1]",
    "h[..., ::2] *= 2.0",
    "h[:, ::2, 1:] = 0.25",
    "h[:, :, 0].fill_(1.0)",
    "h.masked_fill_(h > 0.5, 0.0)",
    "h[h > 0.7] = 0.1",
    "h.narrow(1, 0, 2).mul_(2.0)",
    "h.view(h.shape[0], -1)[:, :2] = 0.0",
    "h.flatten(1)[:, 1:3].zero_()",
    "h.transpose(1, 2)[..., -1].mul_(0.5)",
    "h.mT[:, 0].add_(1.0)",
    "h.movedim(1, 0)[0].mul_(3.0)",
    "h.permute(2, 0, 1)[0].fill_(0.5)",
    "h.view_as(x)[:, -1] = 0.0",
    "h.detach()[:, 0] = 0.0",
    "h.select(1, 0).copy_(x[:, -1])",
    "h.unsqueeze(1).mul_(0.5)",
    "h.diagonal(dim1=-2, dim2=-1).fill_(0.5)",
    "h.clamp_(min=-0.5)",
    "torch.clamp_(h, -1.0, 1.0)",
    "F.relu(h, inplace=True)",
    "h.transpose(1, 2).reshape(h.shape[0], -1).mul_(2.0)",
    "h.reshape(-1, D)[:, 0] = 0.0",
    "h.index_fill_(1, torch.tensor([0, 1]), 0.5)",
    "h.index_add_(1, torch.tensor([0, 1]), x[:, :2])",
    "h.index_copy_(1, torch.tensor([1, 0]), x[:, :2])",
    "h.index_put_((torch.arange(h.shape[0]), torch.zeros(h.shape[0], dtype=torch.long)), torch.tensor(0.5).double())",
    "h[torch.arange(h.shape[0]), -1] = 0.5",
    "h[:, torch.tensor([0, 1])] = 0.0",
    "h.scatter_(1, torch.zeros(h.shape[0], 1, D, dtype=torch.long), 0.5)",
    "h.unflatten(-1, (H, -1))[:, :, 0].mul_(0.5)",
    "h.swapaxes(0, 1)[1].zero_()",
    "h.split(1, 1)[0]",
    "h[:, 0], h[:, 1] = h[:, 1].clone(), h[:, 0].clone()",
    "h[:, 1:].copy_(h[:, :-1].clone())",
    "h.mul_(2.0).add_(1.0)",
    "h.sub_(h.mean(1, keepdim=True))",
    "h[0] = 0.5",
    "h[-1].mul_(2.0)",
    "h.squeeze(0).squeeze().mul_(0.5)",
    "h.real.mul_(0.5)",
    "h.T if h.dim() == 2 else h.mul_(0.5)",
    "h.tril_()",
    "h.addcmul_(x, x, value=0.1)",
    "h.lerp_(x.detach(), 0.3)",
    "h.fill_diagonal_(0.0) if h.dim() == 2 else h[:, 0].fill_(0.1)",
    "torch.add(x, 1.0, out=h) if not torch.is_grad_enabled() else h.add_(x)",
)
ALIASES = (
    ("first = h[:, :1]", "h.mul_(2.0)", "h = h + first"),
    ("flat = h.view(h.shape[0], -1)", "h[:, 0] = 0.0", "h = h + flat.sum(1)[:, None, None] * 0.1"),
    ("other = h.transpose(1, 2)", "other[:, 0].mul_(2.0)", "h = h * 0.5"),
    ("other = h.detach()", "other[:, 0] = 0.0", "h = h + other"),
    ("other = h.reshape(h.shape[0], -1)", "other.mul_(2.0)", "h = h + 0.1"),
    ("a, b = h[..., :1], h[..., 1:]", "a.mul_(2.0)", "b.add_(0.5)"),
)


def in_place(d: Draft, init: Lines, outside: bool = False) -> Lines:
    d.features.add("in-place")
    start = d.rng.choice(
        (
            "h = x.clone()",
            f"h = {d.linear(init)}(x)",
            "h = x * 1.0",
            "h = torch.zeros_like(x)",
            "h = x.transpose(1, 2).contiguous().transpose(1, 2)",
        )
    )
    lines = [start]
    if d.rng.random() < 0.25:
        lines += d.rng.choice(ALIASES)
    else:
        lines += d.rng.choices(WRITES, k=d.rng.choice((1, 1, 2)))
    return [*lines, d.rng.choice(("x = x + h", "x = h", "x = x * h.tanh()"))]


BUFFERS = (
    ("self.register_buffer('{n}', torch.zeros((), dtype=torch.long))", ("self.{n} += 1",)),
    (
        "self.register_buffer('{n}', torch.zeros((), dtype=torch.long))",
        ("self.{n}.add_(1)", "x = x * (1.0 + 0.1 * self.{n})"),
    ),
    ("self.register_buffer('{n}', torch.ones(()))", ("x = x * self.{n}", "self.{n}.mul_(0.9)")),
    (
        "self.register_buffer('{n}', torch.zeros(D))",
        ("self.{n}.mul_(0.9).add_(0.1 * x.detach().mean((0, 1)))", "x = x - self.{n}"),
    ),
    (
        "self.register_buffer('{n}', torch.zeros(D))",
        ("x = x - self.{n}", "with torch.no_grad():", "    self.{n}.lerp_(x.mean((0, 1)), 0.1)"),
    ),
    (
        "self.register_buffer('{n}', torch.zeros(D), persistent=False)",
        ("self.{n}.copy_(x.detach().amax((0, 1)))", "x = x + 0.1 * self.{n}"),
    ),
    (
        "self.register_buffer('{n}', torch.zeros(D))",
        ("self.{n} = 0.9 * self.{n} + 0.1 * x.detach().mean((0, 1))", "x = x + self.{n}"),
    ),
    ("self.register_buffer('{n}', torch.zeros(D))", ("self.{n}[0] = x.detach().mean()", "x = x + self.{n}")),
)


def written(d: Draft, init: Lines, outside: bool = False) -> Lines:
    d.features.add("buffer written")
    if d.rng.random() < 0.3:
        name = d.name("bn")
        momentum = d.rng.choice(("", "", ", momentum=None", ", affine=False", ", track_running_stats=False"))
        init.append(f"self.{name} = nn.BatchNorm1d(D{momentum})")
        if d.rng.random() < 0.4:
            init.append(f"self.{name}.eval()")
            d.features.add("eval")
        return [f"x = self.{name}(x.transpose(1, 2)).transpose(1, 2)"]
    register, body = d.rng.choice(BUFFERS)
    name = d.name("buffer")
    init.append(register.format(n=name))
    return [line.format(n=name) for line in body]


TABLES = (
    ("self.register_buffer('{n}', torch.linspace(0.5, 1.5, S))", "x = x * self.{n}[: x.shape[1], None]"),
    ("self.register_buffer('{n}', torch.randn(D), persistent=False)", "x = x + self.{n}"),
    ("self.{n} = torch.linspace(0.5, 1.5, D)", "x = x * self.{n}"),
    ("self.register_buffer('{n}', torch.linspace(0.5, 1.5, B))", "x = x * self.{n}[:, None, None]"),
    ("self.register_buffer('{n}', torch.randn(S, D))", "x = x + self.{n}[torch.arange(x.shape[1])]"),
    (
        "self.register_buffer('{n}', torch.arange(H) / H)",
        "x = (x.unflatten(-1, (H, -1)) * (1.0 + self.{n})[:, None]).flatten(-2)",
    ),
    ("self.{n} = [torch.randn(D), torch.randn(D)]", "x = x * self.{n}[1]"),
    ("self.{n} = nn.Parameter(torch.ones(D), requires_grad=False)", "x = x * self.{n}"),
)


def read(d: Draft, init: Lines, outside: bool = False) -> Lines:
    d.features.add("buffer read")
    register, use = d.rng.choice(TABLES)
    name = d.name("table")
    init.append(register.format(n=name))
    return [use.format(n=name)]


SHARED = (
    ("self.register_buffer('table', torch.linspace(0.5, 1.5, S))", "return x * self.table[: x.shape[1], None]"),
    ("self.register_buffer('table', torch.randn(S, D), persistent=False)", "return x + self.table[: x.shape[1]]"),
    ("self.fc = nn.Linear(D, D)", "return x + self.fc(x)"),
    ("self.norm = nn.LayerNorm(D)", "return self.norm(x)"),
    ("self.table = torch.linspace(0.5, 1.5, D)", "return x * self.table"),
    (
        "self.a, self.register_b = nn.Linear(D, 2), self.register_buffer('b', torch.randn(2, D))",
        "return x + self.a(x) @ self.b",
    ),
)


def shared(d: Draft, init: Lines, outside: bool = False) -> Lines:
    if outside:
        return constant(d, init)
    d.features.add("shared module")
    if not d.shared:
        made, use = d.rng.choice(SHARED)
        d.shared = [
            "class Shared(nn.Module):",
            "    def __init__(self):",
            "        super().__init__()",
            f"        {made}",
            "",
        ]
        d.shared += ["    def forward(self, x):", f"        {use}", ""]
        init.append("self.shared = shared")
    return ["x = self.shared(x)"]


FLOWS = (
    ("if x.shape[1] > 4:", "    x = 0.5 * x"),
    ("if x.shape[0] == x.shape[1]:", "    x = x + x.transpose(0, 1)"),
    ("for k in range(min(3, x.shape[1])):", "    x = x + 0.1 * x[:, k : k + 1]"),
    ("if self.training:", "    x = 0.5 * x"),
    ("x = x.roll(1, 1) if x.shape[1] % 2 == 0 else x.flip(1)",),
    ("while x.abs().shape[-1] > 1000:", "    x = x[..., ::2]"),
    ("x = x / x.shape[1] * x.numel() / x.shape[0] * 0.1",),
)


def flow(d: Draft, init: Lines, outside: bool = False) -> Lines:
    d.features.add("control flow")
    return list(d.rng.choice(FLOWS))


def detached(d: Draft, init: Lines, outside: bool = False) -> Lines:
    d.features.add("detached")
    name = d.linear(init)
    return list(
        d.rng.choice(
            (
                ("with torch.no_grad():", f"    g = {name}(x)", "x = x + g.tanh()"),
                (f"x = x + {name}(x.detach())",),
                (f"x = x + {name}(x).detach()",),
                (f"x = x * torch.sigmoid({name}(x)).detach() + {name}(x)",),
                (f"g = {name}(x)", "x = x + (g.round() - g).detach() + g"),
            )
        )
    )


MIXED = (
    "x = x + x.mean(1, keepdim=True)",
    "x = x + x.amax(1, keepdim=True)",
    "x = x * x.softmax(1)",
    "x = x.sort(1).values",
    "x = x.cumsum(1) * 0.3",
    "x = x.flip(1)",
    "x = x.roll(1, 1)",
    "x = x + x.mean(0, keepdim=True)",
    "x = x - x.logsumexp(-1, keepdim=True)",
    "x = F.normalize(x, dim=-1)",
    "x = x / (1.0 + x.std(-1, keepdim=True))",
    "x = torch.cat([x[:, :1], x[:, :-1]], 1)",
    "x = F.pad(x, (0, 0, 1, 0))[:, :-1]",
    "x = torch.einsum('bsd,btd->bst', x, x).softmax(-1) @ x",
    "x = x.gather(1, x.argsort(1))",
    "x = torch.stack([x, -x]).amax(0)",
    "x = x.view(x.shape[0], x.shape[1], H, -1).mean(2).repeat(1, 1, H)",
    "x = torch.where(x > 0, x, 0.1 * x)",
    "x = x[:, torch.arange(x.shape[1] - 1, -1, -1)]",
    "x = x + x.new_ones(x.shape[1], 1) * 0.1",
    "x = x * x.norm(dim=(1, 2), keepdim=True)",
    "x = x.bmm(x.transpose(1, 2)).bmm(x) * 0.1",
    "x = x.unsqueeze(2).expand(-1, -1, 2, -1).sum(2)",
)


def mixed(d: Draft, init: Lines, outside: bool = False) -> Lines:
    return [d.rng.choice(MIXED)]


def masked_x(d: Draft, init: Lines, outside: bool = False) -> Lines:
    if not d.keep:
        return mixed(d, init)
    d.features.add("padding mask")
    return [
        d.rng.choice(
            (
                "x = x * keep[..., None]",
                "x = x.masked_fill(~keep.bool()[..., None], 0.0)",
                "x = (x * keep[..., None]).sum(1, keepdim=True) / keep.sum(1).clamp(min=1)[:, None, None] + x",
                "x = x - x.masked_fill(~keep.bool()[..., None], -1e9).amax(1, keepdim=True).clamp(min=-5.0)",
            )
        )
    ]


def layer(d: Draft, init: Lines, outside: bool = False) -> Lines:
    name = d.name("layer")
    first = d.rng.random() < 0.5
    init.append(
        f"self.{name} = nn.TransformerEncoderLayer(D, H, 2 * D, dropout=0.0, batch_first=True, norm_first={first})"
    )
    return [f"x = self.{name}(x)"]


def remembered(d: Draft, init: Lines, outside: bool = False) -> Lines:
    """Two calls of one module, and the same parameter by two ways."""
    d.features.add("reuse")
    name = d.linear(init)
    return list(
        d.rng.choice(
            (
                (f"x = x + {name}({name}(x).tanh())",),
                (f"x = x + F.linear({name}(x), {name}.weight.t())",),
                (f"for _ in range(2): x = x + 0.5 * {name}(x).tanh()",),
            )
        )
    )


def parameter_written(d: Draft, init: Lines, outside: bool = False) -> Lines:
    d.features.add("parameter written")
    name = d.linear(init)
    return [
        *d.rng.choice(
            (
                ("with torch.no_grad():", f"    {name}.weight.clamp_(-0.2, 0.2)"),
                (f"{name}.weight.data = F.normalize({name}.weight.data)",),
                (f"{name}.weight.data.mul_(0.5)",),
            )
        ),
        f"x = x + {name}(x)",
    ]


def counted(d: Draft, init: Lines, outside: bool = False) -> Lines:
    """A Python number that a forward changes."""
    d.features.add("Python state")
    name = d.name("steps")
    init.append(f"self.{name} = 0")
    return [f"self.{name} += 1", f"x = x * (1.0 + 0.1 * self.{name})"]


Part = Callable[..., Lines]
PARTS: tuple[tuple[Part, float], ...] = (
    (attention, 5),
    (many_headed, 0.5),
    (gated, 2),
    (plain, 3),
    (convolution, 0.7),
    (mixture, 1),
    (constant, 2),
    (in_place, 2.5),
    (written, 1),
    (read, 1),
    (shared, 0.8),
    (flow, 0.6),
    (detached, 0.7),
    (mixed, 1.5),
    (masked_x, 0.6),
    (layer, 0.4),
    (remembered, 0.4),
    (parameter_written, 0.08),
    (counted, 0.05),
)


# -- differences between blocks, ties, modes --------------------------------------------------------------------------

VARIATIONS = (
    ("self.scale = 0.5 if i == {k} else 1.0", ("x = x * self.scale",)),
    ("self.flag = i == {k}", ("if self.flag:", "    x = x.flip(1)")),
    ("self.act = nn.ReLU() if i == {k} else nn.GELU()", ("x = x + self.act(x)",)),
    ("self.register_buffer('ramp', torch.arange(D) * (0.1 + 0.1 * i))", ("x = x + self.ramp",)),
    ("self.shift = torch.full((D,), 0.1 * (i == {k}))", ("x = x + self.shift",)),
    ("self.eps = 10.0 ** -(i + 1)", ("x = x / (x.std(-1, keepdim=True) + self.eps)",)),
    ("self.window = 1 + i", ("x = x * (torch.arange(x.shape[1]) >= self.window)[:, None]",)),
    ("self.extra = nn.Linear(D, D, bias=i != {k})", ("x = x + self.extra(x)",)),
    ("self.extra = nn.Linear(D, D) if i == {k} else nn.Identity()", ("x = x + self.extra(x)",)),
    ("self.drop = nn.Dropout(0.5 if i == {k} else 0.0)", ("x = self.drop(x)",)),
    ("self.size = (1, S, 1)", ("x = x * torch.full(self.size, 0.5 + 0.1)",)),
)


def variation(d: Draft) -> Lines:
    d.features.add("variation")
    k = d.rng.randrange(3)
    made, use = d.rng.choice(VARIATIONS)
    d.init.append(made.format(k=k))
    if "Dropout" in made:
        d.features.add("eval")
        d.after.append(f"for block in model.blocks[{k} : {k + 1}]: block.eval()")
    return list(use)


def afterwards(d: Draft) -> None:
    """What is done to the finished model: ties, frozen parameters, modes."""
    rng = d.rng
    if d.count >= 2 and rng.random() < 0.3:
        _tie_blocks(d)
    if d.linears and rng.random() < 0.08 and len({*d.linears}) >= 2:
        first, second = rng.sample(sorted({*d.linears}), 2)
        d.init.append(
            f"self.{second}.bias = self.{first}.bias if self.{first}.bias.shape == self.{second}.bias.shape else self.{second}.bias"
        )
        d.features.add("tie")
    if d.tokens and d.head_out == "V" and rng.random() < 0.25:
        d.after.append("model.head.weight = model.embed.weight")
        d.features.add("tie")
    if rng.random() < 0.12:
        d.features.add("frozen")
        block = rng.randrange(d.count)
        choices = [f"model.blocks[{block}].requires_grad_(False)", "model.embed.requires_grad_(False)"]
        choices += [f"model.blocks[{block}].{name}.weight.requires_grad_(False)" for name in (*d.linears, *d.norms)]
        d.after.append(rng.choice(choices))
    if rng.random() < 0.06:
        d.features.add("eval")
        d.after.append(rng.choice(("model.eval()", f"model.blocks[{rng.randrange(d.count)}].eval()")))
    if rng.random() < 0.03 and d.count >= 2:
        d.after.append("model.blocks[0].double()")
        d.after.append("model.blocks[-1].to(torch.float64)")


def _tie_blocks(d: Draft) -> None:
    rng = d.rng
    first, second = rng.sample(range(d.count), 2)
    own = [*((name, True) for name in d.linears), *((name, False) for name in d.norms)]
    if not own:
        return
    d.features.add("tie")
    for name, is_linear in rng.sample(own, min(len(own), rng.choice((1, 1, 2)))):
        part = rng.choice((".weight", ".weight", "", ".bias" if is_linear else ""))
        d.after.append(f"model.blocks[{second}].{name}{part} = model.blocks[{first}].{name}{part}")
