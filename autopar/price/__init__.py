"""The cost model: seconds and bytes of a layer under a strategy, seconds of resharding between layers, and of sends between stages."""

from autopar.price.collective_costs import CollectiveCost
from autopar.price.pricer import Pricer

__all__ = ["Pricer", "CollectiveCost"]
