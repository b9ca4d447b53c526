"""Plans one model over a range of devices, sequence lengths, batches and GPU kinds.

``Range`` has the values to try, ``sweep`` plans every combination (a cell), ``plot`` draws the cells. Cells with the same sequence length
and batch share a captured graph and its op-level layouts.
"""

from autopar.sweep.cells import Cell, Range, numbers, read_prices, sweep
from autopar.sweep.picture import plot

__all__ = ["Cell", "Range", "numbers", "plot", "read_prices", "sweep"]
