"""Measurements, each beside its yardstick in one run (docs/benchmarks.md); above every layer but the CLI."""
