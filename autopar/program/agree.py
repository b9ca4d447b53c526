"""Checks that all ranks have the same batch, the same initial values and the same options.

Ranks that read different data would train on parts of different batches without an error. Each rank computes a digest of its
input, and one small all-reduce compares the digests. If they differ, the ranks gather them, so that the error names the ranks.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from .weights import bytes_of

FULL_DIGEST_LIMIT_BYTES = 8 * 2**30
"""State dicts of up to this many bytes are compared completely; of larger ones at most ``SAMPLED_BYTES`` per tensor are compared."""
SAMPLED_BYTES = 2**24
_SAMPLES = 16


def same_batch(batch: Mapping[str, Tensor], names: list[str], device: torch.device) -> None:
    """Raise ``ValueError`` if the batch differs between ranks. The message names the ranks and, if it is one of ``names``, the input."""
    if dist.get_world_size() == 1:
        return
    other_entries = zlib.crc32(repr([(n, digest(t)) for n, t in sorted(batch.items()) if n not in names]).encode())
    digests = {f"{name!r}": digest(batch[name]) for name in names} | {"the other entries": other_entries}
    _require_equal(digests, device, "ranks have different batches", "every rank takes the full global batch")


def same_state(state: Mapping[str, Tensor], names: Sequence[str], device: torch.device) -> None:
    """Raise ``ValueError`` if the entries ``names`` of the state dict differ between ranks, or only some ranks have one."""
    if dist.get_world_size() > 1:
        limit = (
            SAMPLED_BYTES
            if sum(state[name].nbytes for name in names if name in state) > FULL_DIGEST_LIMIT_BYTES
            else None
        )
        same_values({name: digest(state[name], limit) if name in state else 0 for name in names}, device)


def same_options(options: Mapping[str, object], device: torch.device) -> None:
    """Raise ``ValueError`` if ranks have different options."""
    same_values({name: zlib.crc32(repr(value).encode()) for name, value in options.items()}, device)


def same_values(digests: Mapping[str, int], device: torch.device) -> None:
    """Raise ``ValueError`` if the digests of the initial values differ between ranks."""
    if dist.get_world_size() > 1:
        what = "the ranks start from different values"
        _require_equal(digests, device, what, "every rank takes the same state dict and options")


def digest(tensor: Tensor, limit: int | None = None) -> int:
    """Return a CRC-32 of a tensor's dtype, shape and bytes. If it has more than ``limit`` bytes, the CRC-32 covers only 16 evenly spaced
    samples, ``limit`` bytes in total."""
    head = zlib.crc32(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    if tensor.numel() == 0:
        return head
    plain = torch.view_as_real(tensor.detach().resolve_conj()) if tensor.is_complex() else tensor.detach()
    held = plain.cpu().contiguous()
    read = bytes_of(held)
    if limit is None or len(read) <= limit:
        return zlib.crc32(read, head)
    length = limit // _SAMPLES
    for i in range(_SAMPLES):
        start = (len(read) - length) * i // (_SAMPLES - 1)
        head = zlib.crc32(read[start : start + length], head)
    return head


def _require_equal(digests: Mapping[str, int], device: torch.device, what: str, hint: str) -> None:
    own = torch.tensor(list(digests.values()), dtype=torch.int64, device=device)
    extremes = torch.cat((own, -own))  # all-reduced: the maxima, then the negative minima
    dist.all_reduce(extremes, dist.ReduceOp.MAX)
    if torch.equal(extremes[: len(own)], -extremes[len(own) :]):
        return
    every = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(every, own)
    table = torch.stack(every)
    differs = (table != table[0]).any(0).tolist()
    index = differs.index(True)
    ranks = [rank for rank in range(len(every)) if int(table[rank, index]) != int(table[0, index])]
    more = sum(differs) - 1
    which = f"{list(digests)[index]}{f' (and {more} more)' if more else ''}"
    shown = ", ".join(map(str, ranks[:8])) + (" and others" if len(ranks) > 8 else "")
    who = f"ranks {shown} differ" if len(ranks) > 1 else f"rank {shown} differs"
    raise ValueError(f"{what}: {who} from rank 0 in {which}; {hint}")
