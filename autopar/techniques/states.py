"""Where a layer's optimizer states and master weights are: in device memory, in host memory, or in a file on the node's NVMe.

The host runs the optimizer on offloaded states (``program.state_places``), as ZeRO-Offload (arXiv:2101.06840) and ZeRO-Infinity
(arXiv:2104.07857) do.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from autopar.techniques.technique import Context, Mode, Technique, Value

DEVICE, HOST, NVME = "device", "host", "nvme"


class States(Technique):
    name = "states"
    modes = (
        Mode(DEVICE, cell=DEVICE),
        Mode(HOST, "in the host's memory", HOST, states_in=HOST),
        Mode(NVME, "on NVMe", NVME, states_in=NVME),
    )
    subject = "optimizer states"
    meaning = "where optimizer states and master copies are: on the device, in the host's memory, or on the node's NVMe"
    example = "states=host"
    optional = True
    adds_work = True
    specified = True

    def effort(self, value: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return (self.values.index(value),), ()

    def within(self, values: Sequence[str], context: Context) -> tuple[str, ...]:
        return tuple(values) if context.nvme else (DEVICE, HOST)

    def candidates(self, context: Context) -> tuple[str, ...]:
        return self.values if context.nvme else (DEVICE,)

    def read(self, layer: Mapping[str, Any]) -> str:
        before = HOST if layer.get("offload") in ("optimizer", "both") else DEVICE
        return str(layer.get(self.name, before))

    def runtime_parts(self, value: str) -> Mapping[str, str]:
        return {} if value == DEVICE else {"places": "state_places.StateStorage"}

    def alternatives(self) -> Iterator[tuple[str, str, dict[str, Value], str]]:
        yield "host_optimizer", "optimizer states in the host's memory", {self.name: HOST}, "host"
        yield "nvme_optimizer", "optimizer states on NVMe", {self.name: NVME}, "nvme"


STATES = States()
