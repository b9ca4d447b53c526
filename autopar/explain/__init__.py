"""Why this plan: what limits it, what more of each resource would save, the alternatives, and what would make a request fit.

Every number comes from a search of its own: the same graph and the same op-level layouts, priced and searched again with one thing
changed. ``Study`` keeps what these searches share. ``explain`` makes the report, ``suggest`` the changes that make an infeasible request
feasible.
"""

from autopar.explain.changes import Change, suggest
from autopar.explain.describe import describe
from autopar.explain.nearby import nearby_batch
from autopar.explain.report import Explanation, explain
from autopar.explain.study import Study

__all__ = ["Change", "Explanation", "Study", "describe", "explain", "nearby_batch", "suggest"]
