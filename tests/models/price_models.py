"""Small layer classes built node by node, and types written by hand, for the tests of the prices."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from autopar.devices import Cluster
from autopar.graph import Graph, GraphLayer, LayerClass, Value
from autopar.layer_price import LayerPrice
from autopar.plan import Axis, Role, Strategy
from autopar.price import order
from autopar.price.assemble import Candidate, assemble
from autopar.price.collectives import group, group_time_s
from autopar.price.layer import bind, divisible, size, sizes_on
from autopar.price.live_memory import PrefetchContext
from autopar.price.microbatch import Microbatch
from autopar.price.replicas import Replicas
from autopar.price.saved_activations import saved_activations
from autopar.price.table import build, flags
from autopar.price.trainer import EMITTED, TrainerModel
from autopar.shard.plan import MICROBATCH
from autopar.sharding import AxisTypes, Sharding
from autopar.techniques.sync import ALL_REDUCE
from autopar.types import Collective, I, P, R, S, SpmdType
from passes.pad import pad_class

aten = torch.ops.aten


class Builder:
    """Builds a graph whose nodes carry meta values."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        self.graph, self.dtype = fx.Graph(), dtype
        self.borders: dict[str, list[Value]] = {"activations": [], "inputs": [], "parameters": []}

    def border(self, kind: str, name: str, *shape: int, dtype: torch.dtype | None = None) -> fx.Node:
        value = Value(name, shape, dtype or self.dtype, requires_grad=(dtype or self.dtype).is_floating_point)
        node = self.graph.placeholder(name)
        node.meta["val"] = torch.empty(shape, dtype=value.dtype, device="meta")
        self.borders[kind].append(value)
        return node

    def call(self, op: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        node = self.graph.call_function(op, args, kwargs)
        values = fx.map_arg((args, kwargs), lambda n: n.meta["val"])
        node.meta["val"] = op(*values[0], **values[1])
        return node

    def done(self, name: str, *outputs: fx.Node) -> LayerClass:
        self.graph.output(tuple(outputs))
        made = tuple(
            Value(f"out{i}", tuple(n.meta["val"].shape), n.meta["val"].dtype, True) for i, n in enumerate(outputs)
        )
        return LayerClass(
            name=name,
            graph=fx.GraphModule(torch.nn.Module(), self.graph),
            activations=tuple(self.borders["activations"]),
            inputs=tuple(self.borders["inputs"]),
            constants=(),
            scalars=(),
            parameters=tuple(self.borders["parameters"]),
            outputs=made,
        )


def mlp(b: int, s: int, h: int, f: int, dtype: torch.dtype = torch.bfloat16) -> LayerClass:
    """``down(gelu(up(x)))`` without biases; nodes x, up, down, linear_default, gelu_default, linear_default_1."""
    g = Builder(dtype)
    x = g.border("activations", "x", b, s, h)
    up, down = g.border("parameters", "up", f, h), g.border("parameters", "down", h, f)
    hidden = g.call(aten.gelu.default, g.call(aten.linear.default, x, up))
    return g.done("mlp", g.call(aten.linear.default, hidden, down))


NO_PREFETCH = PrefetchContext()
_MLP = ("x", "up", "down", "linear_default", "gelu_default", "linear_default_1")


def mlp_types(role: Role) -> AxisTypes:
    """The textbook types of ``mlp`` for each role."""
    x, up, down, hidden, after, border, read, letters = {
        Role.DATA: (S(0), R, R, S(0), S(0), S(0), S(0), ("b", "b", "b")),
        Role.TENSOR: (I, S(0), S(1), S(2), P, I, R, ("n", "n", "k")),
        Role.TENSOR_SEQUENCE: (S(1), S(0), S(1), S(2), P, S(1), R, ("n", "n", "k")),
        Role.IDLE: (I, I, I, I, I, I, I, ()),
    }[role]
    ops = _MLP[3:]
    return AxisTypes(
        role=role,
        produced=dict(zip(_MLP, (x, up, down, hidden, hidden, after), strict=True)),
        needed=dict(zip(ops, ((read, up), (hidden,), (hidden, down)), strict=True)),
        outputs=(border,),
        letter=dict(zip(ops, letters, strict=False)),
        kernel={},
        cost_s=0.0,
    )


def solve_mlp(cls: LayerClass, role: Role, size: int) -> AxisTypes | None:
    """What stands in for the op-level optimum in the tests of ``Pricer``."""
    del cls, size
    return mlp_types(role)


def chain(cls: LayerClass, layers: int) -> Graph:
    """``layers`` layers of one class, one after the other."""
    (x,), (out,) = cls.activations, cls.outputs
    names = [f"v{i}" for i in range(layers + 1)]
    return Graph(
        name="chain",
        inputs=(Value("ids", x.shape[:2], torch.int64),),
        structure=None,
        parameters={},
        constants={},
        scalars=(),
        prelude=None,
        layers=tuple(
            GraphLayer(
                f"layers.{i}",
                cls.name,
                (names[i],),
                (),
                (),
                (),
                tuple(f"{i}.{p.name}" for p in cls.parameters),
                (names[i + 1],),
            )
            for i in range(layers)
        ),
        classes={cls.name: cls},
        values={name: Value(name, out.shape, out.dtype, True) for name in names},
        loss=names[-1],
        dtype=x.dtype,
        tokens=x.shape[0] * x.shape[1],
    )


def gpt_block(b: int, s: int, h: int, heads: int, dtype: torch.dtype = torch.bfloat16) -> LayerClass:
    """A GPT block without biases and dropout: fused qkv, causal attention, an MLP of 4h, two layer norms, two residuals."""
    g = Builder(dtype)
    x = g.border("activations", "x", b, s, h)
    norm1, qkv_w, out_w = (
        g.border("parameters", "norm1", h),
        g.border("parameters", "qkv", 3 * h, h),
        g.border("parameters", "out", h, h),
    )
    norm2, up, down = (
        g.border("parameters", "norm2", h),
        g.border("parameters", "up", 4 * h, h),
        g.border("parameters", "down", h, 4 * h),
    )
    qkv = g.call(aten.linear.default, g.call(aten.layer_norm.default, x, [h], norm1), qkv_w)
    split = g.call(aten.split.Tensor, qkv, h, 2)
    parts = []
    for i in range(3):
        part = g.graph.call_function(operator.getitem, (split, i))
        part.meta["val"] = split.meta["val"][i]
        parts.append(g.call(aten.transpose.int, g.call(aten.view.default, part, [b, s, heads, h // heads]), 1, 2))
    attended = g.call(aten.scaled_dot_product_attention.default, *parts, is_causal=True)
    merged = g.call(aten.reshape.default, g.call(aten.transpose.int, attended, 1, 2), [b, s, h])
    x1 = g.call(aten.add.Tensor, x, g.call(aten.linear.default, merged, out_w))
    hidden = g.call(aten.linear.default, g.call(aten.layer_norm.default, x1, [h], norm2), up)
    x2 = g.call(aten.linear.default, g.call(aten.gelu.default, hidden), down)
    return g.done("block", g.call(aten.add.Tensor, x1, x2))


def llama_block(b: int, s: int, h: int, heads: int, kv: int, f: int, dtype: torch.dtype = torch.bfloat16) -> LayerClass:
    """A Llama block as it is exported, without the rotary embedding: RMS norms in float32, grouped-query attention, SwiGLU."""
    g = Builder(dtype)
    x = g.border("activations", "x", b, s, h)
    d = h // heads
    shapes = {"norm1": (h,), "q": (h, h), "k": (kv * d, h), "v": (kv * d, h), "o": (h, h), "norm2": (h,)}
    shapes |= {"gate": (f, h), "up": (f, h), "down": (h, f)}
    w = {name: g.border("parameters", name, *shape) for name, shape in shapes.items()}

    def norm(value: fx.Node, weight: fx.Node) -> fx.Node:
        wide = g.call(aten.to.dtype, value, torch.float32)
        mean = g.call(aten.mean.dim, g.call(aten.pow.Tensor_Scalar, wide, 2), [-1], True)
        scaled = g.call(aten.mul.Tensor, wide, g.call(aten.rsqrt.default, g.call(aten.add.Tensor, mean, 1e-5)))
        return g.call(aten.mul.Tensor, weight, g.call(aten.to.dtype, scaled, dtype))

    def heads_of(value: fx.Node, weight: fx.Node, n: int) -> fx.Node:
        made = g.call(aten.linear.default, value, weight)
        return g.call(aten.transpose.int, g.call(aten.view.default, made, [b, s, n, d]), 1, 2)

    n1 = norm(x, w["norm1"])
    q, k, v = (heads_of(n1, w[name], n) for name, n in (("q", heads), ("k", kv), ("v", kv)))
    attended = g.call(aten.scaled_dot_product_attention.default, q, k, v, is_causal=True, enable_gqa=True)
    merged = g.call(aten.reshape.default, g.call(aten.transpose.int, attended, 1, 2), [b, s, h])
    x1 = g.call(aten.add.Tensor, x, g.call(aten.linear.default, merged, w["o"]))
    n2 = norm(x1, w["norm2"])
    gate = g.call(aten.silu.default, g.call(aten.linear.default, n2, w["gate"]))
    hidden = g.call(aten.mul.Tensor, gate, g.call(aten.linear.default, n2, w["up"]))
    return g.done("block", g.call(aten.add.Tensor, x1, g.call(aten.linear.default, hidden, w["down"])))


def replicated(cls: LayerClass, border: SpmdType = I) -> AxisTypes:
    """Every value whole on every rank (an idle axis)."""
    from autopar.ops.operands import operands

    nodes = [n for n in cls.graph.graph.nodes if n.op != "output"]
    return AxisTypes(
        role=Role.IDLE,
        produced={n.name: border for n in nodes},
        needed={n.name: (border,) * len(operands(n)) for n in nodes if n.op == "call_function"},
        outputs=(border,) * len(cls.outputs),
        letter={},
        kernel={},
        cost_s=0.0,
    )


def time_s(collective: Collective, bytes_total: float, axis_size: int, stride: int, cluster: Cluster) -> float:
    """Seconds of ``collective`` on ``bytes_total`` (see the module's docstring) over an axis of that size and stride."""
    return group_time_s(collective, bytes_total, group((Axis("axis", axis_size, stride),), cluster), cluster)


def price_layer(
    cls: LayerClass,
    sharding: Sharding,
    strategy: Strategy,
    cluster: Cluster,
    precision_name: str,
    trainer: TrainerModel = EMITTED,
    context: PrefetchContext = NO_PREFETCH,
) -> LayerPrice | None:
    """The price of ``cls`` when ``sharding`` binds its types to the mesh's axes and to the microbatch axis.

    ``sharding.axes`` are the mesh's, in the order of ``strategy.roles``, with ``Axis("microbatch", m, 0)`` among them. ``None`` where
    a local shape is not whole. ``Pricer.layer`` gives the same.
    """
    precision = trainer.precision(precision_name)
    # time is outermost: a microbatch is cut from the batch before the mesh divides it
    outermost = sorted(range(len(sharding.axes)), key=lambda i: sharding.axes[i].name != MICROBATCH)
    axes, types = tuple(sharding.axes[i] for i in outermost), tuple(sharding.types[i] for i in outermost)
    whole = build(cls, precision, trainer)[0].model_flops
    table, rows = build(pad_class(cls, Sharding(axes, types)), precision, trainer)
    table = replace(table, model_flops=whole)  # padding is no work of the model's
    found = tuple(flags(table, rows, t, trainer) for t in types)
    bound = bind(table, rows, types, found, trainer)
    given = sizes_on(bound, tuple((axis,) for axis in axes), cluster)
    if not divisible(bound, given):
        return None
    mesh = tuple(axis for axis in axes if axis.name != MICROBATCH)
    microbatches = math.prod(axis.size for axis in axes if axis.stride == 0)
    sized = size(bound, given, cluster, precision)
    passes = order.passes(sized, strategy, lambda: None, trainer)
    microbatch = Microbatch(sized, passes, saved_activations(sized, passes, strategy.options))
    flops = table.model_flops / microbatches
    replicas = Replicas(sized.counts, strategy.data_axes(mesh), cluster, precision, trainer, ALL_REDUCE)
    around = replicas.costs().of_step(microbatches, flops)
    return assemble(Candidate(strategy, microbatch, around, context, trainer), cluster, precision)
