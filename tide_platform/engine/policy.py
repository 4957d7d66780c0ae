"""Which requests are captured: the operator's rules, which change while the server runs, and the requests'
own word.
"""

import hashlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

HASH_RANGE = 1 << 64


@dataclass(frozen=True)
class Request:
    """What the adapter reads of a request when it first sees it.

    ``options`` is what ``consent.resolve`` left of the request's headers and fields.
    """

    rid: str
    prompt_tokens: int
    temperature: float  # 0: greedy
    top_p: float
    top_k: int  # -1: all
    penalties: bool = False  # anything that changes logits but is no grammar
    grammar: bool = False
    thinking: bool = False
    unsupported: str | None = None  # the support table's name of what is skipped
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def root(self) -> str:
        """What is hashed for sampling: the conversation that the client names, else the request."""
        return str(self.options.get("conversation") or self.rid)

    @property
    def tenant(self) -> str:
        return str(self.options.get("tenant") or "default")

    @property
    def tool_calls(self) -> bool:
        return bool(self.options.get("tool_calls"))


class Budget:
    """Bytes a second, as a bucket that holds one second's worth.

    Requests are admitted while the bucket is not in debt; what they write is taken out, so a burst is paid
    for by a pause of admissions, never by a sample that is cut. ``bytes_per_second`` is the server's; each of
    its ``ranks`` has its share.
    """

    def __init__(
        self,
        bytes_per_second: int | None,
        clock: Callable[[], float] = time.monotonic,
        ranks: int = 1,
    ):
        self._ranks, self._clock = ranks, clock
        self.set(bytes_per_second)

    def set(self, bytes_per_second: int | None) -> None:
        """``None`` lifts the limit, 0 admits nothing. The bucket is full afterwards."""
        self.bytes_per_second = bytes_per_second
        self._left = (bytes_per_second or 0) / self._ranks
        self._seen = self._clock()

    def admits(self) -> bool:
        if self.bytes_per_second is None:
            return True
        rate = self.bytes_per_second / self._ranks
        now = self._clock()
        self._left = min(rate, self._left + (now - self._seen) * rate)
        self._seen = now
        return self._left > 0

    def debit(self, written: int) -> None:
        self._left -= written


@dataclass
class Policy:
    """The operator's rules. :meth:`refusal` names the first that a request does not pass."""

    enabled: bool
    default: str  # allow | deny, for requests that do not say
    sampling_rate: float
    deny_tenants: frozenset[str] = frozenset()
    allow_tenants: frozenset[str] | None = None  # None: all but the denied ones
    max_request_tokens: int | None = None
    budget: Budget = field(default_factory=lambda: Budget(None))

    def refusal(self, request: Request) -> str | None:
        """Why the request is not captured, ``None`` where it is.

        A request may forbid its own capture (``train: deny``), and allow it where the default is ``deny``; a
        tenant that the operator excludes stays excluded.
        """
        if not self.enabled:
            return "disabled"
        if request.unsupported:
            return request.unsupported
        if request.tenant in self.deny_tenants:
            return "tenant"
        if self.allow_tenants is not None and request.tenant not in self.allow_tenants:
            return "tenant"
        if request.options.get("train", self.default) != "allow":
            return "opt_out"
        if fraction(request.root) >= self.sampling_rate:
            return "sampled_out"
        if self.too_long(request.prompt_tokens):
            return "too_long"
        return None if self.budget.admits() else "budget"

    def too_long(self, tokens: int) -> bool:
        return self.max_request_tokens is not None and tokens > self.max_request_tokens

    def change(self, wanted: Mapping[str, Any]) -> None:
        """Sets the rules that ``wanted`` names (the body of ``POST /tide/capture``, already checked).

        ``None`` lifts ``allow_tenants`` and ``bytes_per_second``.
        """
        for name in ("enabled", "default", "sampling_rate"):
            if name in wanted:
                setattr(self, name, wanted[name])
        if "deny_tenants" in wanted:
            self.deny_tenants = frozenset(wanted["deny_tenants"])
        if "allow_tenants" in wanted:
            tenants = wanted["allow_tenants"]
            self.allow_tenants = None if tenants is None else frozenset(tenants)
        if "bytes_per_second" in wanted:
            self.budget.set(wanted["bytes_per_second"])

    def status(self) -> dict[str, Any]:
        """The rules as ``/tide/status`` shows them."""
        return {
            "enabled": self.enabled,
            "default": self.default,
            "sampling_rate": self.sampling_rate,
            "deny_tenants": sorted(self.deny_tenants),
            "allow_tenants": None if self.allow_tenants is None else sorted(self.allow_tenants),
            "bytes_per_second": self.budget.bytes_per_second,
            "max_request_tokens": self.max_request_tokens,
        }


def fraction(root: str) -> float:
    """A number in [0, 1) that depends on the root alone: all turns of a conversation fare alike."""
    digest = hashlib.blake2b(root.encode(errors="surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") / HASH_RANGE
