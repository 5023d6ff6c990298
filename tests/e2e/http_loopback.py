"""A gateway with its real HTTP server over a decode worker that is played by this file: no Ray, no sockets behind.

The worker answers as the fake model does, one token per message, `pace_s` apart, or follows a script.
"""

from __future__ import annotations

import contextlib
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import httpx

from baton.common.clock import MonotonicClock
from baton.common.config import (
    ClusterConfig,
    DecodeConfig,
    GatewayConfig,
    IdempotencyConfig,
    JobsConfig,
    LivenessConfig,
)
from baton.common.engine.core_api import FromPeer, MembershipView, SendTo
from baton.common.engine.fake_answer import fake_prompt_logprobs
from baton.common.engine.fake_model import fake_vocabulary
from baton.common.engine.fake_runner import fake_answer
from baton.common.engine.guiding import Guides
from baton.common.errors import ErrorCode
from baton.common.http_config import HttpConfig
from baton.common.ids import Epoch, Stamp, WorkerId
from baton.common.messages import (
    Body,
    CancelRequest,
    Failure,
    Heartbeat,
    Load,
    Member,
    Output,
    Submit,
    Submitted,
    Timeline,
    TokenLogprob,
    pack_tokens,
    unpack_tokens,
)
from baton.common.prompt_logprobs import PromptLogprobs
from baton.common.tracing import NOBODY, SpanSink
from baton.deploy.api_keys import keys_of
from baton.deploy.gateway_core import GatewayCore
from baton.deploy.gateway_shell import Gateway
from baton.deploy.http_server import GatewayServer
from baton.deploy.jobs.databases import SqliteDatabase
from baton.deploy.jobs.store import JobStore
from baton.deploy.listener import open_listener
from baton.deploy.tokenizer import ByteTokenizer, ServedModel

MAX_MODEL_LEN = 256
GIVE_UP_S = 20.0
LOOK_S = 0.005


def wait(happened: Callable[[], object]) -> None:
    """Until it has. Looks now and then: who asks all the time takes the interpreter from the gateway's thread."""
    give_up_s = time.monotonic() + GIVE_UP_S
    while not happened():
        assert time.monotonic() < give_up_s
        time.sleep(LOOK_S)


DECODE = Stamp(WorkerId("decode-0"), 1, Epoch(11))

Script = Callable[[Submit], tuple[list[int], str]]
"""The tokens to answer with, and the finish reason."""


def fake_script(submit: Submit) -> tuple[list[int], str]:
    answer = fake_answer(unpack_tokens(submit.prompt), submit.sampling, MAX_MODEL_LEN)
    return list(answer.tokens), answer.finish_reason


def saying(text: str, finish_reason: str = "stop") -> Script:
    """Answers with this text, whatever was asked, up to max_tokens."""

    def script(submit: Submit) -> tuple[list[int], str]:
        tokens = list(text.encode())
        if len(tokens) >= submit.sampling.max_tokens:
            return tokens[: submit.sampling.max_tokens], "length"
        return [*tokens, 257], finish_reason

    return script


@dataclass
class Loopback:
    """`deliver` is the gateway's; `post` is what the gateway calls. Timers stand for the worker's engine."""

    script: Script = fake_script
    pace_s: float = 0.0
    failure_after: int | None = None  # tokens until the worker fails the request
    silent: bool = False  # takes nothing, answers nothing
    submits: list[Submit] = field(default_factory=list)
    cancelled: threading.Event = field(default_factory=threading.Event)
    deliver: Callable[[object], None] = lambda event: None
    _cancels: set[str] = field(default_factory=set)

    def post(self, effect: SendTo) -> None:
        match effect.body:
            case Submit():
                if not self.silent:
                    self.submits.append(effect.body)
                    self._say(Submitted(request_id=effect.body.request_id, placement=effect.body.placement))
                    self._emit(effect.body, *self.script(effect.body), 0)
            case CancelRequest():
                self._cancels.add(effect.body.request_id)
                self.cancelled.set()
                for submit in self.submits:
                    if submit.request_id == effect.body.request_id:
                        self._say_cancelled(submit)
            case _:
                pass

    def _emit(self, submit: Submit, tokens: list[int], finish_reason: str, index: int) -> None:
        if submit.request_id in self._cancels:
            return
        ended = index == len(tokens) - 1
        failed = self.failure_after is not None and index >= self.failure_after
        wanted = submit.sampling.logprobs
        logprob = TokenLogprob(logprob=-0.5, top=tuple((tokens[index] - rank, -0.5 - rank) for rank in range(wanted)))
        self._say(
            Output(
                request_id=submit.request_id,
                placement=submit.placement,
                first_index=index,
                tokens=b"" if failed else pack_tokens([tokens[index]]),
                logprobs=(logprob,) if wanted >= 0 and not failed else (),
                prompt_logprobs=_scores(submit) if index == 0 and not failed else None,
                finish_reason=finish_reason if ended and not failed else "",
                failure=Failure(code=ErrorCode.TRANSFER_CORRUPT, reason="as scripted") if failed else None,
                timeline=self._timeline(submit) if ended or failed else None,
            )
        )
        if not ended and not failed:
            if self.pace_s:
                timer = threading.Timer(self.pace_s, self._emit, (submit, tokens, finish_reason, index + 1))
                timer.daemon = True
                timer.start()
            else:
                self._emit(submit, tokens, finish_reason, index + 1)

    def _say_cancelled(self, submit: Submit) -> None:
        self._say(
            Output(
                request_id=submit.request_id,
                placement=submit.placement,
                first_index=0,
                failure=Failure(code=ErrorCode.CANCELLED),
                timeline=self._timeline(submit),
            )
        )

    def _timeline(self, submit: Submit) -> Timeline:
        return Timeline(
            queue_s=0.001,
            prefill_s=0.01,
            transfer_s=0.002,
            decode_s=0.1,
            transfer_bytes=4096,
            lane="local",
            prefill_worker="prefill-0",
            decode_worker="decode-0",
            transferred_tokens=len(submit.prompt) // 4 - 1,
            cached_tokens=1,
            attempts=1,
        )

    def _say(self, body: Body) -> None:
        self.deliver(FromPeer(DECODE, body))

    def membership(self, *, present: bool = True) -> None:
        prefill = Stamp(WorkerId("prefill-0"), 1, Epoch(12))
        members = (
            Member(stamp=prefill, role="prefill", address="tcp://127.0.0.1:1"),
            Member(stamp=DECODE, role="decode", address="tcp://127.0.0.1:2"),
        )
        self.deliver(MembershipView(1, members if present else members[:1]))

    def heartbeat(self, load: Load) -> None:
        self._say(Heartbeat(load=load))


def _scores(submit: Submit) -> PromptLogprobs | None:
    top, prompt = submit.sampling.prompt_logprobs, unpack_tokens(submit.prompt)
    return fake_prompt_logprobs(prompt, top) if top >= 0 and len(prompt) > 1 else None


@dataclass
class Served:
    url: str
    gateway: Gateway
    server: GatewayServer
    worker: Loopback
    http: httpx.Client


@contextlib.contextmanager
def serving(
    worker: Loopback | None = None,
    *,
    members: bool = True,
    jobs: Mapping[str, int] = {},
    keys: Mapping[str, float] = {},
    max_model_len: int = MAX_MODEL_LEN,
    spans: SpanSink = NOBODY,
    rows: int = 64,
    ca_file: str = "",
    **settings: float | str | HttpConfig,
) -> Iterator[Served]:
    """A served gateway. `settings` are GatewayConfig's, `jobs` JobsConfig's, `keys` IdempotencyConfig's; `rows`: of the
    decode worker; `ca_file`: of the client, for a gateway with TLS."""
    worker = worker or Loopback()
    config = ClusterConfig(
        gateway=replace(GatewayConfig(port=0), **settings),  # type: ignore[arg-type]
        jobs=replace(JobsConfig(poll_s=0.05), **jobs),
        idempotency=replace(IdempotencyConfig(), **keys),  # type: ignore[arg-type]
        liveness=replace(LivenessConfig(), heartbeat_interval_s=0.02, republish_interval_s=0.04, dead_after_s=0.06),
    )
    model = ServedModel("fake", max_model_len, 258, (257,), ByteTokenizer(), Guides(fake_vocabulary))

    def make_gateway() -> Gateway:
        decode, clock = DecodeConfig(max_running_requests=rows), MonotonicClock()
        core = GatewayCore(config.gateway, config.transfer, config.liveness, max_model_len, decode=decode)
        api_keys = keys_of(config.gateway.api_keys_file, clock)
        return Gateway(
            core, model, worker.post, clock, version="0.0.test", stuck_after_s=1.0, spans=spans, keys=api_keys
        )

    store = JobStore(SqliteDatabase(Path(":memory:")))
    server = GatewayServer(open_listener("127.0.0.1", 0), config, store, make_gateway)
    gateway = server.start()
    worker.deliver = gateway.deliver
    if members:
        worker.membership()
    try:
        verify = ssl.create_default_context(cafile=ca_file) if ca_file else True
        with httpx.Client(base_url=server.url, timeout=20, verify=verify) as http:
            yield Served(server.url, gateway, server, worker, http)
    finally:
        server.stop()
