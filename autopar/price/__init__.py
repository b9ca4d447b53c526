"""Prices: seconds and bytes of a layer under a strategy, and seconds of resharding a value for the next layer or sending it to the next
stage."""

from autopar.price.collective_costs import CollectiveCost
from autopar.price.pricer import Pricer

__all__ = ["Pricer", "CollectiveCost"]
