"""The steps of a cycle as Dagster calls them: settings, ledger and window taken from the run's context."""

import time
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import dagster as dg

from resources.links import flat, live_figures, mlflow_links, version_link, window_figures
from resources.runs import VERDICT_TAG, DagsterRuns, attempt_of
from tide_platform.config import Settings, load_settings
from tide_platform.control.ledger import Ledger
from tide_platform.control.records import OtherDeployment, WindowRecord
from tide_platform.control.states import WindowKey

if TYPE_CHECKING:
    from resources.trainer import Trainer
    from tide_platform.control.cycle import Trained, Turn
    from tide_platform.control.evaluate import Evaluation
    from tide_platform.control.mend import Mended
    from tide_platform.control.promotion import Verdict
    from tide_platform.control.reconcile import Tick
    from tide_platform.control.rollout import Deployed
    from tide_platform.control.watchman import Look
    from tide_platform.gate.report import GateReport


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

    def look_after(self, runs: DagsterRuns) -> "Look":
        """A tick of the sensor that watches the served draft. A cluster without a ready server is told of by
        `tell`; there is nothing to look at.
        """
        from tide_platform.cluster.discovery import ServersMissing
        from tide_platform.control.watchman import Look, look_after
        from tide_platform.serving.fleet import glance_at_all

        settings = self.settings()
        try:
            with glance_at_all(settings) as servers:
                return look_after(settings, self.ledger(), servers, runs)
        except ServersMissing as error:
            return Look(notes=[str(error)])

    def mend(self) -> "Mended":
        from tide_platform.control.mend import mend

        return mend(self.settings(), self.ledger())

    def train(self, context: dg.AssetExecutionContext, trainer: "Trainer") -> "Trained":
        from tide_platform.control.cycle import train_window

        return train_window(self._turn(context), trainer.command(context))

    def judge(self, context: dg.AssetExecutionContext) -> "Verdict":
        from tide_platform.control.cycle import judge_window

        verdict = judge_window(self._turn(context))
        context.log.info(verdict.summary)
        context.instance.add_run_tags(
            context.run.run_id, {VERDICT_TAG: "passed" if verdict.passed else "rejected"}
        )
        return verdict

    def deploy(self, context: dg.AssetExecutionContext) -> "Deployed":
        from tide_platform.control.cycle import deploy_window

        return deploy_window(self._turn(context))

    def last_verdict(self, partition_key: str) -> "Verdict":
        """The newest verdict on the partition's window, whatever else runs meanwhile."""
        from tide_platform.control.promotion import NotJudgedYet, Verdict

        verdicts = self.ledger().verdicts_of(self._key(partition_key))
        if not verdicts:
            raise NotJudgedYet(partition_key)
        return Verdict.from_json(verdicts[-1].evidence)

    def consistency(self, partition_key: str) -> "GateReport":
        """The consistency gate on the partition's checkpoint."""
        from tide_platform.control.consistency import check_challenger

        return check_challenger(self.settings(), self.ledger(), self._key(partition_key))

    def evaluate(self) -> "Evaluation":
        from tide_platform.control.evaluate import evaluate_champion

        return evaluate_champion(self.settings(), self.ledger())

    def maintain(self) -> dict[str, Any]:
        from tide_platform.control.upkeep import maintain_once

        return maintain_once(self.settings(), self.ledger())

    def tell(self) -> str:
        """Tells people what is new in the audit and what stands as it should not; in words, what was told."""
        from tide_platform.control.happenings import tell_audit, tell_standing
        from tide_platform.control.notify import Notifier
        from tide_platform.control.standing import standing

        settings, ledger, now = self.settings(), self.ledger(), time.time()
        notifier = Notifier.of(settings)
        audited = tell_audit(settings, ledger, notifier, now)
        stands = tell_standing(settings, ledger, notifier, now, standing(settings, ledger, now))
        return f"audit: {audited.summary}; conditions: {stands.summary}"

    def tell_of_run(self, run: dg.DagsterRun, why: str) -> str:
        """Tells people of a run that failed for good.

        Of the sensor's attempts the audit tells, once there is no further one; a rejected challenger is a
        valid end.
        """
        if attempt_of(run) is not None or run.tags.get(VERDICT_TAG) == "rejected":
            return "the ledger goes on with it"
        from tide_platform.control.happenings import tell_one
        from tide_platform.control.notify import Message, Notifier

        settings = self.settings()
        partition = f" on {run.tags['dagster/partition']}" if "dagster/partition" in run.tags else ""
        title = f"{settings.deployment}: run {run.run_id[:8]} of {run.job_name}{partition} failed"
        return tell_one(
            settings, self.ledger(), Notifier.of(settings), Message(title, why, "failure")
        ).summary

    # --- what the pages show

    def trained_metadata(self, context: dg.AssetExecutionContext, trained: "Trained") -> dict[str, Any]:
        settings = self.settings()
        return {
            **mlflow_links(settings, context.log, trained.mlflow_run, provenance="checkpoint/tide.json"),
            **version_link(settings, trained.version),
            **self._of_window(self.ledger().get(self._key(context.partition_key))),
            **flat(trained.metadata()),
        }

    def report_metadata(self, context: dg.AssetExecutionContext, verdict: "Verdict") -> dict[str, Any]:
        record = self.ledger().get(self._key(context.partition_key))
        links = mlflow_links(self.settings(), context.log, record.mlflow_run, evidence="verdict.json")
        return {**self.verdict_metadata(verdict), **self._of_window(record), **links}

    def deployed_metadata(self, context: dg.AssetExecutionContext, deployed: "Deployed") -> dict[str, Any]:
        record = self.ledger().get(self._key(context.partition_key))
        links = mlflow_links(self.settings(), context.log, record.mlflow_run, evidence="verdict.json")
        return {**deployed.to_json(), **live_figures(deployed), **self._of_window(record), **links}

    def evaluation_metadata(
        self, context: dg.AssetExecutionContext, evaluation: "Evaluation"
    ) -> dict[str, Any]:
        settings = self.settings()
        return {
            **evaluation.to_json(),
            **version_link(settings, evaluation.version),
            **mlflow_links(settings, context.log, evaluation.mlflow_run),
        }

    def verdict_metadata(self, verdict: "Verdict") -> dict[str, Any]:
        return {
            "verdict": dg.MetadataValue.md(verdict.markdown()),
            "champion": verdict.champion,
            "challenger": verdict.challenger,
            **verdict.metrics(slices=False),
        }

    def window_metadata(self, record: WindowRecord) -> dict[str, Any]:
        return window_figures(record)

    def _of_window(self, record: WindowRecord) -> dict[str, Any]:
        return {"window": record.key.window, "lance_version": record.lance_version}

    def _key(self, partition_key: str) -> WindowKey:
        """Of two deployments in one instance each has its code location. Raises :class:`OtherDeployment`."""
        key = WindowKey.parse(partition_key)
        own = self.settings().deployment
        if key.deployment != own:
            raise OtherDeployment(key, own)
        return key

    def _turn(self, context: dg.AssetExecutionContext) -> "Turn":
        from tide_platform.control.cycle import Turn

        key = self._key(context.partition_key)
        return Turn(self.settings(), self.ledger(), key, context.run.run_id, attempt_of(context.run))
