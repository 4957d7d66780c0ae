"""The support table, the verify rules and the adapter registry."""

from types import SimpleNamespace

import pytest

from tide_platform.engine import support
from tide_platform.engine.support import (
    UnsupportedFeature,
    UnsupportedSGLang,
    check_device,
    check_server,
    verify_rule,
)


def _arguments(**changed: object) -> SimpleNamespace:
    """SGLang's ServerArgs as `tide serve` sets them."""
    arguments: dict[str, object] = {
        "speculative_algorithm": "EAGLE3",
        "speculative_eagle_topk": 1,
        "speculative_draft_model_quantization": None,
        "disable_overlap_schedule": True,
        "device": "cpu",
        "enable_mixed_chunk": False,
        "enable_dp_attention_local_control_broadcast": False,
        "attn_cp_size": 1,
        "pp_size": 1,
        "tokenizer_worker_num": 1,
        "disaggregation_mode": "null",
    }
    return SimpleNamespace(**(arguments | changed))


def test_the_launch_of_tide_serve_is_supported() -> None:
    check_server(_arguments())
    check_server(_arguments(speculative_algorithm=None, disable_overlap_schedule=False))


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"speculative_algorithm": "EAGLE"}, "EAGLE"),
        ({"speculative_eagle_topk": 4}, "topk"),
        ({"disable_overlap_schedule": False}, "overlap"),
        ({"enable_mixed_chunk": True}, "mixed"),
        ({"enable_dp_attention_local_control_broadcast": True}, "local control"),
        ({"attn_cp_size": 2}, "attn_cp_size"),
        ({"pp_size": 2}, "pp_size"),
        ({"tokenizer_worker_num": 2}, "tokenizer_worker_num"),
        ({"disaggregation_mode": "prefill"}, "disaggregation"),
        ({"speculative_draft_model_quantization": "fp8"}, "quantised"),
    ],
)
def test_what_would_go_wrong_is_refused_by_name(changed: dict, named: str) -> None:
    with pytest.raises(UnsupportedFeature, match=named):
        check_server(_arguments(**changed))


def test_every_refusal_that_arguments_show_is_tested() -> None:
    refusals = [f for f in support.FEATURES if f.server]
    assert len(refusals) == 10, "add the new refusal to the cases above"


def test_overlap_is_refused_on_a_cpu_alone() -> None:
    check_server(_arguments(disable_overlap_schedule=False, device="cuda"))


def test_a_version_that_cannot_speculate_on_a_cpu_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedFeature, match=r"EAGLE3 on a CPU with sglang 0\.5\.23: .*serving\.k 0"):
        check_device("cpu", "0.5.23", speculative=True)
    check_device("cpu", "0.5.23", speculative=False)
    check_device("cuda", "0.5.23", speculative=True)
    check_device("cpu", "0.5.14", speculative=True)


def test_verify_rules() -> None:
    assert verify_rule("cpu", "0.5.14") == "target_only"
    assert verify_rule("cuda", "0.5.14") == "target_only"
    assert verify_rule("cuda", "0.5.14", rejection_sampling=True) == "rejection"
    assert verify_rule("rocm", "0.5.14", rejection_sampling=True) == "greedy"
    assert verify_rule("cpu", "0.5.23") == "greedy"
    assert verify_rule("rocm", "0.5.23") == "greedy"
    assert verify_rule("rocm", "0.5.23", rejection_sampling=True) == "rejection"
    with pytest.raises(UnsupportedSGLang, match=r"0\.5\.99"):
        verify_rule("cpu", "0.5.99")


def test_lossy_rules_say_why() -> None:
    assert support.lossy_reason("target_only") is None
    assert support.lossy_reason("rejection") is None
    assert "temperature" in str(support.lossy_reason("greedy"))
    assert "threshold" in str(support.lossy_reason("target_only", threshold_single=0.9))
    assert "threshold" in str(support.lossy_reason("target_only", threshold_acc=0.9))


def test_the_table_lists_every_feature() -> None:
    table = support.markdown_table()
    assert all(f"| {feature.name} | {feature.status} |" in table for feature in support.FEATURES)
