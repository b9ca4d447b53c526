"""Rules that read a row's words: how the run was set up, where its fields alone don't say it.

Every rule looks for words that trainers and papers use, and none knows a row or its source. Words that stand for something that has no
price are refused with the word, because the row would otherwise be priced as another run.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from autopar.errors import UsageError
from autopar.precision import FLOAT8, SPELLINGS, TF32
from autopar.schedules import (
    CHIMERA,
    DUALPIPE_V,
    GPIPE,
    INTERLEAVED,
    ONE_F_ONE_B,
    ZERO_BUBBLE,
    ZERO_BUBBLE_V,
)
from autopar.techniques import LAYER, Options
from autopar.techniques.activations import ACTIVATIONS
from autopar.validate.fields import RowError, integer

# fact about how a row was run -> pattern that finds it in the row's prose (``_PROSE``)
_FACTS = {
    "eager": r"\beager\b",
    "compiled": r"\bcompil",
    "overlap off": r"overlap (is )?(switched )?off|no overlap|without overlap",
    "all-to-all context": r"\ba2a\b|all-to-all|ulysses",
    "DeepSpeed": r"deepspeed",
    "reserved memory": r"\breserved\b|nvidia-smi",
    "Megatron": r"\bmegatron|\bnemo\b|\bmcore\b|distributed.?(fused.?adam|optimizer)|transformer.?engine|(?-i:\bTE\b)",
    "InternEvo": r"\binternevo\b",
    "16-bit gradients": r"distributed_fused_adam|grad_(sync|reduce)_dtype\W{1,3}bf16|(bf16|bfloat16) grad"
    r"|grad_reduce_in_fp32\W{1,3}false",
    "16-bit moments": r"(bf16|bfloat16|16-bit) (adam('s)? )?moments|moments in (bf16|16 bits)|exp_avg\w*\W{1,3}(bf16|bfloat16)",
    "overlapped gradients": r"overlap(ped|ping)?[ _-]?grad|gradient.{0,12}overlap",
    "overlapped tensor": r"(ub_)?tp_comm_overlap|async.?tp|async tensor",
    "overlapped experts": r"overlap_moe|(?<!no )\b(ep|experts?)[ -](parallel[ -])?(comm\w*[ -])?overlap|overlap\w* (ep|expert|moe)\b",
    "token dispatch kernels": r"deep.?ep\b|hybrid.?ep\b|flex(ible)? dispatcher|megatron.?bridge",
    "natural routing": r"natural rout",
    "consecutive experts": r"fake_balanced_gate\W{1,3}true|(?<!no )fake balanced gate",
    "fused loss": r"fused (ce\b|cross|loss)|liger",
    "unfused attention": r"(unfused|no flash|without flash|non-flash)",
    "flash attention": r"(?<!no )(?<!non-)(?<!without )flash",
}
_TRAINERS = {"nanotron": r"\bnanotron\b"}  # the same, for facts that a row's source may state
_SWITCHED_OFF = r"\boverlap\w*\s?[=:]\s?(false|off|none|null)\b"
_MICROBATCHES = (1, 2, 4, 8)  # the sizes that trainers choose from
_PROSE = ("schedule", *ACTIVATIONS.run_fields, "precision", "interconnect", "notes", "quote")

_PRECISIONS = SPELLINGS | {TF32: TF32} | dict.fromkeys(("fp8", "float8", "mxfp8", "nvfp8"), FLOAT8)
_FOUR_BITS = re.compile(r"\b(?:nv|mx)?(?:fp|float)4\b")

# pattern in ``schedule`` -> the schedule; the first match counts, and no name: it has no price
_SCHEDULES = {
    r"\bzb-?v\b|zero.?bubble.?v\b": ZERO_BUBBLE_V,
    r"zero.?bubble|\bzb": ZERO_BUBBLE,
    r"dual-?pipe-?v": DUALPIPE_V,
    r"dual-?pipe": "",
    r"chimera": CHIMERA,
    r"g-?pipe|all.forward": GPIPE,
    r"interleav|virtual": INTERLEAVED,
    r"1f1b|pipedream.flush": ONE_F_ONE_B,
}

# words that say what is recomputed -> the fact of such a mode of ``techniques.activations``; a recipe's null is a switch that is off
_CHECKPOINT = r"(activations?[ _])?(checkpoint(ing)?|recomput(e|ation|ing)|ac)([_-]granularity)?\b"
_RECOMPUTED = {
    rf"\b(no|without) {_CHECKPOINT}|\b{_CHECKPOINT}( is)?\W{{1,3}}(null|none|off|false)\b": "",
    rf"\bselective {_CHECKPOINT}": "part",
    rf"\bfull {_CHECKPOINT}|\b{_CHECKPOINT}( is)?\W{{1,3}}(on|true|full|enabled)\b": "all",
}
_MICROBATCH = r"\b(?:micro.?batch(?:[ _-]size)?|mbs)(?: of)?\W{0,3}(\d+)\b"
_ACCUMULATED = r"\bgradient[ _-]accumulation(?:[ _-]steps?)?(?: of)?\W{0,3}(\d+)\b|\b(\d+) micro-?batches\b"
_NUMBERS = {"one": 1, "two": 2, "three": 3, "four": 4}
_OFFLOAD = r"off-?load\w*"
_NOT_OFFLOADED = (
    rf"\b(no|not|without)\W+(\w+\W+){{0,2}}{_OFFLOAD}|{_OFFLOAD}\W{{0,3}}(is |are )?(off|false|none|null|disabled)\b"
)
_OFFLOADED_STATES = (
    rf"optimi[sz]er[\w /-]{{0,20}}{_OFFLOAD}|{_OFFLOAD}[\w ]{{0,15}}optimi[sz]er\w*|zero-{_OFFLOAD}|\bcpu.?adam\b"
)
_OFFLOADED_ACTIVATIONS = rf"activations?[\w ]{{0,15}}{_OFFLOAD}|{_OFFLOAD}[\w ]{{0,15}}activation\w*"
_HOST = "host"


def facts_of(data: Mapping[str, Any]) -> frozenset[str]:
    """Return the facts of the run that the row states: keys of ``_FACTS`` in its prose, of ``_TRAINERS`` also in its source."""
    prose = re.sub(_SWITCHED_OFF, "", _prose(data), flags=re.IGNORECASE)
    texts = (prose, _FACTS), (_prose(data, "source"), _TRAINERS)
    return frozenset(
        fact for text, facts in texts for fact, pattern in facts.items() if re.search(pattern, text, re.IGNORECASE)
    )


def _prose(data: Mapping[str, Any], *more: str) -> str:
    return " ".join(str(data.get(key) or "") for key in (*_PROSE, *more))


def precision_of(value: object) -> str:
    """Return the precision of matrix products. Training in 8 bits names the 16-bit type, too, so a word for 8 bits decides."""
    text = str(value or "bf16").lower()
    if found := _FOUR_BITS.search(text):
        raise RowError(f"precision = {value!r}: products in {found.group()} have no price")
    text = re.sub(r"\b(no|not|without)\W+(?=\w*(fp|float)8)\w+", "", text)
    words = [_PRECISIONS[word] for word in re.split(r"[^a-z0-9]+", text) if word in _PRECISIONS]
    if not words:
        raise RowError(f"precision = {value!r} is not known")
    return FLOAT8 if FLOAT8 in words else words[0]


def schedule_of(data: Mapping[str, Any], pipeline: int) -> str:
    """Return the pipeline's schedule, or an empty string if the row names none."""
    value = data.get("schedule")
    text = str(value or "").lower()
    if pipeline == 1 or not text:
        return ""
    found = next((name for pattern, name in _SCHEDULES.items() if re.search(pattern, text)), "")
    if not found:
        raise RowError(f"schedule = {value!r} has no price")
    return found


def recomputed(data: Mapping[str, Any]) -> tuple[str, ...]:
    """Return what may be recomputed (values of ``techniques.activations``): one value if the row says it, else all that are usual."""
    if all(data.get(key) is None for key in ACTIVATIONS.run_fields):
        prose = _prose(data, "flags")
        found = {fact: re.search(words, prose, re.IGNORECASE) for words, fact in _RECOMPUTED.items()}
        said = [fact for fact, words in found.items() if words]
        return tuple(ACTIVATIONS.value_with(recomputes=fact) for fact in (said if len(said) == 1 else found))
    try:
        return (ACTIVATIONS.of_run(data),)
    except UsageError as error:
        raise RowError(error.message) from None


def microbatches(data: Mapping[str, Any], sequences: int) -> tuple[int, ...]:
    """Return the possible sizes of a microbatch where a rank has ``sequences`` in a step: the row's or its prose's, else the usual ones."""
    if data.get("micro_batch") is not None:
        return (integer(data, "micro_batch", least=1),)
    prose = _prose(data)
    if found := re.search(_MICROBATCH, prose, re.IGNORECASE):
        said = int(found.group(1))
    elif found := re.search(_ACCUMULATED, prose, re.IGNORECASE):
        said = sequences // max(1, int(found.group(1) or found.group(2)))
    else:
        said = 0
    return (said,) if said and sequences % said == 0 else tuple(n for n in _MICROBATCHES if sequences % n == 0)


def options_of(data: Mapping[str, Any], activations: str) -> Options:
    """Return the techniques of the row's layers, which keep ``activations``, with what the row says of the host's memory.

    Raises ``RowError`` for words on offloading that don't say what is in the host's memory, or name something else.
    """
    chosen = {ACTIVATIONS.name: activations}
    text = re.sub(_NOT_OFFLOADED, "", _prose(data, "flags"), flags=re.IGNORECASE)
    rest = re.sub(_OFFLOADED_STATES, "", text, flags=re.IGNORECASE)
    if rest != text:
        technique = next(t for t in LAYER if any(mode.states_in == _HOST for mode in t.modes))
        chosen[technique.name] = technique.value_with(states_in=_HOST)
    left = re.sub(_OFFLOADED_ACTIVATIONS, "", rest, flags=re.IGNORECASE)
    if left != rest:
        kept = ACTIVATIONS.mode(activations).recomputes
        chosen[ACTIVATIONS.name] = ACTIVATIONS.value_with(recomputes=kept, saved_in=_HOST)
    if found := re.search(rf"[\w-]*\W?\w*{_OFFLOAD}", left, re.IGNORECASE):
        raise RowError(
            f"{found.group().strip()!r} has no price: it doesn't say that optimizer states or activations are meant"
        )
    return Options(**chosen)


def expert_tensor_degree(data: Mapping[str, Any]) -> int | None:
    """Return the tensor-parallel degree of the experts if the row's prose states it."""
    pattern = r"expert[ -]tensor[ -](?:parallel(?:ism)? )?(?:degree|size)\W{1,3}(\d+)|\betp\W{0,3}(\d+)"
    found = re.search(pattern, _prose(data), re.IGNORECASE)
    return int(found.group(1) or found.group(2)) if found else None


def dense_layers(data: Mapping[str, Any]) -> int | None:
    """Return how many of the first layers have no experts if the row's prose states it: shortened models may have fewer than the published
    ones."""
    found = re.search(
        rf"first ({'|'.join(_NUMBERS)}|\d{{1,3}}) (?:layers? )?(?:is |are )?dense", _prose(data), re.IGNORECASE
    )
    return None if found is None else _NUMBERS.get(word := found.group(1).lower()) or int(word)
