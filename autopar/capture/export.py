"""Exports a fake copy of the model by ``torch.export`` and labels the graph's placeholders."""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import fx, nn

from autopar.capture.auto_opaque import find_opaque, install_opaque_ops, paths_of
from autopar.capture.backward import (
    OP_HINT,
    NotTraceableError,
    refuse_nodes,
    refuse_optimized_modules,
    refuse_scripts,
    refuse_unregistered,
    refuse_unregistered_tensors,
)
from autopar.capture.batch import BatchStructure, flatten_batch, rebuild_batch
from autopar.capture.blocks import stack
from autopar.capture.boundary import HINT, user_line
from autopar.capture.clone import LOSS, FakeModel, choose_experts, configs_with_cache, fake_model
from autopar.capture.derivative import refuse_derivatives
from autopar.capture.effects import assigned_buffers_written, guarded
from autopar.capture.external_state import ExternalState, Run
from autopar.capture.functions import Functions, assumption, functions_as_ops, observed
from autopar.capture.hit_loops import TraceHitLoops, lower_hit_loops
from autopar.capture.hooks import has_hooks, refuse_hooks
from autopar.capture.loops import RefuseLongLoops
from autopar.capture.opaque import observe, opaque_note
from autopar.capture.repeat import Lifted, Repeats, expand, members, record, traced_once
from autopar.capture.segments import TraceSegments, lower_segments
from autopar.capture.skipped import Decision, TraceBranches, Traced, lower_branches
from autopar.capture.specialise import RecordedReads, ReplayReads, keep_guards, record_reads
from autopar.capture.state import State, StateAfterForward, buffers, buffers_kept, check_again, state
from autopar.capture.storage import computed, identity, refuse_overlaps
from autopar.errors import OPAQUE_HINT, CaptureError
from autopar.graph import Parameter
from autopar.ops.facts import facts, op_name
from autopar.ops.meta import graph_meta, meta
from autopar.ops.source import source_line
from autopar.torch_private import (
    as_if_exported,
    is_fake,
    memory,
    patch_tolist,
    traceable_averages,
    traces_of_functions,
    without_mask_detection,
)
from passes.clean.nodes import like, note
from passes.clean.regions import inline_regions_pass
from passes.clean.selections import selections_pass


class _RefusedError(Exception):
    """Wraps an error that the model raised during export. For an unwrapped ``RuntimeError``, ``torch.export`` prints the partial graph."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class _ModelWithLoss(nn.Module):
    """Calls the model and returns its loss. With ``reads``, it also returns the tensors from which forward read a value."""

    def __init__(
        self,
        module: nn.Module,
        loss_fn: Callable[..., Any] | None,
        structure: BatchStructure,
        registered: Collection[str],
        reads: RecordedReads | None = None,
    ) -> None:
        super().__init__()
        self.module = module
        self.registered = registered
        self.loss_fn = loss_fn
        self.structure = structure
        self.reads = reads

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        if self.reads is not None:
            self.reads.read_tensors.clear()
        given = buffers(self.module)
        try:
            with assigned_buffers_written(self.module, self.registered):
                loss = call_model(self.module, self.structure, self.loss_fn, tensors, by_rows=True)
        except Exception as error:
            raise _RefusedError(error) from error
        replaced = {key: b for key, b in buffers(self.module).items() if b is not given.get(key)}
        _STATE[:] = [state(self.module) | replaced]  # not an attribute: torch.export restores attributes
        return loss if self.reads is None else (loss, *self.reads.read_tensors)


def _buffer_names(model: nn.Module) -> frozenset[str]:
    """Return the names of the model's buffers; its fake copy has more, for tensors in plain attributes."""
    return frozenset(name for name, _ in model.named_buffers(remove_duplicate=False))


_STATE: list[State] = []
"""The modules' Python state after the last traced forward."""


def call_model(
    module: nn.Module,
    structure: BatchStructure,
    loss_fn: Callable[..., Any] | None,
    tensors: Sequence[torch.Tensor],
    *,
    by_rows: bool = False,
) -> torch.Tensor:
    """Call the model on a batch and return its loss; ``tensors`` are in the order of the structure's leaves, ``by_rows`` as for
    ``rebuild_batch``."""
    batch = rebuild_batch(structure, tensors, by_rows=by_rows)
    arguments, targets = batch if structure.paired else (batch, None)
    output = module(**arguments) if isinstance(arguments, dict) else module(*arguments)
    if loss_fn is not None:
        output = loss_fn(output, targets) if structure.paired else loss_fn(output)
    return find_loss(output, loss_fn is not None)


def find_loss(output: Any, from_loss_fn: bool) -> torch.Tensor:
    """Return the 0-d loss: the output, ``.loss``, ``["loss"]``, a tuple's first or only 0-d item; else raise ``CaptureError``."""
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
    kind = _describe_output(output)
    if from_loss_fn:
        raise CaptureError(
            f"loss_fn returned {kind}, not a 0-d floating loss", hint="reduce the loss: .mean() or .sum()"
        )
    raise CaptureError(
        f"the model returned {kind}, in which there is no 0-d floating loss",
        hint="return the loss, an object with .loss or a tuple that starts with it (transformers: give labels in the batch), "
        "or pass loss_fn with the batch as (inputs, targets)",
    )


def _describe_output(output: Any) -> str:
    """Describe a model's output with the names and shapes of its items."""
    if isinstance(output, torch.Tensor):
        return f"a tensor {str(output.dtype).removeprefix('torch.')}{list(output.shape)}"
    items: Any = dict(output) if isinstance(output, dict) else vars(output) if hasattr(output, "__dict__") else {}
    if isinstance(output, tuple | list):
        items = {str(index): item for index, item in enumerate(output)}
    inside = [
        f"{name}: {_describe_output(item) if isinstance(item, torch.Tensor) else type(item).__name__}"
        for name, item in items.items()
    ]
    return f"a {type(output).__name__}" + (f" ({', '.join(inside)})" if inside else "")


def _is_loss(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 0 and value.is_floating_point()


def export(
    model: nn.Module,
    structure: BatchStructure,
    loss_fn: Callable[..., Any] | None,
    dtype: torch.dtype | None,
    batch: Any = None,
) -> tuple[fx.GraphModule, dict[str, torch.Tensor], dict[str, str]]:
    """Export the model.

    Returns the lifted graph with labelled placeholders (``ops.meta`` declares the labels), the values of its buffers (none for those
    on meta) and lifted constants by name, and the class name of every module by path (``""`` is the model). If ``batch`` has values,
    modules and autograd functions that can't be exported become opaque ops if that is sound, and branches on the batch's values are
    specialised and guarded. The graph's notes list the ops. Raises ``CaptureError`` for code that can't be captured.
    """
    _refuse_unexportable(model, loss_fn)

    external_state = ExternalState(model, loss_fn)

    def run(copied: nn.Module) -> None:
        cast = copied if dtype is None else copied.to(dtype)
        if dtype == torch.float64:
            choose_experts(cast, "eager")
        with external_state.restored():
            # clones, because a model may write to its batch
            call_model(cast, structure, loss_fn, [t.clone() for t in flatten_batch(structure, batch).values()])

    def run_with_opaque_ops(copied: nn.Module) -> None:
        install_opaque_ops(opaque_ops, copied)
        with without_mask_detection(), traceable_averages():
            run(copied)

    valued = batch is not None and not any(map(is_fake, flatten_batch(structure, batch).values()))
    if valued:
        observe(model, run)
    opaque_ops: dict[str, str] = {}
    functions: Functions = {}
    notes: list[str] = []
    reads: RecordedReads | None = None
    while True:
        try:
            with functions_as_ops(functions):
                gm, values = _export_and_label(model, structure, loss_fn, dtype, external_state, opaque_ops, reads)
            break
        except NotTraceableError as error:
            if not valued:
                raise
            function = None if error.function in functions else error.function
            if function is not None and (found := observed(function, model, run)) is not None:
                functions[function] = found
                notes.append(opaque_note(function.__name__, error.message.splitlines()[0]))
                continue
            previous = reads
            try:  # an opaque module works for every batch, guards only for batches with the same values
                opaque_ops, sentence = find_opaque(error, model, opaque_ops, run)
                notes.append(sentence)
                reads = record_reads(model, run_with_opaque_ops) if previous is not None else None
            except NotTraceableError:
                reads = record_reads(model, run_with_opaque_ops) if previous is None else None
                if reads is None and function is None:
                    raise
                if reads is None:
                    functions[function] = None
                    notes.append(assumption(function, "")[0])
    for sentence in notes:
        note(gm, sentence)
    graph_meta(gm)["assumed"] += tuple(assumption(each, OP_HINT) for each, op in functions.items() if op is None)
    classes = {path: type(module).__name__ for path, module in model.named_modules()}
    return gm, values, classes


def _refuse_unexportable(model: nn.Module, loss_fn: Any) -> None:
    """Raise ``CaptureError`` for what export loses: hooks, compiled modules, unregistered or overlapping tensors, loss parameters."""
    refuse_hooks(model)
    refuse_unregistered_tensors(model)
    refuse_scripts(model)
    refuse_optimized_modules(model)
    refuse_overlaps(model, loss_fn)
    if isinstance(loss_fn, nn.Module) and next(loss_fn.parameters(), None) is not None:
        raise CaptureError(
            "loss_fn has parameters of its own", hint="make it part of the model, and return the loss from there"
        )


def _export_and_label(
    model: nn.Module,
    structure: BatchStructure,
    loss_fn: Callable[..., Any] | None,
    dtype: torch.dtype | None,
    external_state: ExternalState,
    opaque_ops: dict[str, str],
    reads: RecordedReads | None,
) -> tuple[fx.GraphModule, dict[str, torch.Tensor]]:
    """Export with an opaque op for each module in ``opaque_ops``. Reads of values (``.item()``) return the values in ``reads``."""
    # with a key/value cache, transformers doesn't use position_ids to separate documents
    cache = any(leaf.name == "position_ids" for leaf in structure.leaves) and bool(configs_with_cache(model))

    def fake_copy(**options: Any) -> FakeModel:
        copied = fake_model(model, dtype, loss_fn, external_state, cache=cache, **options)
        install_opaque_ops(opaque_ops, copied.module)
        return copied

    try:
        traced = _trace(model, structure, fake_copy, reads)
        _lower(traced, model)
    except NotTraceableError:
        if reads is not None or (found := _trace_branches(model, structure, fake_copy)) is None:
            raise
        traced = found
    gm = selections_pass(traced.program.graph_module)
    values = _label(gm, traced.lifted, traced.program.constants, model, traced.copied, structure)
    if cache:
        note(gm, "config.use_cache is on: transformers then ignores that position_ids may separate documents")
    for sentence in traced.notes:
        note(gm, sentence)
    graph_meta(gm)["assumed"] = tuple(traced.assumed)
    _check_dtypes(gm)
    refuse_nodes(gm)
    gm = inline_regions_pass(gm)
    refuse_derivatives(gm)
    keep_guards(gm, reads)
    return gm, values


def _trace(
    model: nn.Module,
    structure: BatchStructure,
    fake_copy: Callable[..., FakeModel],
    reads: RecordedReads | None = None,
    chosen: Decision | None = None,
) -> Traced:
    """Export the model. ``chosen`` is that of ``TraceBranches``, if branches on masks are traced."""
    repeats = None if reads is not None or has_hooks(model) else _find_repeats(model, structure, fake_copy, chosen)
    copied = fake_copy(without=repeats.unread(model) if repeats is not None else ())
    before = state(copied.module)

    def run(repeats: Repeats | None = repeats) -> tuple[Any, StateAfterForward]:
        return _export(model, copied, structure, repeats, reads, chosen)

    with buffers_kept(copied.module):
        program, after = run()
        notes, assumed = check_again(program, before, after, copied, run)
    lifted = _lifted(program)
    expanded = expand(program.graph_module, lifted, repeats, model) if repeats is not None else lifted
    if expanded is None:
        copied = fake_copy()
        program, _ = _export(model, copied, structure, chosen=chosen)
        expanded = _lifted(program)
    return Traced(program, expanded, copied, notes, assumed)


def _lower(traced: Traced, model: nn.Module) -> dict[int, dict[fx.Node, fx.Node]]:
    """Lower the loops over experts, and return ``LoweredLoops.branched``."""
    names = _parameter_names(model)
    parameters = {n: names[t.removeprefix("module.")][0] for kind, t, n in traced.lifted if kind == "PARAMETER"}
    assumed, branched = lower_hit_loops(traced.program.graph_module, parameters)
    traced.assumed.extend(assumed)
    lower_segments(traced.program.graph_module, parameters)
    return branched


def _trace_branches(model: nn.Module, structure: BatchStructure, fake_copy: Callable[..., FakeModel]) -> Traced | None:
    """Return the lowered trace of a model that skips experts without tokens; ``None`` if this isn't proved (see ``skipped``)."""
    trace = functools.partial(_trace, model, structure, fake_copy)
    try:
        traced = trace(chosen=lambda number: True)
        lower = functools.partial(_lower, traced, model)
        proved = lower_branches(traced, lower, lambda chosen: trace(chosen=chosen))
    except CaptureError:
        return None
    return traced if proved else None


def _find_repeats(
    model: nn.Module, structure: BatchStructure, fake_copy: Callable[..., FakeModel], chosen: Decision | None = None
) -> Repeats | None:
    """Return the blocks that repeat another block's computation; ``None`` without candidates, or if the model fails. A separate fake copy
    runs, because export would record the attributes that this forward sets."""
    if not members(model):
        return None
    for on_meta in (True, False):
        copied = fake_copy(meta=on_meta)

        def run(copied: FakeModel = copied, device: str = "meta" if on_meta else "cpu") -> None:
            with copied.mode, _traceable(model, copied, chosen=chosen), as_if_exported():
                tensors = [torch.empty(leaf.shape, dtype=leaf.dtype, device=device) for leaf in structure.leaves]
                with assigned_buffers_written(copied.module, _buffer_names(model)):
                    call_model(copied.module, structure, copied.loss_fn, tensors, by_rows=True)

        repeats = record(copied.module, run)
        if repeats is not None:
            return repeats
    return None


@contextmanager
def _traceable(
    model: nn.Module, copied: FakeModel, *, replayed: bool = False, chosen: Decision | None = None
) -> Iterator[Run]:
    """A context for a trace, in which torch's modules don't branch on values, and long loops and side effects that export would lose are
    refused. On exit, the trace's tensors are removed from external state. ``replayed``: reads of values return recorded ones; ``chosen`` is
    that of ``_trace``."""
    with copied.external_state.restored() as run:
        hits, segments = TraceHitLoops(), TraceSegments()
        on_masks = nullcontext() if chosen is None else TraceBranches(chosen)

        def listed(tensor: torch.Tensor) -> Any:
            return None if replayed else hits.numbers(tensor) or segments.sizes(tensor)

        with guarded(model, copied.module), without_mask_detection(), traceable_averages(), patch_tolist(listed):
            with hits, segments, on_masks, RefuseLongLoops():
                yield run


def _lifted(program: Any) -> list[Lifted]:
    nodes = {node.name: node for node in program.graph_module.graph.nodes if node.op == "placeholder"}
    specs = program.graph_signature.input_specs
    return [(spec.kind.name, str(spec.target or ""), nodes[spec.arg.name]) for spec in specs]


def _export(
    model: nn.Module,
    copied: FakeModel,
    structure: BatchStructure,
    repeats: Repeats | None = None,
    reads: RecordedReads | None = None,
    chosen: Decision | None = None,
) -> tuple[Any, StateAfterForward]:
    """Return the exported program, and the state after its forward."""
    with copied.mode:
        tensors = tuple(torch.empty(leaf.shape, dtype=leaf.dtype, device="cpu") for leaf in structure.leaves)
    captured = _ModelWithLoss(copied.module, copied.loss_fn, structure, _buffer_names(model), reads)
    names = ("torch.export", "torch.fx.experimental.symbolic_shapes", "torch._subclasses.fake_tensor")
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), ExitStack() as around:
            warnings.simplefilter("ignore")
            if reads is not None:
                around.enter_context(ReplayReads(reads))
            run = around.enter_context(_traceable(model, copied, replayed=reads is not None, chosen=chosen))
            if repeats is not None:
                around.enter_context(traced_once(captured.module, repeats))
            around.enter_context(traces_of_functions())
            program = torch.export.export(captured, tensors, strict=False)
        _complete_users(program.graph_module)
        return program, StateAfterForward(_STATE.pop(), run.changes)
    except _RefusedError as refused:
        if isinstance(refused.error, NotTraceableError):
            refused.error.paths = paths_of(refused.error.__traceback__, copied.module)
        if isinstance(refused.error, CaptureError | MemoryError):
            raise refused.error from None
        raise _explain(refused.error, copied.module) from refused.error
    except Exception as error:
        raise _explain(error, copied.module) from error
    finally:
        _STATE.clear()
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _complete_users(gm: fx.GraphModule) -> None:
    """Complete ``Node.users``, where torch.export (2.13) omits the first node of a chain of views that is written to and not read again."""
    for graph in (part.graph for part in gm.modules() if isinstance(part, fx.GraphModule)):
        for node in graph.nodes:
            for operand in node.all_input_nodes:
                operand.users.setdefault(node)


def _explain(error: Exception, module: nn.Module) -> CaptureError:
    """Return a ``CaptureError`` (``NotTraceableError`` for a line that depends on data) with the user's line and the reason."""
    kind, text = type(error).__name__, str(error).strip().split("\n")[0]
    dependent = (
        "DataDependent" in kind
        or "DynamicOutput" in kind
        or "data-dependent" in str(error).lower()
        or "_local_scalar_dense" in str(error)
    )
    what = "its control flow or a shape depends on the data" if dependent else f"{kind}: {text}"
    line = user_line(error)
    text = f"torch.export refused {line or 'the model'}: {what}"
    if not dependent or not line:
        return CaptureError(text, hint=OPAQUE_HINT if dependent else HINT)
    return NotTraceableError(text, OPAQUE_HINT, paths_of(error.__traceback__, module))


def _label(
    gm: fx.GraphModule,
    lifted: Sequence[Lifted],
    constants: dict[str, Any],
    model: nn.Module,
    copied: FakeModel,
    structure: BatchStructure,
) -> dict[str, torch.Tensor]:
    """Label each placeholder, merge those of tied parameters, make every ``meta["val"]`` a plain meta tensor, and return the values of
    buffers and constants. Raises ``CaptureError`` for tensors that can't be captured."""
    for node in (node for part in gm.modules() if isinstance(part, fx.GraphModule) for node in part.graph.nodes):
        if "val" in meta(node):
            meta(node)["val"] = _on_meta(meta(node)["val"], node)
    names, unregistered = _parameter_names(model), computed(model)
    shapes = dict(model.named_parameters())
    registered = dict(copied.module.named_buffers(remove_duplicate=False))
    sharing = _sharing(registered, model)
    first_names: dict[int, str] = {}
    for name, tensor in registered.items():
        first_names.setdefault(id(tensor), name)
    first: dict[str, fx.Node] = {}
    values: dict[str, torch.Tensor] = {}
    read: set[str] = set()
    leaves = iter(structure.leaves)
    for kind, lifted_as, node in lifted:
        target = lifted_as.removeprefix("module.")
        if lifted_as.startswith("loss_fn."):
            target = f"{LOSS}.{lifted_as.removeprefix('loss_fn.')}"
        if kind == "USER_INPUT":
            meta(node)["input"] = next(leaves).name
        elif kind == "PARAMETER":
            name, tied = names[target]
            if name in first:
                node.replace_all_uses_with(first[name])
                gm.graph.erase_node(node)
                continue
            first[name] = node
            value, size = meta(node)["val"], tuple(shapes[name].shape)
            meta(node)["parameter"] = Parameter(
                name, name, size, size, value.dtype, tied=tied, trainable=shapes[name].requires_grad
            )
            if name in sharing:
                meta(node)["shares"] = sharing[name]
        else:
            if target in registered:
                target = first_names[id(registered[target])]  # the first of its names, as for parameters
            meta(node)["buffer"] = target
            meta(node)["lifted"] = target not in registered
            if target in sharing:
                meta(node)["shares"] = sharing[target]
            real = constants.get(lifted_as)
            if target in unregistered and node.users:
                refuse_unregistered(f"{source_line(next(iter(node.users)))}\nreads a tensor", unregistered[target])
            if target in copied.buffers:
                values[target] = copied.buffers[target]
            elif kind == "CONSTANT_TENSOR" and isinstance(real, torch.Tensor):
                _check_constant(node, real)
                if not is_fake(real):
                    values[target] = real
            elif isinstance(real, torch.Tensor) and not is_fake(real):
                values[target] = real
            if node.users:
                read.add(target)
    refuse_overlaps(model, None, read)
    return values


def _check_constant(node: fx.Node, value: torch.Tensor) -> None:
    """Raise ``CaptureError`` for a tensor that export lifted as a constant although it isn't one."""
    where = source_line(next(iter(node.users))) if node.users else ""
    if value.requires_grad:
        refuse_unregistered(f"{where}\nreads a tensor", value)
    if is_fake(value) and not value.is_meta:
        raise CaptureError(
            f"forward makes a tensor {list(value.shape)} in a way that torch.export does not follow\n{where}",
            OPAQUE_HINT,
        )


def _sharing(names: Collection[str], model: nn.Module) -> dict[str, str]:
    """Map the name of each parameter or buffer that shares memory with another one to the other's name."""
    found: dict[int, dict[int, str]] = {}
    places = {}
    for name in (*dict(model.named_parameters()), *names):
        path, _, attribute = name.rpartition(".")
        tensor = getattr(model.get_submodule(path), attribute)
        places[name] = (memory(tensor), id(tensor))
        found.setdefault(memory(tensor), {}).setdefault(id(tensor), name)
    others = {name: [n for key, n in found[held].items() if key != own] for name, (held, own) in places.items()}
    return {name: first[0] for name, first in others.items() if first}


def _check_dtypes(gm: fx.GraphModule) -> None:
    """Raise ``CaptureError`` for products of mixed dtypes, which kernels reject but fake tensors accept."""
    for node in gm.graph.nodes:
        if not facts(node).is_product:
            continue
        given = [n for n in node.all_input_nodes if isinstance(meta(n).get("val"), torch.Tensor)]
        dtypes = {meta(n)["val"].dtype for n in given}
        if len(dtypes) > 1:
            words = ", ".join(
                f"{meta(n).get('input', n.name)} {str(meta(n)['val'].dtype).removeprefix('torch.')}" for n in given
            )
            raise CaptureError(
                f"{op_name(node)} takes tensors of one dtype and gets {words}\n{source_line(node)}",
                hint="give the batch in the model's dtype, or pass precision=..., which casts parameters and floating-point inputs",
            )


def _on_meta(value: Any, node: fx.Node) -> Any:
    if isinstance(value, torch.Tensor):
        if not all(type(size) is int for size in value.shape):
            raise _data_dependent_error(f"a shape depends on the data: {op_name(node)} gives {list(value.shape)}", node)
        return like(value)
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        raise _data_dependent_error(f"a Python number depends on the data: {op_name(node)}", node)
    if isinstance(value, tuple | list):
        return type(value)(_on_meta(item, node) for item in value)
    return value


def _data_dependent_error(text: str, node: fx.Node) -> NotTraceableError:
    return NotTraceableError(f"{text}\n{source_line(node)}", OPAQUE_HINT, tuple(path for path, _, _ in stack(node)))


def _parameter_names(model: nn.Module) -> dict[str, tuple[str, tuple[str, ...]]]:
    """Map every name of a parameter to its first name and its other names."""
    by_identity: dict[Any, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        by_identity.setdefault(identity(parameter), []).append(name)
    return {name: (group[0], tuple(group[1:])) for group in by_identity.values() for name in group}
