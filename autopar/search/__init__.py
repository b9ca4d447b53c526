"""The search: prices and a cluster in, a plan with its bound and gap out.

``search`` finds a plan, ``price_pins`` says what the user's decisions cost, ``evaluate`` prices a plan that is given, ``hand_plan``
writes one down without prices.
"""

from autopar.search.assess import evaluate, memory_timeline
from autopar.search.driver import price_pins, search
from autopar.search.hand import hand_plan, make_mesh
from autopar.search.options import SearchOptions
from autopar.search.problem import LayerPrice, Pricer

__all__ = [
    "LayerPrice",
    "Pricer",
    "SearchOptions",
    "evaluate",
    "hand_plan",
    "make_mesh",
    "memory_timeline",
    "price_pins",
    "search",
]
