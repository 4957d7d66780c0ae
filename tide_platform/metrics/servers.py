"""What each server says that it serves."""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tide_platform.config import Settings
from tide_platform.metrics.sheet import Sheet
from tide_platform.serving.admin import read_admin_key
from tide_platform.serving.client import ServerRefused, ServerUnreachable, SglangClient
from tide_platform.serving.fleet import addresses

_SHARE = 0.8  # of the scrape's time, so that a server which hangs is told as down and not as not read


def read_servers(settings: Settings) -> Sheet:
    """All servers are asked at once, each one time. Raises :class:`AdminKeyMissing`."""
    key, urls = read_admin_key(settings), addresses(settings)
    timeout_s = _SHARE * settings.metrics.scrape_seconds

    def ask(url: str) -> Mapping[str, Any] | None:
        with SglangClient(url, key, timeout_s, attempts=1) as client:
            try:
                return client.status()
            except (ServerUnreachable, ServerRefused):
                return None

    with ThreadPoolExecutor(len(urls)) as pool:
        return told(dict(zip(urls, pool.map(ask, urls), strict=True)))


def told(said: Mapping[str, Mapping[str, Any] | None]) -> Sheet:
    """``said``: each server's ``/tide/status`` by its URL, None where it did not answer."""
    sheet = Sheet()
    for url, status in said.items():
        sheet.put("tide_server_up", status is not None, url)
        if status is not None:
            serves = (status["draft_digest"] or "none", status["adapter"], status["verify_rule"])
            sheet.put("tide_server_info", 1, url, *serves)
            sheet.put("tide_server_capturing", bool(status["capture"].get("enabled")), url)
            sheet.put("tide_server_reloads_total", status["reloads"], url)
    drafts = {status["draft_digest"] if status else None for status in said.values()}
    sheet.put("tide_servers_agree", len(drafts) == 1 and None not in drafts)
    return sheet
