"""The Dockerfiles: linted, pinned, not root; what they install is in the lock."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "deployments" / "images"
FILES = sorted(FOLDER.glob("*/*Dockerfile"))
IMAGES = ("orchestrator", "trainer", "server")
UNPINNED = {"torch"}  # its version is an argument of the build


def dockerfile(name: str) -> str:
    return (FOLDER / name / "Dockerfile").read_text()


def names(requirements: Path) -> set[str]:
    """Of an .in file, those that it includes too."""
    found: set[str] = set()
    for line in requirements.read_text().splitlines():
        if line.startswith("-r "):
            found |= names((requirements.parent / line[3:]).resolve())
        elif line and not line.startswith("#"):
            found.add(re.split(r"[<>=\[ ]", line)[0])
    return found


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}/{file.name}")
def test_hadolint_finds_nothing(file: Path) -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    argv = [hadolint, "--config", ROOT / ".hadolint.yaml", file]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}/{file.name}")
def test_bases_are_pinned_and_the_last_user_is_not_root(file: Path) -> None:
    text = file.read_text()
    bases = re.findall(r"^FROM (\S+)", text, re.MULTILINE)
    arguments = dict(re.findall(r"^ARG (\w+)=(\S+)", text, re.MULTILINE))
    for base in bases:
        base = arguments[base[2:-1]] if base.startswith("${") else base
        assert re.search(r"@sha256:[0-9a-f]{64}$|:v?\d+\.\d+\.\d+", base), base
    assert re.findall(r"^USER (\S+)", text, re.MULTILINE)[-1] == "10001:10001"


@pytest.mark.parametrize("name", IMAGES)
def test_every_requirement_is_in_the_lock(name: str) -> None:
    lock = (ROOT / "requirements" / "dev.txt").read_text()
    locked = set(re.findall(r"^([a-z0-9-]+)==", lock, re.MULTILINE))
    wanted = names(ROOT / "requirements" / "images" / f"{name}.in")
    assert len(wanted) > 10 and wanted <= locked | UNPINNED


def test_the_images_use_the_versions_of_the_makefile() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for name, pin in (("UV_VERSION", r"\S+"), ("TORCH_VERSION", r"\S+")):
        wanted = re.search(rf"^{name}\s*:= ({pin})", makefile, re.MULTILINE)
        assert wanted is not None
        for image in ("orchestrator", "trainer"):
            assert f"ARG {name}={wanted[1]}\n" in dockerfile(image)
    uv = re.search(r"^UV_VERSION\s*:= (\S+)", makefile, re.MULTILINE)
    assert uv is not None and f"astral-sh/uv:{uv[1]} " in dockerfile("server")


def test_the_server_is_of_a_version_with_an_adapter() -> None:
    from tide_platform.engine.support import ADAPTERS

    tags = re.findall(r"lmsysorg/sglang:v(\d+\.\d+\.\d+)", dockerfile("server"))
    assert len(tags) == 2 and set(tags) <= set(ADAPTERS)
    assert "tide_platform.engine.selfcheck" in dockerfile("server")


def test_what_is_sent_to_a_build_is_what_it_copies() -> None:
    kept = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    assert all((ROOT / name).exists() for name in kept)
    assert {"tide_platform", "assets", "resources", "requirements", "drafts", "pyproject.toml"} <= set(kept)
    assert not {"tests", ".git", ".tide"} & set(kept)
