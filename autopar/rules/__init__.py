"""Sharding rules: a table of einsum-like lines, each of which defines how a mesh axis may shard an op. Tests execute every line."""

from __future__ import annotations

from autopar.rules.candidates import Candidate, candidates, has_rule
from autopar.rules.experts import is_row_wise  # importing the module also adds its rule to the table

__all__ = ["Candidate", "candidates", "has_rule", "is_row_wise"]
