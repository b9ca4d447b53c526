"""Writes a plan as one HTML page (``page``), and predicts its training step in detail (``predict_step``)."""

from autopar.report.figures import PlanFigures, figures
from autopar.report.page import page, page_of
from autopar.report.step import PredictedStep, predict_step

__all__ = ["PredictedStep", "PlanFigures", "figures", "page", "page_of", "predict_step"]
