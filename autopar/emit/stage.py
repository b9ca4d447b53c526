"""Emits a pipeline stage as a readable ``nn.Module`` class: its layers in order, and the conversions between them."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import fx

from autopar.emit.expressions import conversion_text, literal
from autopar.emit.layer import buffer_paths
from autopar.emit.names import Names, flat_attributes, identifier, quoted, remark
from autopar.graph import Value
from autopar.ops.experts import Experts
from autopar.ops.facts import is_custom, op_of
from autopar.plan import Axis
from autopar.program.spec import LayerSpec
from autopar.techniques.technique import Call
from autopar.types import R, SpmdType
from passes.layer import batch_dims
from passes.stages import LocalProgram, Stage, argument_keys

Types = tuple[SpmdType, ...]


@dataclass
class _Variable:
    """A variable of the stage's forward: its text and types."""

    text: str
    types: Types
    dtype: torch.dtype | None  # None if no gradient flows through it


def stage_class(program: LocalProgram, stage: Stage, class_names: dict[int, str]) -> str:
    """Return the source of ``Stage<index>``; ``class_names`` has the class name of every layer by index."""
    axes = tuple(axis.name for axis in program.plan.mesh)
    lines = [
        f"class Stage{stage.index}(nn.Module):",
        f'    """{remark(_summary(program, stage))}"""',
        "",
        *_spec(program, stage, axes),
        "",
        *_constructor(program, stage, class_names, axes),
        "",
        *_Forward(program, stage, class_names).lines(),
    ]
    return "\n".join(lines) + "\n"


@dataclass(frozen=True, slots=True)
class _Place:
    """The place of a layer in its stage: a separate attribute, or the key ``number`` of an ``nn.ModuleDict``."""

    attribute: str
    number: int | None = None

    @property
    def path(self) -> str:
        return self.attribute if self.number is None else f"{self.attribute}.{self.number}"

    @property
    def text(self) -> str:
        return f"self.{self.attribute}" + ("" if self.number is None else f'["{self.number}"]')


@lru_cache(maxsize=256)
def _places(layers: tuple[str, ...], constants: tuple[str, ...]) -> tuple[tuple[_Place, ...], tuple[str, ...]]:
    """Return where a stage holds its ``layers``, and the attributes of its ``constants``. Consecutive layers ``h.0`` to ``h.7`` share a
    ``ModuleDict``."""
    matches = [re.fullmatch(r"(.+)\.(0|[1-9]\d*)", name) for name in layers]
    lists = [match[1] if match else None for match in matches]
    runs = [key for key, _ in itertools.groupby(lists)]
    held = [key if key is not None and lists.count(key) > 1 and runs.count(key) == 1 else None for key in lists]
    keys = tuple(dict.fromkeys(name if key is None else f"{key}." for name, key in zip(layers, held, strict=True)))
    attributes = flat_attributes((*keys, *constants))
    attribute_of = dict(zip(keys, attributes, strict=False))
    places = [
        _Place(attribute_of[name]) if key is None or match is None else _Place(attribute_of[f"{key}."], int(match[2]))
        for name, key, match in zip(layers, held, matches, strict=True)
    ]
    return tuple(places), attributes[len(keys) :]


def _locations(program: LocalProgram, stage: Stage) -> tuple[dict[int, _Place], dict[str, str]]:
    """Return where the stage holds its layers, by index, and the attributes of its constants, by name."""
    names = tuple(program.graph.layers[layer].name for layer in stage.layers)
    places, constants = _places(names, tuple(stage.constants))
    return dict(zip(stage.layers, places, strict=True)), dict(zip(stage.constants, constants, strict=True))


def layer_path(program: LocalProgram, layer: int) -> str:
    """Return a layer's path in its stage."""
    stage = next(stage for stage in program.stages if layer in stage.layers)
    return _locations(program, stage)[0][layer].path


def _summary(program: LocalProgram, stage: Stage) -> str:
    first, last = program.graph.layers[stage.layers[0]].name, program.graph.layers[stage.layers[-1]].name
    return f"{first} to {last}." if first != last else f"{first}."


def _spec(program: LocalProgram, stage: Stage, axes: tuple[str, ...]) -> list[str]:
    """Return the lines of the stage's ``SPEC``."""
    rows = program.graph.batch_size
    given = [value for value in program.graph.inputs if value.name in stage.inputs]
    inputs = {v.name: _tensor((rows, *v.shape[1:]), v.dtype, axes, stage.inputs[v.name]) for v in given}
    sends = {
        border.value.name: _tensor(border.shape, border.value.dtype, axes, border.types, border.value.requires_grad)
        for border in stage.sends
    }
    lines = ["    SPEC = StageSpec("]
    for field, tensors in (("inputs", inputs), ("sends", sends)):
        entries = [f"{quoted(name)}: {text}" for name, text in tensors.items()]
        if len(entries) == 1:
            lines.append(f"        {field}={{{entries[0]}}},")
        elif entries:
            lines += [f"        {field}={{", *(f"            {entry}," for entry in entries), "        },"]
    more = [f"scalars={literal(stage.scalars, {})},"] if stage.scalars else []
    if stage.index == len(program.plan.stages) - 1:
        more.append(f"loss={_types(axes, program.layers[-1].output(0))},")
    more += ["random=True,"] if stage.random else []
    lines += [f"        {' '.join(more)}"] if more else []
    if (own := own_spec(program, stage)) is not None:
        lines.append(f"        own={spec_text(own)},  # of the parameters that several layers share")
    return [*lines, "    )"]


def _tensor(shape: tuple[int, ...], dtype: torch.dtype, axes: tuple[str, ...], types: Types, flows: bool = True) -> str:
    gradient = ", gradient=False" if dtype.is_floating_point and not flows else ""
    return f"TensorSpec({shape!r}, {dtype}, {_types(axes, types)}{gradient})"


def _types(axes: tuple[str, ...], types: Types) -> str:
    return "{" + ", ".join(f"{quoted(axis)}: spmd.{t}" for axis, t in zip(axes, types, strict=True)) + "}"


def layer_spec(program: LocalProgram, layer: int) -> LayerSpec:
    """Return the spec of a layer's parameters."""
    local = program.layers[layer]
    paths = buffer_paths(local)
    return _spec_of(program, layer, [layer], tuple(paths[name] for name in local.cls.updates))


def own_spec(program: LocalProgram, stage: Stage) -> LayerSpec | None:
    """Return the spec of parameters that several layers of the stage share, or ``None`` if there are none."""
    if not stage.owned:
        return None
    users = [i for i in stage.layers if not stage.owned.keys().isdisjoint(program.graph.layers[i].parameters)]
    return _spec_of(program, next(iter(stage.owned.values())), users, ())


def _spec_of(program: LocalProgram, layer: int, users: Sequence[int], updates: tuple[str, ...]) -> LayerSpec:
    local = program.layers[layer]
    strategy = local.strategy
    copies, shards = (tuple(axis.name for axis in axes) for axes in strategy.data_axes(program.plan.mesh))
    return LayerSpec(
        zero=strategy.zero,
        data_axes=copies + shards,
        replicate_axes=copies,
        segment=strategy.options.segment_layers,
        backward=any(value.requires_grad for value in local.cls.outputs),
        opaque=any(_is_opaque(program.layers[user].graph) for user in users),
        updates=updates,
        options=strategy.options.specified,
    )


def spec_text(spec: LayerSpec) -> str:
    """Return the spec as Python text, without defaults."""
    usual = LayerSpec(spec.zero, spec.data_axes)
    needed = ("zero", "data_axes")
    fields = [(field.name, getattr(spec, field.name)) for field in dataclasses.fields(spec)]
    given = [(name, value) for name, value in fields if name in needed or value != getattr(usual, name)]
    return f"LayerSpec({', '.join(f'{name}={literal(value, {})}' for name, value in given)})"


def _is_opaque(graph: fx.GraphModule) -> bool:
    """Return whether a layer runs an opaque module or a custom op, also inside a mixture of experts."""
    targets = [node.target for node in graph.graph.nodes if node.op == "call_function"]
    return any(
        _is_opaque(target.body)
        if isinstance(target, Experts)
        else is_custom(target) or op_of(target).name.startswith("autopar.opaque_")
        for target in targets
    )


def owned_attribute(name: str) -> str:
    """Return the stage's attribute of a parameter that several of its layers use."""
    return identifier(name)


def _constructor(program: LocalProgram, stage: Stage, class_names: dict[int, str], axes: tuple[str, ...]) -> list[str]:
    lines = [
        "    def __init__(self, device: torch.device | str, constants: dict[str, torch.Tensor]) -> None:",
        "        super().__init__()",
    ]
    if any(program.layers[layer].cls.updates for layer in stage.layers):
        lines.append(
            "        self.updates = []  # (layer, new values of its buffers), one for each call; the runtime writes them"
        )
    places, constants = _locations(program, stage)
    for name, attribute in constants.items():
        lines.append(f'        self.register_buffer("{attribute}", constants[{quoted(name)}], persistent=False)')
    for name, layer in stage.owned.items():
        index = program.graph.layers[layer].parameters.index(name)
        parameter = program.layers[layer].parameters[index]
        record = program.graph.parameters[name]
        shape = ", ".join(map(str, parameter.shape)) or "()"
        grad = "" if record.trainable else ", requires_grad=False"
        types = ", ".join(f"{t} on {remark(axis)}" for axis, t in zip(axes, parameter.types, strict=True))
        tensor = f"torch.empty({shape}, device=device, dtype={record.dtype})"
        lines.append(f"        self.{owned_attribute(name)} = nn.Parameter({tensor}{grad})  # {types}")
    return [*lines, *_layers(program, class_names, places)]


def _layers(program: LocalProgram, class_names: dict[int, str], places: dict[int, _Place]) -> list[str]:
    """Return the lines that create the layers, with a loop over consecutive layers of equal class and spec."""

    def loop_key(layer: int) -> tuple[str, str, str, bool, int]:
        place = places[layer]
        kind = place.attribute, class_names[layer], spec_text(layer_spec(program, layer)), program.layers[layer].random
        return *kind, layer - place.number if place.number is not None else -layer - 1

    lines: list[str] = []
    known: set[str] = set()
    for (_, name, spec, random, offset), several in itertools.groupby(places, loop_key):
        layers = list(several)
        first, last = places[layers[0]], places[layers[-1]]
        if first.number is not None and first.attribute not in known:
            known.add(first.attribute)
            lines.append(f"        self.{first.attribute} = nn.ModuleDict()")
        if first.number is None or last.number is None or len(layers) == 1:
            number = f"number={layers[0]}, " if random else ""
            lines.append(f"        {first.text} = {name}({spec}, {number}device=device)")
            continue
        index = f"i {'-' if offset < 0 else '+'} {abs(offset)}" if offset else "i"
        number = f"number={index}, " if random else ""
        lines.append(f"        for i in {_range(first.number, last.number + 1)}:")
        lines.append(f"            self.{first.attribute}[str(i)] = {name}({spec}, {number}device=device)")
    return lines


def _range(start: int, stop: int) -> str:
    return f"range({start}, {stop})" if start else f"range({stop})"


def _gradient_dtype(value: Value) -> torch.dtype | None:
    return value.dtype if value.requires_grad else None


class _Forward:
    """Writes a stage's forward: a line per layer, a loop for a chain of equal layers."""

    def __init__(self, program: LocalProgram, stage: Stage, class_names: dict[int, str]) -> None:
        self.program, self.stage, self.class_names = program, stage, class_names
        self.mesh: tuple[Axis, ...] = program.plan.mesh
        self.names = Names()
        self.values: dict[str, _Variable] = {}
        self.reshardings = {(resharding.layer, resharding.key): resharding for resharding in stage.reshardings}
        self.converted: dict[tuple[str, Types], str] = {}
        self.body: list[str] = []
        self.places, self.constants = _locations(program, stage)

    def lines(self) -> list[str]:
        stage, graph = self.stage, self.program.graph
        for taken in ("hidden", "loss", "layer", "key", "new"):
            self.names.fresh(taken)
        inputs = []
        replicated = (R,) * len(self.mesh)
        for name, types in stage.inputs.items():
            self.values[f"input {name}"] = _Variable(self.names.exactly(name), types, None)
            inputs.append(name)
        for name in stage.scalars:
            self.values[f"scalar {name}"] = _Variable(self.names.exactly(name), replicated, None)
            inputs.append(name)
        received = []
        for border in stage.receives:
            name = self.names.fresh(border.value.name)
            received.append(name)
            self.values[border.value.name] = _Variable(name, border.types, _gradient_dtype(border.value))
        for name in stage.constants:
            self.values[f"constant {name}"] = _Variable(f"self.{self.constants[name]}", replicated, None)
        layers = list(stage.layers)
        while layers:
            run = self._run(layers)
            self._call(layers[0], run)
            del layers[:run]
        sends = [self.values[border.value.name].text for border in stage.sends] or [self.values[graph.loss].text]
        positional = ", ".join(["self", *(f"{name}: torch.Tensor" for name in received)])
        named = [f"{self.values[self._key(name)].text}: torch.Tensor" for name in inputs]
        keywords = ", ".join([*named, *(["key: int | None"] if stage.random else [])])
        signature = f"{positional}, *, {keywords}" if keywords else positional
        result = sends[0] if not stage.sends else f"({', '.join(sends)},)"
        returns = "tuple[torch.Tensor, ...]" if stage.sends else "torch.Tensor"
        start, _, call = self.body[-1].partition(" = ")
        last = [f"        return {call}"] if start.strip() == result else [self.body[-1], f"        return {result}"]
        return [f"    def forward({signature}) -> {returns}:", *self.body[:-1], *last]

    def _key(self, name: str) -> str:
        return f"input {name}" if name in self.stage.inputs else f"scalar {name}"

    def _run(self, layers: list[int]) -> int:
        """Return how many of ``layers``, from the first, one loop or joint call covers; a loop has at least three."""
        graph, program = self.program.graph, self.program
        first = graph.layers[layers[0]]
        count = 1
        for previous, layer in zip(layers, layers[1:], strict=False):
            this, before = graph.layers[layer], graph.layers[previous]
            chained = (
                this.activations == before.outputs
                and len(before.outputs) == 1
                and self._readers(before.outputs[0]) == 1
            )
            alike = (
                self.class_names[layer] == self.class_names[layers[0]]
                and (this.inputs, this.constants, this.scalars) == (first.inputs, first.constants, first.scalars)
                and not any(name in self.stage.owned for name in this.parameters)
                and not graph.classes[this.cls].updates
                and program.layers[layer].border(0) == program.layers[previous].output(0)
                and self._layers_per_call(layer) == self._layers_per_call(layers[0])
                and program.layers[layer].chained == program.layers[layers[0]].chained
            )
            if not (chained and alike):
                break
            count += 1
        together = self._layers_per_call(layers[0]) > 1 or program.layers[layers[0]].chained
        return count if count > 2 or together else 1

    def _layers_per_call(self, layer: int) -> int:
        """Return how many layers a technique calls together, this one included; 1 if each is called separately."""
        return self.program.layers[layer].strategy.options.segment_layers

    def _readers(self, value: str) -> int:
        return sum(value in layer.activations for layer in self.program.graph.layers)

    def _call(self, layer: int, run: int) -> None:
        graph, local = self.program.graph, self.program.layers[layer]
        this = graph.layers[layer]
        arguments = [self._read(layer, key, local.border(place)) for place, key in argument_keys(this)]
        arguments += [f"self.{owned_attribute(name)}" for name in this.parameters if name in self.stage.owned]
        if local.random:
            arguments.append("key")
        last = graph.layers[layer + run - 1]
        results = []
        dtypes = [_gradient_dtype(value) for value in local.cls.outputs]
        for position, name in enumerate(last.outputs):
            single = len(last.outputs) == 1 and name != graph.loss and self._readers(name) == 1
            # the next layer overwrites "hidden", so a value that it doesn't read gets another name
            following = layer + run
            passed = following not in self.stage.layers or name in graph.layers[following].activations
            text = "hidden" if single and passed else "loss" if name == graph.loss else self.names.fresh(name)
            self.values[name] = _Variable(text, local.output(position), dtypes[position])
            results.append(text)
        if local.chained or (run > 1 and self._layers_per_call(layer) > 1):
            self._call_together(layer, run, arguments, results[0])
            return
        if run == 1:
            call = f"{self.places[layer].text}({', '.join(arguments)})"
            if results:
                targets = ", ".join([*results, *(["*new"] if local.cls.updates else [])])
                self.body.append(f"        {targets} = {call}")
            else:  # its outputs are unused, but it writes buffers
                self.body.append(f"        new = [{call}]" if len(local.cls.updates) == 1 else f"        new = {call}")
            if local.cls.updates:
                self.body.append(f'        self.updates.append(("{self.places[layer].path}", new))')
            return
        if arguments[0] != "hidden":
            self.body.append(f"        hidden = {arguments[0]}")
        rest = "".join(f", {argument}" for argument in arguments[1:])
        self.body.append(f"        for layer in {self._members(range(layer, layer + run))}:")
        self.body.append(f"            hidden = layer(hidden{rest})")
        if results != ["hidden"]:
            self.body.append(f"        {results[0]} = hidden")

    def _members(self, layers: range) -> str:
        """Return an expression for the sequence of the stage's modules of ``layers``."""
        places = [self.places[layer] for layer in layers]
        first = places[0]
        numbers = [place.number for place in places if place.number is not None and place.attribute == first.attribute]
        if len(places) == 1 or first.number is None or numbers != [*range(first.number, first.number + len(layers))]:
            return "(" + ", ".join(place.text for place in places) + ("," if len(places) == 1 else "") + ")"
        if len(numbers) == sum(place.attribute == first.attribute for place in self.places.values()):
            return f"self.{first.attribute}.values()"
        return f"[self.{first.attribute}[str(i)] for i in {_range(numbers[0], numbers[-1] + 1)}]"

    def _call_together(self, layer: int, run: int, arguments: list[str], result: str) -> None:
        """Emit ``run`` layers that techniques call together: in groups of ``_layers_per_call``, or all at once if that is 1."""
        local, graph = self.program.layers[layer], self.program.graph
        rows, joined = batch_dims(local.cls, local.sharding.types[0])
        dims = [rows[place] for place, _ in argument_keys(graph.layers[layer])]
        dims = [None, *dims, *(None for _ in arguments[len(dims) :])]
        number = self._layers_per_call(layer) if self._layers_per_call(layer) > 1 else run
        value, last_remark = arguments[0], ""
        for at in range(layer, layer + run, number):
            members = self._members(range(at, min(at + number, layer + run)))
            call = Call((members, value, *arguments[1:]), rows=tuple(dims), joined=joined, layers=True)
            value = "hidden" if at + number < layer + run else result
            changed = local.strategy.options.wrap_call(call)
            lines = changed.lines(f"{value} = ")
            self.body += [f"        {line}" for line in lines if line != f"# {last_remark}"]
            last_remark = changed.remark

    def _read(self, layer: int, key: str, needed: Types) -> str:
        """Emit the conversions of a value to the types that a layer takes, and return its text."""
        variable = self.values[key]
        resharding = self.reshardings.get((layer, key))
        if resharding is not None:
            text = variable.text
            for step in resharding.steps:
                axes = tuple(self.mesh[axis].name for axis in step.axes)
                call = conversion_text(text, axes, str(step.source), str(step.target), variable.dtype)
                # "hidden" has one reader, which reads the converted value
                name = text if text == "hidden" else self.names.fresh(text.removeprefix("self."))
                self.body.append(f"        {name} = {call}")
                text = name
            self.converted[key, needed] = text
        return self.converted.get((key, needed), variable.text)
