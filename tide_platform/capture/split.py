"""Which requests a window keeps for validation: by hash, so that spool, trainer and judge agree untold."""

import hashlib

VALIDATION = "validation"
REFERENCE_TENANT = "reference"  # rows of this tenant are the frozen general set, never a window's


def point(request_id: str, salt: str) -> float:
    """A fixed point of [0, 1) for a request; a set of share s is the requests below s."""
    digest = hashlib.sha256(f"{salt}:{request_id}".encode()).digest()
    return int.from_bytes(digest[:6], "big") / (1 << 48)


def kept_whole(request_id: str, tenant: str, validation_share: float) -> bool:
    """Whether its aux states stay bf16: a judge must see what the server saw."""
    return tenant == REFERENCE_TENANT or point(request_id, VALIDATION) < validation_share
