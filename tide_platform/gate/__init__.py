"""Consistency gate (design 4.4): that capture, training, export and serving agree. An empty layer so far.

It stands above training, evaluation and serving, and may import all three.
"""
