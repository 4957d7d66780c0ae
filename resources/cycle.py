"""The steps of a cycle as Dagster calls them: settings, ledger and window taken from the run's context."""

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import dagster as dg

from resources.runs import DagsterRuns, attempt_of
from tide_platform.config import Settings, load_settings
from tide_platform.control.ledger import Ledger
from tide_platform.control.records import WindowRecord
from tide_platform.control.states import WindowKey

if TYPE_CHECKING:
    from resources.trainer import Trainer
    from tide_platform.control.cycle import Trained, Turn
    from tide_platform.control.promotion import Verdict
    from tide_platform.control.reconcile import Tick
    from tide_platform.control.rollout import Deployed


@cache
def _ledger(url: str) -> Ledger:
    """One for a process: opening it asks the database for its tables."""
    return Ledger(url)


class Cycle(dg.ConfigurableResource):
    """The deployment that TIDE_CONFIG describes."""

    def settings(self) -> Settings:
        return load_settings()

    def ledger(self) -> Ledger:
        return _ledger(self.settings().ledger.url)

    def tick(self, runs: DagsterRuns) -> "Tick":
        from tide_platform.control.dataset import Dataset
        from tide_platform.control.reconcile import tick

        settings = self.settings()
        return tick(settings, self.ledger(), Dataset(settings), runs)

    def retired(self, partitions: "Sequence[str]") -> list[str]:
        """The partitions that Dagster need not show any more (``window.keep_partitions``)."""
        from tide_platform.control.windows import retired

        settings = self.settings()
        if len(partitions) <= settings.window.keep_partitions:
            return []
        opened = {record.key for record in self.ledger().open(settings.deployment)}
        return retired(settings.deployment, partitions, opened, settings.window.keep_partitions)

    def train(self, context: dg.AssetExecutionContext, trainer: "Trainer") -> "Trained":
        from tide_platform.control.cycle import train_window

        return train_window(self._turn(context), trainer.command(context))

    def judge(self, context: dg.AssetExecutionContext) -> "Verdict":
        from tide_platform.control.cycle import judge_window

        verdict = judge_window(self._turn(context))
        context.log.info(verdict.summary)
        context.instance.add_run_tags(
            context.run.run_id, {"tide/verdict": "passed" if verdict.passed else "rejected"}
        )
        return verdict

    def deploy(self, context: dg.AssetExecutionContext) -> "Deployed":
        from tide_platform.control.cycle import deploy_window

        return deploy_window(self._turn(context))

    def last_verdict(self, partition_key: str) -> "Verdict":
        """The newest verdict on the partition's window, whatever else runs meanwhile."""
        from tide_platform.control.promotion import NotJudgedYet, Verdict

        verdicts = self.ledger().verdicts_of(WindowKey.parse(partition_key))
        if not verdicts:
            raise NotJudgedYet(partition_key)
        return Verdict.from_json(verdicts[-1].evidence)

    def verdict_metadata(self, verdict: "Verdict") -> dict[str, Any]:
        return {
            "verdict": dg.MetadataValue.md(verdict.markdown()),
            "champion": verdict.champion,
            "challenger": verdict.challenger,
            **verdict.metrics(),
        }

    def window_metadata(self, record: WindowRecord) -> dict[str, Any]:
        return {
            "samples": record.samples,
            "tokens": record.tokens,
            "lance_version": record.lance_version,
            "rows": f"{record.after_row} < row id <= {record.last_row}",
            "rule": dg.MetadataValue.json(record.rule or {}),
        }

    def _turn(self, context: dg.AssetExecutionContext) -> "Turn":
        from tide_platform.control.cycle import Turn

        key = WindowKey.parse(context.partition_key)
        return Turn(self.settings(), self.ledger(), key, context.run.run_id, attempt_of(context.run))
