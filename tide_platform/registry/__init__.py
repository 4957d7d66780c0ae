"""The model registry (MLflow). Import :mod:`tide_platform.registry.mlflow_registry` inside functions: it is
heavy.
"""
