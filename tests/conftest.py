"""For all tests."""

import signal

# A shell starts background jobs with SIGINT ignored, and Dagster, when it runs a job in this process, gives
# SIGTERM the handler that SIGINT had: children would then ignore both, and tests of endings would fail.
signal.signal(signal.SIGINT, signal.default_int_handler)
