"""Prices: what a layer under a strategy costs in seconds and bytes, and what it costs to pass a value on."""
