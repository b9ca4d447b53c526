"""Trainers of published runs, as cost models alone: nanotron and InternEvo, with their copies of gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autopar.devices import Cluster
from autopar.graph import Graph
from autopar.trainers import figures
from autopar.trainers.options import Option
from autopar.trainers.setting import Setting
from autopar.trainers.trainer import Exported, Reading, Space, Trainer


class Nanotron(Trainer):
    evidence = "nanotron"
    name = "nanotron"
    title = "nanotron"
    checked = ""
    space = Space(zero=(0, 1), tensor=True, pipeline=True)

    def gradient_bytes(self, s: Setting) -> float:
        return (figures.DDP_GRADIENT_BYTES if s.data > 1 else figures.SUMMED_GRADIENT_BYTES).value

    def terms(self, s: Setting) -> dict[str, Any]:
        return {"regather": True, "fresh_bytes": int(figures.FRESH_GRADIENT_BYTES.value)}

    def export(self, s: Setting, graph: Graph, cluster: Cluster) -> Exported:
        raise NotImplementedError

    def read(self, options: Sequence[Option], blocks: int, devices: int) -> Reading | None:
        return None


class InternEvo(Nanotron):
    evidence = "internevo"
    name = "internevo"
    title = "InternEvo"

    def gradient_bytes(self, s: Setting) -> float:
        return figures.INTERNEVO_GRADIENT_BYTES.value

    def terms(self, s: Setting) -> dict[str, Any]:
        return {"regather": True}
