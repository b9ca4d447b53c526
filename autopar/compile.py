"""Compiles a model to its distributed program, in named stages.

======== =============================== ==================================================================
capture  model, batch -> graph           ``torch.export``, cleaned, cut into layers and layer classes
search   graph, cluster -> plan          cost model, OR-Tools, bound and gap
emit     graph, plan -> program folder   the passes, then one readable module per layer class
run      program folder -> ``Program``   the object that trains
======== =============================== ==================================================================

The command line, logs and progress show these names.
"""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from autopar.checks.collectives import check_collectives
from autopar.checks.types import check_program
from autopar.devices import Cluster, parse
from autopar.emit import emit
from autopar.errors import UsageError
from autopar.expert_loads import expert_loads
from autopar.graph import Graph, forget_graphs
from autopar.keywords import Request, Training, as_keywords, read_keywords, with_explicit_signature
from autopar.plan import Plan
from autopar.planning import plan_model
from autopar.progress import Progress, report
from autopar.run import Program, ranks
from autopar.run.folder import folder_for_program
from autopar.run.initialise import initial_values, with_buffer_values
from autopar.run.processes import finalize_unless_forked
from autopar.search import SearchOptions
from autopar.torch_private import without_kept_sources
from autopar.workload import Workload, without_inference

if TYPE_CHECKING:
    from torch import Tensor, nn

_COMPILING = threading.RLock()
NOT_TYPED = "the program was not type-checked: type checking was off (type_check=False)"


@with_explicit_signature
def compile(
    model: nn.Module,
    devices: Any,
    batch: Sequence[Any] | Mapping[str, Any] | Tensor,
    loss_fn: Callable[..., Tensor] | None = None,
    *,
    plan: Plan | str | Path | None = None,
    pin: Mapping[str, int | str | bool] | None = None,
    folder: str | Path | None = None,
    progress: Progress | None = None,
    **keywords: Any,
) -> Program:
    """Plan, rewrite and emit ``model`` for ``devices``, and load the result.

    Args:
        model: a module on the CPU or on meta that returns the loss, an object with ``.loss``, or what ``loss_fn`` takes.
        devices: ``4``, ``"128x8xH100-80GB"``, a TOML file, or a list of torch devices (see ``autopar.devices.parse``).
        batch: an example of one global batch: a tuple for positional, a mapping for keyword arguments; dim 0 is the batch.
        loss_fn: ``loss_fn(output, targets)`` returns the loss, a 0-d tensor; ``batch`` is then the pair ``(inputs, targets)``.
        plan: a plan, or the path of its file, to use instead of a search.
        pin: pinned decisions of the plan, of all layers or of named layers: ``{"pipeline": 4, "layers.0-7.tensor": 8}``.
        folder: the program's folder; by default a temporary one that lives as long as the ``Program``.
        progress: a function that is called with a stage's name and a short text, when the stage begins and for updates.

    Keywords:
        PINS: the pins of the plan, and of every layer, by name (``docs/guide/pins.md``).
        precision: ``"bfloat16"``, ``"float32"`` etc.; by default the model's.
        local_batch_norm: batch norm uses the statistics of each rank's part of a microbatch.
        allow: allowed numerical deviations from exact training (of ``autopar.plan.ALLOWED``).
        memory_limit_bytes: the bytes of each device's memory that a plan may use.
        calibration: a file of ``autopar profile``; by default the one at the default path, if any.
        expert_loads: a file of ``train.py --record-expert-loads``, or the load of the busiest expert-parallel rank divided by the mean.
        time_limit_s: the processor time that the search may take, so that other work on the machine hardly changes its result.
        within: choose the simplest plan whose step is at most this share longer than that of the fastest plan; 0: the fastest plan.
        capture_check, type_check: compare the captured graph with the model, and type-check the program. The plan notes if one is off.
        optimizer, scheduler, lr, max_norm, seed, port, draw_init: as for ``Program``.

        init: initial values of a model on meta. ``"own"``: its own initialisers run with ``seed``, tensor by tensor, into the folder's
            ``initial.safetensors``, without ever materialising the full model (``autopar.run.initialise``). A function: applied to each
            module, like ``model.apply``. A path: safetensors, such as a folder of transformers; each rank reads its own shards.

    A model on the CPU keeps its values as initial values. Under ``torchrun`` every process calls this function, and rank 0 searches.

    Raises:
        UsageError: invalid devices, batch or pins, or a folder with other files; exit status 2 on the command line.
        CaptureError, InfeasibleError: the model can't be exported; no plan fits.
    """
    # one thread at a time: imported folders, the fake process group and torch's tracing are process-wide
    with _COMPILING, torch.inference_mode(False), torch.enable_grad(), without_kept_sources():
        request, training, pins = read_keywords(keywords)
        if folder is not None and ranks.is_local_rank_0():
            folder_for_program(folder)
        cluster = parse(devices, memory_limit_bytes=request.memory_limit_bytes, calibration=request.calibration)
        options = SearchOptions(
            pin=pin or {}, allow=request.allow, time_limit_s=request.time_limit_s, within=request.within, **pins
        )
        model = with_buffer_values(model, request.init)
        numerics = (request.precision, request.local_batch_norm)
        loads = expert_loads(request.expert_loads)
        workload = Workload(model, without_inference(batch), loss_fn, None, *numerics, loads)
        try:
            graph, chosen = plan_model(
                workload, cluster, options, plan=plan, capture_check=request.capture_check, progress=progress
            )
            return start_program(
                graph, chosen, cluster, model, folder, training=training, request=request, progress=progress
            )
        finally:
            forget_graphs()


def emit_program(
    graph: Graph,
    plan: Plan,
    folder: Path,
    progress: Progress | None = None,
    *,
    type_check: bool = True,
    state: Mapping[str, Tensor] | None = None,
) -> None:
    """Run stage ``emit``: write the program into ``folder`` and check it. ``state`` is a state dict of initial values. Raises
    ``UsageError`` if the folder can't be written, ``ProgramError`` if a check fails."""
    report(progress, "emit")
    if not type_check:
        plan = dataclasses.replace(plan, notes=(*plan.notes, NOT_TYPED))
    try:
        check_collectives(emit(graph, plan, folder, state=state))
    except OSError as error:
        raise UsageError(
            f"the program cannot be written to {folder}: {error.strerror}",
            "give a folder that can be made and written to",
        ) from error
    if type_check and ranks.is_local_rank_0():
        start_s = time.perf_counter()
        stages = check_program(folder, lambda text: report(progress, "emit", text))
        report(progress, "emit", f"{stages} stages are well-typed ({time.perf_counter() - start_s:.1f} s)")


def start_program(
    graph: Graph,
    plan: Plan,
    cluster: Cluster,
    model: nn.Module,
    folder: str | Path | None = None,
    *,
    training: Training | None = None,
    request: Request | None = None,
    progress: Progress | None = None,
) -> Program:
    """Emit the program, load it, and set its parameters: to the values of ``model``'s parameters, or as ``request.init`` says.

    Without ``folder`` the program is written to a temporary folder. With it, one process writes ``folder`` (one per machine, if machines
    share no file system); all others write to temporary folders.
    """
    request, training = request or Request(), training or Training()
    init = request.init
    state = model.state_dict() if init is None else None
    writer = ranks.machine() if folder is None else ranks.writer_of(Path(folder))
    lasting = folder is not None and ranks.writes(writer)
    home = Path(folder) if folder is not None and lasting else Path(tempfile.mkdtemp(prefix="autopar-program-"))
    try:
        # processes that read a temporary folder get the values from this process
        emit_program(graph, plan, home, progress, type_check=request.type_check, state=state if lasting else None)
        initial: Mapping[str, Tensor] | str | Path | None = state
        if init is not None:
            report(progress, "emit", f"values: {init}")
            initial = initial_values(model, init, training.seed, home, folder, writer)
        report(progress, "run")
        # the program was type-checked when it was emitted
        program = Program(plan, home, graph, cluster=cluster, state=initial, type_check=False, **as_keywords(training))
    except BaseException:
        if not lasting:
            shutil.rmtree(home, ignore_errors=True)
        raise
    if lasting:
        # this process can train with a recipe that can't be written as code; the folder's ``train.py`` then raises the error
        with contextlib.suppress(UsageError):
            program.write_recipe(home)
    else:
        finalize_unless_forked(program, shutil.rmtree, home, ignore_errors=True)
    return program
