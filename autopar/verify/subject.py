"""A model with what one device computes for its batch, in float64: what every program of it must equal."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from autopar.capture import BatchStructure, WholeFloat64, capture, flatten_batch
from autopar.capture.export import call_model
from autopar.errors import BatchError, ModelError
from autopar.graph import Graph
from autopar.rules.operands import op_name
from autopar.shard import annotate

_DROPOUT_ARGUMENTS = ("dropout_p", "dropout")
_DRAWS = ("kernels_random.uniform", "kernels_random.normal")  # what capture makes of torch's own


@dataclass(frozen=True)
class Subject:
    """The captured graph, the state dict, the batch by input name, and eager PyTorch's loss and gradients by parameter name.

    ``dropout`` says whether the model has dropout, which is off here. ``buffers`` are those that the forward pass writes, after it.
    """

    graph: Graph
    state: dict[str, Tensor]
    batch: dict[str, Tensor]
    loss: float
    gradients: dict[str, Tensor]
    dropout: bool = False
    buffers: dict[str, Tensor] = field(default_factory=dict)


class WithoutDropout(TorchFunctionMode):
    """A context in which dropout has probability 0, however a model asks for it: a module, a function, an argument of attention.

    ``seen`` tells whether any was asked for.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if "dropout" in name:
            # (input, p, training, ...) in every spelling, of torch and of torch.nn.functional
            self.seen = self.seen or bool(args[1] if len(args) > 1 else kwargs.get("p", 0.5))
            rest = {key: value for key, value in kwargs.items() if key != "p"}
            return func(args[0], 0.0, *args[2:], **rest) if args else func(p=0.0, **rest)
        if name == "scaled_dot_product_attention" and len(args) > 4:
            self.seen = self.seen or bool(args[4])
            args = (*args[:4], 0.0, *args[5:])
        elif name == "multi_head_attention_forward":
            args, kwargs = self._by_name(func, args, kwargs)
        for key in _DROPOUT_ARGUMENTS:
            if isinstance(kwargs.get(key), float):
                self.seen = self.seen or bool(kwargs[key])
                kwargs[key] = 0.0
        return func(*args, **kwargs)

    @staticmethod
    def _by_name(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        bound = inspect.signature(func).bind(*args, **kwargs)
        return (), dict(bound.arguments)


def make_subject(
    model: nn.Module, batch: Any, loss_fn: Callable[..., Any] | None = None, *, name: str | None = None
) -> Subject:
    """Capture a copy of ``model`` in float64 and run it eagerly, forward and backward. ``model`` itself is not touched.

    Raises:
        ModelError: parameters or buffers on meta, which have no values; random numbers other than dropout.
        BatchError: a batch on meta.
        CaptureError: the model cannot be exported.
    """
    if any(tensor.is_meta for tensor in model.state_dict().values()):
        raise ModelError("the model is on meta, where parameters have no values", "build it on the CPU to verify it")
    model = copy.deepcopy(model).cpu().double().train()
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if getattr(config, "_experts_implementation", None) is not None:
            config._experts_implementation = "eager"  # transformers' grouped products know no float64
    recurrent = [module for module in model.modules() if isinstance(module, nn.RNNBase) and module.dropout]
    for module in recurrent:
        module.dropout = 0.0  # handed to the kernel without a name
    with WholeFloat64(), WithoutDropout() as off:
        graph = annotate(capture(model, batch, loss_fn, precision="float64", name=name))
        assert isinstance(graph.structure, BatchStructure)
        tensors = flatten_batch(graph.structure, batch)
        if any(tensor.is_meta for tensor in tensors.values()):
            raise BatchError("the batch is on meta and has no values", "give one on the CPU")
        _refuse_random(graph)
        tensors = {n: tensor.detach().cpu() for n, tensor in tensors.items()}
        state = {n: tensor.detach().clone() for n, tensor in model.state_dict().items()}  # before statistics move
        loss = call_model(model, graph.structure, loss_fn, tuple(tensors.values()))
        loss.backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    after = dict(model.named_buffers())
    written = {name: after[name].detach().clone() for name, buffer in graph.buffers.items() if buffer.persistent}
    return Subject(graph, state, tensors, float(loss.detach()), gradients, off.seen or bool(recurrent), written)


def _refuse_random(graph: Graph) -> None:
    """Two runs of a model that draws random numbers differ with or without autopar."""
    for layer in graph.layers:
        for node in graph.classes[layer.cls].graph.graph.nodes:
            if node.op == "call_function" and op_name(node.target) in _DRAWS:
                raise ModelError(
                    f"the model draws random numbers ({op_name(node.target).rpartition('.')[2]} ones, in {layer.name}), so no two runs "
                    "of it can be compared",
                    "give the drawn numbers in the batch; dropout alone is turned off by itself",
                )
