"""Workers whose fake model keeps everything there is: full attention, a sliding window and a recurrent state."""

from __future__ import annotations

from collections.abc import Callable

from baton.common.engine.batch import ModelRunner
from baton.common.engine.fake_runner import fake_runner
from baton.common.kv.layout import Component, KvLayout
from baton.decode.actor import DecodeActor
from baton.prefill.actor import PrefillActor
from baton.transfer.process import ProcessSpec

LAYOUT = KvLayout(16, window=50, state=True)
NUM_PAGES = {Component.FULL: 300, Component.SWA: 150, Component.STATE: 20}
STATE_BYTES = 40_000  # three pieces on the way

LAYERED = {
    "prefill": "layered:LayeredPrefillActor",
    "decode": "layered:LayeredDecodeActor",
    "gateway": "baton.deploy.gateway:GatewayActor",
}


def make_layered(spec: ProcessSpec, progress: Callable[[str], None]) -> ModelRunner:
    return fake_runner(NUM_PAGES, LAYOUT.page_size, layout=LAYOUT, state_bytes=STATE_BYTES, shared=True)


class LayeredPrefillActor(PrefillActor):
    def make_runner(self, spec: ProcessSpec, progress: Callable[[str], None]) -> ModelRunner:
        return make_layered(spec, progress)


class LayeredDecodeActor(DecodeActor):
    def make_runner(self, spec: ProcessSpec, progress: Callable[[str], None]) -> ModelRunner:
        return make_layered(spec, progress)
