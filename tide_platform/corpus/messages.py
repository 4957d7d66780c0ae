"""Messages of both formats in the one form that chat templates take: OpenAI's, contents as plain text."""

import json
from typing import Any

from tide_platform.corpus.errors import BadRecord

_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "system": "system",
    "developer": "system",  # templates know the older name
    "tool": "tool",
    "function": "tool",
    "function_response": "tool",
    "observation": "tool",
}
_KEPT = ("name", "tool_call_id", "reasoning_content")


def from_sharegpt(turns: Any, system: Any = None) -> list[dict[str, Any]]:
    """``[{from, value}]``; ``system``: a prompt in a column of its own. Raises :class:`BadRecord`."""
    messages = []
    for number, turn in enumerate(turns, 1):
        if not isinstance(turn, dict) or not isinstance(turn.get("value"), str):
            raise BadRecord(f"turn {number} must be an object with `from` and a text as `value`")
        messages.append({"role": _role(number, turn.get("from")), "content": turn["value"]})
    return _checked(messages, system)


def from_openai(turns: Any, system: Any = None) -> list[dict[str, Any]]:
    """``[{role, content, tool_calls?, …}]``, each tool call with arguments of its own shape.

    Raises :class:`BadRecord`.
    """
    messages = []
    for number, turn in enumerate(turns, 1):
        if not isinstance(turn, dict):
            raise BadRecord(f"message {number} must be an object with `role` and `content`")
        message: dict[str, Any] = {
            "role": _role(number, turn.get("role")),
            "content": _content(number, turn.get("content")),
        }
        message |= {key: turn[key] for key in _KEPT if turn.get(key) is not None}
        calls = turn.get("tool_calls")
        if calls is None and turn.get("function_call") is not None:  # before OpenAI named them tools
            calls = [{"type": "function", "function": turn["function_call"]}]
        if calls:
            message["tool_calls"] = _tool_calls(number, calls)
        messages.append(message)
    return _checked(messages, system)


def answers(messages: list[dict[str, Any]]) -> list[int]:
    """Indices of the assistant's messages."""
    return [index for index, message in enumerate(messages) if message["role"] == "assistant"]


def _checked(messages: list[dict[str, Any]], system: Any) -> list[dict[str, Any]]:
    if isinstance(system, str) and system.strip() and messages and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": system}, *messages]
    places = answers(messages)
    if not places:
        raise BadRecord("no answer: none of its messages is the assistant's")
    if not any(message["role"] == "user" for message in messages[: places[0]]):
        raise BadRecord("its first answer follows no prompt")
    for index in places:
        if not messages[index]["content"].strip() and not messages[index].get("tool_calls"):
            raise BadRecord(f"message {index + 1}: the answer is empty")
    return messages[: places[-1] + 1]  # a prompt that nobody answered teaches nothing


def _role(number: int, name: Any) -> str:
    role = _ROLES.get(name.strip().lower()) if isinstance(name, str) else None
    if role is None:
        raise BadRecord(f"message {number}: role {name!r} is not one of {', '.join(_ROLES)}")
    return role


def _content(number: int, content: Any) -> str:
    if content is None:  # beside tool calls; an empty answer is refused above
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadRecord(f"message {number}: `content` must be a text or a list of parts")
    parts = []
    for part in content:
        text = part if isinstance(part, str) else part.get("text") if isinstance(part, dict) else None
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise BadRecord(f"message {number}: a part of type {kind!r} is not text")
        parts.append(text)
    return "".join(parts)


def _tool_calls(number: int, calls: Any) -> list[dict[str, Any]]:
    """Arguments as objects, which is what templates print; OpenAI's API gives them as JSON text."""
    if not isinstance(calls, list):
        raise BadRecord(f"message {number}: `tool_calls` must be a list")
    found = []
    for call in calls:
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise BadRecord(f"message {number}: a tool call needs a `function` with a `name`")
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except ValueError:  # some models say plain text; a template prints it as it is
                arguments = function["arguments"]
        named = {"name": function["name"], "arguments": {} if arguments is None else arguments}
        found.append({"type": "function", "function": named} | ({"id": call["id"]} if "id" in call else {}))
    return found
