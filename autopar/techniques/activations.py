"""Which activations a layer saves for its backward pass (all, some, or only its input), where, and in what form.

``full`` recomputes the layer from its input (Chen et al. 2016, arXiv:1604.06174), ``full:4`` recomputes four consecutive layers of one
class and strategy from the first one's input, ``selective`` recomputes cheap ops only (Korthikanti et al. 2022, arXiv:2205.05198;
``passes.selective``). ``host`` offloads activations to host memory, ``full+host`` offloads the input of a fully recomputed layer, and
``selective+host`` offloads the values that a selectively recomputed layer saves besides the selected ones. ``int8`` stores activations as
8-bit integers (``program.activation_storage``), which is not exact: gradients are computed from rounded activations. The layer that
computes the loss always saves exact activations.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from autopar.errors import UsageError
from autopar.schedules import CHIMERA, DUALPIPE_V, INTERLEAVED, ONE_F_ONE_B, ZERO_BUBBLE
from autopar.techniques.technique import ANY, Call, Case, Context, Mode, Pin, Pinned, QuantizedStorage, Technique, Value
from autopar.units import Constant

KEEP, SELECTIVE, FULL, HOST, INT8 = "keep", "selective", "full", "host", "int8"
FULL_HOST, SELECTIVE_HOST = "full+host", "selective+host"

INT8_ACTIVATIONS = "int8_activations"
"""The numerical deviation of ``int8``."""

SEGMENTS = (2, 3, 4, 6, 8, 12, 16, 24, 32)
"""The numbers of layers per recomputed segment that a search tries."""

INT8_ROUNDING = Constant(
    47.0,
    "bytes moved per element, besides those read and stored",
    "library: program/activation_storage.py, not compiled: written in float32, and read and written for its finite values (8), the "
    "largest (4), the quotient (8), the rounding (8), the lower limit (8); read and written as codes (5), which are copied (2)",
)
INT8_RESTORING = Constant(
    18.0,
    "bytes moved per element, besides those stored and restored",
    "library: program/activation_storage.py, not compiled: products with the scales are written (4), codes compared (2), -infinities "
    "filled in (9), and read (4), less the byte of a code",
)
INT8_KERNELS = Constant(
    11.0,
    "kernels that round a tensor, or restore it",
    "library: program/activation_storage.py, not compiled: a conversion, finite values, the norm, its division and limit, the "
    "quotient, its rounding and limit, codes, two copies",
)

_IN_8_BITS = QuantizedStorage(
    block=64,
    min_elements=1024,
    chunk=2**22,
    scale_bytes=4,
    temporary_bytes=9,  # a copy in float32, its quotient by the scale, the code
    rounding=INT8_ROUNDING,
    restoring=INT8_RESTORING,
    kernels=INT8_KERNELS,
)
"""The format of ``program.activation_storage``."""

_UNSPLIT = "microbatches in parts can be combined with full recomputation, not with selective"

_RECOMPUTED = ("", "part", "all")
"""``Facts.recomputes`` from least to most; ``_RECOMPUTE_PIN`` has the values of the pin ``recompute`` in the same order."""

_RECOMPUTE_PIN = ("none", "selective", "full")

GRANULARITIES = dict(zip(_RECOMPUTE_PIN, (KEEP, SELECTIVE, FULL), strict=True))
"""The values that other trainers' words for recomputation (activation checkpointing) stand for, from least to most."""


class Activations(Technique):
    name = "activations"
    modes = (
        Mode(KEEP),
        Mode(SELECTIVE, "recomputed in part", "in part", recomputes="part", wraps_layer=True, unsplittable=_UNSPLIT),
        Mode(FULL, "recomputed", "recomputed", counted=2, recomputes="all", wraps_layer=True),
        Mode(HOST, "with activations in the host's memory", "in the host", saved_in="host", wraps_layer=True),
        Mode(
            FULL_HOST,
            "recomputed, with inputs in the host's memory",
            "recomputed, input in the host",
            recomputes="all",
            saved_in="host",
            wraps_layer=True,
        ),
        Mode(
            INT8,
            "with activations in 8 bits",
            "in 8 bits",
            deviation=INT8_ACTIVATIONS,
            inexact="gradients are computed from activations that were rounded to 8 bits",
            quantized=_IN_8_BITS,
            wraps_layer=True,
        ),
        Mode(
            SELECTIVE_HOST,
            "recomputed in part, with inputs in the host's memory",
            "in part, input in the host",
            recomputes="part",
            saved_in="host",
            wraps_layer=True,
            unsplittable=_UNSPLIT,
            unsearched="what selective recomputation keeps stays on the device",
        ),
    )
    subject = "layers"
    shown = True
    meaning = (
        "what layers save for the backward pass: everything; a part, with the rest recomputed; only the input of each layer, or of "
        "every K-th; everything in host memory; everything in 8 bits (if `int8_activations` is allowed)"
    )
    example = "activations=full"
    optional = True
    former_pins = (
        Pin(
            "recompute",
            True,
            "how activations are recomputed in the backward pass",
            "recompute=selective",
            ("none", "selective", "full"),
            switch=True,
            former=True,
        ),
        Pin(
            "segment",
            True,
            "how many consecutive layers are recomputed as one; more than one is full recomputation",
            "segment=4",
            former=True,
        ),
        Pin(
            "offload",
            True,
            "whether saved activations wait in the host's memory",
            "offload=activations",
            ("none", "activations", ANY),
            former=True,
        ),
        Pin(
            "saved",
            True,
            "how saved activations are stored; exact unless `int8_activations` is allowed",
            "saved=int8",
            ("exact", "int8"),
            former=True,
        ),
    )
    former_fields = {
        "recomputation": {"kind": ("none", "selective", "full"), "layers": int},
        "offload": ("none", "activations", "optimizer", "both"),
        "saved": ("exact", "int8"),
    }
    adds_work = True
    rewrite_local = "selective"
    run_fields = ("recompute",)
    modules = ("recomputing", "activation_storage")
    former_modules = ("int8", "offload", "saved_views", "segments", "selective")

    def phrase(self, value: str) -> str:
        name, layers = self.split(value)
        return f"{self.mode(name).phrase} in segments of {layers} layers" if layers > 1 else self.mode(name).phrase

    def cell(self, value: str) -> str:
        name, layers = self.split(value)
        return f"{layers} as one" if layers > 1 else self.mode(name).cell

    def effort(self, value: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        name, layers = self.split(value)
        mode = self.mode(name)
        return (int(name == INT8), int(bool(mode.saved_in))), (_RECOMPUTED.index(mode.recomputes), layers)

    def allowed(self, pinned: Pinned, context: Context) -> tuple[str, ...]:
        own, segment = pinned(self.name), pinned("segment")
        if segment is not None and self.split(str(own))[1] not in (1, int(segment)):
            return ()
        numbers = [1, *(_segment_sizes(context.chain) if context.segments else ())]
        if (wanted := int(segment or self.split(str(own))[1])) > 1 or segment is not None:
            numbers = [wanted]
        segments = [full(min(n, context.chain)) for n in numbers if n > 1]
        tried = [*((KEEP, INT8, HOST, SELECTIVE, FULL, FULL_HOST, SELECTIVE_HOST) if 1 in numbers else ()), *segments]
        to_host = own is not None or pinned("offload") is not None
        wants_8_bits = own == INT8 or pinned("saved") is not None
        return tuple(
            value
            for value in dict.fromkeys(tried)
            if self._satisfies(value, pinned)
            and (to_host or not self.mode(value).saved_in)
            and (value != SELECTIVE_HOST or ANY not in (own, pinned("offload")))
            and (wants_8_bits or value != INT8 or INT8_ACTIVATIONS in context.allow)
        )

    def admits(self, value: str, pinned: Pinned) -> bool:
        segment, (_, wanted), (_, layers) = pinned("segment"), self.split(str(pinned(self.name))), self.split(value)
        return self._satisfies(value, pinned) and segment in (None, layers) and wanted in (1, layers)

    def _satisfies(self, value: str, pinned: Pinned) -> bool:
        """Return whether a value satisfies every pin, except for the number of layers."""
        name, own = self.split(value)[0], pinned(self.name)
        by_pin = {
            "recompute": _RECOMPUTE_PIN[_RECOMPUTED.index(self.mode(name).recomputes)],
            "offload": "activations" if self.mode(name).saved_in else "none",
            "saved": "int8" if name == INT8 else "exact",
        }
        fits = own in (None, ANY) or self.split(str(own))[0] == name
        return fits and all(pinned(pin) in (None, ANY, value) for pin, value in by_pin.items())

    def unreadable(self, layer: Mapping[str, Any]) -> str:
        if self.name in layer:
            return ""
        old, saved = layer.get("recomputation"), layer.get("saved", "exact")
        if old is None:
            return f"no {self.name!r}"
        kind, segment, offloaded = old["kind"], old["layers"], layer.get("offload", "none") in ("activations", "both")
        wrong = {
            f"segments of {segment} layers, and its recomputation is {kind}": segment > 1 and kind != "full",
            f"segments of {segment} layers, and offloads its activations": segment > 1 and offloaded,
            f"activations saved as {saved}, and its recomputation is {kind}": saved != "exact" and kind != "none",
            f"activations saved as {saved}, and offloads them": saved != "exact" and offloaded,
        }
        return next((what for what, is_so in wrong.items() if is_so), "")

    def read(self, layer: Mapping[str, Any]) -> str:
        if self.name in layer:
            return str(layer[self.name])
        old = layer["recomputation"]
        host = layer.get("offload", "none") in ("activations", "both")
        if old["kind"] == "full":
            return FULL_HOST if host else full(old["layers"])
        if old["kind"] == "selective":
            return SELECTIVE_HOST if host else SELECTIVE
        if layer.get("saved", "exact") == "int8":
            return INT8
        return HOST if host else KEEP

    def refused_roles(self, value: str, roles: Sequence[Any]) -> str:
        if value == INT8 and any(role.gathers_parameters for role in roles):
            return "also saves the parameters that it gathers on a grid of devices, and only activations may be stored in 8 bits"
        return ""

    def note(self, names: Sequence[str], total: int, value: str) -> str:
        if value != INT8:
            return ""
        return (
            f"not exact, as {INT8_ACTIVATIONS} allows: {len(names)} of {total} layers store saved activations in 8 bits (one scale for "
            "each 64 numbers), so gradients are computed from rounded numbers; the loss, and the layer that computes it, are not affected"
        )

    def header(self, value: str, gives_loss: bool = False) -> str:
        if value != INT8 or gives_loss:
            return ""
        saved = "Some layers store what they save for the backward pass in 8 bits"
        return f"{saved}, as {INT8_ACTIVATIONS} allows: their gradients are rounded."

    def wrap_call(self, value: str, call: Call) -> Call:
        (name, layers), mode = self.split(value), self.mode(value)
        recomputed = "Recomputed in the backward pass: only the arguments are kept."
        if mode.recomputes == "all" and call.layers:
            return call.by("recomputing.as_one", remark=recomputed) if layers > 1 else call
        if mode.recomputes == "all" and layers == 1:
            options = ("use_reentrant=False", "preserve_rng_state=False")
            call = call.by("checkpoint", call.function, *call.arguments, *options, remark=recomputed)
        elif mode.recomputes == "part":
            remark = "Recomputed in the backward pass, but for what is kept."
            call = call.by("recomputing.selectively", call.function, *call.arguments, remark=remark)
        if mode.saved_in:
            stays = ", ".join(("self", *call.resident))
            return call.inside(
                f"activation_storage.in_host({stays})", "What the backward pass needs waits in the host's memory."
            )
        if name == INT8 and not call.gives_loss:
            stays = ", ".join(("self", *call.inputs)) + (", fused=True" if call.compiled else "")
            remark = "What the backward pass needs is stored in 8 bits: gradients are rounded."
            return call.inside(f"activation_storage.in_8_bits({stays})", remark)
        return call

    def cases(self, n: int) -> Iterator[Case]:
        full, part = {self.name: FULL}, {self.name: SELECTIVE}
        if n == 1:
            yield "one device, recompute", {"microbatches": 2} | full
            return
        yield f"recompute, data {n}, zero 3", {"data": n, "zero": 3} | full
        yield f"recompute, tensor {n}", {"tensor": n, "microbatches": 2} | full
        yield f"recompute in part, tensor {n}", {"tensor": n, "microbatches": 2} | part
        yield f"recompute in part, data {n}, zero 3", {"data": n, "zero": 3, "microbatches": 2} | part
        yield f"recompute in part, tensor+sequence {n}", {"tensor": n, "sequence": True} | part
        if n <= 3:  # more would require models of many layers
            two = {"pipeline": n, "chunks": 2, "microbatches": 4}
            yield f"pipeline {n} of 2 chunks, zero bubble, recompute in part", two | {"schedule": ZERO_BUBBLE} | part
            yield f"pipeline {n}, DualPipeV, recompute", two | {"schedule": DUALPIPE_V} | full
        if n % 2 == 0 and n >= 4:
            yield from self._combined(n // 2)

    def _combined(self, half: int) -> Iterator[Case]:
        """Yield cases on ``2 half`` devices that combine recomputation with pipelines and sequence parallelism."""
        full, part = {self.name: FULL}, {self.name: SELECTIVE}
        sequence, sharded = {"tensor": half, "sequence": True}, {"data": half, "zero": 3}
        one = {"pipeline": 2, "microbatches": 2, "schedule": ONE_F_ONE_B}
        split, both = ({"pipeline": 2, "microbatches": 4, "schedule": name} for name in (ZERO_BUBBLE, CHIMERA))
        interleaved = {"pipeline": 2, "chunks": 2, "microbatches": 4, "schedule": INTERLEAVED}
        yield f"ring 2 x tensor {half}, recompute", {"ring": 2, "tensor": half} | full
        yield f"pipeline 2 x tensor+sequence {half}, recompute in part", sequence | one | part
        yield f"pipeline 2 x ring {half}, zero 2, recompute", {"ring": half, "zero": 2} | one | full
        yield f"pipeline 2 x data {half}, zero 3, recompute", sharded | one | full
        yield f"pipeline 2 of 2 chunks x data {half}, zero 3, recompute", sharded | interleaved | full
        yield f"pipeline 2, zero bubble x data {half}, zero 1, recompute", {"data": half, "zero": 1} | split | full
        yield f"pipeline 2, Chimera x data {half}, zero 3, recompute", sharded | both | full
        yield f"pipeline 2, Chimera x tensor+sequence {half}, recompute in part", sequence | both | part

    def case_phrase(self, value: str) -> str:
        return {"part": "recompute in part", "all": "recompute"}.get(self.mode(value).recomputes, "")

    def of_run(self, run: Mapping[str, Any]) -> str:
        text = str(run.get("recompute") or "none").lower()
        for word, found in {"none": KEEP, "selective": SELECTIVE, "full": FULL, "true": FULL, "false": KEEP}.items():
            if text.startswith(word):
                return found
        raise UsageError(f"recompute = {run['recompute']!r} is neither none, selective nor full")

    def random_value(self, number: float, zero: int) -> str:
        return FULL if number < 0.3 else SELECTIVE if number < 0.5 else KEEP

    def alternatives(self) -> Iterator[tuple[str, str, dict[str, Value], str]]:
        yield "no_recomputation", "no recomputation", {"recompute": "none"}, ""
        yield "selective_recomputation", "every layer recomputed in part (selective)", {self.name: SELECTIVE}, ""
        yield "full_recomputation", "every layer recomputed", {self.name: FULL}, ""
        yield "host_activations", "activations in the host's memory", {"offload": "activations"}, "host"


def full(layers: int) -> str:
    """Return the value that recomputes ``layers`` consecutive layers as one segment."""
    return f"{FULL}:{layers}" if layers > 1 else FULL


def _segment_sizes(chain: int) -> list[int]:
    """Return the segment sizes that a search tries: up to twice the square root of ``chain``, since live memory is lowest near the root."""
    return [n for n in SEGMENTS if n <= chain and n * n <= 4 * chain]


ACTIVATIONS = Activations()
