"""The dataset's extent, as its newest manifest tells it."""

from functools import cached_property
from typing import TYPE_CHECKING

from tide_platform.config import Settings
from tide_platform.metrics.sheet import Sheet

if TYPE_CHECKING:
    from tide_platform.store.hidden_states import HiddenStates


class DatasetReader:
    """Keeps its handle open: opening it anew costs several reads."""

    def __init__(self, settings: Settings):
        self._settings = settings

    @cached_property
    def _store(self) -> "HiddenStates":
        from tide_platform.store.hidden_states import open_store  # Lance: 150 MB, only where it is asked for

        return open_store(self._settings)

    def read(self) -> Sheet:
        """Raises what the store raises."""
        extent, sheet = self._store.extent(), Sheet()
        sheet.put("tide_dataset_rows", extent.rows)
        sheet.put("tide_dataset_version", extent.version)
        sheet.put("tide_dataset_fragments", extent.fragments)
        sheet.put("tide_dataset_fragments_allowed", self._settings.maintain.max_fragments)
        sheet.put("tide_dataset_data_bytes", extent.data_bytes)
        sheet.put("tide_dataset_commit_timestamp_seconds", extent.committed_at)
        return sheet
