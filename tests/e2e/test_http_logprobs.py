"""`prompt_logprobs`, `echo` and `logprobs` over HTTP, as vLLM and OpenAI write them. The test plays the worker."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from http_loopback import Loopback, Served, saying, serving

from baton.common.engine.fake_answer import fake_prompt_logprobs

PROMPT = "Héy"
ROWS = fake_prompt_logprobs(list(PROMPT.encode()), 2).rows()
SHOWN = ["H", "\ufffd", "\ufffd", "y"]  # a token each, as texts


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(Loopback(script=saying("ok"))) as served:
        yield served


def post(served: Served, path: str = "/v1/completions", **fields: Any) -> httpx.Response:
    return served.http.post(path, json={"model": "fake", **fields})


def choice_of(served: Served, **fields: Any) -> Any:
    response = post(served, prompt=PROMPT, **fields)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]


def test_prompt_logprobs_of_a_completion(served: Served) -> None:
    choice = choice_of(served, prompt_logprobs=2)
    first, *others = choice["prompt_logprobs"]
    assert first is None
    assert len(others) == len(PROMPT.encode()) - 1
    for token, (rank, logprob, best), entries in zip(PROMPT.encode()[1:], ROWS, others, strict=True):
        assert entries[str(token)]["rank"] == rank
        assert entries[str(token)]["logprob"] == pytest.approx(logprob)
        assert entries.keys() == {str(token), *(str(one) for one, _ in best)}
        assert [entries[str(one)]["rank"] for one, _ in best] == [1, 2]
    assert others[-1][str(ord("y"))]["decoded_token"] == "y"
    assert (choice["text"], choice["logprobs"]) == ("ok", None)
    assert "prompt_logprobs" not in choice_of(served)


def test_prompt_logprobs_of_a_chat_stand_beside_its_choices(served: Served) -> None:
    messages = [{"role": "user", "content": "hi"}]
    answer = post(served, "/v1/chat/completions", messages=messages, prompt_logprobs=0, n=2).json()
    prompt_tokens = answer["usage"]["prompt_tokens"]
    assert [entries and len(entries) for entries in answer["prompt_logprobs"]] == [None] + [1] * (prompt_tokens - 1)
    assert "prompt_logprobs" not in answer["choices"][0]


def test_an_echo_is_the_prompt_and_then_the_answer(served: Served) -> None:
    assert choice_of(served, echo=True)["text"] == f"{PROMPT}ok"
    ids = post(served, prompt=list(PROMPT.encode()), echo=True).json()
    assert ids["choices"][0]["text"] == f"{PROMPT}ok"


def test_an_echo_has_the_log_probabilities_of_all_tokens(served: Served) -> None:
    logprobs = choice_of(served, echo=True, logprobs=1)["logprobs"]
    assert logprobs["tokens"] == [*SHOWN, "o", "k", "<end>"]
    assert logprobs["token_logprobs"][0] is logprobs["top_logprobs"][0] is None
    assert logprobs["token_logprobs"][1:4] == pytest.approx([logprob for _, logprob, _ in ROWS])
    assert logprobs["token_logprobs"][4:] == [-0.5] * 3
    assert logprobs["text_offset"] == [0, 1, 2, 3, 4, 5, 6]
    assert all(0 < len(best) <= 2 for best in logprobs["top_logprobs"][1:])


def test_who_wants_to_know_the_prompt_alone(served: Served) -> None:
    """As evaluation harnesses ask."""
    response = post(served, prompt=PROMPT, echo=True, logprobs=2, max_tokens=0).json()
    (choice,) = response["choices"]
    assert (choice["text"], choice["finish_reason"], choice["logprobs"]["tokens"]) == (PROMPT, "length", SHOWN)
    assert response["usage"]["completion_tokens"] == 0


def test_an_echo_streams_in_front_of_its_answer(served: Served) -> None:
    response = post(served, prompt=[PROMPT, "x"], echo=True, logprobs=0, n=2, stream=True)
    texts, tokens, offsets = [""] * 4, [list[str]() for _ in range(4)], [list[int]() for _ in range(4)]
    for line in response.text.split("\n\n")[:-2]:
        (choice,) = json.loads(line.removeprefix("data: "))["choices"]
        texts[choice["index"]] += choice["text"]
        if choice["logprobs"]:
            tokens[choice["index"]] += choice["logprobs"]["tokens"]
            offsets[choice["index"]] += choice["logprobs"]["text_offset"]
    assert texts == [f"{PROMPT}ok"] * 2 + ["xok"] * 2
    assert tokens == [[*SHOWN, "o", "k", "<end>"]] * 2 + [["x", "o", "k", "<end>"]] * 2
    assert offsets[0][:5] == [0, 1, 2, 3, 4]
    assert offsets[2] == [0, 1, 2, 3]


def test_several_choices_of_a_prompt_score_it_once(served: Served) -> None:
    served.worker.submits.clear()
    answer = post(served, prompt=[PROMPT, "ab"], prompt_logprobs=1, n=3).json()
    asked = {submit.request_id[-2:]: submit.sampling.prompt_logprobs for submit in served.worker.submits}
    assert asked == {"-0": 1, "-1": -1, "-2": -1, "-3": 1, "-4": -1, "-5": -1}
    assert [len(choice["prompt_logprobs"]) for choice in answer["choices"]] == [4, 4, 4, 2, 2, 2]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "session_id": "s"}, "session_id"),
        ({"logprobs": 21}, "logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
    ],
)
def test_what_cannot_be_had_is_refused_by_name(served: Served, fields: dict[str, Any], param: str) -> None:
    response = post(served, prompt=PROMPT, **fields)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
