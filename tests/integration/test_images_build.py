"""The Python part of the Dockerfiles that need no GPU: RUN lines of the build stage, in new environments."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
IMAGES = ROOT / "deployments" / "images"
pytestmark = [pytest.mark.integration, pytest.mark.slow]


def build_lines(file: str, **given: str) -> list[str]:
    """The first stage's RUN lines, without mounts, its ARGs filled in."""
    text = (IMAGES / file).read_text().replace("\\\n", " ")
    stage = text.split("\nFROM ")[1]
    arguments = dict(re.findall(r"^ARG (\w+)=(\S+)", stage, re.MULTILINE)) | given
    lines = [re.sub(r"--mount=\S+ ", "", line) for line in re.findall(r"^RUN (.+)$", stage, re.MULTILINE)]
    return [re.sub(r"\$\{(\w+)(:\?)?\}", lambda match: arguments[match[1]], line) for line in lines]


def context(folder: Path) -> Path:
    """What `.dockerignore` lets a build see."""
    folder.mkdir()
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        if line.startswith("!"):
            kept = ROOT / line[1:]
            copy = shutil.copytree if kept.is_dir() else shutil.copy
            copy(kept, folder / kept.name)
    return folder


@pytest.mark.parametrize(
    ("file", "steps"),
    [("orchestrator/Dockerfile", 6), ("trainer/Dockerfile", 5), ("server/cpu.Dockerfile", 4)],
)
def test_the_environment_is_complete(file: str, steps: int, tmp_path: Path) -> None:
    source = context(tmp_path / "src")
    first, *lines = build_lines(file, TORCH_BACKEND="cpu")
    assert first.startswith("pip install") and "uv==" in first  # uv is here, in this environment
    binaries = Path(sys.executable).parent
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "TIDE_"))
    }
    environment |= {"PATH": f"{binaries}:{environment['PATH']}", "DAGSTER_DISABLE_TELEMETRY": "1"}
    if wheels := environment.get("PIP_FIND_LINKS"):  # torch's CPU wheel, where it is at hand
        environment["UV_FIND_LINKS"] = wheels
        lines = [line.replace("UV_TORCH_BACKEND=cpu ", "") for line in lines]
    assert len(lines) == steps
    for line in lines:
        command = line.replace("/opt/", f"{tmp_path}/")
        done = subprocess.run(
            ["sh", "-ec", command], cwd=source, env=environment, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, f"{line}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    assert "Usage" in done.stdout  # the last one is the self-check


def test_the_plugin_passes_its_self_check_in_sglangs_python() -> None:
    python = ROOT / ".venv-serving" / "bin" / "python"
    argv = [python, "-m", "tide_platform.engine.selfcheck", "--adapter"]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "imported tide_platform.engine.adapter_0_5_14" in done.stdout
