"""The cluster section: profiles, what goes before what, and what is refused."""

import pytest
from pydantic import ValidationError

from tide_platform.config import ConfigError, dump_settings, load_settings
from tide_platform.config.cluster import PROFILES, Cluster, TrainerPods


@pytest.mark.parametrize("profile", PROFILES)
def test_a_profile_gives_what_the_file_does_not_say(profile: str) -> None:
    pods = TrainerPods.model_validate({"profile": profile, "image": "tide-trainer:1"})
    for name, value in PROFILES[profile].items():
        assert pods.model_dump(mode="json", exclude_none=True)[name] == value
    assert pods.processes_per_pod == (pods.gpus or 1)


def test_the_files_word_goes_before_the_profiles() -> None:
    pods = TrainerPods.model_validate(
        {
            "profile": "mi250",
            "image": "tide-trainer:1",
            "gpus": 2,
            "env": {"NCCL_SOCKET_IFNAME": "hsn0"},
            "node_selector": {"pool": "old"},
        }
    )
    assert (pods.gpus, pods.gpu_resource) == (2, "amd.com/gpu")
    assert pods.env["NCCL_SOCKET_IFNAME"] == "hsn0" and pods.env["HSA_FORCE_FINE_GRAIN_PCIE"] == "1"
    assert pods.node_selector == {"amd.com/gpu.device-id": "740c", "pool": "old"}


def test_a_dump_reads_back(tmp_path) -> None:
    path = tmp_path / "tide.yaml"
    path.write_text(
        "cluster: {namespace: tide, trainer: {profile: h100, image: t}, serving: {service: tide-sglang}}"
    )
    settings = load_settings(path, {})
    path.write_text(dump_settings(settings))
    assert load_settings(path, {}) == settings


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("trainer: {profile: mi300, image: t}", "cluster.trainer.profile"),
        ("trainer: {profile: mi250}", "cluster.trainer.image"),
        ("serving: {}", "cluster.serving"),
        ("serving: {service: a, selector: b=c}", "cluster.serving"),
        ("context: prod", "cluster"),
    ],
)
def test_what_is_refused_is_named(tmp_path, text: str, named: str) -> None:
    path = tmp_path / "tide.yaml"
    path.write_text(f"cluster: {{{text}}}")
    with pytest.raises(ConfigError, match=named):
        load_settings(path, {})


def test_neither_part_needs_the_other() -> None:
    assert Cluster().trainer is None
    with pytest.raises(ValidationError):
        Cluster.model_validate({"nodes": 3})
