"""The activations that a layer keeps from forward to backward: bytes, and seconds of recomputation, copies and quantization.

*Recomputation*: the layer keeps only its input, or a selection of values (``selective``), and recomputes the rest.

*Activation offload*: kept tensors are copied to the host after the layer's forward and back before its backward, while other layers
compute; the device waits for copies that take longer than the layer's own arithmetic. Device memory holds the tensors of the running layer
and of one layer that is being copied, assumed to be equally large. If devices and host share one memory (``Cluster.host`` is ``None``),
offload saves nothing: the tensors stay, and while a layer runs, copies of its tensors and of the next layer's exist, too.

*Quantization* (``QuantizedStorage``): while the layer runs, its tensors also exist at full width: in the forward until their last reader
(in a compiled layer until its end), in the backward from their first reader. The cost model counts all of them as live at the same time, as
in a recomputed layer.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from autopar.price.layer import BoundClass, SizedClass, distinct
from autopar.price.microbatch import Pass, Passes, SavedActivations
from autopar.price.selective import Selected
from autopar.techniques import Options
from autopar.techniques.technique import QuantizedStorage


def saved_activations(sized: SizedClass, passes: Passes, options: Options) -> SavedActivations:
    """Return the activations that the layer keeps under its options."""
    assert not (options.recomputes and options.quantized), "these activations have no price together"
    if options.recomputes == "all":
        found = _input_alone(sized, passes, options.segment_layers)
    elif options.recomputes:
        found = _selection(sized)
    elif options.quantized is not None:
        found = _quantized(sized, passes, options.quantized)
    else:
        found = SavedActivations(sized.plain_bytes, sized.plain_bytes, sized.plain_bytes)
    return _in_host(found, sized.cluster.host is not None) if options.saved_in else found


def _input_alone(sized: SizedClass, passes: Passes, layers: int) -> SavedActivations:
    share = sized.input_bytes / layers
    return SavedActivations(
        saved_bytes=share,
        first_bytes=sized.input_bytes,
        working_bytes=max(sized.input_bytes, layers * sized.plain_bytes) - (sized.input_bytes - share),
        recomputed=passes.forward,
        pairs=sized.bound.pairs,
        layers=layers,
        recomputes=True,
    )


def _selection(sized: SizedClass) -> SavedActivations:
    bound, table = sized.bound, sized.bound.table
    entries, chosen = _selected(bound)
    saved_bytes, working_bytes = table.selection.memory(
        table.saved, sized.saved, list(bound.plain), list(entries), table.live.saver, len(table.ops), sized.input_bytes
    )
    repeated = sized.pass_of("forward", chosen.pairs, chosen.recomputed)
    return SavedActivations(
        saved_bytes=saved_bytes,
        first_bytes=saved_bytes,
        working_bytes=max(saved_bytes, working_bytes, sized.plain_bytes),
        recomputed=dataclasses.replace(repeated, wire_s=repeated.wire_s + repeated.exposed_s, exposed_s=0.0),
        pairs=chosen.pairs,
        recomputes=True,
    )


def _selected(bound: BoundClass) -> tuple[tuple[int, ...], Selected]:
    """Return the saved entries under selective recomputation, one per storage, and the ops and collectives that run again."""
    if "selected" not in bound.cache:
        table = bound.table
        chosen = table.selection.under(bound.types, table.ops, table.saved, bound.pairs)
        bound.cache["selected"] = distinct(table, bound.flags, chosen.saved), chosen
    return bound.cache["selected"]


def _in_host(found: SavedActivations, separate: bool) -> SavedActivations:
    """Return the kept activations when they are offloaded. ``separate``: devices and host have separate memories."""
    working_bytes = found.working_bytes + (1 if separate else 2) * found.saved_bytes
    return dataclasses.replace(
        found,
        saved_bytes=0.0 if separate else found.saved_bytes,
        working_bytes=working_bytes,
        copied_bytes=found.first_bytes,
        host_bytes=found.first_bytes if separate else 0.0,
    )


def _quantized(sized: SizedClass, passes: Passes, storage: QuantizedStorage) -> SavedActivations:
    """Return the kept activations when large floating-point tensors are quantized (not arguments, and not in the layer with the loss)."""
    saved_bytes, live_bytes = _quantized_bytes(sized, storage)[:2]
    *_, storing, restoring = _quantized_bytes(passes.part, storage)
    working_bytes = saved_bytes + live_bytes
    times = passes.parts
    return SavedActivations(
        saved_bytes, saved_bytes, working_bytes, storing=storing * times, restoring=restoring * times
    )


def _quantized_bytes(sized: SizedClass, storage: QuantizedStorage) -> tuple[float, float, Pass, Pass]:
    """Return the bytes that are saved, the additional bytes that are live while the layer runs, and the work added to each pass."""
    table, gpu, plain = sized.bound.table, sized.cluster.gpu, list(sized.bound.plain)
    floats = np.array([entry.dtype.is_floating_point for entry in table.saved], dtype=bool)
    numel, whole = sized.local(table.saved_numel, "saved"), sized.saved
    narrow = floats & ~table.saved_argument & (numel >= storage.min_elements) & (not table.cls.gives_loss)
    stored = np.where(narrow, numel + storage.scale_bytes * np.ceil(numel / storage.block), whole)
    at = np.array(plain, dtype=np.intp)[narrow[plain]]
    elements, moved = float(numel[at].sum()), float(whole[at].sum()) + float(stored[at].sum())
    # in a compiled layer one kernel quantizes a tensor, and one dequantizes it
    calls = float(len(at) if table.fused else np.ceil(numel[at] / storage.chunk).sum())
    eager = (storage.rounding.value, storage.restoring.value, storage.kernels.value)
    rounding, restoring, launches = (0.0, 0.0, 1.0) if table.fused else eager
    kernels = calls * launches
    temporary = 0.0 if table.fused else storage.temporary_bytes * min(storage.chunk, float(numel[at].max(initial=0.0)))

    def added(temporaries: float) -> Pass:
        arithmetic_s = (moved + temporaries * elements) / gpu.bytes_per_s + kernels * gpu.kernel_s
        return Pass(compute_s=arithmetic_s, host_s=kernels * gpu.op_floor_s)

    live_bytes = float(whole[at].sum()) + temporary
    return float(stored[plain].sum()), live_bytes, added(rounding), added(restoring)
