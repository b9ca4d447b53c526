"""Writes the program folder: ``model.py``, ``train.py``, ``plan.json``, ``layouts.json``, initial values, and the package ``runtime`` with
its data."""

from __future__ import annotations

import ast
import dataclasses
import json
import textwrap
from collections.abc import Mapping, Sequence, Set
from pathlib import Path

import torch
from torch import Tensor

from autopar.emit.custom import custom_modules
from autopar.emit.expressions import literal
from autopar.emit.ignored import ignored_labels
from autopar.emit.layer import buffer_paths, layer_body, parameter_paths
from autopar.emit.names import CALLED, Names, quoted, remark
from autopar.emit.opaque import describe_opaque, imported_modules
from autopar.emit.parts import runtime_parts
from autopar.emit.prelude import prelude_function
from autopar.emit.runtime import PACKAGE, copy_runtime
from autopar.emit.stage import layer_path, owned_attribute, stage_class
from autopar.errors import ModelError, UsageError
from autopar.graph import Graph
from autopar.ops.meta import meta
from autopar.plan import Plan, deviations
from autopar.precision import FLOAT16, name_of
from autopar.program.chimera import ORDERS
from autopar.program.opaque import OPAQUE
from autopar.program.state import CONSTANTS, write_initial
from autopar.program.type_check import write_digests
from autopar.program.weights import write_file
from autopar.schedules.orders import device_order
from autopar.shard import plan_shardings
from autopar.techniques import SYNC, phrases
from passes.stages import LocalProgram, cut_stages

_HEADER = '''"""{model} on {devices}: {summary}.

A step takes {batch} rows{microbatches}. Each device runs the layers below on its part of the rows.{deviations}
Comments and calls name the type of a tensor on each axis of the mesh: S(d) is a slice of dim d; R the same values everywhere, and terms
of the gradient; I the same values and the same gradient; P a term of the sum. A collective turns one type into another.

    torchrun --nproc-per-node {processes} train.py --dataset FILE

trains PROGRAM, at the end of this file, with the trainer in runtime/. plan.json is the plan with its prices, and layouts.json says what of
the original parameters each device holds. Written by autopar; yours to edit.
"""

from __future__ import annotations

{imports}


'''


_SEPARATE_BATCHES = (
    "Each microbatch has its own statistics and loss, as microbatch_statistics allows: the step's loss is the mean of theirs, not that of "
    "the full batch."
)


def emit(
    graph: Graph, plan: Plan, folder: str | Path, *, watch: bool = False, state: Mapping[str, Tensor] | None = None
) -> LocalProgram:
    """Write the program of ``plan`` for the captured ``graph`` into ``folder`` (created if missing) and return the local program.

    With ``watch`` layers keep every value that they compute (``layer_body``). Initial values come from ``state``, the user's state dict;
    without it, or if it is on meta, the folder has none.

    Raises:
        UsageError: the plan is invalid for the model, or has float16 gradients without loss scaling.
        ModelError: the model's constants have no values.
        ProgramError: the program can't import the class of an opaque module, or the definition of a custom op.
    """
    if graph.valueless:
        some = ", ".join(graph.valueless[:5])
        raise ModelError(
            f"{len(graph.valueless)} buffers of the model have no values, and its forward pass computes with them: {some}",
            "build the model on the CPU, or give their modules a reset_parameters() that computes them",
        )
    _refuse_float16(graph, plan)
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    local = cut_stages(graph, plan, plan_shardings(graph, plan))
    modules = describe_opaque(graph)
    imports = imported_modules(modules)
    note = f"the program imports {', '.join(imports)} for opaque modules"
    if imports and note not in plan.notes:
        plan = dataclasses.replace(plan, notes=(*plan.notes, note))
    allow = (*graph.allow, *deviations(plan.sync, (layer.strategy for layer in plan.layers)))
    plan = dataclasses.replace(plan, imports=tuple(sorted({*imports, *custom_modules(graph)})), allow=allow)
    source = model_source(local, watch)
    (path / "model.py").write_text(source, "utf-8")
    (path / "plan.json").write_text(plan.dumps() + "\n")
    write_initial(path, state)
    (path / "layouts.json").write_text(
        json.dumps(
            {
                "parameters": layouts(local),
                "buffers": buffers(local),
                "model": [dataclasses.asdict(entry) for entry in graph.state],
            },
            indent=1,
        )
        + "\n"
    )
    copy_runtime(path, _imported(source))
    _write_orders(path, plan)
    for file in (path / OPAQUE, path / CONSTANTS):
        file.unlink(missing_ok=True)
    if modules:
        (path / OPAQUE).write_text(json.dumps(modules, indent=1) + "\n")
    values = {f"buffer {buffer.name}": buffer.value for buffer in graph.buffers.values() if buffer.value is not None}
    if graph.constants or values:
        write_file(path / CONSTANTS, {**graph.constants, **values})
    write_digests(path)
    return local


def _write_orders(folder: Path, plan: Plan) -> None:
    """Write the actions of every pipeline rank if torch lacks the schedule; otherwise remove an earlier program's file."""
    schedule = plan.sized_schedule
    if schedule.copies == 1:
        (folder / ORDERS).unlink(missing_ok=True)
        return
    rows = (device_order(schedule, rank) for rank in range(schedule.pipeline))
    text = "\n".join(",".join(f"{stage}{kind}{microbatch}" for kind, stage, microbatch in row) for row in rows)
    (folder / ORDERS).write_text(f"{text}\n")


def _refuse_float16(graph: Graph, plan: Plan) -> None:
    """Raise ``UsageError`` if gradients would be float16 without loss scaling, which only programs with ``FLOAT16`` precision have."""
    if plan.precision == FLOAT16:
        return
    found = [(p.original, p.dtype) for p in graph.parameters.values() if p.trainable]
    found += [(value.name, value.dtype) for value in graph.values.values() if value.requires_grad]
    for cls in graph.classes.values():
        nodes = [node for node in cls.graph.graph.nodes if meta(node).get("gradient") and node.op == "call_function"]
        found += [(f"{cls.name}.{node.name}", t.dtype) for node in nodes if isinstance(t := meta(node)["val"], Tensor)]
    for name, dtype in found:
        if dtype == torch.float16:
            raise UsageError(
                f"the gradient of {name} would be float16, which needs loss scaling, and a program in {plan.precision} does not scale "
                "its loss",
                "request one precision: precision='float16', whose loss is scaled, or 'bfloat16', with the range of float32",
            )


def model_source(program: LocalProgram, watch: bool = False) -> str:
    """Return the text of ``model.py``; with ``watch`` layers keep every value that they compute."""
    axes = tuple(axis.name for axis in program.plan.mesh)
    parts = runtime_parts(program, layouts(program))
    sources, class_names = _layer_classes(program, axes, watch)
    stages = [stage_class(program, stage, class_names) for stage in program.stages]
    prelude, record = prelude_function(program.graph)
    body = "\n\n".join([*sources, *stages, *([prelude] if prelude else []), _program_record(program, parts, record)])
    modules = {part.partition(".")[0] for part in parts.values()}
    return _header(program, _imports(body, modules, program)) + body


def _header(program: LocalProgram, imports: str) -> str:
    plan = program.plan
    stages, schedule = len(plan.stages), plan.sized_schedule
    mesh = remark(" x ".join(f"{axis.name} {axis.size}" for axis in plan.mesh))
    rows = plan.global_batch // plan.microbatches
    return _HEADER.format(
        model=remark(plan.model),
        devices=_count(plan.device_count, "device") if plan.devices.isdigit() else remark(plan.devices),
        summary=f"a pipeline of {stages} stages ({schedule.name}), each on a mesh of {mesh}"
        if stages > 1
        else f"a mesh of {mesh}",
        batch=plan.global_batch,
        microbatches=f" in {plan.microbatches} microbatches of {rows}" if plan.microbatches > 1 else "",
        deviations=_deviation_sentences(program),
        processes=plan.device_count,
        imports=imports,
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _imported(source: str) -> set[str]:
    """Return the runtime's modules that a ``model.py`` imports."""
    found = [node for node in ast.parse(source).body if isinstance(node, ast.ImportFrom)]
    names = {alias.name for node in found if node.module == PACKAGE for alias in node.names}
    prefix = f"{PACKAGE}."
    return names | {str(node.module).removeprefix(prefix) for node in found if str(node.module).startswith(prefix)}


def _imports(body: str, modules: Set[str], program: LocalProgram) -> str:
    """Return the import statements of ``model.py`` for the runtime's ``modules`` and the names in ``body``."""
    used = {node.id for node in ast.walk(ast.parse(body)) if isinstance(node, ast.Name)}
    usual = {
        "spmd": "import spmd_types as spmd",
        "torch": "import torch",
        "F": "import torch.nn.functional as F",
        "nn": "from torch import nn",
        "checkpoint": "from torch.utils.checkpoint import checkpoint",
    }
    compiled = any(layer.compiled for layer in program.layers)
    lines = [line for name, line in usual.items() if name in used and not (name == "spmd" and compiled)]
    lines += ["", *(f"import {name}" for name in custom_modules(program.graph))]
    if imported := sorted(used & CALLED | modules):
        lines += _wrapped(f"from {PACKAGE} import ", imported)
    lines += [f"from {PACKAGE}.compiled import OPTIONS, spmd"] if compiled else []
    lines += _wrapped(f"from {PACKAGE}.spec import ", sorted(name for name in used if name in _RECORDS))
    return "\n".join(lines)


def _wrapped(start: str, names: Sequence[str]) -> list[str]:
    """Return an import statement, in brackets if it is long."""
    line = start + ", ".join(names)
    return [line] if len(line) <= 120 else textwrap.wrap(f"{start}({', '.join(names)})", 120, subsequent_indent="    ")


_RECORDS = ("Layer", "LayerSpec", "Prelude", "ProgramSpec", "StageSpec", "TensorSpec", "Tensors", "Total")


def _program_record(program: LocalProgram, parts: Mapping[str, str], prelude: str) -> str:
    """Return the source of ``PROGRAM``, the record of the program at the end of ``model.py``."""
    mesh = ", ".join(f"{quoted(axis.name)}: {axis.size}" for axis in program.plan.mesh)
    stages = ", ".join(f"Stage{stage.index}" for stage in program.stages) + ("," if len(program.stages) == 1 else "")
    ignored = ignored_labels(program.graph)
    sample = program.graph.structure and program.graph.structure.sample
    if isinstance(sample, dict) and all(key == name for key, name in sample.items()):
        sample = None  # a dict by input name
    fields = {
        "mesh": f"{{{mesh}}},  # of a stage, outermost axis first",
        "stages": f"({stages}),",
        "prelude": f"{prelude}," if prelude else "",
        "sample": f"{literal(sample, {})},  # the structure of a data set's sample" if sample else "",
        "ignored": f"{literal(ignored, {})},  # labels of rows that the loss leaves out" if ignored else "",
        "flattened": f"{literal(program.flattened, {})}," if program.flattened else "",
        "no_evaluation": f"{quoted(refusal)}," if (refusal := program.graph.no_evaluation) else "",
        **{name: f"{literal(fact, {})}," for name, fact in SYNC.spec(program.plan.sync).items()},
    }
    lines = [f"    {name}={text}" for name, text in fields.items() if text]
    more = ", ".join(f"{name}={part}" for name, part in parts.items())
    lines += [f"    {line}" for line in textwrap.wrap(f"{more},", 150)]
    return "\n".join(["PROGRAM = ProgramSpec(", *lines, ")"]) + "\n"


def _deviation_sentences(program: LocalProgram) -> str:
    """Return sentences on how the program's step deviates from that of one device."""
    sentences = [_SEPARATE_BATCHES] if program.graph.accumulated > 1 else []
    sentences.append(SYNC.header(program.plan.sync))
    for layer in program.layers:
        chosen = layer.strategy.options.chosen
        sentences += (technique.header(value, layer.cls.gives_loss) for technique, value in chosen)
    return "".join(f"\n{sentence}" for sentence in dict.fromkeys(sentences) if sentence)


def _layer_classes(program: LocalProgram, axes: tuple[str, ...], watch: bool) -> tuple[list[str], dict[int, str]]:
    """Return the sources of the layer classes, one for all layers with equal code, and every layer's class name by index."""
    names = Names()
    bodies: dict[tuple[int, frozenset[int]], str] = {}
    users: dict[tuple[str, str], list[int]] = {}  # (class in the user's model, code) -> layers
    for stage in program.stages:
        for index in stage.layers:
            layer, local = program.graph.layers[index], program.layers[index]
            shared = frozenset(i for i, name in enumerate(layer.parameters) if name in stage.owned)
            if (id(local), shared) not in bodies:
                bodies[id(local), shared] = layer_body(local, axes, shared, watch)
            users.setdefault((layer.cls.rstrip("0123456789"), bodies[id(local), shared]), []).append(index)
    sources: list[str] = []
    class_names: dict[int, str] = {}
    for (_, body), layers in users.items():
        name = names.fresh(program.graph.layers[layers[0]].cls)
        sources.append(f'class {name}(Layer):\n    """{remark(_uses(program, layers))}"""\n\n{body}')
        class_names.update(dict.fromkeys(layers, name))
    return sources, class_names


def _uses(program: LocalProgram, layers: Sequence[int]) -> str:
    """Describe which layers share the class, and their strategies."""
    names = [program.graph.layers[layer].name for layer in layers]
    which = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]} ({len(names)} layers)"
    found: dict[str, dict[str, None]] = {}
    for layer in layers:
        strategy = program.layers[layer].strategy
        roles = ", ".join(
            f"{role.value} on {a.name}" for a, role in zip(program.plan.mesh, strategy.roles, strict=True)
        )
        copies = f" in {strategy.replicate} copies" if strategy.replicate > 1 else ""
        found.setdefault(roles, {})[", ".join([f"ZeRO {strategy.zero}{copies}", *phrases(strategy.options)])] = None
    parts = "; or ".join(f"{roles}; {' or '.join(found[roles])}" for roles in found)
    return f"{which}: {parts}."


def layouts(program: LocalProgram) -> list[dict[str, object]]:
    """Return the layout records of all stages' parameters as JSON."""
    graph, axes = program.graph, tuple(axis.name for axis in program.plan.mesh)
    stages_of: dict[str, set[int]] = {}
    for stage in program.stages:
        for layer in stage.layers:
            for name in graph.layers[layer].parameters:
                stages_of.setdefault(name, set()).add(stage.index)
    records: list[dict[str, object]] = []
    for stage in program.stages:
        written: set[str] = set()
        for layer in stage.layers:
            for position, name in enumerate(graph.layers[layer].parameters):
                if name in written:
                    continue
                written.add(name)
                here = program.layers[layer]
                local = here.parameters[position]
                record = graph.parameters[name]
                owned = name in stage.owned
                attribute = owned_attribute(name) if owned else _parameter_path(program, layer, local.name)
                part = None
                if record.dim is not None:
                    part = {"dim": record.dim, "start": record.start, "length": record.shape[record.dim]}
                records.append(
                    {
                        "stage": stage.index,
                        "name": attribute,
                        "original": record.original,
                        "original_shape": list(record.original_shape),
                        "part": part,
                        "global_shape": list(record.shape),
                        "padded_shape": list(here.cls.parameters[position].shape),
                        "dtype": name_of(record.dtype),
                        "trainable": record.trainable,
                        "tied": list(record.tied),
                        "types": {axis: str(t) for axis, t in zip(axes, local.types, strict=True)},
                        "shared": name if len(stages_of[name]) > 1 else None,
                        **({"stacked": list(record.stacked)} if record.stacked else {}),
                    }
                )
    return records


def buffers(program: LocalProgram) -> list[dict[str, object]]:
    """Return the records of the buffers that the model writes, as JSON; ``written`` says whether the layer computes the new value."""
    records: list[dict[str, object]] = []
    for stage in program.stages:
        for index in stage.layers:
            layer, local = program.graph.layers[index], program.layers[index]
            for original, value in zip(layer.buffers, local.cls.buffers, strict=True):
                record = program.graph.buffers[original]
                records.append(
                    {
                        "stage": stage.index,
                        "name": f"{layer_path(program, index)}.{buffer_paths(local)[value.name]}",
                        "original": original,
                        "shape": list(record.shape),
                        "dtype": name_of(record.dtype),
                        "persistent": record.persistent,
                        "written": value.name in local.cls.updates,
                    }
                )
    return records


def _parameter_path(program: LocalProgram, layer: int, name: str) -> str:
    return f"{layer_path(program, layer)}.{parameter_paths(program.layers[layer])[name]}"
