"""Dagster assets, checks, jobs and sensors of the adaptation cycle: thin, the work is done in
`tide_platform`.
"""
