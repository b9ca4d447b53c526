"""Prices: what a layer under a strategy costs in seconds and bytes, and what it costs to pass a value on."""

from autopar.price.layer import price_layer
from autopar.price.pricer import Pricer, edge_s

__all__ = ["Pricer", "edge_s", "price_layer"]
