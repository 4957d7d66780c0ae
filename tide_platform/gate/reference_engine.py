"""The reference of a target that transformers can't run: the same engine, its cache and speculation unused.

The whole text, prompt and answer, is one prompt of a new request, with the prefix cache off: its rows come
from one causal pass of the target, no draft has touched them. What was captured came from a shorter prefill
and from verify rounds of k + 1 rows. Log-probabilities are those that SGLang itself returns for a prompt's
tokens, by another path than capture's. It shares the engine's own numerics and layer numbering with what it
is compared to: a layer id that engine and configuration both take wrongly is seen by ``--reference
transformers`` alone.
"""

from tide_platform.gate.example import Example, ask, collect
from tide_platform.gate.reference import Reference
from tide_platform.gate.states import to_float
from tide_platform.serving.own_server import Served


def engine_reference(server: Served, example: Example, text: list[int]) -> Reference:
    """Of an example's text. Raises ``NotCaptured`` and the client's errors."""
    rid = f"{example.answer.rid}-whole"
    # two tokens: a request that ends at its prefill has nothing to learn from and is not kept
    ask(server, rid, tuple(text), 2)
    sample, stream = collect(server, [rid])[rid]
    rows, width = sample.tensors["row_pos"].tolist(), stream.hidden_size
    assert rows[: len(text)] == list(range(len(text))), "the prefix cache is off"
    aux = to_float(sample.tensors["aux"])[: len(text)]
    entering = {
        layer: aux[:, n * width : (n + 1) * width] for n, layer in enumerate(example.stream.aux_layer_ids)
    }
    return Reference("engine", entering, _logp(server, text, stream.teacher_k))


def _logp(server: Served, text: list[int], top: int) -> dict[int, dict[int, float]]:
    """Position p -> the ``top`` likely next tokens' log-probabilities, from SGLang's own account."""
    reply = server.client.prompt_logprobs(text, top)
    # entry i tells of token i given those before it, that is of row i - 1; there is none for the first
    return {
        position - 1: {int(token): float(logp) for logp, token, *_ in entry}
        for position, entry in enumerate(reply)
        if entry
    }
