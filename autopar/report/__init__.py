"""Writes a plan as one HTML page (``page``), and predicts its training step in detail (``predict_step``)."""

from autopar.report.figures import PlanFigures
from autopar.report.page import page
from autopar.report.step import PredictedStep, predict_step

__all__ = ["PredictedStep", "PlanFigures", "page", "predict_step"]
