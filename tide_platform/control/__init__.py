"""Ledger, windows, verdicts and the steps of one adaptation cycle."""
