"""What a layer keeps from its forward pass to its backward pass, and what that costs.

*Recomputation* keeps a layer's input alone, or the values that ``passes.selective`` selects (``selection``), and computes the rest again.

*In the host's memory*: what is kept is copied to the host after the layer's forward, and back before its backward, during the arithmetic of
other layers; the device waits for copies that take longer than the layer's own arithmetic. Device memory has the tensors of the running
layer and of one layer that is being copied, assumed to be as large. If devices and host share one memory (``Cluster.host`` is ``None``),
this saves no memory: the tensors stay, and while a layer runs, so do the copies of its tensors and of the next layer's.

*In 8 bits*, as ``program.int8`` stores them: while the layer runs, its tensors also exist at full width: in the forward until the last op
has read each (in a compiled layer until its end), in the backward from the first op that reads each. All of them are counted as live, as
they are while a recomputed layer runs.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from autopar.devices.constants import INT8_KERNELS, INT8_RESTORING, INT8_ROUNDING
from autopar.price.layer import Bound, Sized, distinct
from autopar.price.microbatch import Kept, Pass, Passes
from autopar.price.selection import Selected
from autopar.techniques.activations import ACTIVATIONS, FULL, IN_HOST, INT8, RECOMPUTED, SELECTIVE

BLOCK, LEAST, CHUNK = 64, 1024, 2**22
"""As in ``program.int8``: numbers that share a scale; elements of the smallest tensor that is rounded; elements rounded at a time."""

SCALE_BYTES = 4
TEMPORARY_BYTES = 9
"""Per element that is rounded by several kernels: a copy in float32, its quotient by the scale, the code."""


def kept(sized: Sized, passes: Passes, value: str) -> Kept:
    """What the layer keeps under a value of ``activations``."""
    name, layers = ACTIVATIONS.split(value)
    again = RECOMPUTED[name]
    if again == FULL:
        found = _input_alone(sized, passes, layers)
    elif again == SELECTIVE:
        found = _selection(sized)
    elif name == INT8:
        found = _in_8_bits(sized, passes)
    else:
        found = Kept(sized.plain_bytes, sized.plain_bytes, sized.plain_bytes)
    return _in_host(found, sized.cluster.host is not None) if name in IN_HOST else found


def _input_alone(sized: Sized, passes: Passes, layers: int) -> Kept:
    share = sized.input_bytes / layers
    return Kept(
        saved_bytes=share,
        first_bytes=sized.input_bytes,
        working_bytes=max(sized.input_bytes, layers * sized.plain_bytes) - (sized.input_bytes - share),
        again=passes.forward,
        moves=sized.bound.moves,
        layers=layers,
        recomputes=True,
    )


def _selection(sized: Sized) -> Kept:
    bound, table = sized.bound, sized.bound.table
    entries, chosen = _selected(bound)
    saved_bytes, working_bytes = table.selection.memory(
        table.saved, sized.saved, list(bound.plain), list(entries), table.live.saver, len(table.ops), sized.input_bytes
    )
    again = sized.pass_of("forward", chosen.moves, chosen.again)
    return Kept(
        saved_bytes=saved_bytes,
        first_bytes=saved_bytes,
        working_bytes=max(saved_bytes, working_bytes, sized.plain_bytes),
        again=dataclasses.replace(again, wire_s=again.wire_s + again.exposed_s, exposed_s=0.0),
        moves=chosen.moves,
        recomputes=True,
    )


def _selected(bound: Bound) -> tuple[tuple[int, ...], Selected]:
    """The saved entries under selective recomputation, one per storage, and what runs again."""
    if "selected" not in bound.known:
        table = bound.table
        chosen = table.selection.under(bound.types, table.ops, table.saved, bound.moves)
        bound.known["selected"] = distinct(table, bound.flags, chosen.saved), chosen
    return bound.known["selected"]


def _in_host(found: Kept, separate: bool) -> Kept:
    """``separate``: the host's memory is not the device's."""
    working_bytes = found.working_bytes + (1 if separate else 2) * found.saved_bytes
    return dataclasses.replace(
        found,
        saved_bytes=0.0 if separate else found.saved_bytes,
        working_bytes=working_bytes,
        copied_bytes=found.first_bytes,
        host_bytes=found.first_bytes if separate else 0.0,
    )


def _in_8_bits(sized: Sized, passes: Passes) -> Kept:
    """The entries of floats that are not the layer's arguments are in 8 bits if they are large enough, in layers but the last."""
    saved_bytes, live_bytes = _narrow(sized)[:2]
    *_, storing, restoring = _narrow(passes.part)
    working_bytes = saved_bytes + live_bytes
    times = passes.parts
    return Kept(saved_bytes, saved_bytes, working_bytes, storing=storing * times, restoring=restoring * times)


def _narrow(sized: Sized) -> tuple[float, float, Pass, Pass]:
    """The bytes that are saved, those that are live besides while the layer runs, and what is added to both passes."""
    table, gpu, plain = sized.bound.table, sized.cluster.gpu, list(sized.bound.plain)
    floats = np.array([entry.dtype.is_floating_point for entry in table.saved], dtype=bool)
    numel, whole = sized.local(table.saved_numel, "saved"), sized.saved
    narrow = floats & ~table.saved_argument & (numel >= LEAST) & (not table.cls.gives_loss)
    stored = np.where(narrow, numel + SCALE_BYTES * np.ceil(numel / BLOCK), whole)
    at = np.array(plain, dtype=np.intp)[narrow[plain]]
    elements, moved = float(numel[at].sum()), float(whole[at].sum()) + float(stored[at].sum())
    # in a compiled layer one kernel rounds a tensor, and one restores it
    calls = float(len(at) if table.fused else np.ceil(numel[at] / CHUNK).sum())
    eager = (INT8_ROUNDING.value, INT8_RESTORING.value, INT8_KERNELS.value)
    rounding, restoring, launches = (0.0, 0.0, 1.0) if table.fused else eager
    kernels = calls * launches
    temporary = 0.0 if table.fused else TEMPORARY_BYTES * min(CHUNK, float(numel[at].max(initial=0.0)))

    def added(temporaries: float) -> Pass:
        arithmetic_s = (moved + temporaries * elements) / gpu.bytes_per_s + kernels * gpu.kernel_s
        return Pass(compute_s=arithmetic_s, host_s=kernels * gpu.op_floor_s)

    live_bytes = float(whole[at].sum()) + temporary
    return float(stored[plain].sum()), live_bytes, added(rounding), added(restoring)
