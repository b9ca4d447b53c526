"""Live memory of a layer of an emitted program, besides its persistent state: activations, gathered parameters, gradients in flight.

A ``LayerPrice`` divides it in three: bytes per microbatch in flight (``saved_bytes``), bytes during the whole step (``gradients_bytes``),
and the peak while the layer runs, above all other memory (``transient_bytes``). A stage's memory is then a sum over its layers plus a
maximum, so that a search can decide layer by layer. Under ZeRO 0 and 1 gradients accumulate in a buffer, and the gradients that autograd
computes are freed at once. Under ZeRO 2 and 3 one FSDP root contains the layers of a stage. It gathers the next layers' parameters while a
layer runs, and keeps the input of a layer's reduction until the next reduction begins. A layer goes through these phases:

    forward    its activations, its all-gather's result and the parameters copied out of it, the next layers' all-gathers' results
    before     its activations, and under ZeRO 2 its gathered parameters
    gathered   its activations, the all-gather's result and the parameters copied out of it
    running    the op that needs most memory, and the gradients computed so far
    copied     unsharded gradients, and the reduction's input
    reduced    the reduction's input and its result
    after      the shard of the gradients

From ``gathered`` to ``running`` the previous backward's reduction input also exists. From ``running`` to ``reduced``, under ZeRO 3, so do
the all-gather results of the layers whose backward runs next, as many as are prefetched; at ``gathered``, all but the furthest. If
anything is recomputed, ``forward`` is the recomputed forward, with the gathered parameters and prefetches of ``running``.

While other layers run, a layer is counted with the larger of ``before`` and ``after``: when the last layers have finished their backward,
the first have not yet started theirs. ``transient_bytes`` is the additional memory of the other phases. Gradient shards exist from the
first microbatch's backward on; later microbatches add to them. Gradients that are reduced once per step stay unsharded until the last
microbatch's backward, and the phases are counted in the same way.
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.price.elementwise import least, most
from autopar.price.microbatch import PeakMemory, SavedActivations
from autopar.price.state import Precision


@dataclass(frozen=True, slots=True)
class PrefetchContext:
    """Elements on one device of the largest layers that may run before and after a layer: the parameters that are prefetched during its
    backward (``earlier``) and its forward (``later``), and the trainable parameters of the next layer (``later_trainable``).
    ``later_saved`` are the minimum bytes that the next layer saves for its backward. ``earlier_ready`` are the elements of ``earlier`` that
    are gathered before the layer uses its own parameters: 0 if one layer is prefetched."""

    earlier: int = 0
    later: int = 0
    later_trainable: int = 0
    later_saved: float = 0.0
    earlier_ready: int = 0


@dataclass(frozen=True, slots=True)
class LayerMemory:
    """A layer on one device: ``plain_bytes`` are the saved bytes if the layer keeps all activations; ``parameters``, ``trainable``
    (parameters) and the ``largest`` trainable parameter are in elements, before ZeRO."""

    peaks: PeakMemory
    kept: SavedActivations
    plain_bytes: float
    parameters: int
    trainable: int
    largest: float
    microbatches: int
    context: PrefetchContext = PrefetchContext()


def replicated_transient(layer: LayerMemory, data: float, zero: int, precision: Precision, cpu: bool) -> float:
    """Return a layer's transient bytes under ZeRO 0 and 1. Reductions of two layers' gradients at a time overlap the backward of earlier
    layers; then the optimizer runs.

    ``cpu``: gloo's reduce-scatter copies its input, and AdamW allocates two temporaries of the size of the parameter that it updates.
    """
    # bytes per element of a reduction in flight: its result and the copy of its input
    per_element = (1 / data + cpu) * precision.reduced if zero else 0.0
    later, freed = layer.context.later_trainable, layer.context.later_saved
    # reductions of the next two layers (the second no larger than this layer or the first), whose saved activations are already free
    in_flight = most(
        0.0, later * per_element - freed, (later + least(later, layer.trainable)) * per_element - 2 * freed
    )
    running = layer.kept.working_bytes + most(0.0, layer.peaks.forward, layer.peaks.one_gradient) + in_flight
    reducing = (layer.trainable + later) * per_element
    shard = layer.trainable * precision.reduced / (data if zero else 1)
    updating = 2 * least(shard, layer.largest * precision.reduced) if cpu else 0.0
    return most(running, reducing, updating) - layer.kept.saved_bytes


def sharded_bytes(
    layer: LayerMemory, data: float, zero: int, unsharded_gradients: bool, precision: Precision, cpu: bool
) -> tuple[float, float]:
    """Return a layer's bytes of gradients and transient bytes under ZeRO 2 and 3; ``unsharded_gradients``: gradients are reduced once per
    step."""
    kept = layer.kept
    full, gradients = layer.parameters * precision.width, layer.trainable * precision.width
    unreduced = layer.trainable * precision.reduced
    shard = unreduced / data
    next_gathered = layer.context.later * precision.width  # in the forward
    previous_gathered = layer.context.earlier * precision.width if zero == 3 else 0.0  # in the backward
    reducing = layer.context.later_trainable * precision.reduced
    earlier = (unreduced if unsharded_gradients else shard) if layer.microbatches > 1 else 0.0  # earlier microbatches
    before = kept.saved_bytes + (full if zero == 2 else 0.0)
    after = shard - earlier
    # in a segment of several recomputed layers, the parameters of all but the last layer are gathered again
    again = zero == 3 and kept.layers > 1
    phases = (
        kept.working_bytes - layer.plain_bytes + layer.peaks.forward + 3 * full + reducing if again else 0.0,
        kept.saved_bytes + 2 * full + reducing + (layer.context.earlier_ready * precision.width if zero == 3 else 0.0),
        kept.working_bytes
        + layer.peaks.forward
        + full
        # a recomputed forward uses the parameters that its backward has gathered
        + (previous_gathered + reducing if kept.recomputes else full + next_gathered),
        kept.working_bytes + most(0.0, layer.peaks.all_gradients) + full + previous_gathered + reducing,
        gradients + unreduced + previous_gathered,
        unreduced * (2 if cpu else 1) + shard + previous_gathered,
    )
    return earlier + most(0.0, after - before), most(*phases) - most(before, after)
