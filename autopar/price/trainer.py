"""The properties of the program that runs a plan, as far as the cost model needs them; ``autopar.trainers`` models other trainers."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from torch import fx

from autopar.devices import Cluster
from autopar.devices.constants import FP8_PASSES
from autopar.graph import LayerClass
from autopar.price.collective_pairs import CollectivePair
from autopar.price.collectives import FLAT, SHARDED, RankGroup, group_time_s, overlapped_s
from autopar.price.fusion import merge
from autopar.price.live_memory import LayerMemory, replicated_transient, sharded_bytes
from autopar.price.op_costs import OpCosts
from autopar.price.selective import Selection, select_emitted
from autopar.price.state import Precision, precision
from autopar.price.trace import INTERNAL, OUTPUT, Saved, Trace, trace
from autopar.sharding import AxisTypes
from autopar.types import Collective


@dataclass(frozen=True)
class TrainerModel:
    """A model of the programs that autopar emits. A model of another trainer overrides methods (see ``autopar.trainers``).

    Each method computes one term of a price. ``cpu`` means PyTorch's CPU kernels and gloo instead of CUDA kernels and NCCL.
    ``starts_early``: the input gradient of a column-parallel product is reduced while the weight gradient is computed (``passes.overlap``).
    ``fused``: a chain of pointwise ops and reductions is one kernel and saves only its inputs and results, as in layers that
    ``torch.compile`` compiles and in hand-written kernels (``price.fusion``). ``compiles``: on GPUs layers are compiled by default.
    ``dispatches``: kernels send a token once to each node with any of its experts (``collectives.dispatch_s``), not to each expert, and
    ``permutation_passes`` times the bytes of rows are moved to sort them by expert. ``consecutive_experts``: see ``routing.Routing``.
    ``fuses_rounding``: few kernels round the operands of a product to 8 bits.
    ``stage1_reduction``: the collective that sums gradients under ZeRO 1.
    ``fp8_passes``: how many times the bytes of their operands products move at the precision ``float8``, with the conversion to 8 bits.
    """

    cpu: bool = False
    fuses_rounding: bool = False
    starts_early: bool = True
    fused: bool = False
    compiles: bool = True
    dispatches: bool = False
    permutation_passes: float = 0.0
    consecutive_experts: bool = False
    stage1_reduction: Collective = Collective.REDUCE_SCATTER
    fp8_passes: float = FP8_PASSES.value

    def precision(self, name: str, allow: Collection[str] = ()) -> Precision:
        """Return the bytes per element of parameters, gradients and optimizer state at precision ``name``."""
        return precision(name, allow)

    def trace(self, cls: LayerClass) -> Trace:
        """Return the tensors of the layer that autograd saves."""
        return trace(cls, self.cpu)

    def adapt(self, costs: OpCosts) -> None:
        """Change the costs of eager PyTorch ops if the trainer runs other kernels."""
        if self.fused:
            merge(costs)

    def selection(
        self, cls: LayerClass, ops: Sequence[fx.Node], run: Trace, saved: Sequence[Saved]
    ) -> tuple[tuple[Saved, ...], Selection]:
        """Return the entries that selective recomputation may save (``saved`` and additional ones), and the selection among them."""
        return select_emitted(cls, ops, run, saved)

    def saves_shard(self, types: AxisTypes, node: fx.Node, operand: int) -> bool:
        """Return whether an axis of these types shards a saved value; a value gathered for ``node`` is saved as ``node`` reads it."""
        return is_sharded(types, node.name, operand)

    def conversions(self, pairs: list[CollectivePair], gradient: bool) -> list[CollectivePair]:
        """Return the collectives that convert one value between ops; ``gradient`` says whether the value has a gradient."""
        return pairs

    def data_collective_s(
        self, collective: Collective, size: int, tensors: int, members: RankGroup, cluster: Cluster, around_layer: bool
    ) -> float:
        """Return the seconds of a data-parallel collective on ``size`` bytes of a layer's ``tensors`` parameters or gradients.

        ``around_layer``: the collective runs in every pass of the layer, as under ZeRO 2 and 3; otherwise once per step.
        """
        return group_time_s(collective, size, members, cluster, caller=SHARDED if around_layer else FLAT)

    def exposed_tensor_s(self, communication_s: float) -> float:
        """Return the seconds of tensor-parallel communication that are not hidden under matrix products."""
        return communication_s

    def exposed_exchange_s(self, communication_s: float, compute_s: float, slowdown: float) -> float:
        """Return the seconds that exchanges of tokens with their experts add to a pass that computes for ``compute_s``."""
        return communication_s

    def exposed_sharded_s(self, communication_s: float, compute_s: float, slowdown: float) -> float:
        """Return the seconds that FSDP's gathers and reductions (ZeRO 2 and 3) add to a layer's pass that computes for ``compute_s``. On
        CPUs FSDP2 has no streams, and waits for its collectives."""
        return communication_s if self.cpu else overlapped_s(compute_s, communication_s, slowdown)

    def sharded_copies_s(
        self, gathered_bytes: float, gradient_bytes: float, reduced_bytes: float, cluster: Cluster
    ) -> tuple[float, float]:
        """Return the seconds of FSDP's copies around a gather of a layer's parameters and around a reduction of their gradients.

        FSDP2 copies gathered parameters out of the flat buffer, and gradients into a buffer in the reduction's dtype, on the compute
        stream, so that the copies never overlap arithmetic. On CPUs the copies are part of the collectives that ``autopar profile``
        measures.
        """
        if self.cpu:
            return 0.0, 0.0
        return 2 * gathered_bytes / cluster.gpu.bytes_per_s, (gradient_bytes + reduced_bytes) / cluster.gpu.bytes_per_s

    def exposed_early_s(self, communication_s: float, arithmetic_s: float, cluster: Cluster) -> float:
        """Return the seconds that a tensor-parallel collective adds if ``arithmetic_s`` of arithmetic overlap it.

        On CPUs gloo competes with the layer for the processors, so nothing is hidden, unless the overlap was measured.
        """
        if self.cpu and cluster.collective_times is None:
            return communication_s
        return overlapped_s(arithmetic_s, communication_s, cluster.overlap_slowdown)

    def exposed_reduction_s(self, communication_s: float, backward_s: float, slowdown: float) -> float:
        """Return the seconds that the reduction of a layer's gradients adds to the step under ZeRO 0 and 1, if the layer's backward of one
        microbatch takes ``backward_s``. Emitted programs reduce during the backward of the last microbatch."""
        return overlapped_s(backward_s, communication_s, slowdown)

    def exposed_gather_s(self, communication_s: float, forward_s: float, slowdown: float) -> float:
        """Return the seconds that sending updated parameters (ZeRO 1's gather, a server's broadcast) adds to the step, if the layer's
        forward of one microbatch takes ``forward_s``. Emitted programs send them during the next step's first forward."""
        return overlapped_s(forward_s, communication_s, slowdown)

    def boundary_bytes(self, size: float) -> float:
        """Return the bytes that a pipeline stage allocates to receive or send one activation of ``size`` bytes."""
        return size

    def live_bytes(
        self,
        share: LayerMemory,
        gradients: int,
        data: float,
        zero: int,
        unsharded_gradients: bool,
        precision: Precision,
    ) -> tuple[float, float]:
        """Return the layer's bytes of gradients and its transient bytes, see ``live_memory``; ``gradients`` are the bytes that persist.
        ``data`` is the number of devices over which ZeRO shards the layer: if experts are sharded over fewer, the mean over elements."""
        if zero < 2:
            return gradients, replicated_transient(share, data, zero, precision, self.cpu)
        return sharded_bytes(share, data, zero, unsharded_gradients, precision, self.cpu)

    def lasting_gradients(self, gradients: int, zero: int, microbatches: int) -> int:
        """Return how many of a parameter's ``gradients`` bytes exist during the whole step. Under ZeRO 2 and 3 they are those of earlier
        microbatches: none in a step of one."""
        return 0 if zero >= 2 and microbatches == 1 else gradients


EMITTED = TrainerModel()


def is_sharded(types: AxisTypes, node: str, operand: int) -> bool:
    """Return whether an axis of these types shards a value of an op: an operand as the op reads it, the result (``OUTPUT``), or a tensor
    that the op allocates internally (``INTERNAL``)."""
    if operand == INTERNAL:
        return types.letter.get(node) is not None
    return (types.produced[node] if operand == OUTPUT else types.needed[node][operand]).sharded
