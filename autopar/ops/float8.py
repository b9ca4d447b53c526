"""Facts about products in 8 bits: their recipe, the bytes of their scales, and between which elements axes may divide their operands."""

from __future__ import annotations

import math

from torch import fx

from autopar.ops.experts import FIRST_PARAMETER, Experts
from autopar.ops.facts import facts
from autopar.ops.operands import arguments, operands, shape_of
from autopar.precision import FP8_RECIPES, Fp8Recipe
from autopar.program.kernels_fp8 import ACTIVATION, GRADIENT, SCALINGS, WEIGHT


def products_in_float8(op: Experts) -> list[fx.Node]:
    """Return the grouped products of the body of a mixture of experts that are in 8 bits."""
    return [node for node in op.body.graph.nodes if facts(node).in_float8]


def recipe_of(node: fx.Node) -> Fp8Recipe | None:
    """Return how the products of an op round their operands to 8 bits; ``None`` if they do not."""
    if isinstance(node.target, Experts):
        return next(map(recipe_of, products_in_float8(node.target)), None)
    if not facts(node).in_float8:
        return None
    scaling = arguments(node)["scaling"]
    return next(recipe for recipe in FP8_RECIPES.values() if recipe.scaling == scaling)


def scale_bytes(recipe: Fp8Recipe) -> tuple[float, float, float]:
    """Return the bytes of scales for each number of an activation, of a weight, and of a gradient."""
    found = SCALINGS[recipe.scaling]
    return found.scale_bytes(ACTIVATION), found.scale_bytes(WEIGHT), found.scale_bytes(GRADIENT)


def shard_multiples(node: fx.Node) -> dict[tuple[int, int], int]:
    """Return the numbers of which devices' shares of sharded dims must be multiples, so that no tile of an operand spans two devices. Keys
    are an operand's index and a dim; shares of other dims may have any size.

    Each dim of a product is contracted by the result or by a gradient, and has tiles: tokens, too, which ``linear`` flattens. In a mixture
    of experts a tile has tokens that one expert gets on one device, so that tokens may be distributed in any way.
    """
    recipe = recipe_of(node)
    if recipe is None or not recipe.tile:
        return {}
    tile = recipe.tile
    if isinstance(node.target, Experts):
        shapes = [(i, shape_of(operand)) for i, operand in enumerate(operands(node)[FIRST_PARAMETER:], FIRST_PARAMETER)]
        in_tiles = [i for i, shape in shapes if len(shape) == 3 and not any(n % recipe.multiple for n in shape[1:])]
        return {(i, dim): tile for i in in_tiles for dim in (1, 2)}
    *tokens, _ = shape_of(operands(node)[0])
    found = {(0, dim): tile // math.gcd(tile, math.prod(tokens[dim + 1 :])) for dim in range(len(tokens))}
    return found | {(0, len(tokens)): tile, (1, 0): tile, (1, 1): tile}
