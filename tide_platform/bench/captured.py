"""Samples for an experiment, captured once from a server of its own; an interrupted capture goes on."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tide_platform.capture.record import Sample
from tide_platform.config import Settings, TideError

if TYPE_CHECKING:
    from tide_platform.serving.workloads import Prompt


class NotCaptured(TideError):
    """The server captured fewer samples than were sent. ``errors``: of requests that failed."""

    def __init__(self, tenant: str, found: int, wanted: int, errors: Sequence[str], log: Path):
        why = (
            f"{len(errors)} requests failed, the last: {errors[-1]}" if errors else f"the server's log: {log}"
        )
        super().__init__(
            f"{found} of {wanted} samples of tenant {tenant} were captured ({why}); what is there is kept, "
            "the same command sends the others again"
        )
        self.tenant, self.found, self.wanted, self.errors = tenant, found, wanted, errors


def request_id(tenant: str, number: int) -> str:
    """The id of the request that sends a tenant's prompt ``number``."""
    return f"{tenant}-{number:04d}"


def captured(
    settings: Settings,
    folder: Path,
    prompts: "Mapping[str, Sequence[Prompt]]",
    *,
    new_tokens: int,
    concurrency: int,
    temperatures: Mapping[str, float] | None = None,
    say: Callable[[str], None],
) -> dict[str, list[Sample]]:
    """By tenant, the sample of each of its ``prompts``, in their order: those in ``folder``, the others sent
    to a server with these settings, whose capture keeps everything in bf16.

    ``temperatures``: of tenants that are not greedy. Raises :class:`NotCaptured`.
    """
    from tide_platform.serving.own_server import LOG

    samples = _found(folder)
    missing, errors = _missing(samples, prompts), list[str]()
    if any(missing.values()):
        whole = settings.model_copy(deep=True)
        whole.capture.enabled, whole.capture.sampling_rate, whole.capture.default = True, 1.0, "allow"
        whole.capture.aux_format = "bf16"
        errors = _send(whole, folder, prompts, missing, new_tokens, concurrency, temperatures or {}, say)
        samples = _found(folder)
    for tenant, left in _missing(samples, prompts).items():
        if left:
            wanted = len(prompts[tenant])
            raise NotCaptured(tenant, wanted - len(left), wanted, errors, folder / LOG)
    return {
        tenant: [samples[request_id(tenant, number)] for number in range(len(of))]
        for tenant, of in prompts.items()
    }


def _found(folder: Path) -> dict[str, Sample]:
    """Samples by request; one that an interrupted run aborted is none."""
    from tide_platform.capture.segment import read_segment
    from tide_platform.capture.spool import sealed_segments

    spool = folder / "state" / "spool"
    paths = sealed_segments(spool) if spool.exists() else []
    samples = (sample for path in paths for sample in read_segment(path)[1])
    return {s.meta.request_id: s for s in samples if "aborted" not in s.meta.flags}


def _missing(
    samples: Mapping[str, Sample], prompts: "Mapping[str, Sequence[Prompt]]"
) -> dict[str, list[int]]:
    """By tenant, the numbers of the prompts without a sample."""
    return {
        tenant: [number for number in range(len(of)) if request_id(tenant, number) not in samples]
        for tenant, of in prompts.items()
    }


def _send(
    settings: Settings,
    folder: Path,
    prompts: "Mapping[str, Sequence[Prompt]]",
    missing: Mapping[str, Sequence[int]],
    new_tokens: int,
    concurrency: int,
    temperatures: Mapping[str, float],
    say: Callable[[str], None],
) -> list[str]:
    """The errors of requests that failed."""
    from tide_platform.serving.chat import encode_prompts
    from tide_platform.serving.client import GenerateRequest
    from tide_platform.serving.own_server import served
    from tide_platform.serving.traffic import send

    errors: list[str] = []
    with served(settings, folder) as server:
        for tenant, numbers in missing.items():
            if not numbers:
                continue
            say(f"capturing {len(numbers)} samples of tenant {tenant}")
            inputs = encode_prompts(server.target, [prompts[tenant][number] for number in numbers])
            requests = [
                GenerateRequest(
                    ids,
                    new_tokens,
                    temperatures.get(tenant, 0.0),
                    capture=True,
                    tenant=tenant,
                    rid=request_id(tenant, number),
                )
                for number, ids in zip(numbers, inputs, strict=True)
            ]
            errors += asyncio.run(send(server.url, requests, concurrency)).errors
    return errors
