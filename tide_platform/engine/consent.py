"""Whose data a request is and whether it may be kept: what its headers and its body say, and who is believed.

Runs in the HTTP process. Headers are the proxy's word, the body's ``custom_params.tide`` is the client's.

* ``train: deny`` counts whoever says it.
* ``allow``, tenant and conversation count only where the peer of the connection is a trusted proxy
  (``capture.trusted_proxies``); from others they are left out, and counted as ``untrusted``.
* Where a trusted peer sends any of the headers, the body counts for ``deny`` alone.
* What cannot be read (an unknown value, a header given twice, a field of another type) is taken for
  ``deny``, and counted as ``malformed``: a request is served whatever it says here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Any, Protocol

TRAIN, TENANT, CONVERSATION = "x-tide-train", "x-tide-tenant", "x-tide-conversation"
HEADERS = {TRAIN: "train", TENANT: "tenant", CONVERSATION: "conversation"}
MAX_LENGTH = 128  # characters of a tenant or conversation

Network = IPv4Network | IPv6Network


class Headers(Protocol):
    """Starlette's ``Headers``: all values of a name, whatever its case."""

    def getlist(self, key: str) -> list[str]: ...


@dataclass(frozen=True)
class Statement:
    """What one source says; ``None`` where it says nothing."""

    train: str | None = None
    tenant: str | None = None
    conversation: str | None = None

    def __bool__(self) -> bool:
        return (self.train, self.tenant, self.conversation) != (None, None, None)


NOTHING, DENIED = Statement(), Statement(train="deny")


def networks(trusted: Sequence[str]) -> list[Network]:
    """The CIDRs of ``capture.trusted_proxies``. Raises ValueError where one is none."""
    return [ip_network(one) for one in trusted]


def is_trusted(peer: str | None, trusted: Sequence[Network]) -> bool:
    """Whether the address at the other end of the connection is a trusted proxy's."""
    try:
        address = ip_address(peer or "")
    except ValueError:  # a unix socket, a test client: no address to believe
        return False
    if isinstance(address, IPv6Address) and address.ipv4_mapped:
        address = address.ipv4_mapped
    return any(address in network for network in trusted)


def resolve(headers: Headers | None, body: Any, trusted: bool) -> dict[str, Any]:
    """The options that the scheduler follows: ``train``, ``tenant``, ``conversation`` where they count, and
    ``ignored``, by commas the causes for which something was not followed.

    ``body`` is the value of ``custom_params["tide"]``, ``None`` where there is none.
    """
    ignored: list[str] = []
    of_proxy = _read({HEADERS[name]: headers.getlist(name) for name in HEADERS} if headers else {}, ignored)
    of_client = _read(_lists(body), ignored)
    said = of_proxy if of_proxy else of_client
    if not trusted:
        claims = [s for s in (of_proxy, of_client) if s.tenant or s.conversation or s.train == "allow"]
        if claims:
            ignored.append("untrusted")
        said = NOTHING
    train = "deny" if "deny" in (of_proxy.train, of_client.train) else said.train
    options = {"train": train, "tenant": said.tenant, "conversation": said.conversation}
    kept: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    # one string: SGLang's messages carry no list within the options
    return kept | ({"ignored": ",".join(sorted(set(ignored)))} if ignored else {})


def _lists(body: Any) -> Mapping[str, Any]:
    """The body's fields as a header's values are given: a list each."""
    if body is None:
        return {}
    if not isinstance(body, dict):
        return {"": [body]}  # a field that does not exist
    return {name: [value] for name, value in body.items() if value is not None}


def _read(values: Mapping[str, Any], ignored: list[str]) -> Statement:
    present = {name: given for name, given in values.items() if given}
    if all(name in HEADERS.values() and len(given) == 1 for name, given in present.items()):
        fields = {name: given[0] for name, given in present.items()}
        if isinstance(train := fields.get("train"), str):
            fields["train"] = train.strip().lower()
        if fields.get("train") in (None, "allow", "deny") and all(map(_is_name, fields.values())):
            return Statement(**fields)
    ignored.append("malformed")
    return DENIED


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and 0 < len(value) <= MAX_LENGTH and value.isascii() and value.isprintable()
