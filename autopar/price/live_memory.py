"""Live memory of a layer of an emitted program, besides its persistent state: activations, gathered parameters, gradients in flight.

A price has three such values: bytes per microbatch in flight (``saved``), bytes during the whole step (``gradients``), and the peak
while the layer runs, above all other memory (``transient``). The memory of a stage is then a sum over its layers plus a maximum, which
a search can decide layer by layer. Under ZeRO 0 and 1 gradients are summed in a buffer, and the gradients that autograd makes are freed
at once. Under ZeRO 2 and 3 the layers of a stage are under one FSDP root, which gathers the next layer's parameters while a layer runs,
and keeps the input of a layer's reduction until the next reduction begins. A layer goes through these phases:

    forward    its activations, its all-gather's result and the parameters copied out of it, the next layers' all-gathers' results
    before     its activations, and under ZeRO 2 its gathered parameters
    gathered   the all-gather's result and the parameters copied out of it
    running    the op that needs most memory, and the gradients made so far
    copied     whole gradients, and the reduction's input
    reduced    the reduction's input and its result
    after      the shard of the gradients

From ``gathered`` to ``running`` the reduction's input of the layer whose backward ran before exists too, and from ``running`` to
``reduced`` under ZeRO 3 the all-gather's result of the layer whose backward runs next; of as many layers as are gathered ahead.

A layer's persistent value is the larger of before and after: when the last layers have finished their backward, the first have not yet
started theirs. The shards of the gradients appear with the first microbatch's backward; later microbatches add to them. Gradients that are
reduced once a step persist whole until the last microbatch's backward, and the phases are counted in the same way.
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.price.microbatch import Kept, PeakMemory
from autopar.price.state import Precision


@dataclass(frozen=True, slots=True)
class PrefetchContext:
    """What prefetching needs to know of the largest layers that may run before and after a layer, in elements on one device: the parameters
    that are prefetched during its backward (``earlier``) and its forward (``later``), and the trainable parameters of the layer directly
    after (``later_trainable``). ``later_saved`` are the least bytes that a layer directly after saves for its backward. ``earlier_ready``
    are the elements of ``earlier`` that are gathered before the layer's own parameters are in use: with one layer ahead, none."""

    earlier: int = 0
    later: int = 0
    later_trainable: int = 0
    later_saved: float = 0.0
    earlier_ready: int = 0


@dataclass(frozen=True, slots=True)
class LayerMemory:
    """A layer's share on one device: ``plain_bytes``, saved if the layer keeps everything; and the elements of its parameters, of the
    trainable ones, and of the ``largest`` trainable one."""

    peaks: PeakMemory
    kept: Kept
    plain_bytes: float
    parameters: int
    trainable: int
    largest: float
    microbatches: int
    context: PrefetchContext = PrefetchContext()


def replicated_transient(share: LayerMemory, data: int, zero: int, numbers: Precision, cpu: bool) -> float:
    """The transient of a layer under ZeRO 0 and 1. Gradients are reduced under the backward of earlier layers, two layers' at a time, then
    the optimizer runs.

    ``cpu``: gloo's reduce-scatter copies its input, and AdamW makes two temporaries as large as the parameter that it updates.
    """
    # bytes per element of a reduction in flight: its result, the copy of its input
    kept = (1 / data + cpu) * numbers.reduced if zero else 0.0
    later, freed = share.context.later_trainable, share.context.later_saved
    # of the two layers after (the second is taken to be no larger), whose saved activations are freed by then
    in_flight = max(0.0, later * kept - freed, (later + min(later, share.trainable)) * kept - 2 * freed)
    running = share.kept.working_bytes + max(0.0, share.peaks.forward, share.peaks.one_gradient) + in_flight
    reducing = (share.trainable + later) * kept
    own = share.trainable * numbers.reduced / (data if zero else 1)
    updating = 2 * min(own, share.largest * numbers.reduced) if cpu else 0.0
    return max(running, reducing, updating) - share.kept.saved_bytes


def sharded_bytes(
    share: LayerMemory, data: int, zero: int, whole_gradients: bool, numbers: Precision, cpu: bool
) -> tuple[float, float]:
    """The gradients and the transient of a layer under ZeRO 2 and 3; ``whole_gradients``: gradients are reduced once a step."""
    kept = share.kept
    whole, made = share.parameters * numbers.width, share.trainable * numbers.width
    sent = share.trainable * numbers.reduced
    shard = sent / data
    next_gathered = share.context.later * numbers.width  # in the forward
    previous_gathered = share.context.earlier * numbers.width if zero == 3 else 0.0  # in the backward
    reducing = share.context.later_trainable * numbers.reduced
    earlier = (sent if whole_gradients else shard) if share.microbatches > 1 else 0.0  # of earlier microbatches
    before = kept.saved_bytes + (whole if zero == 2 else 0.0)
    after = shard - earlier
    # where several layers run again as one, the parameters of all of them but the last are gathered again
    again = zero == 3 and kept.layers > 1
    phases = (
        kept.working_bytes - share.plain_bytes + share.peaks.forward + 3 * whole + reducing if again else 0.0,
        kept.saved_bytes + 2 * whole + reducing + (share.context.earlier_ready * numbers.width if zero == 3 else 0.0),
        kept.working_bytes
        + share.peaks.forward
        + whole
        # a forward that runs again finds its parameters gathered
        + (previous_gathered + reducing if kept.recomputes else whole + next_gathered),
        kept.working_bytes + max(0.0, share.peaks.all_gradients) + whole + previous_gathered + reducing,
        made + sent + previous_gathered,
        sent * (2 if cpu else 1) + shard + previous_gathered,
    )
    return earlier + max(0.0, after - before), max(phases) - max(before, after)
