"""Explains a plan: what limits it, what more of each resource would save, the alternatives, and what would make a request feasible.

Every number comes from a separate search with one thing changed, on the same graph and op-level layouts, which ``Study`` caches.
``explain`` makes the report, ``suggest`` the changes that make an infeasible request feasible.
"""

from autopar.explain.changes import Change, suggest
from autopar.explain.describe import describe
from autopar.explain.nearby import nearby_batch
from autopar.explain.report import Explanation, explain
from autopar.explain.study import Study

__all__ = ["Change", "Explanation", "Study", "describe", "explain", "nearby_batch", "suggest"]
