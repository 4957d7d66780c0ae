"""TIDE Platform keeps speculative decoding fast: it fine-tunes the draft of a running server on its own traffic."""

__version__ = "0.1.0"
