"""The endpoints as the real `openai` package and plain HTTP see them. The decode worker is played by the test."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
from http_loopback import MAX_MODEL_LEN, Loopback, Served, saying, serving

from baton.common.engine.core_api import SendTo
from baton.common.messages import Load, Submit

TEXT = "Hello wörld €😀, and good bye!"
CHAT: list[Any] = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(Loopback(script=saying(TEXT))) as served:
        yield served


@pytest.fixture
def client(served: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key="unused", max_retries=0)


def events(response: httpx.Response) -> list[Any]:
    """The server-sent events; the last one must be [DONE]."""
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def post(served: Served, path: str, **fields: Any) -> httpx.Response:
    return served.http.post(f"{path}", json={"model": "fake", **fields})


def test_chat_with_the_openai_package(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="fake", messages=CHAT)
    (choice,) = answer.choices
    assert (choice.message.content, choice.message.role, choice.finish_reason) == (TEXT, "assistant", "stop")
    assert answer.object == "chat.completion"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len(TEXT.encode()) + 1  # the end token counts
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 1


def test_streamed_chat_with_the_openai_package(client: openai.OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(model="fake", messages=CHAT, stream=True, stream_options={"include_usage": True})
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == TEXT
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]].count("stop") == 1
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens == chunks[-1].usage.prompt_tokens + len(TEXT.encode()) + 1
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk.id for chunk in chunks}) == 1


def test_completions_with_the_async_openai_package(served: Served) -> None:
    async def ask() -> tuple[Any, str]:
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="unused") as client:
            whole = await client.completions.create(model="fake", prompt="x", max_tokens=100)
            stream = await client.completions.create(model="fake", prompt="x", max_tokens=100, stream=True)
            return whole, "".join([chunk.choices[0].text async for chunk in stream])

    whole, streamed = asyncio.run(ask())
    assert whole.choices[0].text == streamed == TEXT


def test_a_list_of_prompts_gives_a_choice_each(client: openai.OpenAI, served: Served) -> None:
    answer = client.completions.create(model="fake", prompt=["a", "b", "c"], max_tokens=4)
    assert [(choice.index, choice.text) for choice in answer.choices] == [(0, "Hell"), (1, "Hell"), (2, "Hell")]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 12
    texts = ["", "", ""]
    for chunk in client.completions.create(model="fake", prompt=[[1], [2], [3]], max_tokens=4, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == ["Hell"] * 3


def test_several_choices_of_a_prompt(client: openai.OpenAI, served: Served) -> None:
    """Each with a seed of its own, streamed under its index; the prompt counts once."""
    served.worker.submits.clear()
    options: Any = {"model": "fake", "messages": CHAT, "n": 3, "seed": 40, "max_tokens": 4}
    answer = client.chat.completions.create(**options)
    assert [(choice.index, choice.message.content) for choice in answer.choices] == [(n, "Hell") for n in range(3)]
    assert sorted(submit.sampling.seed for submit in served.worker.submits) == [40, 41, 42]
    prompt_tokens = len(served.worker.submits[0].prompt) // 4
    roles, texts, ended = [""] * 3, [""] * 3, 0
    *chunks, last = client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True})
    for chunk in chunks:
        (choice,) = chunk.choices
        roles[choice.index] += choice.delta.role or ""
        texts[choice.index] += choice.delta.content or ""
        ended += choice.finish_reason == "length"
    assert (roles, texts, ended) == (["assistant"] * 3, ["Hell"] * 3, 3)
    for usage in (answer.usage, last.usage):
        assert usage is not None
        assert (usage.prompt_tokens, usage.completion_tokens) == (prompt_tokens, 12)
        assert usage.prompt_tokens_details is not None
        assert usage.prompt_tokens_details.cached_tokens == 1


class _Holding(Loopback):
    """Answers nothing until it is told to."""

    released = False

    def post(self, effect: SendTo) -> None:
        if isinstance(effect.body, Submit) and not self.released:
            self.submits.append(effect.body)
        else:
            super().post(effect)

    def release(self) -> None:
        self.released = True
        for submit in list(self.submits):
            self._emit(submit, *self.script(submit), 0)


@pytest.mark.parametrize("stream", [False, True])
def test_choices_of_a_prompt_wait_until_the_first_one_has_it_computed(stream: bool) -> None:
    """Then it is in a cache. Together they would compute it as often as there are choices."""
    worker = _Holding(script=saying(TEXT))
    with serving(worker) as served, ThreadPoolExecutor(1) as pool:
        asked = pool.submit(post, served, "/v1/completions", prompt=["a", "b"], n=3, max_tokens=4, stream=stream)
        give_up_s = time.monotonic() + 20
        while len({submit.request_id for submit in worker.submits}) < 2:
            assert time.monotonic() < give_up_s
        served.http.get("/live")
        assert {submit.request_id[-2:] for submit in worker.submits} == {"-0", "-3"}
        worker.release()
        assert asked.result(20).text.count('"finish_reason":"length"') == 6
        assert len({submit.request_id for submit in worker.submits}) == 6


def test_several_choices_of_several_prompts(client: openai.OpenAI, served: Served) -> None:
    served.worker.submits.clear()
    answer = client.completions.create(model="fake", prompt=["a", "bc"], n=2, max_tokens=4)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    prompts = {submit.request_id[-2:]: len(submit.prompt) // 4 for submit in served.worker.submits}
    assert prompts == {"-0": 1, "-1": 1, "-2": 2, "-3": 2}
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 16)


def test_the_openai_package_can_bias_and_penalize(client: openai.OpenAI, served: Served) -> None:
    client.chat.completions.create(
        model="fake",
        messages=CHAT,
        logit_bias={"72": -100},
        presence_penalty=0.5,
        frequency_penalty=-1,
        extra_body={"min_p": 0.2, "repetition_penalty": 1.1},
    )
    sampling = served.worker.submits[-1].sampling
    assert sampling.logit_bias == ((72, -100.0),)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.5, -1.0)
    assert (sampling.min_p, sampling.repetition_penalty) == (0.2, 1.1)


def test_completions_default_to_sixteen_tokens(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="fake", prompt=[104, 105])
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (2, 16)


def test_logprobs(client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(model="fake", messages=CHAT, logprobs=True, top_logprobs=2, max_tokens=3)
    logprobs = chat.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert [entry.token for entry in logprobs.content] == ["H", "e", "l"]
    assert [(top.token, top.logprob, top.bytes) for top in logprobs.content[0].top_logprobs] == [
        ("H", -0.5, [72]),
        ("G", -1.5, [71]),
    ]
    text = client.completions.create(model="fake", prompt="x", logprobs=1, max_tokens=3)
    assert text.choices[0].logprobs is not None
    assert text.choices[0].logprobs.text_offset == [0, 1, 2]
    assert text.choices[0].logprobs.token_logprobs == [-0.5] * 3


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_end_the_answer_and_never_show(served: Served, stream: bool) -> None:
    response = post(served, "/v1/chat/completions", messages=CHAT, stop=["€😀", "good bye", "zzz"], stream=stream)
    if stream:
        parts = [event["choices"][0]["delta"].get("content", "") for event in events(response)]
        text, reason = "".join(parts), events(response)[-1]["choices"][0]["finish_reason"]
    else:
        choice = response.json()["choices"][0]
        text, reason = choice["message"]["content"], choice["finish_reason"]
    assert (text, reason) == ("Hello wörld ", "stop")


def test_a_stop_string_makes_the_worker_let_go() -> None:
    with serving(Loopback(script=saying("abcdefgh" * 20), pace_s=0.01)) as served:
        response = post(served, "/v1/completions", prompt="x", stop="d", max_tokens=100)
        assert response.json()["choices"][0]["text"] == "abc"
        assert response.json()["usage"]["completion_tokens"] == 4
        assert response.json()["baton"]["timeline"]["lane"] == "local"
        assert served.worker.cancelled.wait(5)


def test_what_a_worker_says_after_the_stop_string_does_not_count() -> None:
    """The worker runs on to its limit, or fails, before it hears that the answer was complete."""
    for failure_after in (None, 10):
        with serving(Loopback(script=saying("abcdefghijklmnop"), failure_after=failure_after)) as served:
            choice = post(served, "/v1/completions", prompt="x", stop="d", max_tokens=12).json()["choices"][0]
            assert (choice["text"], choice["finish_reason"]) == ("abc", "stop")


def test_where_the_time_went_comes_with_the_answer(served: Served) -> None:
    response = post(served, "/v1/completions", prompt="hi there")
    extension = response.json()["baton"]
    assert extension["timeline"]["lane"] == "local"
    assert extension["timeline"]["transfer_bytes"] == 4096
    assert extension["placements"] == 1
    assert extension["total_s"] >= extension["ttft_s"] >= 0
    assert "transfer;dur=2.0" in response.headers["Server-Timing"]
    assert response.headers["X-Request-Id"] == extension["request_id"]
    streamed = post(served, "/v1/completions", prompt="hi there", stream=True)
    assert streamed.headers["X-Request-Id"] == events(streamed)[-1]["baton"]["request_id"]
    assert not any("baton" in event for event in events(streamed)[:-1])


def test_a_clients_request_id_is_returned_and_never_used_as_ours(served: Served) -> None:
    def ask(name: str) -> httpx.Response:
        body = {"model": "fake", "prompt": "x"}
        return served.http.post("/v1/completions", json=body, headers={"X-Request-Id": name})

    twice = [ask("job-7") for _ in range(2)]
    assert [response.headers["X-Request-Id"] for response in twice] == ["job-7", "job-7"]
    ours = [response.headers["X-Baton-Request-Id"] for response in twice]
    assert ours == [response.json()["baton"]["request_id"] for response in twice]
    assert len({*ours, "job-7"}) == 3
    for name in ("", "a b", "x" * 129, "<script>"):
        refused = ask(name)
        assert refused.headers["X-Request-Id"] == refused.headers["X-Baton-Request-Id"]
    assert served.http.get("/version", headers={"X-Request-Id": "mine"}).headers["X-Request-Id"] == "mine"


def test_server_timing_has_every_stage(served: Served) -> None:
    timing = post(served, "/v1/completions", prompt="hi there").headers["Server-Timing"]
    stages = {part.partition(";")[0] for part in timing.split(", ")}
    assert stages == {
        "gateway", "queue", "reserve", "restore", "handoff", "prefill", "transfer", "scatter", "decode_queue", "decode",
        "moved", "ttft", "total",
    }  # fmt: skip
    assert 'moved;desc="4096 bytes by local"' in timing


def test_an_absent_seed_is_drawn_and_a_given_one_is_used(served: Served) -> None:
    served.worker.submits.clear()
    for seed in (None, None, 7, -1):
        post(served, "/v1/completions", prompt="x", seed=seed)
    drawn, again, given, negative = (submit.sampling.seed for submit in served.worker.submits)
    assert drawn != again
    assert given == 7
    assert negative == (1 << 63) - 1
    assert served.worker.submits[0].sampling.temperature == 1.0


def test_models_version_and_probes(served: Served, client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.id == "fake"
    assert served.http.get("/version").json() == {"version": "0.0.test", "model": "fake"}
    for path in ("live", "ready", "health"):
        assert served.http.get(f"/{path}").status_code == 200


def test_a_model_by_its_name(served: Served, client: openai.OpenAI) -> None:
    assert client.models.retrieve("fake") == client.models.list().data[0]
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("other/one")
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


def test_tokenize_and_detokenize(served: Served) -> None:
    text = post(served, "/tokenize", prompt="hi €", return_token_strs=True).json()
    tokens = list("hi €".encode())
    assert text["tokens"] == tokens
    assert (text["count"], text["max_model_len"]) == (6, MAX_MODEL_LEN)
    assert text["token_strs"][:3] == ["h", "i", " "]
    chat = post(served, "/tokenize", messages=CHAT, add_generation_prompt=True).json()
    assert bytes(chat["tokens"]) == b"user: hi\nassistant: "
    assert chat["token_strs"] is None
    assert post(served, "/detokenize", tokens=[*tokens, 257]).json() == {"prompt": "hi €<end>"}
    assert post(served, "/v1/chat/completions", messages=CHAT).json()["usage"]["prompt_tokens"] == chat["count"]


def test_the_openapi_document_has_the_bodies(served: Served) -> None:
    document = served.http.get("/openapi.json").json()
    schemas = document["components"]["schemas"]
    for path in ("/v1/chat/completions", "/v1/completions", "/detokenize"):
        schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert schema["$ref"].removeprefix("#/components/schemas/") in schemas
    assert schemas["ChatRequest"]["properties"]["temperature"]["anyOf"][0] == {
        "type": "number",
        "minimum": 0,
        "maximum": 100,
    }
    assert "docs/docs.js" in served.http.get("/docs").text


def test_metrics_count_every_prompt_token_once(served: Served) -> None:
    def prompt_tokens() -> dict[str, float]:
        lines = served.http.get("/metrics").text.splitlines()
        found = [line.split() for line in lines if line.startswith("baton_prompt_tokens_total{")]
        return {name.split('"')[1]: float(value) for name, value in found}

    before = prompt_tokens()
    post(served, "/v1/completions", prompt="twenty bytes of text")
    after = prompt_tokens()
    assert {source: after[source] - before[source] for source in after} == {
        "local": 0.0,
        "cached": 1.0,
        "restored": 0.0,
        "transferred": 19.0,
    }
    page = served.http.get("/metrics").text
    assert "baton_time_to_first_token_seconds_count" in page
    assert 'baton_workers{role="decode",state="live"} 1.0' in page


def test_status_shows_workers_and_lanes(served: Served) -> None:
    served.worker.heartbeat(Load(running=3, free_pages=7, total_pages=9))
    post(served, "/v1/completions", prompt="x")
    status = served.http.get("/status").json()
    workers = {worker["worker"]: worker for worker in status["workers"]}
    assert set(workers) == {"decode-0", "prefill-0"}
    assert workers["decode-0"]["load"]["running"] == 3
    (lane,) = status["lanes"]
    assert (lane["prefill_worker"], lane["decode_worker"], lane["lane"]) == ("prefill-0", "decode-0", "local")
    assert lane["nbytes"] == 4096 * lane["transfers"]


def test_health_sees_a_worker_that_answers_but_is_stuck() -> None:
    with serving() as served:
        served.worker.heartbeat(Load(step_age_s=5.0))
        assert served.http.get("/ready").status_code == 200
        response = served.http.get("/health")
        assert response.status_code == 503
        assert "stuck" in response.json()["reason"]


def test_a_client_that_hangs_up_cancels_its_request() -> None:
    """While it streams, while it waits for a whole answer, and before the first token."""
    for stream, silent in ((True, False), (False, False)):
        with serving(Loopback(script=saying("x" * 200), pace_s=0.05, silent=silent)) as served:
            body = {"model": "fake", "messages": CHAT, "stream": stream}
            with (
                httpx.Client(timeout=0.5) as client,
                pytest.raises(httpx.ReadTimeout)
                if not stream
                else client.stream("POST", f"{served.url}/v1/chat/completions", json=body) as response,
            ):
                if stream:
                    next(response.iter_lines())
                else:
                    client.post(f"{served.url}/v1/chat/completions", json=body)
            assert served.worker.cancelled.wait(5)


def test_a_failure_in_the_middle_of_a_stream_is_an_event() -> None:
    with serving(Loopback(script=saying(TEXT), failure_after=3)) as served:
        response = post(served, "/v1/chat/completions", messages=CHAT, stream=True)
        *_, last = events(response)
        assert response.status_code == 200
        assert last["error"]["code"] == "transfer_corrupt"
        client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="unused", max_retries=0)
        with pytest.raises(openai.APIError, match="as scripted"):
            list(client.chat.completions.create(model="fake", messages=CHAT, stream=True))
        whole = post(served, "/v1/chat/completions", messages=CHAT)
        assert (whole.status_code, whole.json()["error"]["code"]) == (500, "transfer_corrupt")


def test_every_answer_is_whole_under_concurrency() -> None:
    async def ask(url: str) -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0) as client:
            calls = [
                client.chat.completions.create(model="fake", messages=[{"role": "user", "content": f"n{n}"}])
                for n in range(50)
            ]
            return [answer.choices[0].message.content or "" for answer in await asyncio.gather(*calls)]

    with serving(Loopback(script=saying(TEXT), pace_s=0.001)) as served:
        assert asyncio.run(ask(served.url)) == [TEXT] * 50


def test_drain_refuses_new_requests_and_waits_for_the_running() -> None:
    with serving(Loopback(script=saying("x" * 20), pace_s=0.02)) as served, httpx.Client() as client:
        body = {"model": "fake", "messages": CHAT, "stream": True}
        with client.stream("POST", f"{served.url}/v1/chat/completions", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            drained = served.server.begin(served.gateway.drain(10))
            refused = post(served, "/v1/chat/completions", messages=CHAT)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
            assert "Retry-After" in refused.headers
            assert "data: [DONE]" in list(lines)
        assert drained.result(5) is True


def test_what_a_drain_cuts_off_ends_with_an_error_and_not_with_a_closed_connection() -> None:
    with serving(Loopback(script=saying("x" * 2000), pace_s=0.02)) as served, httpx.Client() as client:
        body = {"model": "fake", "messages": CHAT, "stream": True}
        with client.stream("POST", f"{served.url}/v1/chat/completions", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            assert served.server.begin(served.gateway.drain(0.05)).result(5) is False
            (told,) = [line for line in lines if "error" in line]
            assert '"draining"' in told


def test_the_longest_possible_answer_fills_the_model(served: Served) -> None:
    response = post(served, "/v1/chat/completions", messages=CHAT)
    assert response.json()["usage"]["total_tokens"] <= MAX_MODEL_LEN
    assert served.worker.submits[-1].sampling.max_tokens == MAX_MODEL_LEN - response.json()["usage"]["prompt_tokens"]
