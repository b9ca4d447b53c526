"""The search: it takes prices and a cluster, and returns a plan with its bound and gap.

``search`` finds a plan, ``search_again`` searches under a changed request, ``price_pins`` computes what the user's pins cost, ``evaluate``
and ``reprice`` price an existing plan, and ``manual_plan`` writes a plan without prices.
"""

from autopar.search.driver import price_pins, search, search_again
from autopar.search.evaluation import evaluate, memory_timeline, reprice
from autopar.search.manual import filled_plan, make_mesh, manual_plan
from autopar.search.options import SearchOptions
from autopar.search.prices import Shared
from autopar.search.problem import PriceSource

__all__ = [
    "PriceSource",
    "SearchOptions",
    "Shared",
    "evaluate",
    "filled_plan",
    "manual_plan",
    "make_mesh",
    "memory_timeline",
    "price_pins",
    "reprice",
    "search",
    "search_again",
]
