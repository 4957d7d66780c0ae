"""The report in a real browser: it is drawn, fits the window and asks for nothing."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.fixtures.week import Clock, week
from tide_platform.config import Settings
from tide_platform.control.ledger import Ledger
from tide_platform.report.gather import gather
from tide_platform.report.page import write_report

pytestmark = pytest.mark.integration
# what the browser made of the page, written into its title
PROBE = """<script>addEventListener('load', () => {
  const svgs = [...document.querySelectorAll('svg')].map(one => one.getBoundingClientRect());
  const root = document.documentElement;
  document.title = JSON.stringify({
    plots: svgs.filter(box => box.width > 200 && box.height > 80).length,
    overflow: root.scrollWidth - root.clientWidth,
    fetched: performance.getEntriesByType('resource').length,
    figures: JSON.parse(document.getElementById('figures').textContent).deployment,
  });
});</script></body>"""


@pytest.mark.parametrize("width", [1280, 500])
def test_a_browser_draws_the_page(tmp_path: Path, width: int):
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    assert browser, "Chromium is not installed: `make setup-system`, or apt-get install chromium"
    clock, settings = Clock(), Settings(state=tmp_path)
    ledger = Ledger(f"sqlite:///{tmp_path}/ledger.db", clock=clock)
    week(ledger, clock, days=2, gap_s=2400)
    page = tmp_path / "page.html"
    write_report(page, gather(settings, ledger, 30 * 86_400.0, clock.now))
    ledger.close()
    page.write_text(page.read_text().replace("</body>", PROBE))
    done = subprocess.run(
        [
            browser, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}/profile",
            f"--window-size={width},2400", "--virtual-time-budget=5000", "--dump-dom", page.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=180,
        check=True,
    )  # fmt: skip
    title = re.search(r"<title>(\{.*?\})</title>", done.stdout)
    assert title is not None, done.stderr[-2000:]
    assert title[1].replace("&quot;", '"') == '{"plots":8,"overflow":0,"fetched":0,"figures":"demo"}'
