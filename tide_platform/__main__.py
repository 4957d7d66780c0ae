"""``python -m tide_platform``: the command ``tide``, for launchers that want a module (``torchrun -m``)."""

from tide_platform.cli import main

main()
