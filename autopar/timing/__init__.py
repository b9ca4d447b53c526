"""Times several training programs that are loaded in the same warm worker processes and take turns.

``session`` starts the workers and measures, ``remote`` has what they run, ``statistics`` the medians over rounds with their intervals.
"""

from autopar.timing.session import TimingSession
from autopar.timing.statistics import paired_ratio

__all__ = ["TimingSession", "paired_ratio"]
