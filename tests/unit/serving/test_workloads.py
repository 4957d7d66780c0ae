import json
from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tide_platform.serving.workloads import WorkloadError, load_workload
from tide_platform.serving.workloads import build as module
from tide_platform.serving.workloads.build import Builder, build_workload, workload_file
from tide_platform.serving.workloads.code import code
from tide_platform.serving.workloads.maths import held_out_templates, maths
from tide_platform.serving.workloads.prompts import HELD_OUT, TRAFFIC, WorkloadPrompt, digest, hashed_split


def sides(prompts, key):
    found = defaultdict(set)
    for prompt in prompts:
        found[prompt.split].add(getattr(prompt, key))
    return found


@pytest.fixture(scope="module")
def maths_prompts():
    return maths()


def test_maths_has_no_template_on_both_sides(maths_prompts):
    templates = sides(maths_prompts, "template")
    assert not templates[TRAFFIC] & templates[HELD_OUT]
    assert len(templates[HELD_OUT]) == round(0.25 * len(templates[HELD_OUT] | templates[TRAFFIC]))


def test_maths_prompts_are_clean_and_unique(maths_prompts):
    texts = [prompt.prompt for prompt in maths_prompts]
    assert len(set(texts)) == len(texts) >= 1400
    assert len({prompt.id for prompt in maths_prompts}) == len(texts)
    assert not any("final answer" in text or "Do not include units" in text for text in texts)


def test_maths_is_the_same_on_every_machine(maths_prompts):
    lines = "".join(f"{prompt.id} {prompt.split}\n" for prompt in maths_prompts)
    assert digest(lines) == "25df0269b925", (
        "raise BUILD in workloads/build.py: files in caches are of the former"
    )


def test_code_has_no_function_name_on_both_sides():
    prompts = code()
    names = sides(prompts, "template")
    assert len(prompts) >= 1400 and not names[TRAFFIC] & names[HELD_OUT]
    assert 0.1 < len(names[HELD_OUT]) / len(names[TRAFFIC] | names[HELD_OUT]) < 0.2


@given(st.sets(st.text(max_size=8), min_size=4, max_size=40), st.text(max_size=8))
def test_held_out_templates_are_a_quarter_of_any_set(templates, other):
    chosen = held_out_templates(templates)
    assert chosen <= templates and len(chosen) == round(len(templates) / 4)


@given(st.text())
def test_split_depends_on_the_key_alone(key):
    assert hashed_split(key) == hashed_split(key) in (TRAFFIC, HELD_OUT)


def test_share_held_out():
    held_out = sum(hashed_split(str(number)) == HELD_OUT for number in range(4000))
    assert 0.13 < held_out / 4000 < 0.17


def test_built_once_and_read_back(tmp_path, monkeypatch):
    made = []

    def make():
        made.append(1)
        return [WorkloadPrompt("a", TRAFFIC, "t", "Één?\nline"), WorkloadPrompt("b", HELD_OUT, "u", "two")]

    monkeypatch.setenv("TIDE_HOME", str(tmp_path))
    monkeypatch.setitem(module.BUILDERS, "general", Builder(make, "fake"))
    assert [p.id for p in load_workload("general", HELD_OUT)] == ["b"]
    [prompt] = load_workload("general", TRAFFIC)
    assert prompt.messages == [{"role": "user", "content": "Één?\nline"}]
    assert made == [1] and workload_file("general").is_relative_to(tmp_path)
    build_workload("general", again=True)
    assert made == [1, 1]


def write(path, *lines):
    path.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines))
    return path


def test_user_file(tmp_path):
    path = write(
        tmp_path / "mine.jsonl",
        {"prompt": "one", "split": "traffic", "id": "first"},
        "\n",
        {
            "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}],
            "split": "traffic",
        },
        {"prompt": "two", "split": "held_out"},
    )
    first, second = load_workload(path, TRAFFIC)
    assert first.id == "first" and first.messages == [{"role": "user", "content": "one"}]
    assert [message["role"] for message in second.messages] == ["system", "user"]
    assert len(load_workload(str(path), HELD_OUT)) == 1
    assert len(load_workload(path, TRAFFIC, limit=1)) == 1


def test_user_file_without_split_is_divided_by_content(tmp_path):
    path = write(tmp_path / "mine.jsonl", *({"prompt": f"question {number}"} for number in range(400)))
    traffic, held_out = load_workload(path, TRAFFIC), load_workload(path, HELD_OUT)
    assert len(traffic) + len(held_out) == 400 and 30 < len(held_out) < 90
    assert not {p.id for p in traffic} & {p.id for p in held_out}


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{broken\n", "not JSON"),
        ("[1]\n", "expected an object"),
        ({"text": "x"}, "either `prompt` or `messages`"),
        ({"prompt": "x", "messages": []}, "either `prompt` or `messages`"),
        ({"prompt": "  "}, "needs text"),
        ({"prompt": 3}, "needs text"),
        ({"messages": []}, "at least one message"),
        ({"messages": [{"role": "boss", "content": "x"}]}, "`role` of"),
        ({"prompt": "x", "split": "test"}, "split 'test'"),
    ],
)
def test_errors_name_the_line(tmp_path, line, problem):
    path = write(tmp_path / "mine.jsonl", {"prompt": "good"}, line)
    with pytest.raises(WorkloadError, match=rf"mine\.jsonl:2: .*{problem}"):
        load_workload(path, TRAFFIC)


def test_unknown_things_are_named(tmp_path):
    with pytest.raises(WorkloadError, match="no such file"):
        load_workload("physics", TRAFFIC)
    with pytest.raises(WorkloadError, match="split validation"):
        load_workload("maths", "validation")
    with pytest.raises(WorkloadError, match="empty"):
        load_workload(write(tmp_path / "empty.jsonl"), TRAFFIC)
    only = write(tmp_path / "only.jsonl", {"prompt": "x", "split": "traffic"})
    with pytest.raises(WorkloadError, match="no prompts of split held_out"):
        load_workload(only, HELD_OUT)
