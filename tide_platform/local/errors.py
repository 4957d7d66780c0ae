"""What can go wrong with the local stack, and what to do about it."""

from pathlib import Path

from tide_platform.config import TideError


class StackError(TideError):
    """The local stack can't be started, reached or ended."""


class PortTaken(StackError):
    """Another program listens on a port that a service of the stack is to have."""

    def __init__(self, service: str, port: int, setting: str):
        variable = f"TIDE_{setting.replace('.', '__').upper()}"
        super().__init__(
            f"port {port} ({service}) is taken by another program: set {setting} (or {variable}=PORT), "
            "or give --ports auto to use free ones"
        )
        self.service, self.port, self.setting = service, port, setting


class StackBusy(StackError):
    """Another process is starting or using the stack of this state folder."""

    def __init__(self, state: Path, holder: str):
        super().__init__(
            f"the stack of {state} is in use by process {holder}: wait for it, end it, "
            "or give another --state"
        )
        self.state, self.holder = state, holder


class ServiceFailed(StackError):
    """A service ended, or did not become ready in time."""

    def __init__(self, service: str, what: str, log: Path, last_lines: list[str]):
        tail = "".join(f"\n    {line}" for line in last_lines)
        super().__init__(f"{service} {what}; its log is {log}{tail}")
        self.service, self.log, self.last_lines = service, log, last_lines


class ToolMissing(StackError):
    """A program that the stack runs is not installed in this environment."""

    def __init__(self, tool: str, distribution: str):
        super().__init__(f"{tool} is not installed here: install {distribution} (make setup installs all)")
        self.tool, self.distribution = tool, distribution
