"""Serves the local page of ``autopar ui``: a server for one user on 127.0.0.1, and a worker process that plans."""

from autopar.ui.server import Choices, Server

__all__ = ["Choices", "Server"]
