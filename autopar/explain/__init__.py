"""Explains a plan: its bottlenecks, the value of more of each resource, alternatives, and changes that make a request feasible.

Every number comes from a separate search with one change to the request. The searches share a graph and its op-level layouts, which
``Study`` caches. ``explain`` explains a plan; ``suggest`` finds changes that make an infeasible request feasible.
"""

from autopar.explain.changes import Change, suggest
from autopar.explain.nearby import nearby_batch
from autopar.explain.report import Explanation, explain
from autopar.explain.study import Study

__all__ = ["Change", "Explanation", "Study", "explain", "nearby_batch", "suggest"]
