"""``maths``: word problems of the grade-school kind, split so that no template is on both sides."""

from typing import Any

from tide_platform.serving.workloads.prompts import HELD_OUT, TRAFFIC, WorkloadPrompt, digest, position

SIZE, SEED = 1500, 7
HELD_OUT_TEMPLATES = 0.25
# reasoning-gym appends this for its own scoring
_SUFFIX = " Give the result as your final answer"


def maths() -> list[WorkloadPrompt]:
    """About 1,500 prompts from the 85 templates of ``gsm_symbolic``, with fresh names and numbers."""
    import reasoning_gym

    dataset: Any = reasoning_gym.create_dataset("gsm_symbolic", size=SIZE, seed=SEED)
    texts: dict[str, str] = {}
    for index, task in enumerate(dataset.task_indices):
        question = dataset[index]["question"].split(_SUFFIX)[0].strip()
        texts.setdefault(question, f"gsm-{task:02d}")
    held_out = held_out_templates(set(texts.values()))
    return [
        WorkloadPrompt(f"maths-{digest(text)}", HELD_OUT if template in held_out else TRAFFIC, template, text)
        for text, template in texts.items()
    ]


def held_out_templates(templates: set[str]) -> set[str]:
    """A quarter of the templates, those whose hashes come first."""
    ordered = sorted(templates, key=lambda template: position(f"held_out {template}"))
    return set(ordered[: round(HELD_OUT_TEMPLATES * len(ordered))])
