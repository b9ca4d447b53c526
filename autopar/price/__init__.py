"""Prices: seconds and bytes of a layer under a strategy, and seconds of passing a value to the next layer or stage."""

from autopar.price.pricer import Pricer, edge_s

__all__ = ["Pricer", "edge_s"]
