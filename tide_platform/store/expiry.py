"""Which samples have expired, as SQL over the plain columns."""

from tide_platform.capture.split import REFERENCE_TENANT
from tide_platform.config.schema import Retention
from tide_platform.store.reading import quoted

# a fragment that expires in parts is rewritten: not more often than this
_STEP = 3600.0


def expired_where(retention: Retention, now: float) -> str | None:
    """None: nothing ever expires. The reference set, the operator's own, expires by its own rule only."""
    rules = []
    for tenant, hours in sorted(retention.tenants.items()):
        rules.append(f"(tenant = {quoted([tenant])} AND captured_at < {_cut(now, hours)})")
    if retention.days is not None:
        others = quoted([REFERENCE_TENANT, *sorted(retention.tenants)])
        rules.append(f"(tenant NOT IN ({others}) AND captured_at < {_cut(now, 24 * retention.days)})")
    return " OR ".join(rules) or None


def _cut(now: float, hours: float) -> float:
    return (now - 3600 * hours) // _STEP * _STEP
