"""Does an SGLang version keep what its adapter relies on? Run by that version's own Python.

``python -m tests.contract.probe GIVEN.json OUT.json``: given are the launch plans' command lines and an
engine configuration, made by the platform's Python. Every check is a function of a :class:`Contract`; one
that raises found a breach. The mutants are contracts with one thing wrong: a check that lets its mutant pass
is void.
"""

import dataclasses
import json
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any


@dataclass(frozen=True)
class Contract:
    """What the adapter, the hooks and the launcher take for granted of a version."""

    version: str
    hooks: Any  # engine.hooks.Hooks
    targets: dict[str, Callable[..., Any]]
    sglang: Any  # the module that knows the version's objects
    argvs: dict[str, list[str]]
    refused: dict[str, list[str]]  # refused feature -> the flags that ask for it
    plugin_group: str = "sglang.srt.plugins"
    metrics: tuple[str, ...] = ("spec_accept_length", "spec_accept_rate", "spec_verify_calls_total")
    meta_info: tuple[str, ...] = (
        "spec_verify_ct",
        "spec_num_correct_drafts",
        "spec_correct_drafts_histogram",
        "cached_tokens",
    )
    arguments: tuple[str, ...] = ()  # names of ServerArgs read beside the support table's
    rope: Callable[..., Any] = field(default_factory=lambda: draft_rope)  # of a draft's config
    logits_of: tuple[str, ...] = ("self", "input_ids", "hidden_states")  # the logits processor's first


def draft_rope(draft: Any, positions: Any) -> Any:
    """``cos | sin`` [L, D] that the trainer rotates with, half of each as SGLang keeps them."""
    import torch

    from tide_platform.draft.rope import frequencies, rotation

    inverse, scale = frequencies(draft.rope, draft.head_dim, draft.max_position_embeddings)
    return torch.cat([x.chunk(2, -1)[0] for x in rotation(positions, inverse, scale)], -1)


def load(given: dict[str, Any]) -> Contract:
    from tide_platform.config.engine import EngineConfig
    from tide_platform.engine.hooks import Hooks
    from tide_platform.engine.support import adapter_module

    installed = version("sglang")
    adapter = import_module(adapter_module(installed))
    sglang = import_module(adapter_module(installed).replace("adapter_", "sglang_"))
    hooks = Hooks(EngineConfig.model_validate(given["engine"]), sglang, lambda: [])
    return Contract(
        version=installed,
        hooks=hooks,
        targets=adapter.targets(hooks),
        sglang=sglang,
        argvs=given["argvs"],
        refused=given["refused"],
        arguments=tuple(given["arguments"]),
    )


def mutants(contract: Contract) -> dict[str, tuple[str, Contract]]:
    """Mutant -> (the check that must find it, the contract with one thing wrong)."""
    targets = contract.targets
    sample = next(name for name in targets if name.endswith(".eagle_sample"))
    verify = targets[sample]

    def narrow(original: Any, verify_input: Any, batch: Any) -> Any:
        return verify(original, verify_input, batch, None)

    def renamed(old: str, new: str) -> dict[str, Any]:
        return {name.replace(old, new): hook for name, hook in targets.items()}

    def spoken(**changed: Any) -> Any:
        return SimpleNamespace(**{**vars(contract.sglang), **changed})

    def unscaled(draft: Any, positions: Any) -> Any:
        table = contract.rope(draft, positions)
        return table / table[:1, : draft.head_dim // 2].max()  # cos of position 0 is the scale

    refused = dict(contract.refused)
    refused[next(iter(refused))] = []
    flagged = {**contract.argvs, "cpu": [*contract.argvs["cpu"], "--no-such-flag"]}
    link = SimpleNamespace(link=lambda manager: _DeafLink(manager))
    change = dataclasses.replace
    return {
        "a hooked function renamed": (
            "targets",
            change(contract, targets=renamed("eagle_sample", "eagle_take")),
        ),
        "a hooked class renamed": (
            "targets",
            change(contract, targets=renamed("EAGLEWorkerV2", "EAGLEWorkerV3")),
        ),
        "logits of another parameter": ("batches", change(contract, logits_of=("self", "hidden_states"))),
        "a hook with too few parameters": ("calls", change(contract, targets={**targets, sample: narrow})),
        "a flag that is gone": ("flags", change(contract, argvs=flagged)),
        "a setting that is gone": ("arguments", change(contract, arguments=("speculative_nothing",))),
        "a feature that is let through": ("refusals", change(contract, refused=refused)),
        "a reply of another form": (
            "messages",
            change(contract, sglang=spoken(answer=lambda payload: SimpleNamespace(updated=True))),
        ),
        "a link that asks by another name": ("messages", change(contract, sglang=spoken(**vars(link)))),
        "a request field misread": (
            "requests",
            change(contract, sglang=spoken(read_request=lambda req: SimpleNamespace(rid=req.rid))),
        ),
        "a metric renamed": ("names", change(contract, metrics=("spec_nothing",))),
        "a reply's field renamed": ("names", change(contract, meta_info=("spec_nothing",))),
        "another verify rule": ("verify_rule", change(contract, version=_other(contract.version))),
        "a rope that is not scaled": ("rope", change(contract, rope=unscaled)),
        "another plugin group": ("plugin", change(contract, plugin_group="sglang.plugins")),
    }


class _DeafLink:
    def __init__(self, manager: Any):
        self.manager = manager

    async def call(self, message: dict[str, Any]) -> list[dict[str, Any]]:
        return await self.manager.tide_communicator(message)


def _other(known: str) -> str:
    from tide_platform.engine.support import ADAPTERS

    return next(name for name in ADAPTERS if name != known)


def problem(check: Callable[[Contract], None], contract: Contract) -> str | None:
    try:
        check(contract)
    except (Exception, SystemExit) as error:  # noqa: BLE001 (whatever a check raises is its finding)
        return "".join(traceback.format_exception_only(error)).strip() or repr(error)
    return None


def main() -> None:
    from tests.contract import checks

    contract = load(json.loads(Path(sys.argv[1]).read_text()))
    found = {name: problem(getattr(checks, name), contract) for name in checks.CHECKS}
    killed = {
        name: problem(getattr(checks, check), mutant) for name, (check, mutant) in mutants(contract).items()
    }
    result = {"version": contract.version, "checks": found, "mutants": killed}
    Path(sys.argv[2]).write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    main()
