"""Prices: what a layer under a strategy costs in seconds and bytes, and what it costs to pass a value on."""

from autopar.price.layer import LayerPrice, price_layer
from autopar.price.pricer import Pricer, edge_s

__all__ = ["LayerPrice", "Pricer", "edge_s", "price_layer"]
