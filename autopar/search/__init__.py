"""The search: prices and a cluster in, a plan with its bound and gap out.

``search`` finds a plan, ``evaluate`` prices one that is given, ``hand_plan`` writes one down without prices.
"""

from autopar.search.assess import evaluate
from autopar.search.driver import search
from autopar.search.hand import hand_plan, make_mesh
from autopar.search.problem import LayerPrice, Pricer, SearchOptions

__all__ = ["LayerPrice", "Pricer", "SearchOptions", "evaluate", "hand_plan", "make_mesh", "search"]
