"""The notes of a plan: sentences that a reader needs besides its figures."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.graph import Graph
from autopar.plan import DEGREES, NARROW_GRADIENTS, NARROW_MOMENTS, Plan, Role, Strategy, distinct, for_each
from autopar.precision import FP8_RECIPES, TF32
from autopar.search.problem import Configuration, Devices, Mesh, PriceSource
from autopar.techniques import LAYER, not_splittable_error, parts_phrase
from autopar.techniques.sync import SYNC
from autopar.units import size


def notes_of(graph: Graph, config: Configuration, strategies: Sequence[Strategy], mesh: Mesh) -> tuple[str, ...]:
    """Return notes on how the plan runs the model, and on the devices or microbatches that it cannot use."""
    notes = []
    idle = for_each(strategies, lambda strategy: strategy.degree(mesh, Role.IDLE))
    if max(idle) > 1:
        where, rows = idle.index(max(idle)), graph.batch_size // config.schedule.microbatches
        notes.append(
            f"{sum(d > 1 for d in idle)} of {len(idle)} layers cannot use every device: up to {max(idle)} devices duplicate the same "
            f"work (first {graph.layers[where].name}), because a microbatch of {rows} "
            f"{'sample' if rows == 1 else 'samples'} does not divide further"
        )
    if shared := graph.shared_parameters:
        notes.append(
            f"shared by several layers, and stored once if one device has these layers: {', '.join(sorted(shared))}"
        )
    notes += _expert_notes(graph, graph.parts(config.schedule.microbatches), strategies, mesh)
    if graph.accumulated > 1:
        notes.append(
            f"not exact, as microbatch_statistics allows: each of {graph.accumulated} microbatches has its own statistics and loss; the "
            f"step's loss is their mean, not the loss of the full batch ({graph.unmicrobatchable})"
        )
    elif graph.unmicrobatchable and config.schedule.microbatches > 1:
        notes.append(
            f"this plan can be priced, but not emitted, because the model does not run in {config.schedule.microbatches} microbatches: "
            f"{graph.unmicrobatchable}"
        )
    elif graph.unmicrobatchable:
        notes.append(f"one microbatch only: {graph.unmicrobatchable}")
    narrow = {
        NARROW_GRADIENTS: "gradients add up and are reduced in 16 bits, not in float32",
        NARROW_MOMENTS: "Adam keeps its moments in 16 bits, not in float32",
        TF32: "matrix products of float32 may round their operands to TF32, 10 bits of mantissa, and add up in float32",
    }
    for name, recipe in FP8_RECIPES.items():
        experts = "" if recipe.experts else " experts,"
        narrow[name] = (
            f"products with weights multiply 8-bit numbers ({recipe.formats}); embeddings, the head, attention, routers,{experts} and "
            f"weights of dims that {recipe.multiple} does not divide stay in bfloat16"
        )
    notes += [f"not exact, as {name} allows: {narrow[name]}" for name in graph.narrow]
    names = [layer.name for layer in graph.layers]
    for technique in LAYER:
        value_of = {id(strategy): strategy.options[technique] for strategy in distinct(strategies)}
        values = list(dict.fromkeys(value_of.values()))
        for value in values:
            having = (
                [n for n, s in zip(names, strategies, strict=True) if value_of[id(s)] == value] if values[1:] else names
            )
            note = technique.note(having, len(strategies), value)
            notes += [note] if note else []
    return tuple(notes)


def _expert_notes(graph: Graph, parts: int, strategies: Sequence[Strategy], mesh: Mesh) -> list[str]:
    """Return a note for each number of experts, tokens and degree: how many experts a device has, and how many tokens of one
    of ``parts`` microbatches each of them gets."""
    found: dict[str, int] = {}
    if not any(cls.mixtures for cls in graph.classes.values()):
        return []
    for layer, strategy in zip(graph.layers, strategies, strict=True):
        degree = strategy.degree(mesh, *DEGREES["expert"])
        # these axes have other tokens and the same experts
        copies = strategy.degree(mesh, Role.DATA, Role.ULYSSES, Role.RING)
        sliced = strategy.degree(mesh, Role.TENSOR, Role.TENSOR_SEQUENCE)
        loads = graph.classes[layer.cls].loads
        for i, (count, choices) in enumerate(graph.classes[layer.cls].mixtures):
            tokens = choices / parts / copies / count
            slices = f", sliced over {sliced} devices" if sliced > 1 else ""
            each, padded = -(-count // degree), count % degree > 0
            here = f"{'at most ' * padded}{each} of {count} experts{slices}"
            text = f"each device has {here} (expert {degree}), and each expert {tokens:,.0f} "
            text += "tokens of a microbatch on average"
            if graph.classes[layer.cls].stacks_experts and degree > 1:
                text += (
                    f"; it computes those, but holds the parameters of all {count}, because each expert is a module: "
                )
                text += "one tensor with the experts as first dim would be distributed, too"
            if loads is not None and degree > 1:
                imbalance = max(loads.imbalance(i, degree), each * degree / count)
                text += f"; the busiest device gets {imbalance:.3g} times the mean ({loads.of_all.source})"
            elif degree > 1:
                text += "; the price assumes that all experts get the same number of tokens: uneven loads are slower"
            found[text] = found.get(text, 0) + 1
    return [f"in {n} layers {text}" for text, n in found.items()]


def sync_notes(sync: str) -> tuple[str, ...]:
    """Return a note on replicas that don't all-reduce their gradients in every step."""
    found = SYNC.note((), 0, sync)
    return (found,) if found else ()


def offload_notes(offloaded: Sequence[tuple[int, int]], stages: Sequence[Devices]) -> tuple[str, ...]:
    """Return notes that compare the bytes per device in host memory and on NVMe with the device's share of either."""
    found = []
    for i, where in enumerate(("in the host's memory", "on NVMe")):
        sizes = [each[i] for each in offloaded]
        if max(sizes):
            limits = [(stage.host_limit_bytes, stage.nvme_limit_bytes)[i] for stage in stages]
            d = max(range(len(sizes)), key=lambda d: sizes[d] / max(limits[d], 1))
            full = ", which does not fit" if sizes[d] > limits[d] else ""
            text = f"{where}: {size(sizes[d])} per device, whose share is {size(limits[d])}{full}"
            found.append(text)
    return tuple(found)


def unsplit_layers(plan: Plan, pricer: PriceSource) -> tuple[str, ...]:
    """Return a note on layers that cannot be computed in parts (``overlap=halves``), if the plan computes other layers in parts.

    Raises:
        UsageError: the plan computes microbatches in parts, and no layer admits it.
    """
    wanted = [layer for layer in plan.layers if layer.strategy.options.parts > 1]
    reasons = {
        layer.name: pricer.not_splittable_reason(layer.cls, plan.mesh, layer.strategy, plan.microbatches)
        for layer in wanted
    }
    unsplit = {name: reason for name, reason in reasons.items() if reason}
    if wanted and len(unsplit) == len(wanted):
        raise not_splittable_error(wanted[0].strategy.options, unsplit)
    if not unsplit:
        return ()
    name, how = next(iter(unsplit)), parts_phrase(wanted[0].strategy.options)
    return (f"{len(unsplit)} of {len(wanted)} layers are not computed {how}: {name} {unsplit[name]}",)


def odd_experts(plan: Plan, pricer: PriceSource) -> tuple[str, ...]:
    """Return a note on the layers whose experts are computed one after the other."""
    found = {
        (layer.cls, id(strategy)): pricer.odd_experts(layer.cls, plan.mesh, strategy)
        for layer, strategy in {
            (layer.cls, id(layer.strategy)): (layer, layer.strategy) for layer in plan.layers
        }.values()
    }
    odd = {layer.name: widths for layer in plan.layers if (widths := found[layer.cls, id(layer.strategy)]) is not None}
    if not odd:
        return ()
    name, widths = next(iter(odd.items()))
    return (
        f"the experts of {len(odd)} layers are computed one after the other, slower than the price assumes: a product of {name} on one "
        f"device has widths {widths[0]} and {widths[1]}, and grouped products on GPUs need multiples of 8 in bfloat16",
    )
