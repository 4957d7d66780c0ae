"""What a person, or the platform hours later, does to the served draft: serve another, take it back."""

from tide_platform.config import Settings, TideError
from tide_platform.control.audit import Action
from tide_platform.control.champion import Champion, ensure_champion, means
from tide_platform.control.guard import Barred
from tide_platform.control.ledger import Ledger
from tide_platform.control.rollout import Deployed, roll_out
from tide_platform.control.rollouts import Order


class DraftUnknown(TideError):
    """No registered draft has this digest."""

    def __init__(self, deployment: str, digest: str, known: list[str]):
        others = f"; known: {', '.join(known)}" if known else ""
        super().__init__(f"{deployment}: no registered draft begins with {digest!r}{others}")
        self.deployment, self.digest = deployment, digest


class NothingBefore(TideError):
    """There is no draft to go back to."""

    def __init__(self, deployment: str, served: str):
        super().__init__(
            f"{deployment}: the ledger knows of no draft before {served}; "
            "`tide promote DIGEST` serves one that is registered"
        )
        self.deployment, self.served = deployment, served


def promote(
    settings: Settings,
    ledger: Ledger,
    digest: str,
    actor: str,
    reason: str,
    *,
    unbar: bool = False,
    watched: bool = True,
) -> Deployed:
    """Serve a registered draft (``digest``, or its beginning) without a verdict, frozen or not.

    ``unbar`` lifts its bar. Raises :class:`DraftUnknown`, :class:`Barred`, and what
    :func:`~tide_platform.control.rollout.roll_out` does.
    """
    champion = ensure_champion(settings, ledger)
    found = _registered(settings, champion, digest)
    if unbar:
        ledger.guard.unbar(settings.deployment, found, actor, reason)

    def fence(_: str) -> None:
        if (held := ledger.guard.barred(settings.deployment, found)) is not None:
            raise Barred(settings.deployment, found, held)

    order = Order(found, actor, reason, Action.PROMOTED)
    with means(settings, ledger) as given:
        return roll_out(given, order, fence=fence, watched=watched)


def roll_back(settings: Settings, ledger: Ledger, actor: str, reason: str) -> Deployed:
    """The champion before this one on all servers, at once; the draft that is served now is barred.

    Raises :class:`NothingBefore`, and what :func:`~tide_platform.control.rollout.roll_out` does.
    """
    deployment, served = settings.deployment, ensure_champion(settings, ledger).digest
    before = previous_of(ledger, deployment, served)
    if before is None:
        raise NothingBefore(deployment, served)
    ledger.guard.bar(deployment, served, actor, reason)
    order = Order(before, actor, reason, Action.ROLLED_BACK)
    with means(settings, ledger) as given:
        return roll_out(given, order, fence=lambda _: None, watched=False)


def previous_of(ledger: Ledger, deployment: str, served: str) -> str | None:
    """The newest draft before ``served`` that is not barred."""
    drafts = [row["previous"] for row in ledger.deployments(deployment) if row["served"] == served][-1:]
    seen = {served}
    while drafts and (digest := drafts.pop()) is not None and digest not in seen:
        if ledger.guard.barred(deployment, digest) is None:
            return digest
        seen.add(digest)
        drafts = [row["previous"] for row in ledger.deployments(deployment) if row["served"] == digest][-1:]
    return None


def _registered(settings: Settings, champion: Champion, digest: str) -> str:
    """The whole digest."""
    from tide_platform.registry.mlflow_registry import DraftRegistry

    if digest == champion.digest:
        return digest
    known = DraftRegistry(settings).digests()
    found = [one for one in known if one.startswith(digest)]
    if len(found) != 1:
        raise DraftUnknown(settings.deployment, digest, found or known[-5:])
    return found[0]
