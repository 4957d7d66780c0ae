"""Runs inside the SGLang processes: plugin entry point, capture hooks, draft reload, the server's own routes.

Only ``plugin`` and the adapters know SGLang; the rest is torch, numpy and the standard library.
"""
