"""The storage benchmarks run to their end on a real S3 server; what they find is judged elsewhere."""

import json

import pytest

from tide_platform.bench import ingest, store

pytestmark = pytest.mark.integration


def test_ingest(tmp_path):
    report = ingest.run(tmp_path / "bench", bytes=4 << 20, rounds=2)
    assert report.ratios["ingest"] > 0 and json.loads(report.to_json())["bench"] == "ingest"
    assert len(report.raw["mb_s"]["ingest"]) == len(report.raw["mb_s"]["boto3"]) == 2
    assert not (tmp_path / "bench").exists()


def test_store(tmp_path):
    report = store.run(str(tmp_path / "bench"), commits=(5, 110))
    for place in ("local", "s3"):
        assert report.ratios[f"{place}_poll_reads"] <= 1
        assert report.ratios[f"{place}_fragments_110"] < 0.25, "upkeep ran"
        assert report.ratios[f"{place}_read"] > 0 and report.ratios[f"{place}_write"] > 0
    assert not (tmp_path / "bench").exists()
