"""``capture`` and its stages: export, clean, fold constants, segment."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx, nn

from autopar.capture.batch import BatchStructure, count_tokens, describe_batch, flatten_batch
from autopar.capture.boundary import errors_as_capture_errors
from autopar.capture.constants import fold_constants, share_constants, simplify_constants, used_constants
from autopar.capture.evaluate import Evaluator
from autopar.capture.export import export
from autopar.capture.kernels import make_opaque_without_meta_kernel
from autopar.capture.layers import build_layers, build_prelude, layer_interfaces, loss_node
from autopar.capture.masks import recognise_masks
from autopar.capture.opaque import opaque_modules
from autopar.capture.reach import freeze_unreached
from autopar.capture.routers import sample_routers
from autopar.capture.segment import mark_main, segment, updates
from autopar.capture.specialise import batch_guards, check_guards
from autopar.capture.storage import identity, ties
from autopar.errors import CaptureError
from autopar.graph import Buffer, Graph, Parameter, StateTensor, Value
from autopar.ops.meta import graph_meta, meta
from autopar.precision import PRECISIONS, name_of, torch_dtype
from autopar.torch_private import without_function_modes
from passes.clean import FINAL_STEPS, STEPS
from passes.clean.nodes import gradients_pass
from passes.runner import run as run_passes

Progress = Callable[[str], None]


def capture(
    model: nn.Module,
    batch: Any,
    loss_fn: Callable[..., Any] | None = None,
    *,
    precision: str | None = None,
    name: str | None = None,
    progress: Progress | None = None,
    local_batch_norm: bool = False,
) -> Graph:
    """Capture one training step's forward pass of ``model`` as layers.

    ``model`` may be on the CPU or on meta; capture doesn't change it. It traces a copy that has no memory for parameters. A full copy runs
    on the batch's values, if it has any, only where code can't be traced (a module, a function, a branch on a value), or for an opaque
    module without ``output``. ``batch`` is an example of one global batch (shapes matter, values mostly don't): a tensor, a tuple of
    positional or a dict of keyword arguments, with the batch along dim 0. The model returns its loss, an object or dict with ``loss``, or a
    tuple that starts with it; with ``loss_fn`` the batch is ``(inputs, targets)`` and the loss is ``loss_fn(model(inputs), targets)``; a
    ``loss_fn`` of one argument gets only the output, and the batch is the inputs. ``precision`` (``"float64"``, ``"float32"``,
    ``"bfloat16"``, ``"float16"``) casts floating parameters, buffers and inputs. ``progress`` is called with each stage's name. With
    ``local_batch_norm`` batch norm uses the statistics of each rank's part of each microbatch, as in most trainers; otherwise it uses those
    of the global batch, as on one device.

    Raises ``CaptureError`` (with the source line) if the model can't be exported, ``BatchError`` if the batch is invalid.
    """
    if precision is not None and precision not in PRECISIONS:
        raise CaptureError(f"precision {precision!r} is not known", hint=f"one of {', '.join(PRECISIONS)}")
    dtype = torch_dtype(precision) if precision is not None else None
    report = progress or (lambda stage: None)
    with errors_as_capture_errors(model):
        structure = describe_batch(model, batch, loss_fn, dtype)
        report("export")
        gm, buffers, classes = export(model, structure, loss_fn, dtype, batch)
        with without_function_modes():  # the caller's modes are meant for the model's code, not for passes
            report("clean")
            graph_meta(gm)["local_batch_norm"] = local_batch_norm
            gm, constants = clean(gm, buffers)
            report("segment")
            written = _written_buffers(gm, buffers, model)
            graph = _assemble(gm, constants, structure, classes, model, name or type(model).__name__, written)
        return check_guards(graph, list(flatten_batch(structure, batch).values()))


def clean(gm: fx.GraphModule, buffers: dict[str, torch.Tensor]) -> tuple[fx.GraphModule, dict[str, torch.Tensor]]:
    """Return the cleaned graph, and its folded constants by name."""
    gm = run_passes(gm, STEPS)
    share_constants(gm)
    recognise_masks(gm, Evaluator(gm, buffers))
    gm = run_passes(gm, STEPS[-1:])
    constants = fold_constants(gm, Evaluator(gm, buffers))
    simplify_constants(gm, constants)
    make_opaque_without_meta_kernel(gm)
    gm = run_passes(gm, FINAL_STEPS)
    return gm, used_constants(gm, constants)


def _assemble(
    gm: fx.GraphModule,
    constants: dict[str, torch.Tensor],
    structure: BatchStructure,
    classes: dict[str, str],
    model: nn.Module,
    name: str,
    written: dict[str, Buffer],
) -> Graph:
    gradients_pass(gm)
    mark_main(gm)
    loss = loss_node(gm)
    if not isinstance(loss, fx.Node) or not meta(loss)["gradient"]:
        raise CaptureError(
            "the loss does not depend on any trainable parameter",
            hint="set requires_grad on the parameters to train, and compute the loss without detach() or torch.no_grad()",
        )
    freeze_unreached(gm, loss)
    inputs = tuple(Value(leaf.name, leaf.shape, leaf.dtype) for leaf in structure.leaves)
    guards = batch_guards(gm)
    scalars, prelude = build_prelude(gm, inputs, constants, [node for _, node in guards])
    groups = segment(gm, classes)
    interfaces = layer_interfaces(gm, groups)
    rows = inputs[0].shape[0]
    layers, layer_classes, values = build_layers(groups, interfaces, classes, type(model).__name__)
    sample_routers(layers, layer_classes, constants)
    parameters = _parameters(gm, model)
    notes = list(graph_meta(gm).get("notes", ()))
    tied = ties(model)
    if tied:
        some = ", ".join(f"{name} is {first}" for name, first in list(tied.items())[:3])
        notes.append(
            f"{some}, in the same memory: one parameter, which the optimizer updates once, with the sum of both gradients"
        )
    used = {name for parameter in parameters.values() for name in parameter.names} | tied.keys()
    if unused := [n for n, p in model.named_parameters() if p.requires_grad and n not in used]:
        notes.append(f"the loss does not depend on {len(unused)} parameters: {', '.join(unused[:5])}")
    notes += _eval_mode_notes(model)
    updated = {name for layer in layers for name in layer.buffers}
    notes += [f"buffer {name} is not updated" for name in written if name not in updated]
    dtypes = _dtypes(parameters)
    if len(dtypes) > 1:
        kinds = ", ".join(f"{count:,} of {name_of(dtype)}" for dtype, count in dtypes)
        notes.append(
            f"parameters of several dtypes keep them: {kinds} (precision=NAME, or --precision NAME, casts all)"
        )
    return Graph(
        name=name,
        inputs=inputs,
        structure=structure,
        parameters=parameters,
        constants=constants,
        scalars=scalars,
        prelude=prelude,
        layers=layers,
        classes={key: dataclasses.replace(cls, rows=rows) for key, cls in layer_classes.items()},
        values=values,
        loss=layers[-1].outputs[0],
        dtype=dtypes[0][0],
        tokens=count_tokens(inputs),
        notes=tuple(notes),
        unmicrobatchable=graph_meta(gm).get("unmicrobatchable", ""),
        opaque=opaque_modules(gm.graph),
        buffers={name: buffer for name, buffer in written.items() if name in updated},
        valueless=tuple(graph_meta(gm).get("valueless", ())),
        state=_state_tensors(model),
        guards=tuple(guard for guard, _ in guards),
        assumed=graph_meta(gm)["assumed"],
        possibly_unused=graph_meta(gm)["possibly_unused"],
    )


def _eval_mode_notes(model: nn.Module) -> list[str]:
    """Return notes on modules in eval mode."""
    in_eval = [name for name, module in model.named_modules() if not module.training]
    if not in_eval:
        return []
    if not model.training:
        return ["the model is in eval mode: no dropout, and running statistics; model.train() changes that"]
    some = f"{', '.join(in_eval[:3])}{', ...' if len(in_eval) > 3 else ''}"
    return [f"{len(in_eval)} modules are in eval mode and stay in it: {some}"]


def _state_tensors(model: nn.Module) -> tuple[StateTensor, ...]:
    """Return the model's parameters, then the buffers of its state dict. A tensor with several names has an entry for each."""
    found, first = [], dict[Any, str]()
    kept = model.state_dict(keep_vars=True)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    buffers = {name: tensor for name, tensor in model.named_buffers(remove_duplicate=False) if name in kept}
    for name, tensor in (*parameters.items(), *buffers.items()):
        alias = first.setdefault(identity(tensor), name)
        alias_of = None if alias == name else alias
        found.append(StateTensor(name, tuple(tensor.shape), name in parameters, tensor.requires_grad, alias_of))
    return tuple(found)


def _written_buffers(gm: fx.GraphModule, values: dict[str, torch.Tensor], model: nn.Module) -> dict[str, Buffer]:
    """Return the buffers (and frozen parameters) that the graph writes, with their initial values."""
    kept = model.state_dict(keep_vars=True)
    parameters = {name: parameter for name, parameter in model.named_parameters() if not parameter.is_meta}
    found = {}
    for name, node in updates(gm).items():
        value, before = meta(node)["val"], values.get(name, parameters.get(name))
        initial = before.detach().to("cpu", value.dtype, copy=True) if before is not None else None
        found[name] = Buffer(name, tuple(value.shape), value.dtype, initial, name in kept)
    return found


def _dtypes(parameters: Mapping[str, Parameter]) -> list[tuple[torch.dtype, int]]:
    """Return the parameters' floating dtypes with their numbers of elements, the largest number first."""
    found = Counter[torch.dtype]()
    for parameter in parameters.values():
        if parameter.dtype.is_floating_point:
            found[parameter.dtype] += math.prod(parameter.shape)
    return found.most_common()


def _parameters(gm: fx.GraphModule, model: nn.Module) -> dict[str, Parameter]:
    """Return the graph's parameters by name, in the model's order; slices of one parameter are ordered by their start."""
    found = [meta(n)["parameter"] for n in gm.graph.nodes if n.op == "placeholder" and "parameter" in meta(n)]
    order = {name: index for index, (name, _) in enumerate(model.named_parameters())}
    found.sort(key=lambda p: (order[p.names[0]], p.start))
    return {parameter.name: parameter for parameter in found}
