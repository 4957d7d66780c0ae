"""Steps from the cost model, as SGLang takes them: its own rule settles where the model says, and a real
server is started with the file.
"""

import json
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tide_platform.capture.record import Sample
from tide_platform.capture.segment import read_segment
from tide_platform.capture.spool import sealed_segments
from tide_platform.config import Settings, draft_digest, target_digest
from tide_platform.control.ledger import Ledger
from tide_platform.control.promotion import Comparison, Interval, Measured, Verdict
from tide_platform.control.records import Cut, Scan
from tide_platform.draft.checkpoint import load_target_parts, new_draft, save_draft
from tide_platform.evaluation.cost_model import (
    FILE,
    BatchCosts,
    CostModel,
    best_k,
    expected_tokens,
    speeds_of,
)
from tide_platform.evaluation.speculation import candidates
from tide_platform.serving.adaptive import FILE as STEPS
from tide_platform.serving.interpreter import find_python
from tide_platform.serving.own_server import served

pytestmark = pytest.mark.integration

TINY = Path(__file__).parents[1] / "fixtures" / "tiny_target"
KS = range(1, 6)

# runs in the server's environment: SGLang's own controller, told what a draft's acceptance gives at each k
SETTLE = """
import json, sys, tempfile
from sglang.srt.speculative import adaptive_spec_params as own
own.log_info_on_rank0 = lambda *_: None
answers = []
for case in json.load(open(sys.argv[1])):
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(case["steps"], file)
        file.flush()
        most = own.resolve_candidate_steps_from_config(file.name)[-1]
        seen = {}
        for batch in case["fastest"]:
            params, taken = own.AdaptiveSpeculativeParams(most, file.name), []
            for _ in range(300):
                k = params.get_steps_for_batch(int(batch))
                params.on_verify_complete([case["by_k"][k - 1] - 1 if k else 0] * int(batch), int(batch))
                taken.append(k)
            seen[batch] = taken[200:]
        answers.append(seen)
json.dump(answers, open(sys.argv[2], "w"))
"""


def cases(number: int) -> list[dict[str, Any]]:
    """Drafts and machines, with the fastest steps at each batch size that an entry begins at."""
    rng, made = np.random.default_rng(0), []
    for _ in range(number):
        by_batch = {
            batch: BatchCosts(10.0 * batch**0.5, rng.uniform(0, 0.3), verify(rng.uniform(0, 0.6, 5)))
            for batch in (1, 4, 8)
        }
        model = CostModel(by_batch, "t")
        rates = np.sort(rng.uniform(0.05, 0.95, 5))[::-1]
        by_k = [expected_tokens(rates.tolist(), k) for k in KS]
        steps = candidates(model, by_k)
        fastest = {batch: best_k(speeds_of(by_k, model.near(int(batch)))) for batch in steps}
        made.append({"steps": steps, "by_k": by_k, "fastest": fastest})
    return made


def verify(more: np.ndarray) -> dict[int, float]:
    return dict(zip(KS, (1 + more.cumsum()).tolist(), strict=True))


def test_sglangs_own_rule_settles_at_the_fastest_steps(tmp_path: Path) -> None:
    given, told = tmp_path / "cases.json", tmp_path / "answers.json"
    made = cases(60)
    given.write_text(json.dumps(made))
    python = find_python(Settings())
    subprocess.run([python, "-c", SETTLE, given, told], check=True, timeout=300, capture_output=True)
    for case, seen in zip(made, json.loads(told.read_text()), strict=True):
        for batch, fastest in case["fastest"].items():
            entry, taken = case["steps"][batch], seen[batch]
            if fastest:
                assert set(taken) == {fastest}, (entry, case["by_k"])
            else:  # from none it tries a step every five rounds
                assert set(taken) <= {0, entry["candidate_steps"][1 % len(entry["candidate_steps"])]}
                assert taken.count(0) >= 45, (entry, case["by_k"])
    assert {fastest for case in made for fastest in case["fastest"].values()} >= {0, 1, 2, 3}


def test_a_server_starts_with_the_steps_of_its_cost_model(tmp_path: Path) -> None:
    """The draft never hits, the verdict says that it does: SGLang begins high and comes down by itself."""
    draft = tmp_path / "draft"
    save_draft(draft, new_draft(load_target_parts(TINY), np.arange(64, 192), seed=0), {"made_by": "test"})
    settings = Settings(target=TINY, draft=draft)
    settings.serving.adaptive, settings.serving.threads = True, 1
    settings.serving.context_length, settings.serving.max_total_tokens = 256, 2048
    settings.capture.ring_bytes, settings.capture.segment_bytes = 16 << 20, 1 << 20
    settings.capture.segment_seconds = 0.2
    settings.ledger.url = f"sqlite:///{tmp_path}/ledger.db"
    a_verdict_on(settings, draft_digest(draft))
    conditions = {"dtype": settings.serving.dtype, "device": "cpu"}
    by_batch = {
        1: BatchCosts(40.0, 0.08, {1: 1.02, 2: 1.05, 3: 1.1}),
        4: BatchCosts(50.0, 0.1, {1: 1.6, 2: 2.5, 3: 3.2}),
    }
    CostModel(by_batch, target_digest(TINY), conditions).write(tmp_path / "state" / FILE)
    with served(settings, tmp_path) as running:
        said = (tmp_path / "serve.log").read_text()
        assert "adaptive speculation: " in said and "by the verdict on demo/w00001" in said
        steps = json.loads((running.settings.state / STEPS).read_text())
        assert [entry["candidate_steps"] for entry in steps.values()] == [[2, 3], [1], [0, 1]]
        assert "--speculative-num-steps 3 " in said and f"{STEPS} " in said
        # a draft that never hits comes down from 3 to 2
        done = running.client.generate(range(65, 90), max_new_tokens=60, rid="adapts")
        assert done.completion_tokens == 60
        sample = captured(running.settings, "adapts")
    assert "adaptive_k" in sample.meta.flags and sample.meta.k == 3
    assert sample.meta.verify_rounds >= 50


def a_verdict_on(settings: Settings, digest: str) -> None:
    ledger = Ledger(settings.ledger.url)
    [key] = ledger.cut("demo", Scan(), Scan(1, 9, 9), [Cut(0, 9, 1, 9, 90)])
    ledger.claim(key, "run")
    ledger.trained(key, "run", challenger=digest, parent="old", mlflow_run="m")
    measured = Measured(1.9, [1.6, 1.9, 2.035, 2.09, 2.11], [0.6, 0.5])
    of = Comparison(20, measured, measured, Interval(0.2, 0.1, 0.3))
    verdict = Verdict(str(key), "old", digest, 2, 0.95, 0.02, 0.95, True, [], of)
    ledger.judged(key, "run", champion="old", passed=True, evidence=verdict.to_json(), reason="better")
    ledger.close()


def captured(settings: Settings, rid: str) -> Sample:
    until = time.monotonic() + 20
    while time.monotonic() < until:
        for path in sealed_segments(settings.spool_folder):
            for sample in read_segment(path)[1]:
                if sample.meta.request_id == rid:
                    return sample
        time.sleep(0.2)
    raise AssertionError(f"{rid} was not captured")
