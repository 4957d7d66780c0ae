"""Where captured samples and checkpoints are kept. Import the modules: this package itself loads neither
Lance nor boto3.
"""
