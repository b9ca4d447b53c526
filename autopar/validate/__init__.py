"""Compares predictions with published measurements: rows of a JSON Lines file, each priced with a cost model of the trainer that ran it.

``rows`` reads a row. ``models`` turns its architecture into a captured graph, ``setting`` its degrees and hardware into a plan, a cost
model of its trainer (``autopar.trainers``) and a cluster. ``scoring`` compares. A row's id, source and group are only labels in reports.
"""

from autopar.validate.run import RowOutcome, ValidationReport, validate
from autopar.validate.scoring import Score, score, scores

__all__ = ["RowOutcome", "ValidationReport", "Score", "score", "scores", "validate"]
