"""Consistency gate (design 4.4): that capture, training, export and serving agree on a controlled example.

It stands above training, evaluation and serving, and imports all three. ``run.py`` is the order of events,
``report.py`` what comes of it, every other module a group of checks; ``doctor.py`` asks whether a deployment
can work at all, before anything runs.
"""
