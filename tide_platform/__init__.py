"""TIDE Platform keeps speculative decoding fast: it fine-tunes the served draft on live traffic."""

__version__ = "0.1.0"
