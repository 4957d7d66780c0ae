"""Target folders with chat templates of several kinds, and records to put into files."""

import json
import shutil
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

TINY = Path(__file__).parents[2] / "fixtures" / "tiny_target"
END = "<|im_end|>"
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}"
    "{% if m['tool_calls'] %}{{ m['tool_calls'] | tojson }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKED = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}<|im_start|>assistant\n"
    "{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}\n"
    "{% else %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# as Qwen3's: of all answers but the last, what stands before </think> is taken out
FORGETFUL = CHATML.replace(
    "m['content'] +", "(m['content'] if loop.last else m['content'].split('</think>')[-1]) +"
)
REVERSED = "{% for m in messages | reverse %}{{ m['content'] }}|{% endfor %}"
# whoever speaks is said behind what is said, and answers begin with nothing of their own
BARE = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
CORPUS = ["the quick brown fox jumps over the lazy dog", "once upon a time", "user assistant system"] * 4


def bpe_tokenizer() -> Tokenizer:
    """Byte-level BPE with merges, `<|im_start|>`, `<|im_end|>`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        special_tokens=["<|im_start|>", END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def chat_target(folder: Path, template: str, vocab_size: int = 340) -> Path:
    """A folder with a BPE tokenizer and this template; no weights."""
    folder.mkdir(parents=True)
    bpe_tokenizer().save(str(folder / "tokenizer.json"))
    config = json.loads((TINY / "config.json").read_text()) | {"vocab_size": vocab_size}
    (folder / "config.json").write_text(json.dumps(config))
    shutil.copy(TINY / "model.safetensors", folder)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text(template)
    return folder


def conversation(*contents: str, **more: Any) -> dict[str, Any]:
    """An OpenAI record; user and assistant take turns."""
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": c} for i, c in enumerate(contents)]} | more


def write_jsonl(path: Path, records: list[Any]) -> Path:
    """Strings are written as they are."""
    lines = [record if isinstance(record, str) else json.dumps(record) for record in records]
    path.write_text("\n".join(lines) + "\n")
    return path
