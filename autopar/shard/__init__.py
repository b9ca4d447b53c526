"""Chooses the sharding inside a layer: the cheapest SPMD types of all values on one mesh axis that the sharding rules admit."""

from autopar.shard.annotate import annotate
from autopar.shard.plan import layer_sharding, plan_shardings, role_types
from autopar.shard.solve import solve

__all__ = ["annotate", "layer_sharding", "plan_shardings", "role_types", "solve"]
