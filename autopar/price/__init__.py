"""Prices: seconds and bytes of a layer under a strategy, and seconds of resharding a value for the next layer or sending it to the next
stage."""

from autopar.price.pricer import Pricer, edge_s

__all__ = ["Pricer", "edge_s"]
