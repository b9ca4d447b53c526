"""Cleaning passes: bring the exported graph into the canonical form on which sharding rules, masks and segmentation rely.

A cleaned graph is functional, names no device, has explicit sizes, and expresses each computation in one way: ``linear`` for every
product with a parameter, attention without repeated heads, losses as sums. ``STEPS`` is the order; each pass may rely
on the ones before it.
"""

from passes.clean.attention import grouped_query_pass
from passes.clean.bags import bags_pass
from passes.clean.batch_norm import batch_norm_pass
from passes.clean.bias import split_bias_pass
from passes.clean.borders import borders_pass
from passes.clean.broadcast import broadcast_pass
from passes.clean.ctc import ctc_pass
from passes.clean.dead import dead_code_pass
from passes.clean.derivatives import derivatives_pass
from passes.clean.einsum import einsum_pass
from passes.clean.experts import experts_pass
from passes.clean.functional import functionalise_pass, updates_pass
from passes.clean.indexing import indexing_pass
from passes.clean.linear import fused_projections_pass, linear_pass
from passes.clean.losses import cross_entropy_pass, mean_losses_pass, wide_losses_pass
from passes.clean.nodes import gradients_pass
from passes.clean.noops import attention_defaults_pass, devices_pass, noops_pass, views_pass
from passes.clean.packed import packed_projections_pass
from passes.clean.randomness import randomness_pass
from passes.clean.recurrent import recurrent_pass
from passes.clean.regions import inline_regions_pass
from passes.clean.rows import rows_pass
from passes.clean.shapes import reshapes_pass, splits_pass
from passes.clean.stacked import stacked_parameters_pass
from passes.clean.strided import strided_pass

DERIVATIVE_STEPS = (
    ("inline regions", inline_regions_pass),
    ("batch norm", batch_norm_pass),
    ("recurrent", recurrent_pass),
    ("ctc", ctc_pass),
    ("functional", functionalise_pass),
    ("derivatives", derivatives_pass),
)
STEPS = (
    *DERIVATIVE_STEPS,
    ("strided", strided_pass),
    ("randomness", randomness_pass),
    ("gradients", gradients_pass),
    ("devices", devices_pass),
    ("no-ops", noops_pass),
    ("reshapes", reshapes_pass),
    ("splits", splits_pass),
    ("no-ops", noops_pass),
    ("dead code", dead_code_pass),
    ("bags", bags_pass),
    ("borders", borders_pass),
    ("linear", linear_pass),
    ("einsum", einsum_pass),
    ("packed projections", packed_projections_pass),
    ("dead code", dead_code_pass),
    ("fused projections", fused_projections_pass),
    ("stacked parameters", stacked_parameters_pass),
    ("experts", experts_pass),
    ("attention_defaults", attention_defaults_pass),
    ("grouped query", grouped_query_pass),
    ("indexing", indexing_pass),
    ("gradients", gradients_pass),
    ("cross entropy", cross_entropy_pass),
    ("mean losses", mean_losses_pass),
    ("wide losses", wide_losses_pass),
    ("rows", rows_pass),
    ("reshapes again", reshapes_pass),
    ("dead code again", dead_code_pass),
)

# These run after constants are folded: they push down the constants' broadcasting, and choose ``view`` or ``reshape``.
FINAL_STEPS = (
    ("broadcast", broadcast_pass),
    ("no-ops", noops_pass),
    ("dead code", dead_code_pass),
    ("views", views_pass),
    ("biases", split_bias_pass),
    ("updates", updates_pass),
)
