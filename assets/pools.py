"""Pools of the deployment that this code location works for: another one's runs, in the same Dagster
instance, wait in pools of their own.
"""

from tide_platform.config import load_settings

_DEPLOYMENT = load_settings().deployment
TRAINING, DEPLOYMENT = f"training/{_DEPLOYMENT}", f"deployment/{_DEPLOYMENT}"
