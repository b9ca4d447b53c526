"""``torch.export`` of the twin, and its result as a graph whose placeholders say what they are."""

from __future__ import annotations

import logging
import traceback
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

from autopar.capture.backward import OPAQUE_HINT, own_gradients_refused, refuse_hooks
from autopar.capture.batch import BatchStructure, rebuild_batch
from autopar.capture.clone import LOSS, Twin, twin
from autopar.capture.data import data_is_detached
from autopar.capture.repeat import Lifted, Repeats, expand, members, record, traced_once
from autopar.errors import CaptureError
from autopar.graph import Parameter
from autopar.torch_private import as_if_exported, is_fake, masks_as_given, memory, plain_averages
from passes.clean.nodes import like, packet


class _RefusedError(Exception):
    """What the model raised while it was exported.

    Not a ``RuntimeError``: on those, ``torch.export`` prints the whole partial graph to stderr.
    """

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class _Captured(nn.Module):
    """Calls the model and picks the loss, so that the loss is all that the graph computes."""

    def __init__(self, module: nn.Module, loss_fn: Callable[..., Any] | None, structure: BatchStructure) -> None:
        super().__init__()
        self.module = module
        self.loss_fn = loss_fn
        self.structure = structure

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        try:
            with data_is_detached():
                return call_model(self.module, self.structure, self.loss_fn, tensors)
        except Exception as error:
            raise _RefusedError(error) from error


def call_model(
    module: nn.Module, structure: BatchStructure, loss_fn: Callable[..., Any] | None, tensors: Sequence[torch.Tensor]
) -> torch.Tensor:
    """The loss of a batch given as its tensors, in the order of the structure's leaves: what a training step computes."""
    batch = rebuild_batch(structure, tensors)
    arguments, targets = batch if structure.paired else (batch, None)
    output = module(**arguments) if isinstance(arguments, dict) else module(*arguments)
    if loss_fn is not None:
        output = loss_fn(output, targets) if structure.paired else loss_fn(output)
    return find_loss(output, loss_fn is not None)


def find_loss(output: Any, from_loss_fn: bool) -> torch.Tensor:
    """The 0-d loss in what a model returned: itself, ``.loss``, ``["loss"]``, the first or the only 0-d item of a tuple."""
    candidates = [output, getattr(output, "loss", None)]
    if isinstance(output, dict):
        candidates.append(output.get("loss"))
    if isinstance(output, tuple | list) and output:
        candidates.append(output[0])
        scalars = [item for item in output if _is_loss(item)]
        candidates += scalars if len(scalars) == 1 else []
    for candidate in candidates:
        if _is_loss(candidate):
            return candidate
    kind = _outputs(output)
    if from_loss_fn:
        raise CaptureError(
            f"loss_fn returned {kind}, not a 0-d floating loss", hint="reduce the loss: .mean() or .sum()"
        )
    raise CaptureError(
        f"the model returned {kind}, in which there is no 0-d floating loss",
        hint="return the loss, an object with .loss or a tuple that starts with it (transformers: give labels in the batch), "
        "or pass loss_fn with the batch as (inputs, targets)",
    )


def _outputs(output: Any) -> str:
    """What a model returned, in words, with the names and shapes of what is in it."""
    if isinstance(output, torch.Tensor):
        return f"a tensor {str(output.dtype).removeprefix('torch.')}{list(output.shape)}"
    items: Any = dict(output) if isinstance(output, dict) else vars(output) if hasattr(output, "__dict__") else {}
    if isinstance(output, tuple | list):
        items = {str(index): item for index, item in enumerate(output)}
    inside = [
        f"{name}: {_outputs(item) if isinstance(item, torch.Tensor) else type(item).__name__}"
        for name, item in items.items()
    ]
    return f"a {type(output).__name__}" + (f" ({', '.join(inside)})" if inside else "")


def _is_loss(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 0 and value.is_floating_point()


def export(
    model: nn.Module, structure: BatchStructure, loss_fn: Callable[..., Any] | None, dtype: torch.dtype | None
) -> tuple[fx.GraphModule, dict[str, torch.Tensor], dict[str, str]]:
    """Export the model's twin.

    Returns the lifted graph with labelled placeholders (``passes.clean.nodes``), the values of its buffers and lifted constants
    by name (absent where the model is on meta), and the class name of every module by path (``""`` is the model).
    """
    refuse_hooks(model)
    if isinstance(loss_fn, nn.Module) and next(loss_fn.parameters(), None) is not None:
        raise CaptureError(
            "loss_fn has parameters of its own", hint="make it part of the model, and return the loss from there"
        )
    repeats = _repeats(model, dtype, loss_fn, structure)
    copied = twin(model, dtype, loss_fn, without=repeats.unread(model) if repeats is not None else ())
    program = _export(copied, structure, repeats)
    lifted = _lifted(program)
    whole = expand(program.graph_module, lifted, repeats, model) if repeats is not None else lifted
    if whole is None:
        copied = twin(model, dtype, loss_fn)
        program = _export(copied, structure)
        whole = _lifted(program)
    gm = program.graph_module
    values = _label(gm, whole, program.constants, model, copied, structure)
    _check_dtypes(gm)
    classes = {path: type(module).__name__ for path, module in model.named_modules()}
    return gm, values, classes


def _repeats(
    model: nn.Module, dtype: torch.dtype | None, loss_fn: Callable[..., Any] | None, structure: BatchStructure
) -> Repeats | None:
    """What the model repeats. A twin of its own is run, since what a forward leaves in its module's attributes would be exported."""
    if not members(model):
        return None
    for meta in (True, False):
        copied = twin(model, dtype, loss_fn, meta=meta)

        def run(copied: Twin = copied, device: str = "meta" if meta else "cpu") -> None:
            with copied.mode, _traceable(), data_is_detached(), as_if_exported():
                tensors = [torch.empty(leaf.shape, dtype=leaf.dtype, device=device) for leaf in structure.leaves]
                call_model(copied.module, structure, copied.loss_fn, tensors)

        repeats = record(copied.module, run)
        if repeats is not None:
            return repeats
    return None


@contextmanager
def _traceable() -> Iterator[None]:
    """Inside, torch's modules compute the same without looking at values, and what would be lost is refused."""
    with own_gradients_refused(), masks_as_given(), plain_averages():
        yield


def _lifted(program: Any) -> list[Lifted]:
    nodes = {node.name: node for node in program.graph_module.graph.nodes if node.op == "placeholder"}
    specs = program.graph_signature.input_specs
    return [(spec.kind.name, str(spec.target or ""), nodes[spec.arg.name]) for spec in specs]


def _export(copied: Twin, structure: BatchStructure, repeats: Repeats | None = None) -> Any:
    with copied.mode:
        tensors = tuple(torch.empty(leaf.shape, dtype=leaf.dtype, device="cpu") for leaf in structure.leaves)
    captured = _Captured(copied.module, copied.loss_fn, structure)
    names = ("torch.export", "torch.fx.experimental.symbolic_shapes", "torch._subclasses.fake_tensor")
    noisy = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in noisy]
    for logger in noisy:
        logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), ExitStack() as stack:
            warnings.simplefilter("ignore")
            stack.enter_context(_traceable())
            if repeats is not None:
                stack.enter_context(traced_once(captured.module, repeats))
            return torch.export.export(captured, tensors, strict=False)
    except _RefusedError as refused:
        if isinstance(refused.error, CaptureError):
            raise refused.error from None
        raise _explain(refused.error) from refused.error
    except Exception as error:
        raise _explain(error) from error
    finally:
        for logger, level in zip(noisy, levels, strict=True):
            logger.setLevel(level)


def _explain(error: Exception) -> CaptureError:
    """The user's source line and what it did."""
    ours = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))  # a mode's frames are ours wherever it is
    frames: Sequence[traceback.FrameSummary] = traceback.extract_tb(error.__traceback__)
    user = [f for f in frames if not f.filename.startswith((*ours, "<")) and not f.filename.endswith("contextlib.py")]
    kind, text = type(error).__name__, str(error).strip().split("\n")[0]
    dependent = "DataDependent" in kind or "data-dependent" in str(error).lower() or "_local_scalar_dense" in str(error)
    what = "its control flow or a shape depends on the data" if dependent else f"{kind}: {text}"
    if not user:
        return CaptureError(f"torch.export refused the model: {what}", hint=OPAQUE_HINT)
    frame = user[-1]
    line = f" `{frame.line}`" if frame.line else ""
    hint = OPAQUE_HINT if dependent else f"the model must run on this batch by itself first; if it does, {OPAQUE_HINT}"
    return CaptureError(f"torch.export refused {frame.filename}:{frame.lineno}{line}: {what}", hint=hint)


def _label(
    gm: fx.GraphModule,
    lifted: Sequence[Lifted],
    constants: dict[str, Any],
    model: nn.Module,
    copied: Twin,
    structure: BatchStructure,
) -> dict[str, torch.Tensor]:
    """Say on each placeholder what it is, make every ``meta["val"]`` a plain meta tensor; the values of buffers and constants."""
    for node in (node for part in gm.modules() if isinstance(part, fx.GraphModule) for node in part.graph.nodes):
        if "val" in node.meta:
            node.meta["val"] = _plain(node.meta["val"], node)
    names = _parameter_names(model)
    shapes = dict(model.named_parameters())
    buffers = dict(copied.module.named_buffers(remove_duplicate=False))
    sharing = _sharing(buffers, model)
    names_of: dict[int, str] = {}
    for name, tensor in buffers.items():
        names_of.setdefault(id(tensor), name)
    first: dict[str, fx.Node] = {}
    values: dict[str, torch.Tensor] = {}
    leaves = iter(structure.leaves)
    for kind, lifted_as, node in lifted:
        target = lifted_as.removeprefix("module.")
        if lifted_as.startswith("loss_fn."):
            target = f"{LOSS}.{lifted_as.removeprefix('loss_fn.')}"
        if kind == "USER_INPUT":
            node.meta["input"] = next(leaves).name
        elif kind == "PARAMETER":
            name, tied = names[target]
            if name in first:
                node.replace_all_uses_with(first[name])
                gm.graph.erase_node(node)
                continue
            first[name] = node
            value, size = node.meta["val"], tuple(shapes[name].shape)
            node.meta["parameter"] = Parameter(
                name, name, size, size, value.dtype, tied=tied, trainable=shapes[name].requires_grad
            )
        else:
            if target in buffers:
                target = names_of[id(buffers[target])]  # of several names of one buffer the first, as parameters have
            node.meta["buffer"] = target
            node.meta["lifted"] = target not in buffers
            if target in sharing:
                node.meta["shares"] = sharing[target]
            real = constants.get(lifted_as)
            if target in copied.buffers:
                values[target] = copied.buffers[target]
            elif isinstance(real, torch.Tensor) and not is_fake(real):
                values[target] = real
    return values


def _sharing(names: Collection[str], model: nn.Module) -> dict[str, str]:
    """For each tensor of the model that shows memory of another one (a view of it, not the tensor itself): that one's name."""
    found: dict[int, dict[int, str]] = {}
    places = {}
    for name in (*dict(model.named_parameters()), *names):
        path, _, attribute = name.rpartition(".")
        tensor = getattr(model.get_submodule(path), attribute)
        places[name] = (memory(tensor), id(tensor))
        found.setdefault(memory(tensor), {}).setdefault(id(tensor), name)
    others = {name: [n for key, n in found[held].items() if key != own] for name, (held, own) in places.items()}
    return {name: first[0] for name, first in others.items() if first}


_ONE_DTYPE = (
    "aten.linear",
    "aten.matmul",
    "aten.mm",
    "aten.bmm",
    "aten.addmm",
    "aten.conv1d",
    "aten.conv2d",
    "aten.conv3d",
)


def _check_dtypes(gm: fx.GraphModule) -> None:
    """Refuse products of different dtypes, which a device would refuse too: shapes alone, which export looks at, do not tell."""
    for node in gm.graph.nodes:
        if node.op != "call_function" or packet(node) not in _ONE_DTYPE:
            continue
        given = [n for n in node.all_input_nodes if isinstance(n.meta.get("val"), torch.Tensor)]
        dtypes = {n.meta["val"].dtype for n in given}
        if len(dtypes) > 1:
            words = ", ".join(
                f"{n.meta.get('input', n.name)} {str(n.meta['val'].dtype).removeprefix('torch.')}" for n in given
            )
            raise CaptureError(
                f"{packet(node)} takes tensors of one dtype and gets {words}\n{_trace(node)}",
                hint="give the batch in the model's dtype, or pass precision=..., which casts parameters and floating inputs alike",
            )


def _plain(value: Any, node: fx.Node) -> Any:
    if isinstance(value, torch.Tensor):
        if not all(type(size) is int for size in value.shape):
            raise CaptureError(
                f"a shape depends on the data: {packet(node)} gives {list(value.shape)}\n{_trace(node)}", OPAQUE_HINT
            )
        return like(value)
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        raise CaptureError(f"a Python number depends on the data: {packet(node)}\n{_trace(node)}", OPAQUE_HINT)
    if isinstance(value, tuple | list):
        return type(value)(_plain(item, node) for item in value)
    return value


def _trace(node: fx.Node) -> str:
    """The last line of the user's code that made the node."""
    trace = str(node.meta.get("stack_trace") or "").strip().split("\n")
    return "\n".join(trace[-2:])


def _parameter_names(model: nn.Module) -> dict[str, tuple[str, tuple[str, ...]]]:
    """For every name of every parameter: the parameter's first name, and its other names."""
    by_identity: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        by_identity.setdefault(id(parameter), []).append(name)
    return {name: (group[0], tuple(group[1:])) for group in by_identity.values() for name in group}
