"""Sharding rules: what one mesh axis may do to each op, as one table of einsum-like lines that are checked by execution.

``python -m autopar.rules`` executes the whole table and prints what it did.
"""

from __future__ import annotations

from autopar.rules.candidates import Candidate, candidates, has_rule
from autopar.rules.operands import operands
from autopar.rules.register import register_rule

__all__ = ["Candidate", "candidates", "has_rule", "operands", "register_rule"]
