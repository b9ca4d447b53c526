"""Sharding inside a layer: the type of every value on one axis, as an optimum over the rule table."""

from autopar.shard.annotate import annotate
from autopar.shard.plan import layer_sharding, plan_shardings, role_types
from autopar.shard.solve import solve

__all__ = ["annotate", "layer_sharding", "plan_shardings", "role_types", "solve"]
