"""Copies between the host and the device for which the host doesn't wait.

The host queues work ahead of the device. A plain ``tensor.to(device)``, ``.item()`` or ``.cpu()`` waits for the
end of all queued work, and the device then idles until the host has queued more.
"""

from __future__ import annotations

import torch
from torch import Tensor


class AsyncHostCopy:
    """A tensor's copy to the host, queued right after the tensor's computation: ``read`` waits for this copy, but not for later work."""

    def __init__(self, tensor: Tensor) -> None:
        self._values, self._copied = tensor, None
        if tensor.is_cuda:
            self._values = tensor.to("cpu", non_blocking=True)  # into pinned memory
            self._copied = torch.cuda.Event()
            self._copied.record()

    def read(self) -> Tensor:
        """Wait for the values, and return them on the CPU."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._values


def on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return ``tensor.to(device)`` without waiting: the copy is queued, from pinned memory that torch keeps until the copy has ended."""
    if device.type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    return (tensor if tensor.is_pinned() else tensor.pin_memory()).to(device, non_blocking=True)
