"""Sharding rules: how a mesh axis may shard each op, as a table of einsum-like lines that are checked by execution."""

from __future__ import annotations

from autopar.rules.candidates import Candidate, candidates, has_rule
from autopar.rules.experts import is_row_wise  # the module also adds its own rule to the table

__all__ = ["Candidate", "candidates", "has_rule", "is_row_wise"]
