"""The checks of the contract. Each raises where the installed SGLang does not keep it; see ``probe.py``."""

import argparse
import ast
import asyncio
import inspect
import pkgutil
from array import array
from collections.abc import Callable, Iterator
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from tests.contract.probe import Contract

CHECKS = (
    "plugin",
    "targets",
    "calls",
    "applied",
    "flags",
    "arguments",
    "refusals",
    "resolved",
    "messages",
    "updates",
    "requests",
    "options",
    "batches",
    "verify_result",
    "weights",
    "data_ranks",
    "names",
    "verify_rule",
    "rope",
)


def source_of(what: Any) -> str:
    return inspect.getsource(inspect.unwrap(what) if callable(what) else what)


def need(names: Any, text: str, where: str) -> None:
    missing = [name for name in names if name not in text]
    assert not missing, f"{where}: {missing}"


# ---- hooks ----


def plugin(contract: Contract) -> None:
    """SGLang looks for plugins in the group that the project is installed under."""
    from sglang.srt import plugins

    assert any(e.name == "tide" for e in entry_points(group=contract.plugin_group)), contract.plugin_group
    need([f'"{contract.plugin_group}"'], source_of(plugins), "sglang.srt.plugins")


def targets(contract: Contract) -> None:
    """Every hooked name is a function."""
    problems = []
    for target in contract.targets:
        try:
            assert callable(pkgutil.resolve_name(target)), f"{target} is no function"
        except (ImportError, AttributeError, AssertionError) as error:
            problems.append(f"{target}: {error}")
    assert not problems, "; ".join(problems)


def calls(contract: Contract) -> None:
    """Each hook takes all that SGLang may give the function: by its signature, and as it is called."""
    problems = []
    for target, hook in contract.targets.items():
        original = inspect.signature(inspect.unwrap(pkgutil.resolve_name(target)))
        mine = inspect.signature(hook)
        for positional, named in (*_extremes(original), *_calls_of(target, original)):
            try:
                mine.bind(None, *[None] * positional, **dict.fromkeys(named))
            except TypeError as error:
                problems.append(f"{target}({positional} positional, {sorted(named)}): {error}")
    assert not problems, "; ".join(problems)


def _extremes(signature: inspect.Signature) -> Iterator[tuple[int, set[str]]]:
    """The calls with fewest and with most arguments."""
    kinds = inspect.Parameter
    parameters = signature.parameters.values()
    positional = [p for p in parameters if p.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)]
    only_named = [p for p in parameters if p.kind is kinds.KEYWORD_ONLY]
    yield (
        len([p for p in positional if p.default is kinds.empty]),
        {p.name for p in only_named if p.default is kinds.empty},
    )
    yield len(positional), {p.name for p in only_named}


def _calls_of(target: str, signature: inspect.Signature) -> Iterator[tuple[int, set[str]]]:
    """(positional arguments, names) of the calls in SGLang's own code that fit the function."""
    name = target.rpartition(".")[2]
    if name.startswith("__"):
        return
    method = "self" in signature.parameters
    for call in _parsed_calls().get(name, []):
        named = {keyword.arg for keyword in call.keywords if keyword.arg}
        starred = any(isinstance(a, ast.Starred) for a in call.args) or len(named) < len(call.keywords)
        positional = len(call.args) + method
        try:
            signature.bind(*[None] * positional, **dict.fromkeys(named))
        except TypeError:
            continue  # another function of that name
        if not starred:
            yield positional, named


@cache
def _parsed_calls() -> dict[str, list[ast.Call]]:
    """Calls in the folders that use what is hooked, by the name that is called."""
    import sglang.srt

    root = Path(sglang.srt.__path__[0])
    found: dict[str, list[ast.Call]] = {}
    folders = ("managers", "speculative", "entrypoints", "model_executor", "utils")
    for path in (p for folder in folders for p in (root / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                name = getattr(node.func, "attr", None) or getattr(node.func, "id", "")
                found.setdefault(name, []).append(node)
    return found


def applied(contract: Contract) -> None:
    """SGLang's registry takes every hook, and puts it where the callers look."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for target, hook in contract.targets.items():
        HookRegistry.register(target, hook, HookType.AROUND)
    HookRegistry.apply_hooks()
    missing = sorted(contract.targets.keys() - HookRegistry._patched)
    assert not missing, missing
    from sglang.srt.speculative import eagle_utils

    assert hasattr(eagle_utils.eagle_sample, "__wrapped__")


# ---- launch plan ----


def _parse(argv: list[str]) -> argparse.Namespace:
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser(exit_on_error=False)
    ServerArgs.add_cli_args(parser)
    known, unknown = parser.parse_known_args(argv[3:])  # python -m sglang.launch_server
    assert not unknown, f"not accepted: {unknown}"
    return known


def flags(contract: Contract) -> None:
    """The version's parser takes every flag and value of the launch plan."""
    for name, argv in contract.argvs.items():
        parsed = _parse(argv)
        assert parsed.model_path and parsed.port, name


class _Spy:
    """Answers every name, and remembers it."""

    def __init__(self, values: dict[str, Any]):
        self._values, self.read = values, set()

    def __getattr__(self, name: str) -> Any:
        self.read.add(name)
        return self._values.get(name)


def arguments(contract: Contract) -> None:
    """The names that the support table and the hooks read are ServerArgs' own."""
    from sglang.srt.server_args import ServerArgs

    from tide_platform.engine.support import FEATURES

    spy = _Spy({"speculative_algorithm": "EAGLE3", "pp_size": 1, "tokenizer_worker_num": 1})
    for feature in FEATURES:
        if feature.server:
            feature.server(spy)
    fields = getattr(ServerArgs, "__dataclass_fields__", None) or ServerArgs.__struct_fields__
    missing = ({*spy.read, *contract.arguments} - {"_values", "read"}) - set(fields)
    assert not missing, f"ServerArgs lacks {sorted(missing)}"


def refusals(contract: Contract) -> None:
    """The flag of each refused feature leads to its refusal, by name."""
    from tide_platform.engine.support import UnsupportedFeature, check_server

    for feature, asking in contract.refused.items():
        try:
            check_server(_parse([*contract.argvs["cpu_k2"], *asking]))
        except UnsupportedFeature as error:
            assert error.feature == feature, f"{asking} is refused as {error.feature}, not {feature}"
        else:
            raise AssertionError(f"{asking} is let through, not refused as {feature}")


def resolved(contract: Contract) -> None:
    """SGLang resolves the plain launch plan to what was asked, and the support table lets it pass."""
    from sglang.srt.server_args import ServerArgs

    from tide_platform.engine.support import check_server

    args = ServerArgs.from_cli_args(_parse(contract.argvs["cpu"]))
    if hasattr(args, "resolve_once"):
        args.resolve_once()
    view = contract.sglang.arguments(args)
    check_server(view)
    assert view.device == "cpu" and view.attention_backend == "torch_native", view.attention_backend
    assert view.disable_overlap_schedule and view.speculative_algorithm is None
    assert view.context_length == 256 and view.max_total_tokens == 2048 and view.enable_metrics


# ---- messages ----


def _over_the_wire(message: Any) -> Any:
    """Sent and received as this version's processes do."""
    import zmq
    from sglang.srt.managers import io_struct

    with zmq.Context() as context, context.socket(zmq.PAIR) as sender, context.socket(zmq.PAIR) as receiver:
        sender.bind("inproc://contract")
        receiver.connect("inproc://contract")
        if hasattr(io_struct, "sock_send"):
            io_struct.sock_send(sender, message)
            return io_struct.sock_recv(receiver)
        sender.send_pyobj(message)
        return receiver.recv_pyobj()


class _Manager:
    """Stands for TokenizerManager: what goes to the scheduler goes over the wire, to the hook and back."""

    def __init__(self, contract: Contract):
        self.contract, self.asked, self.sent, self.is_pause = contract, [], [], False

    def auto_create_handle_loop(self) -> None: ...

    def __getattr__(self, name: str) -> Any:
        from sglang.srt.managers import tokenizer_control_mixin as mixin

        known = {spec[0] for spec in mixin._COMMUNICATOR_SPECS}
        assert name.removesuffix("_communicator") in known, f"no {name}"
        return self.communicate

    async def communicate(self, message: Any) -> list[Any]:
        received = _over_the_wire(message)
        self.asked.append(type(received).__name__)
        sglang = self.contract.sglang
        assert sglang.asked(received) is not None, f"{received} is not known for the plugin's"
        said = {"seen": sglang.asked(received)}
        ranks = (2, 0, 1)  # as they come
        return [_over_the_wire(sglang.answer(said | {"dp_rank": rank})) for rank in ranks]

    async def pause_generation(self, message: Any) -> None:
        self.sent.append(_over_the_wire(message))

    async def continue_generation(self, message: Any) -> None:
        self.sent.append(_over_the_wire(message))


def messages(contract: Contract) -> None:
    """What the routes ask reaches the hook on the scheduler, and its answer comes back; both as they were."""
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

    manager = _Manager(contract)
    link = contract.sglang.link(manager)
    message = {"op": "reload", "folder": "/d", "stamp": [1, 2, 3], "ignored": ["a"], "k": None, "on": True}
    told = [{"seen": message, "dp_rank": rank} for rank in range(3)]
    assert asyncio.run(link.call(message)) == told
    need(manager.asked, source_of(Scheduler.init_request_dispatcher), "the scheduler takes no message")
    assert link.paused() is False
    asyncio.run(link.pause())
    asyncio.run(link.resume())
    assert manager.sent[0].mode == "in_place"
    need(
        ["is_pause", "async def pause_generation", "async def continue_generation"],
        source_of(TokenizerManager),
        "",
    )


def updates(contract: Contract) -> None:
    """Each of SGLang's own weight updates is refused, in the reply that it expects."""
    hooked = [name for name in contract.targets if "SchedulerWeightUpdaterManager" in name]
    for target in hooked:
        function = inspect.unwrap(pkgutil.resolve_name(target))
        message = list(inspect.signature(function, eval_str=False).parameters.values())[1].annotation
        kind = message if isinstance(message, type) else getattr(inspect.getmodule(function), message)
        required = [p.name for p in inspect.signature(kind).parameters.values() if p.default is p.empty]
        reply = _over_the_wire(contract.sglang.refused_update(kind(**dict.fromkeys(required)), "no"))
        assert reply.success is False and reply.message == "no", target


# ---- requests ----


def _request(**changed: Any) -> Any:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.sampling_params import SamplingParams

    sampling = {"max_new_tokens": 4, "temperature": 0.7, "top_p": 0.9, "top_k": 20} | changed
    params = SamplingParams(**sampling)
    if hasattr(params, "normalize"):
        params.normalize(None)
    return Req("rid-1", "text", array("q", [5, 6, 7]), params, vocab_size=64)


def requests(contract: Contract) -> None:
    """A request of SGLang's is read as it was asked, and has what the hooks look at."""
    from sglang.srt.managers.schedule_batch import FINISH_LENGTH

    read = contract.sglang.read_request
    one = read(_request(custom_params={"tide": {"train": "allow", "tenant": "a"}}))
    assert (one.rid, one.prompt_tokens, one.temperature, one.top_p, one.top_k) == ("rid-1", 3, 0.7, 0.9, 20)
    assert one.options == {"train": "allow", "tenant": "a"}
    assert not (one.penalties or one.grammar or one.thinking or one.unsupported)
    assert read(_request(temperature=0.0)).temperature == 0.0
    assert read(_request(top_k=-1)).top_k == -1
    for name, value in {"frequency_penalty": 0.5, "repetition_penalty": 1.1, "min_new_tokens": 2}.items():
        req = _request()
        setattr(req.sampling_params, name, value)
        assert read(req).penalties, name
    req = _request()
    assert not contract.sglang.is_health_check(req) and not req.finished()
    req.rid = "HEALTH_CHECK_1"
    assert contract.sglang.is_health_check(req)
    assert (req.spec_verify_ct, req.spec_num_correct_drafts, req.retraction_count) == (0, 0, 0)
    req.output_ids.extend([8, 9])
    req.finished_reason = FINISH_LENGTH(2)
    assert req.finished() and req.finished_reason.to_json()["type"] == "length"
    assert [*req.origin_input_ids, *req.output_ids_through_stop] == [5, 6, 7, 8, 9]
    for name, value in {"lora_id": "l", "multimodal_inputs": object(), "input_embeds": [[0.0]]}.items():
        req = _request()
        assert hasattr(req, name), name
        setattr(req, name, value)
        assert read(req).unsupported in ("lora", "multimodal", "input_embeds")


def options(contract: Contract) -> None:
    """What the HTTP process made of a request's word reaches the scheduler as it was."""
    import msgspec
    from starlette.datastructures import Headers

    said = Headers({"x-tide-train": "allow", "x-tide-tenant": "a", "x-tide-conversation": "c"})
    for peer in ("127.0.0.1", "192.0.2.1"):  # believed; not believed, which is told on
        http = SimpleNamespace(client=SimpleNamespace(host=peer), headers=said)
        asked = SimpleNamespace(sampling_params={"custom_params": {"tide": {"train": "maybe"}}})
        passed = contract.hooks.on_generate(lambda manager, obj, request: obj, None, asked, http)
        params = _request(**passed.sampling_params).sampling_params
        if isinstance(params, msgspec.Struct):
            params = msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=type(params))
        assert params.custom_params["tide"] == passed.sampling_params["custom_params"]["tide"]
        assert contract.sglang.read_request(_request(**passed.sampling_params)).options["train"] == "deny"


def batches(contract: Contract) -> None:
    """Batches, verify inputs and logits have the fields that the hooks read; a bias changes logits."""
    from sglang.srt.layers.logits_processor import LogitsProcessor, LogitsProcessorOutput
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
    from sglang.srt.speculative.eagle_info import EagleVerifyInput

    from tide_platform.engine.last_hidden import MARK

    for kind, names in {
        ScheduleBatch: ("reqs", "prefix_lens", "extend_lens", "seq_lens", "forward_mode", "sampling_info"),
        SamplingBatchInfo: ("acc_additive_penalties", "acc_scaling_penalties", "logit_bias"),
        EagleVerifyInput: ("draft_token_num", "draft_token"),
        LogitsProcessorOutput: ("next_token_logits", "hidden_states"),
    }.items():
        fields = {name for base in kind.__mro__ for name in getattr(base, "__annotations__", {})}
        assert fields >= set(names), f"{kind.__name__} lacks {sorted(set(names) - fields)}"
    assert "is_extend_in_batch" in source_of(ScheduleBatch)
    setattr(LogitsProcessorOutput(next_token_logits=None), MARK, 1)  # where the last hidden states are noted
    given = list(inspect.signature(LogitsProcessor.forward).parameters)
    assert tuple(given[:3]) == contract.logits_of, given
    quiet = dict.fromkeys((f for f in SamplingBatchInfo.__annotations__), None)
    assert not contract.sglang.changes_logits(SimpleNamespace(**quiet))
    assert contract.sglang.changes_logits(SimpleNamespace(**{**quiet, "logit_bias": 1}))


def verify_result(contract: Contract) -> None:
    """``eagle_sample`` returns the predictions, then the accepted counts with the bonus token."""
    from sglang.srt.speculative import eagle_utils

    function = ast.parse(source_of(eagle_utils.eagle_sample)).body[0]
    nodes = list(ast.walk(function))
    assigned = {ast.unparse(n.targets[0]): ast.unparse(n.value) for n in nodes if isinstance(n, ast.Assign)}
    last = max((n for n in nodes if isinstance(n, ast.Return)), key=lambda node: node.lineno)
    assert isinstance(last.value, ast.Tuple)
    first, second = (ast.unparse(element) for element in last.value.elts[:2])
    assert first == "predict" and assigned.get(second, second) == "num_correct_drafts + 1", (first, second)


def weights(contract: Contract) -> None:
    """The draft's model, its vocabulary map and SGLang's own loading are where a reload looks for them."""
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.model_loader.loader import DefaultModelLoader
    from sglang.srt.models.llama_eagle3 import LlamaForCausalLMEagle3
    from sglang.srt.speculative.eagle_worker_v2 import EagleDraftWorker, EAGLEWorkerV2

    given = list(inspect.signature(DefaultModelLoader.load_weights_and_postprocess).parameters)
    assert given == ["model", "weights", "target_device"], given
    need(["self._draft_worker = "], source_of(EAGLEWorkerV2), "EAGLEWorkerV2")
    need(["self.draft_runner = ", "self.hot_token_id = "], source_of(EagleDraftWorker), "EagleDraftWorker")
    need(["self.hot_token_id = "], source_of(LlamaForCausalLMEagle3), "LlamaForCausalLMEagle3")
    need(["self.tp_cpu_group = ", "self.draft_worker", "self.tp_worker"], source_of(Scheduler), "Scheduler")
    need(["attn_tp_rank"], source_of(contract.sglang.writes), "writes")


def data_ranks(contract: Contract) -> None:
    """Every data-parallel rank answers a control message; under DP attention all get it at the same step."""
    from sglang.srt.managers.data_parallel_controller import DataParallelController
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.managers.scheduler_components.request_receiver import SchedulerRequestReceiver
    from sglang.srt.managers.tokenizer_control_mixin import TokenizerControlMixin

    numbers = ("dp_size", "num_dp_ranks")
    source = source_of(TokenizerControlMixin.init_communicators)
    assert any(name in source for name in numbers), f"a communicator waits for another number: {source}"
    source = source_of(contract.sglang.data_rank)
    assert "dp_rank" in source and any(name in source for name in numbers), source
    need(["def send_control_message"], source_of(DataParallelController), "DataParallelController")
    need(
        ["_split_work_and_control_reqs", "tp_group.ranks[0]"],
        source_of(SchedulerRequestReceiver),
        "how control messages reach all ranks",
    )
    loop = source_of(Scheduler.event_loop_normal)
    receiving = (
        "self.ingest_requests()" if "self.ingest_requests()" in loop else "self.process_input_requests("
    )
    order = [loop.find(part) for part in (receiving, "if self._engine_paused:", "self.run_batch(")]
    assert order == sorted(order) and -1 not in order, f"a pause takes effect elsewhere: {loop}"


def names(contract: Contract) -> None:
    """The fields of replies and the metrics that the platform reads."""
    from sglang.srt.managers import tokenizer_manager

    text = source_of(tokenizer_manager)
    need(
        [f'meta_info["{name}"]' for name in contract.meta_info if name.startswith("spec_")], text, "meta_info"
    )
    need([f'"{name}"' for name in contract.meta_info if not name.startswith("spec_")], text, "meta_info")
    collector = _metrics_source()
    need([f'"sglang:{name}"' for name in contract.metrics], collector, "metrics")


def _metrics_source() -> str:
    import sglang.srt

    root = Path(sglang.srt.__path__[0])
    return "".join(path.read_text() for path in root.rglob("metrics_collector.py"))


def verify_rule(contract: Contract) -> None:
    """The rule that the platform stores is the branch that SGLang takes."""
    from tide_platform.engine.support import verify_rule as rule

    taken = _greedy_branch()
    for device in ("cpu", "cuda", "rocm"):
        for rejection in (False, True):
            said = rule(device, contract.version, rejection)
            greedy = taken(device, rejection)
            assert (said == "greedy") == greedy, (
                f"{device}, rejection {rejection}: greedy {greedy}, said {said}"
            )
            assert greedy or (said == "rejection") == rejection


def _greedy_branch() -> Callable[[str, bool], bool]:
    """Whether a batch with a temperature is verified greedily, by the installed code."""
    from sglang.srt.speculative import eagle_utils

    asks = getattr(eagle_utils, "_verify_uses_greedy", None)
    if asks is not None:
        return lambda device, rejection: asks(
            is_all_greedy=False,
            is_cpu=device == "cpu",
            is_hip=device == "rocm",
            is_xpu=False,
            use_rejection_sampling=rejection,
        )
    function = ast.parse(source_of(eagle_utils.eagle_sample)).body[0]
    branches = [ast.unparse(n.test) for n in ast.walk(function) if isinstance(n, ast.If)]
    test = next(text for text in branches if "is_all_greedy" in text)
    return lambda device, rejection: bool(
        eval(  # the condition of the installed source, with the device's flags
            test,
            {
                "sampling_info": SimpleNamespace(is_all_greedy=False),
                "_is_npu": False,
                "_is_hip": device == "rocm",
            },
        )
    )


# ---- the draft's numbers ----

_ROPES: tuple[dict[str, Any], ...] = (
    {"rope_type": "default", "rope_theta": 1e5},
    {"rope_type": "linear", "rope_theta": 1e4, "factor": 4},  # an integer: SGLang 0.5.14 iterates over it
    {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
    {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 128},
    {
        "rope_type": "yarn",  # gpt-oss
        "rope_theta": 1.5e5,
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 64,
    },
)


def rope(contract: Contract) -> None:
    """What is trained is what is served: cos and sin of every rope type, from the exported config.json."""
    import torch
    from sglang.srt.layers.rotary_embedding import base as embedding
    from sglang.srt.layers.rotary_embedding import get_rope
    from transformers import LlamaConfig

    from tide_platform.draft.config import DraftConfig

    shape = {
        "hidden_size": 128,
        "intermediate_size": 8,
        "num_attention_heads": 2,
        "vocab_size": 9,
        "max_position_embeddings": 256,
    }
    # 0.5.14 asks the server's arguments, and there is no server; 0.5.23 knows that
    none = SimpleNamespace(rl_on_policy_target=None)
    with patch.object(embedding, "get_global_server_args", lambda: none, create=True):
        for rope in _ROPES:
            draft = DraftConfig.from_json(shape | {"rope_parameters": rope}, 12)
            config = LlamaConfig.from_dict(draft.to_json())
            theirs = get_rope(  # as models/llama.py calls it
                draft.head_dim,
                rotary_dim=draft.head_dim,
                max_position=config.max_position_embeddings,
                base=config.rope_parameters["rope_theta"],
                rope_scaling=config.rope_parameters,
            )
            table = theirs._compute_cos_sin_cache().float()[: shape["max_position_embeddings"]]
            ours = contract.rope(draft, torch.arange(len(table)))
            assert torch.allclose(ours, table, atol=1e-4), (rope, float((ours - table).abs().max()))
