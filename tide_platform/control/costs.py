"""The cost model, where it is of this deployment: its target, device and precision."""

from tide_platform.config import Settings
from tide_platform.evaluation.cost_model import CostModel, of_deployment


def usable_costs(settings: Settings) -> tuple[CostModel | None, str]:
    """The model, and where its coefficients are from; or None, and why there is none that fits.

    Raises :class:`~tide_platform.evaluation.cost_model.NoCostModel`, and what resolving the target does.
    """
    from tide_platform.config import target_digest
    from tide_platform.serving.target import resolve_target

    return of_deployment(settings, target_digest(resolve_target(settings)))
