"""A server of its own for a benchmark (``serving/own_server.py``)."""

from tide_platform.serving.own_server import Served, ServerMissing, served

__all__ = ["Served", "ServerMissing", "served"]
