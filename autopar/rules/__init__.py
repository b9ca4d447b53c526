"""Sharding rules: what one mesh axis may do to each op, as one table of einsum-like lines that are checked by execution."""

from __future__ import annotations

from autopar.rules.candidates import Candidate, candidates, has_rule

__all__ = ["Candidate", "candidates", "has_rule"]
