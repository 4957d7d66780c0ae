"""Tests in a real browser against the real pages of Dagster and MLflow, run by `make test-ui`."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright
from ui_stack import UiStack, ui_stack

HERE = Path(__file__).parent
WINDOWS = 8  # as many as one tick cuts: the newest is trained, the others are superseded
PATIENCE_MS = 60_000  # of an action in the page: two cores are busy with runs meanwhile


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.ui)


@pytest.fixture(scope="session")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[UiStack]:
    """The stack, once its sensor has adapted the draft to the newest window by itself."""
    with ui_stack(tmp_path_factory.mktemp("stack"), WINDOWS) as found:
        found.wait_final(WINDOWS)
        yield found


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """Debian's Chromium, headless: no browser is downloaded."""
    program = shutil.which("chromium") or shutil.which("chromium-browser")
    assert program, "no chromium: `make setup-system` installs it"
    expect.set_options(timeout=PATIENCE_MS)
    with sync_playwright() as playwright:
        # as root, in a container: Chromium's own sandbox has nothing to stand on
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def context(browser: Browser, tmp_path: Path) -> Iterator[BrowserContext]:
    """A fresh visitor; what each of his pages shows at the end is kept as a picture."""
    context = browser.new_context(viewport={"width": 1400, "height": 1000})
    context.set_default_timeout(PATIENCE_MS)
    yield context
    for number, page in enumerate(context.pages):
        page.screenshot(path=tmp_path / f"end-{number}.png")
    context.close()


@pytest.fixture
def page(context: BrowserContext) -> Page:
    return context.new_page()


@pytest.fixture
def shot(page: Page, tmp_path: Path) -> Callable[[str], None]:
    """``shot(name)`` keeps what the page shows now."""

    def take(name: str) -> None:
        page.screenshot(path=tmp_path / f"{name}.png")

    return take
