"""Chat messages to token ids, with the served target's own tokenizer and template."""

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from tide_platform.config import TideError
from tide_platform.serving.workloads.prompts import Prompt


class TemplateFailed(TideError):
    """The target's chat template does not take these messages."""

    def __init__(self, prompt_id: str, reason: str):
        super().__init__(f"prompt {prompt_id}: the target's chat template refuses it: {reason}")
        self.prompt_id = prompt_id


def encode_prompts(target: Path, prompts: Sequence[Prompt]) -> list[list[int]]:
    """Token ids of each prompt, up to where the answer begins. Raises :class:`TemplateFailed`.

    Done here, not in the server: then a prompt's ids do not depend on the route it takes.
    """
    return [encode_messages(target, prompt.messages, prompt.id) for prompt in prompts]


def encode_messages(target: Path, messages: list[dict[str, str]], name: str = "given") -> list[int]:
    import jinja2

    tokenizer = load_tokenizer(target.resolve())
    try:
        ids = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=False
        )
    except (jinja2.TemplateError, TypeError) as error:
        raise TemplateFailed(name, str(error)) from error
    return list(ids)


@lru_cache(maxsize=4)
def load_tokenizer(target: Path) -> Any:
    """Takes seconds the first time."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(target, local_files_only=True)
