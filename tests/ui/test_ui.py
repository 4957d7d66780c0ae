"""What the owner does in the pages of Dagster and MLflow, in the order in which he does it."""

from collections.abc import Callable

from playwright.sync_api import BrowserContext, Page, expect
from ui_stack import UiStack

from tide_platform.control.states import State

NEWEST, BY_HAND, RANGE = 8, 2, (3, 4)  # all but the newest were superseded


def key(number: int) -> str:
    return f"demo/w{number:05d}"


def choose(page: Page, numbers: tuple[int, ...]) -> None:
    """Ticks these partitions in the dialog that is open."""
    page.get_by_text("Select a partition or create one").click()
    for number in numbers:
        page.get_by_title(key(number), exact=True).first.click()
    page.get_by_text("Launch runs to materialize").click()  # closes the list
    expect(page.get_by_text(f"{len(numbers)} partition", exact=False).first).to_be_visible()


def test_the_loop_ran_by_itself_and_the_page_says_how(
    up: UiStack, page: Page, shot: Callable[[str], None]
) -> None:
    newest = up.window(NEWEST)
    assert newest is not None and newest.state in (State.DEPLOYED, State.REJECTED), newest
    page.goto(f"{up.dagster.url}/assets/acceptance_report?view=checks")
    page.get_by_text("challenger_is_better").first.click()
    expect(page.get_by_text("This is a blocking asset check")).to_be_visible()
    expect(page.get_by_text("gain_lower.window").first).to_be_visible()
    shot("blocking-check")
    page.get_by_text("reference_is_held").first.click()
    expect(page.get_by_text("ratio").first).to_be_visible()
    page.goto(f"{up.dagster.url}/assets/hidden_states?view=overview")
    expect(page.get_by_text("tokens_a_sample").first).to_be_visible()
    shot("hidden-states")


def test_a_window_is_materialised_by_hand_and_its_check_is_seen(
    up: UiStack, page: Page, shot: Callable[[str], None]
) -> None:
    before = up.window(BY_HAND)
    assert before is not None and before.state is State.SUPERSEDED
    page.goto(f"{up.dagster.url}/assets/draft_checkpoint?view=overview")
    page.get_by_role("button", name="Materialize").first.click()
    choose(page, (BY_HAND,))
    shot("dialog")
    page.get_by_role("button", name="Launch 1 run").click()
    up.wait("a run by hand", lambda: any(run.tags.get("dagster/from_ui") for run in up.dagster.runs()))
    up.wait(
        "the checkpoint",
        lambda: (record := up.window(BY_HAND)) is not None and record.challenger is not None,
    )
    (run,) = [run for run in up.dagster.runs() if run.tags.get("dagster/from_ui")]
    assert run.tags["dagster/partition"] == key(BY_HAND)
    up.wait("the run's end", lambda: status(up, run.run_id) == "SUCCESS")
    page.goto(f"{up.dagster.url}/assets/draft_checkpoint?view=checks")
    expect(page.get_by_text("This is a blocking asset check")).to_be_visible()
    page.get_by_role("tab", name="Execution history").click()
    expect(page.get_by_text("Passed").first).to_be_visible()
    shot("check-history")
    page.goto(f"{up.dagster.url}/runs/{run.run_id}")
    expect(page.get_by_text("draft_is_consistent").first).to_be_visible()
    shot("run")


def test_the_run_is_opened_in_mlflow_from_the_assets_page(
    up: UiStack, page: Page, context: BrowserContext, shot: Callable[[str], None]
) -> None:
    page.goto(f"{up.dagster.url}/assets/draft_checkpoint?view=events")
    link = page.get_by_role("link").filter(has_text=f"{up.mlflow}/#/experiments/").first
    shot("events")
    with context.expect_page() as opened:
        link.click()
    mlflow = opened.value
    expect(mlflow.get_by_text("demo/w000").first).to_be_visible()
    expect(mlflow.get_by_text("accuracy.step_1").first).to_be_visible()


def test_a_range_of_windows_is_backfilled(up: UiStack, page: Page, shot: Callable[[str], None]) -> None:
    up.wait_final(BY_HAND)  # the sensor goes on with what the hand has trained
    page.goto(f"{up.dagster.url}/locations/tide/jobs/adapt_draft")
    page.get_by_role("button", name="Materialize all").first.click()
    choose(page, RANGE)
    page.get_by_role("button", name="Launch backfill").click()
    states = {up.wait_final_of(number, before=State.SUPERSEDED) for number in RANGE}
    assert states <= {State.DEPLOYED, State.REJECTED}
    runs = [run for run in up.dagster.runs() if "dagster/backfill" in run.tags]
    assert {run.tags["dagster/partition"] for run in runs} == {key(number) for number in RANGE}
    (backfill,) = {run.tags["dagster/backfill"] for run in runs}
    page.goto(f"{up.dagster.url}/runs/b/{backfill}")
    expect(page.get_by_text(backfill).first).to_be_visible()
    expect(page.get_by_text("2 partitions")).to_be_visible()
    expect(page.get_by_text("100% completed")).to_be_visible()
    shot("backfill")


def test_two_versions_are_compared_in_mlflow(up: UiStack, page: Page, shot: Callable[[str], None]) -> None:
    page.goto(f"{up.mlflow}/#/models/draft-demo")
    for version in ("Version 2", "Version 3"):
        page.get_by_role("row").filter(has_text=version).get_by_role("checkbox").check()
    page.get_by_role("button", name="Compare", exact=True).click()
    expect(page.get_by_text("Comparing 2 Versions")).to_be_visible()
    for figure in ("acceptance_length.reference.k2", "gain_lower.window"):
        expect(page.get_by_text(figure, exact=True).first).to_be_visible()
    shot("versions")


def test_old_windows_are_retired(up: UiStack, page: Page, shot: Callable[[str], None]) -> None:
    page.goto(f"{up.dagster.url}/assets/hidden_states?view=partitions")
    expect(page.get_by_text(key(1)).first).to_be_visible()
    up.land(4, seed=3)
    up.wait("four more windows", lambda: up.window(NEWEST + 4) is not None)
    up.land(1, seed=4)
    up.wait("one more", lambda: up.window(NEWEST + 5) is not None)

    def retired() -> bool:
        page.reload()
        expect(page.get_by_text(key(NEWEST + 4)).first).to_be_visible()
        return page.get_by_text(key(1), exact=True).count() == 0

    up.wait("the oldest partitions to go", retired)
    shot("partitions")
    assert up.window(1) is not None  # the ledger keeps it


def status(up: UiStack, run_id: str) -> str:
    return next(run.status for run in up.dagster.runs() if run.run_id == run_id)
