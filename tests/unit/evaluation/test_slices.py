"""Which slices a sample belongs to, and what two drafts do in each."""

import pytest
from tiny import make_meta

from tide_platform.evaluation.acceptance import KReplay, RequestReplay
from tide_platform.evaluation.slices import by_slice, labels


def test_labels() -> None:
    meta = make_meta("a", 200, 64, tenant="t", temperature=0.7, flags=("grammar", "stretch"))
    assert labels(meta) == {
        "tenant": ("t",),
        "prompt_tokens": ("<= 64",),
        "draft_version": ("d",),
        "flags": ("grammar", "stretch"),
        "temperature": ("<= 1",),
    }
    other = labels(make_meta("b", 9000, 5000))
    assert (
        other["prompt_tokens"] == ("> 4096",)
        and other["temperature"] == ("0",)
        and other["flags"] == ("none",)
    )


def replays(accepted: dict[str, int], **dimensions: dict[str, tuple[str, ...]]) -> list[RequestReplay]:
    return [
        RequestReplay(
            name, name, 20, {2: KReplay(10, n, (n, 0))}, labels={d: of[name] for d, of in dimensions.items()}
        )
        for name, n in accepted.items()
    ]


def test_a_slice_is_a_ratio_of_sums_of_its_requests() -> None:
    tenants = {"tenant": {"a": ("x",), "b": ("x",), "c": ("y",)}}
    flags = {"flags": {"a": ("f", "g"), "b": ("g",), "c": ("none",)}}
    champion = replays({"a": 5, "b": 7, "c": 1}, **tenants, **flags)
    challenger = replays({"c": 4, "b": 9, "a": 5}, **tenants, **flags)
    found = {(s.dimension, s.value): s for s in by_slice(champion, challenger, 2)}
    assert sorted(found) == [
        ("flags", "f"),
        ("flags", "g"),
        ("flags", "none"),
        ("tenant", "x"),
        ("tenant", "y"),
    ]
    x = found["tenant", "x"]
    assert (x.requests, x.champion, x.challenger) == (2, pytest.approx(1.6), pytest.approx(1.7))
    assert x.gain == pytest.approx(1.7 / 1.6 - 1)
    assert found["flags", "g"].requests == 2 and found["tenant", "y"].challenger == pytest.approx(1.4)
