"""The page: self-contained, readable without seeing it, and with all figures as JSON."""

import json
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.fixtures.week import SECOND, Clock, week
from tide_platform.config import Settings
from tide_platform.control.ledger import Ledger
from tide_platform.report.gather import gather
from tide_platform.report.page import write_report

VOID = {"meta", "link", "br", "img"}


class Page(HTMLParser):
    """What a test asks of a page."""

    def __init__(self, text: str):
        super().__init__()
        self.text, self.ids, self.tags = text, Counter[str](), Counter[str]()
        self.addresses: list[str] = []
        self.unnamed: list[str] = []  # plots without words
        self.open: list[str] = []
        self.words: list[str] = []
        self.figures = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.tags[tag] += 1
        if found.get("id"):
            self.ids[str(found["id"])] += 1
        self.addresses += [v or "" for k, v in attrs if k in ("src", "href", "xlink:href", "data", "srcset")]
        if tag == "svg" and not (found.get("role") == "img" and found.get("aria-label")):
            self.unnamed.append(str(found.get("id")))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"</{tag}> closes something else"

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_data(self, data: str) -> None:
        if self.open[-1:] == ["script"]:
            self.figures += data
        elif "svg" not in self.open and "style" not in self.open:
            self.words.append(data)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Settings, Page]:
    folder = tmp_path_factory.mktemp("week")
    settings, clock = Settings(state=folder), Clock()
    settings.ledger.url = f"sqlite:///{folder}/ledger.db"
    ledger = Ledger(settings.ledger.url, clock=clock)
    week(ledger, clock, days=2, gap_s=2400)
    write_report(folder / "page.html", gather(settings, ledger, 30 * 86_400.0, clock.now))
    ledger.close()
    return settings, Page((folder / "page.html").read_text())


def test_the_page_is_whole_and_alone(made: tuple[Settings, Page]):
    _, page = made
    assert not page.open and page.tags["svg"] == page.tags["figcaption"] == 8
    assert [a for a in page.addresses if not a.startswith("#")] == [], "nothing is fetched"
    assert "@import" not in page.text and "url(http" not in page.text
    assert [one for one, times in page.ids.items() if times > 1] == []
    asked = {a.removeprefix("#") for a in page.addresses}
    assert asked <= page.ids.keys(), "every reference, of glyphs and of sections, is there"
    assert page.unnamed == []


def test_the_page_says_what_happened(made: tuple[Settings, Page]):
    _, page = made
    words = " ".join(" ".join(page.words).split())
    assert SECOND in words and "rolled back" in words and "release day" in words
    assert "answers got slower <at once>" in words, "escaped, and read back"
    assert "An estimate." in words and "no cost model was measured" in words
    assert "is below +2.0%" in words, "why the last window was rejected"


def test_the_figures_are_in_the_page(made: tuple[Settings, Page]):
    settings, page = made
    figures = json.loads(page.figures)
    assert figures["saved"]["share"] > 0 and figures["served"]["digest"] == SECOND
    ledger = Ledger(settings.ledger.url)
    report = gather(settings, ledger, 30 * 86_400.0, figures["made_at"])
    ledger.close()
    assert figures == json.loads(json.dumps(report.to_json()))


def test_an_empty_page_says_so(tmp_path: Path):
    settings = Settings(state=tmp_path)
    ledger = Ledger(f"sqlite:///{tmp_path}/ledger.db")
    write_report(tmp_path / "page.html", gather(settings, ledger, 3600.0))
    ledger.close()
    page = Page((tmp_path / "page.html").read_text())
    words = " ".join(page.words)
    assert not page.open and page.tags["svg"] == 0
    for sentence in (
        "no draft was deployed, and no live request was recorded yet",
        "Nothing is claimed: no draft but the first has been served.",
        "No window was cut yet",
        "No challenger was judged yet.",
    ):
        assert sentence in words


def _tide(*words: str):
    import typer

    from tide_platform.cli import report

    app = typer.Typer()
    app.command()(report.command)
    return CliRunner().invoke(app, [*words], catch_exceptions=False)


def test_the_command(made: tuple[Settings, Page], tmp_path: Path):
    settings, _ = made
    config = tmp_path / "tide.yaml"
    config.write_text(f"state: {tmp_path}\nledger: {{url: '{settings.ledger.url}'}}\n")
    done = _tide("--config", str(config), "--since", "90d")
    assert done.exit_code == 0 and (tmp_path / "report.html").is_file()
    told = _tide(
        "--config", str(config), "--since", "5000d", "--json", "--out", str(tmp_path / "a" / "b.html")
    )
    assert json.loads(told.stdout)["served"]["digest"] == SECOND
    assert Page((tmp_path / "a" / "b.html").read_text()).tags["svg"] == 8
