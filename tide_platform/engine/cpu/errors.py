"""What the CPU backend cannot do."""

from tide_platform.config.errors import TideError


class UnsupportedOnCpu(TideError):
    """A feature that the CPU backend lacks; ``feature`` names it, ``mend`` says what to do."""

    def __init__(self, feature: str, mend: str) -> None:
        super().__init__(f"{feature}: not supported on a CPU; {mend}")
        self.feature = feature
        self.mend = mend
