"""Dagster resources around the domain's objects: thin, and free of heavy imports at module level."""
