"""Samples that a benchmark captures once, by a server of its own, and keeps in its folder."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path

from tide_platform.capture.record import Sample
from tide_platform.config import Settings, TideError
from tide_platform.serving.workloads import Prompt

Prompts = Mapping[str, Sequence[Prompt]]  # by the tenant that they are sent as


class NotCaptured(TideError):
    """The server captured fewer samples than were sent."""

    def __init__(self, tenant: str, found: int, wanted: int):
        super().__init__(f"{found} of {wanted} samples of tenant {tenant} were captured; run it again")
        self.tenant, self.found, self.wanted = tenant, found, wanted


def captured(
    settings: Settings,
    folder: Path,
    prompts: Prompts,
    say: Callable[[str], None],
    *,
    new_tokens: int,
    concurrency: int,
) -> dict[str, list[Sample]]:
    """A sample for each prompt, by tenant, in the order of the prompts; those that ``folder`` does not hold
    yet are captured first, by a server with ``settings``. An interrupted call goes on where it was.

    Raises :class:`NotCaptured`.
    """
    from tide_platform.serving.chat import encode_prompts
    from tide_platform.serving.target import resolve_target
    from tide_platform.serving.traffic import run_traffic

    target = resolve_target(settings)
    ids = {tenant: [tuple(x) for x in encode_prompts(target, of)] for tenant, of in prompts.items()}
    held = _held(folder)
    missing = {
        tenant: [p for p, key in zip(of, ids[tenant], strict=True) if (tenant, key) not in held]
        for tenant, of in prompts.items()
    }
    if any(missing.values()):
        from tide_platform.bench.server import served

        with served(settings, folder) as server:
            for tenant, of in missing.items():
                if of:
                    say(f"capturing {len(of)} samples of tenant {tenant}")
                    run_traffic(
                        server.url,
                        of,
                        server.target,
                        concurrency=concurrency,
                        max_new_tokens=new_tokens,
                        capture=True,
                        tenant=tenant,
                    )
        held = _held(folder)
    for tenant, keys in ids.items():
        found = sum((tenant, key) in held for key in keys)
        if found < len(keys):
            raise NotCaptured(tenant, found, len(keys))
    return {tenant: [held[tenant, key] for key in keys] for tenant, keys in ids.items()}


def _held(folder: Path) -> dict[tuple[str, tuple[int, ...]], Sample]:
    """Whole requests in the folder's sealed segments, by tenant and prompt."""
    return {(s.meta.tenant, _prompt(s)): s for s in _samples(folder) if s.meta.start_pos == 0}


def _samples(folder: Path) -> Iterator[Sample]:
    from tide_platform.capture.segment import read_segment
    from tide_platform.capture.spool import sealed_segments

    spool = folder / "state" / "spool"
    segments = sealed_segments(spool) if spool.exists() else []
    return chain.from_iterable(read_segment(path)[1] for path in segments)


def _prompt(sample: Sample) -> tuple[int, ...]:
    return tuple(sample.tensors["input_ids"][: sample.meta.prompt_tokens].tolist())
