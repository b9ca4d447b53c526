"""Why this plan: what binds it, what more of each thing would be worth, what else there was, and what would make a request fit.

Every number is a solve: the same graph and the same op-level layouts, priced and searched again with one thing changed. ``Study`` keeps
what such solves share. ``explain`` makes the report, ``suggest`` the changes that make an infeasible request feasible.
"""

from autopar.explain.changes import Change, suggest
from autopar.explain.describe import describe
from autopar.explain.report import Explanation, explain
from autopar.explain.study import Study

__all__ = ["Change", "Explanation", "Study", "describe", "explain", "suggest"]
