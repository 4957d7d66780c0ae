"""Files of conversations as training data: read, rendered, answered by the target, turned into samples.

Above draft, store and serving, below the CLI. Import the modules: the package itself loads nothing heavy.
"""
