"""The program that runs a plan's arithmetic, for the properties on which prices depend; the extension point for models of other
trainers."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from torch import fx

from autopar.devices import Cluster
from autopar.graph import LayerClass
from autopar.price.collectives import FLAT, SHARDED, RankGroup, group_time_s, overlapped_s
from autopar.price.fusion import merge
from autopar.price.live_memory import LayerMemory, replicated_transient, sharded_bytes
from autopar.price.moves import Move
from autopar.price.op_costs import OpCosts
from autopar.price.selective import Selection, select_emitted
from autopar.price.state import Precision, precision
from autopar.price.trace import INTERNAL, OUTPUT, Saved, Trace, trace
from autopar.sharding import AxisTypes
from autopar.types import Collective


@dataclass(frozen=True)
class TrainerModel:
    """The programs that autopar emits, run eagerly. A model of another trainer overrides methods (see ``autopar.trainers``).

    Each method computes one term of a price. ``cpu`` means PyTorch's CPU kernels and gloo instead of CUDA kernels and NCCL.
    ``starts_early``: the gradient of a column-parallel product's input is reduced while the weight's gradient is computed
    (``passes.overlap``). ``fused``: a chain of pointwise ops and reductions is one kernel and saves only its inputs, as in layers that
    ``torch.compile`` compiles and in hand-written kernels (``price.fusion``). ``compiles``: on GPUs layers are compiled where no
    pin decides.
    """

    cpu: bool = False
    starts_early: bool = True
    fused: bool = False
    compiles: bool = True

    def precision(self, name: str, allow: Collection[str] = ()) -> Precision:
        """Bytes per element: parameters, the copies of gradients, optimizer state."""
        return precision(name, allow)

    def trace(self, cls: LayerClass) -> Trace:
        """The tensors of the layer that autograd saves."""
        return trace(cls, self.cpu)

    def adapt(self, costs: OpCosts) -> None:
        """Change the costs of eager PyTorch ops if the trainer runs other kernels."""
        if self.fused:
            merge(costs)

    def selection(
        self, cls: LayerClass, ops: Sequence[fx.Node], run: Trace, saved: Sequence[Saved]
    ) -> tuple[tuple[Saved, ...], Selection]:
        """The entries that selective recomputation may save (``saved`` and additional ones), and the selection among them."""
        return select_emitted(cls, ops, run, saved)

    def saves_shard(self, types: AxisTypes, node: fx.Node, operand: int) -> bool:
        """Whether an axis of these types shards a saved value; a value gathered for ``node`` is saved as ``node`` reads it."""
        return is_sharded(types, node.name, operand)

    def conversions(self, moves: list[Move], gradient: bool) -> list[Move]:
        """The collectives of converting one value between ops; ``gradient`` tells whether a gradient flows back through it."""
        return moves

    def data_collective_s(
        self, collective: Collective, size: int, tensors: int, members: RankGroup, cluster: Cluster, around_layer: bool
    ) -> float:
        """Seconds of a collective of data parallelism on ``size`` bytes of a layer's ``tensors`` parameters or gradients.

        ``around_layer``: in every pass of the layer, as under ZeRO 2 and 3; otherwise once per step.
        """
        return group_time_s(collective, size, members, cluster, caller=SHARDED if around_layer else FLAT)

    def exposed_tensor_s(self, communication_s: float) -> float:
        """The part of tensor-parallel communication that is not hidden under matrix products."""
        return communication_s

    def exposed_sharded_s(self, communication_s: float, compute_s: float, slowdown: float) -> float:
        """The seconds that FSDP's gathers and reductions (ZeRO 2 and 3) add to a layer's pass that computes for ``compute_s``. On CPUs
        FSDP2 has no streams, and waits for its collectives."""
        return communication_s if self.cpu else overlapped_s(compute_s, communication_s, slowdown)

    def sharded_copies_s(
        self, gathered_bytes: float, gradient_bytes: float, reduced_bytes: float, cluster: Cluster
    ) -> tuple[float, float]:
        """Seconds of FSDP's copies around a gather of a layer's parameters and around a reduction of their gradients.

        FSDP2 copies what it gathered out of the flat buffer, and gradients into a buffer in the dtype of the reduction, on the compute
        stream, so that the copies never overlap arithmetic.
        On CPUs they are part of the collectives, as ``autopar profile`` measures them.
        """
        if self.cpu:
            return 0.0, 0.0
        return 2 * gathered_bytes / cluster.gpu.bytes_per_s, (gradient_bytes + reduced_bytes) / cluster.gpu.bytes_per_s

    def exposed_early_s(self, communication_s: float, arithmetic_s: float, cluster: Cluster) -> float:
        """The seconds that a collective of tensor parallelism adds if ``arithmetic_s`` of arithmetic run after its start.

        gloo competes with the layer for the processors: on CPUs nothing is hidden, unless the hidden share was measured.
        """
        if self.cpu and cluster.wires is None:
            return communication_s
        return overlapped_s(arithmetic_s, communication_s, cluster.overlap_slowdown)

    def exposed_reduction_s(self, communication_s: float, backward_s: float, slowdown: float) -> float:
        """The seconds that the reduction of a layer's gradients adds to the step under ZeRO 0 and 1, if one microbatch's backward of the
        layer computes for ``backward_s``. Emitted programs reduce during the backward of the last microbatch."""
        return overlapped_s(backward_s, communication_s, slowdown)

    def exposed_gather_s(self, communication_s: float, forward_s: float, slowdown: float) -> float:
        """The seconds that sending updated parameters (ZeRO 1's gather, a server's broadcast) adds to the step, if one microbatch's
        forward of the layer computes for ``forward_s``. Emitted programs send them during the next step's first forward."""
        return overlapped_s(forward_s, communication_s, slowdown)

    def border_bytes(self, size: float) -> float:
        """Bytes that a pipeline stage allocates to receive or send one activation of ``size`` bytes."""
        return size

    def live_bytes(
        self, share: LayerMemory, gradients: int, data: int, zero: int, whole_gradients: bool, numbers: Precision
    ) -> tuple[float, float]:
        """Bytes of the layer's gradients (``gradients`` counts only the copies) and its transient, see ``live_memory``."""
        if zero < 2:
            return gradients, replicated_transient(share, data, zero, numbers, self.cpu)
        return sharded_bytes(share, data, zero, whole_gradients, numbers, self.cpu)


EMITTED = TrainerModel()


def is_sharded(types: AxisTypes, node: str, operand: int) -> bool:
    """Whether an axis of these types shards a value of an op: an operand as the op reads it, the result (``OUTPUT``), or a tensor that
    the op allocates internally (``INTERNAL``)."""
    if operand == INTERNAL:
        return types.letter.get(node) is not None
    return (types.produced[node] if operand == OUTPUT else types.needed[node][operand]).sharded
