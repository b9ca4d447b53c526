"""Published measurements against predictions: rows of a JSON Lines file priced as a user's plan would be.

``rows`` reads a row, ``models`` turns its architecture into a captured graph, ``setting`` its degrees and hardware into a plan and
a cluster, ``score`` compares. Nothing here looks at a row's id, source or group except to report by them.
"""

from autopar.validate.run import Outcome, Report, validate
from autopar.validate.scoring import Score, score, scores

__all__ = ["Outcome", "Report", "Score", "score", "scores", "validate"]
