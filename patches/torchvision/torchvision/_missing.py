"""The one error of this stand-in."""

from collections.abc import Callable
from typing import Any, NoReturn


def missing(name: str) -> Callable[..., NoReturn]:
    """A callable that refuses, naming ``name``; not an error before it is called, so that imports work."""

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(
            f"{name}: this server has a stand-in for torchvision, which serves text models only; "
            "to serve image or video inputs install torchvision itself (patches/torchvision/README.md)"
        )

    refuse.__name__ = name.rpartition(".")[2]
    return refuse


def missing_attributes(module: str) -> Callable[[str], Callable[..., NoReturn]]:
    """A module's ``__getattr__``: every public name it lacks is a callable that refuses."""

    def lookup(name: str) -> Callable[..., NoReturn]:
        if name.startswith("_"):
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        return missing(f"{module}.{name}")

    return lookup
