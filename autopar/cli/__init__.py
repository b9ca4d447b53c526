"""The command line: ``autopar plan | emit | run | ...``.

Commands write data to stdout and messages for people to stderr. An error is a sentence and a hint. The exit status is 2 for an invalid
request, and 1 if a valid request fails.
"""

from autopar.cli.entry import main

__all__ = ["main"]
