"""What a user of the client gives and gets, as typed values. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

from baton.common.errors import BatonError, RequestError
from baton.common.messages import Timeline

Message = Mapping[str, Any]
Prompt = str | Sequence[int] | Sequence[Message]
"""A text or token ids to continue, or the messages of a conversation to answer."""


class Params(TypedDict, total=False):
    """How to answer. What is left out is the server's default."""

    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    seed: int
    stop: str | list[str]
    stop_token_ids: list[int]
    ignore_eos: bool
    timeout_s: float
    session_id: str
    priority: int  # smaller is sooner; 0 when not given, in jobs the cluster's jobs.priority
    response_format: dict[str, Any]  # OpenAI's: {"type": "json_schema", "json_schema": {"schema": ...}}
    structured_outputs: dict[str, Any]  # vLLM's: one of json, regex, choice, grammar
    tools: list[dict[str, Any]]  # OpenAI's: {"type": "function", "function": {"name": ..., "parameters": ...}}
    tool_choice: str | dict[str, Any]
    parallel_tool_calls: bool


class ClusterUnreachable(BatonError):
    """Nobody answers at that address, or the connection broke."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A function that the model wants to be called. `arguments` are JSON."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Answer:
    """A complete answer, and where its time went."""

    text: str
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    request_id: str
    ttft_s: float | None
    total_s: float
    placements: int
    timeline: Timeline
    tool_calls: tuple[ToolCall, ...] = ()

    @property
    def message(self) -> Message:
        """As the conversation goes on with it; what its tools said follows as messages of the role "tool"."""
        if not self.tool_calls:
            return {"role": "assistant", "content": self.text}
        calls = [
            {"id": one.id, "type": "function", "function": {"name": one.name, "arguments": one.arguments}}
            for one in self.tool_calls
        ]
        return {"role": "assistant", "content": self.text or None, "tool_calls": calls}


Outcome = Answer | RequestError
"""Of one request of a job."""


def is_one_prompt(prompts: object) -> bool:
    """Or several of them. Lists of texts are several; lists of token ids, and of messages, are one."""
    if isinstance(prompts, str):
        return True
    return isinstance(prompts, Sequence) and bool(prompts) and isinstance(prompts[0], int | Mapping)


def is_conversation(prompt: Prompt) -> bool:
    return not isinstance(prompt, str) and bool(prompt) and isinstance(prompt[0], Mapping)
