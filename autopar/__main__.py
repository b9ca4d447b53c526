"""``python -m autopar``: the command line without the console script."""

from autopar.cli import main

main()
