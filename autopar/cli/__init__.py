"""The command line: ``autopar plan | emit | run | ...``.

stdout is data, stderr is messages for people. Errors are a sentence and a hint; the status is 2 for a request that is wrong, 1 for one that
cannot be met.
"""

from autopar.cli.entry import main

__all__ = ["main"]
