"""Prompt sets: `general`, `maths`, `code` from pinned packages, and the user's own files."""

from tide_platform.serving.workloads.load import load_workload
from tide_platform.serving.workloads.prompts import HELD_OUT, SPLITS, TRAFFIC, Prompt, WorkloadError

__all__ = ["HELD_OUT", "SPLITS", "TRAFFIC", "Prompt", "WorkloadError", "load_workload"]
