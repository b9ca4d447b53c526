"""Selects the optional parts of the runtime that a program needs: its ``PROGRAM`` record names them; files of other parts aren't copied."""

from __future__ import annotations

import itertools
import json
from typing import Any

from autopar.emit.stage import layer_path, layer_spec, own_spec
from autopar.ops.meta import meta
from autopar.plan import NARROW
from autopar.precision import FLOAT16
from autopar.program.optimizers import cut
from autopar.program.parameters import kind_of
from autopar.program.spec import LayerSpec, ProgramSpec
from autopar.program.world import Layout, LoadedProgram
from autopar.techniques import SYNC
from passes.stages import LocalProgram, Stage


def runtime_parts(program: LocalProgram, layouts: list[dict[str, Any]]) -> dict[str, str]:
    """Return the fields of ``ProgramSpec`` that name parts of the runtime, as module and class; ``layouts`` as in ``layouts.json``."""
    loaded = _loaded(program, layouts)
    trained = [layout for layout in loaded.layouts if layout.trainable]
    kinds = {kind_of(layout, loaded) for layout in loaded.layouts}
    split = loaded.splits_backward
    wanted = {
        "schedule": (True, _schedule(program)),
        "fsdp": ("fsdp" in kinds, "fsdp_split.SplitShardedGroup" if split else "fsdp.ShardedGroup"),
        "whole_tensors": (any(cut(layout, loaded) for layout in trained), "whole_tensors.WholeTensors"),
        "chunked_updates": (any(name in program.plan.allow for name in NARROW), "chunked_updates.ChunkedUpdates"),
        "loss_scale": (program.plan.precision == FLOAT16, "scaling.LossScale"),
        "buffers": (any(local.cls.buffers for local in program.layers), "buffers.StageBuffers"),
    }
    found = {name: text for name, (needed, text) in wanted.items() if needed}
    of_layers = (local.strategy.options.runtime_parts.items() for local in program.layers)
    return {**found, **dict(itertools.chain(*of_layers)), **SYNC.runtime_parts(program.plan.sync)}


def _schedule(program: LocalProgram) -> str:
    schedule = program.plan.sized_schedule
    if len(program.stages) == 1:
        return "microbatches.Microbatches"
    if schedule.copies > 1:
        return "chimera.Chimera"
    if any(meta(node).get("kernel_send") for local in program.layers for node in local.graph.graph.nodes):
        return "pairs.PairedPipeline"
    return "split_pipeline.SplitPipeline" if schedule.split else "pipeline.Pipeline"


def _loaded(program: LocalProgram, layouts: list[dict[str, Any]]) -> LoadedProgram:
    """Return the program as its runtime will load it, without ``model.py``."""
    mesh = {axis.name: axis.size for axis in program.plan.mesh}
    return LoadedProgram(
        plan=json.loads(program.plan.dumps()),
        layouts=tuple(Layout.read(record, mesh) for record in layouts),
        spec=ProgramSpec(mesh=mesh, stages=program.stages, schedule=None, **SYNC.spec(program.plan.sync)),
        layers=tuple(_layers(program, stage) for stage in program.stages),
        constants={},
    )


def _layers(program: LocalProgram, stage: Stage) -> dict[str, LayerSpec]:
    own = own_spec(program, stage)
    layers = {layer_path(program, layer): layer_spec(program, layer) for layer in stage.layers}
    return layers if own is None else {**layers, "": own}
