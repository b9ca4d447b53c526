"""Compares autopar's rules with DTensor's: for every sample call, the accepted placements on an axis of two ranks, and the result's type.

For operands placed as ``R``, ``P`` or ``S(dim)``, both determine whether the op can run on them directly, and the type of its result. For
DTensor, the call runs on DTensors over the fake process group (so that composite ops decompose as usual), and redistribution of inputs
raises an error. Execution checks each type that either claims: the call runs on two simulated ranks, and a type is right if the ranks'
results, combined by this type, equal the unsharded result.
"""

from __future__ import annotations

import itertools
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx

from autopar.checks.rules import Sample, Value, build, check_candidate
from autopar.errors import RuleError
from autopar.ops.facts import OpKind, op_of
from autopar.rules.candidates import Candidate, candidates
from autopar.torch_private import RedistributionRefusedError, dtensor_as_placed, fake_store
from autopar.types import P, R, S, SpmdType
from passes.localise import apply

RANKS = 2
MAX_PLACEMENTS = 64
"""Maximum combinations of placements per call; if there are more, only those that autopar's rules accept are compared."""

SKIPPED = frozenset((OpKind.VALUE_INDEPENDENT, OpKind.ATTENTION))
"""Kinds of ops that aren't compared. DTensor has rules for attention's CUDA kernels; for the CPU ones it searches placements of the
decomposition, which takes many minutes per call."""


@dataclass(frozen=True, slots=True)
class Agreement:
    """A placement of a call's operands: the result's type by autopar's rule and by DTensor (``None`` if it refuses the placement), and
    whether execution confirms each type (``None`` without a type, and in ``theirs_confirmed`` if the types are equal)."""

    op: str
    operands: tuple[SpmdType, ...]
    ours: SpmdType | None
    theirs: SpmdType | None
    ours_confirmed: bool | None = None
    theirs_confirmed: bool | None = None

    @property
    def verdict(self) -> str:
        """``agree``, ``contradict``, ``only ours`` or ``only theirs``."""
        if self.ours is None:
            return "only theirs"
        return "only ours" if self.theirs is None else "agree" if self.ours == self.theirs else "contradict"


def compare(samples: Iterable[Sample]) -> Iterator[Agreement]:
    """Yield the comparisons of the samples of aten ops that aren't ``SKIPPED``, except those with lists of tensors as operands. Runs in a
    fake process group if none is initialised."""
    starts_group = not dist.is_initialized()
    if starts_group:
        dist.init_process_group("fake", rank=0, world_size=RANKS, store=fake_store())
    try:
        mesh = dist.device_mesh.init_device_mesh("cpu", (RANKS,))
        for given in samples:
            kind = op_of(given.target).kind
            if given.name.startswith("aten.") and kind not in SKIPPED:
                yield from _comparisons(given, given.name, mesh)
    finally:
        if starts_group:
            dist.destroy_process_group()


def _comparisons(given: Sample, name: str, mesh: Any) -> Iterator[Agreement]:
    node, values = build(given)
    if not values or not all(isinstance(value, Tensor) for value in values):
        return
    ours: dict[tuple[SpmdType, ...], list[Candidate]] = {}
    for candidate in candidates(node):
        if (
            candidate.kernel is None
            and candidate.extent % RANKS == 0
            and all(t.kind != "I" for t in candidate.operands)
        ):
            ours.setdefault(candidate.operands, []).append(candidate)
    combinations = list(itertools.product(*(_placements(value) for value in values)))
    for operands in combinations if len(combinations) <= MAX_PLACEMENTS else list(ours):
        theirs = _dtensor_result(node, values, operands, mesh)
        mine = next(iter(sorted(ours.get(operands, []), key=lambda c: c.result != theirs)), None)
        if mine is None and theirs is None:
            continue
        ours_type = mine.result if mine is not None else None
        yield Agreement(
            name,
            operands,
            ours_type,
            theirs,
            _is_confirmed(node, values, operands, ours_type, mine),
            _is_confirmed(node, values, operands, theirs, None) if theirs != ours_type else None,
        )


def _placements(value: Value) -> list[SpmdType]:
    assert isinstance(value, Tensor)
    sliced = [S(d) for d, extent in enumerate(value.shape) if extent > 1 and extent % RANKS == 0]
    return [R, *([P] if value.is_floating_point() else []), *sliced]


def _dtensor_result(node: fx.Node, values: Sequence[Value], operands: Sequence[SpmdType], mesh: Any) -> SpmdType | None:
    """Return the type of the (first) result on DTensors with these placements; ``None`` if DTensor would redistribute them, has no rule, or
    returns a placement that autopar has no type for."""
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    places = {"R": Replicate(), "P": Partial()}
    tensors = []
    for value, t in zip(values, operands, strict=True):
        assert isinstance(value, Tensor)
        local = value if t.dim is None else value.chunk(RANKS, t.dim)[0].contiguous()
        place = places.get(t.kind) or Shard(t.dim if t.dim is not None else 0)
        tensors.append(DTensor.from_local(local, mesh, [place], run_check=False))
    try:
        with dtensor_as_placed(), torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = apply((node.target, node.args, dict(node.kwargs), None), node, tensors)  # type: ignore[arg-type]
    except (
        RedistributionRefusedError,
        RuntimeError,
        NotImplementedError,
        AssertionError,
        ValueError,
        TypeError,
        IndexError,
    ):
        return None  # DTensor refuses calls with all these types of exceptions
    first = result[0] if isinstance(result, tuple | list) else result
    if not isinstance(first, DTensor):
        return None
    place = first.placements[0]
    if place.is_replicate():
        return R
    if isinstance(place, Shard) and type(place) is Shard:
        return S(place.dim % max(1, first.ndim))
    return P if type(place) is Partial and place.reduce_op == "sum" else None


def _is_confirmed(
    node: fx.Node,
    values: Sequence[Value],
    operands: tuple[SpmdType, ...],
    result: SpmdType | None,
    mine: Candidate | None,
) -> bool | None:
    """Return whether the ranks' results combine by ``result`` to the unsharded one (``None`` without a ``result``); forward only, as
    DTensor has no types of gradients."""
    if result is None:
        return None
    candidate = mine or Candidate(operands, result, extent=RANKS)
    try:
        check_candidate(node, values, candidate, RANKS, constants=range(len(values)))
    except (RuleError, RuntimeError, AssertionError, IndexError):
        return False
    return True


def page(answers: Sequence[Agreement], rules: int, calls: int) -> str:
    """Return the text of ``docs/evidence/dtensor-check.md``."""
    count = Counter(answer.verdict for answer in answers)
    executed = sum((a.ours_confirmed is not None) + (a.theirs_confirmed is not None) for a in answers)
    wrong_ours = [a for a in answers if a.ours_confirmed is False]
    wrong_theirs = [a for a in answers if a.theirs_confirmed is False]
    missing = Counter(a.op for a in answers if a.verdict == "only theirs" and a.theirs_confirmed)
    lines = [
        f"| {a.op} | {', '.join(map(str, a.operands))} | {a.ours or 'refused'} | {a.theirs or 'refused'} "
        f"| {'ours' if a.ours_confirmed is False else 'theirs'} |"
        for a in (*wrong_ours, *wrong_theirs)
    ]
    return f"""# Our rules against DTensor's

{rules} rules, {calls} sample calls. For each call, autopar's rule and DTensor (torch {torch.__version__.split("+")[0]}) are compared
on every placement of the operands as R, P or S(dim), on one axis of {RANKS} ranks. DTensor runs the call on DTensors, with redistribution
disabled. Calls with more than {MAX_PLACEMENTS} placements are compared only on those that our rule accepts. Attention is left out, because
DTensor has no rule for its CPU kernel.

| | placements |
|---|---|
| both accept, same result | {count["agree"]} |
| both accept, different results | {count["contradict"]} |
| only ours accepts | {count["only ours"]} |
| only DTensor accepts | {count["only theirs"]} |
| executed checks (forward) | {executed} |
| ours wrong by execution | {len(wrong_ours)} |
| DTensor wrong by execution | {len(wrong_theirs)} |

## Wrong by execution

| op | operands | ours | DTensor | wrong |
|---|---|---|---|---|
{chr(10).join(lines)}

"Wrong" means that the two ranks' results, combined by the claimed type, differ from the unsharded result, or that a rank can't run the op.
DTensor handles convolutions with a special handler, which never redistributes. If a spatial dim is sharded, it exchanges a halo, which this
execution does not: rows with such a dim (after the second) only show that the shards alone do not suffice.

## Placements that only DTensor accepts, and that are right

By op: {", ".join(f"{op} ({n})" for op, n in sorted(missing.items())) or "none"}.

Made by `make report NAME=dtensor-check`. Do not edit.
"""
