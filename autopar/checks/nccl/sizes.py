"""Tensors without values: a rank of a large plan runs at its real sizes on a laptop.

Inside ``sizes_only`` floating-point tensors and large integer tensors are fake tensors without memory. Small integer tensors are real,
because programs use them to compute which rows a rank reads; so are the results of ``arange``, ``randint`` and ``randperm``. When the host
reads a fake tensor, it gets a constant: a loss is 1, a condition is false, tensors are equal.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from autopar.checks.nccl.functional import NAMESPACE, Functional
from autopar.checks.nccl.recorder import Recorder
from autopar.torch_private import dispatched, fake_tensors, is_fake

REAL_ELEMENTS = 2**16
"""Maximum number of elements of a real integer tensor."""


@contextlib.contextmanager
def sizes_only(recorder: Recorder) -> Iterator[None]:
    fake, functional = fake_tensors(), Functional(recorder)

    def run(op: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        tensors = list(_tensors((*args, *options.values())))
        if any(is_fake(tensor) and not tensor.is_meta for tensor in tensors) or _makes_fake(op, tensors, args, options):
            with fake:
                result = op(*args, **options)
            return functional.run(op, args, result) if op.namespace == NAMESPACE else result
        return op(*args, **options)

    recorder.in_thread = functools.partial(dispatched, run)
    with dispatched(run), _constants():
        yield


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors among an op's arguments, also in lists. It runs for every op, so it must be fast."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _makes_fake(op: Any, tensors: list[Tensor], args: tuple[Any, ...], options: dict[str, Any]) -> bool:
    """Return whether the op creates a tensor that should be fake."""
    device = options.get("device")
    if any(tensor.is_meta for tensor in tensors) if device is None else torch.device(device).type == "meta":
        return False
    if tensors:
        name = op.overloadpacket.__name__
        made = name.startswith(("new_", "empty_like", "zeros_like", "ones_like", "full_like", "rand"))
        return made and any(tensor.is_floating_point() for tensor in tensors)
    dtype = options.get("dtype") or torch.get_default_dtype()
    if "dtype" not in options and op.overloadpacket.__name__ in ("arange", "randperm", "randint"):
        dtype = torch.int64
    sizes = args[0] if args and isinstance(args[0], list | tuple) else ()
    if dtype.is_floating_point or dtype.is_complex:
        return True
    return math.prod(sizes) > REAL_ELEMENTS


@contextlib.contextmanager
def _constants() -> Iterator[None]:
    """Make the host's reads of fake tensors return constants."""
    read: dict[str, Callable[[Tensor], Any]] = {
        "item": lambda tensor: 1.0 if tensor.is_floating_point() else 1,
        "tolist": lambda tensor: _nested(tuple(tensor.shape), 1.0 if tensor.is_floating_point() else 1),
        "__bool__": lambda tensor: False,
        "__float__": lambda tensor: 1.0,
        "__int__": lambda tensor: 1,
        "__index__": lambda tensor: 1,
    }
    before = {name: getattr(Tensor, name) for name in read}
    equal = torch.equal
    for name, constant in read.items():
        setattr(Tensor, name, _reading(before[name], constant))
    torch.equal = lambda input, other: is_fake(input) or is_fake(other) or equal(input, other)
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(Tensor, name, function)
        torch.equal = equal


def _nested(shape: tuple[int, ...], value: Any) -> Any:
    return value if not shape else [_nested(shape[1:], value) for _ in range(shape[0])]


def _reading(function: Callable[..., Any], constant: Callable[[Tensor], Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def read(tensor: Tensor, *args: Any) -> Any:
        return constant(tensor) if is_fake(tensor) else function(tensor, *args)

    return read
