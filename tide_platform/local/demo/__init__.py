"""The demo: one whole adaptation cycle on this machine, measured before and after."""
