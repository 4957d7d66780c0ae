"""The root of the platform's typed errors."""


class TideError(Exception):
    """An error that a user can mend: its text names the thing that is wrong and what to do.

    Subclasses keep the values they speak of as attributes. The CLI prints the text on one line and exits 2.
    """


class ConfigError(TideError):
    """A setting that is missing, unknown or out of range."""
