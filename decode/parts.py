"""What the core of a decode worker consists of, for those of its modules that decide over several parts.

Owns: the table of its requests, and the commands and spans that leave with the core's next answer. Everything else is
a part's own. Never: decides anything.
"""

from __future__ import annotations

from baton.common.config import DecodeConfig, TiersConfig, TransferConfig
from baton.common.deadlines import Deadlines
from baton.common.engine.chunk_predictor import ChunkPredictor
from baton.common.engine.pacing import ItlPacer
from baton.common.ids import Stamp
from baton.common.kv.pool import KvPool
from baton.common.kv.tiers.api import TierCommand
from baton.common.kv.tiers.keys import PageKeys
from baton.common.spans import TracedSpan
from baton.decode.caching import Caching
from baton.decode.handoffs import Handoffs
from baton.decode.outbox import Outbox
from baton.decode.peers import Peers
from baton.decode.request import DecodeRequest, Done, RequestKey
from baton.decode.restoring import Restores
from baton.decode.sessions import Sessions
from baton.decode.steps import Steps
from baton.decode.storing import Stores
from baton.decode.waiting import WaitingRequests
from baton.transfer.api import SinkCommand, SourceCommand


class Parts:
    """`starved`: the last plan of a step left out a request that lacks pages."""

    def __init__(
        self,
        stamp: Stamp,
        pool: KvPool,
        config: DecodeConfig,
        transfer: TransferConfig,
        tiers: TiersConfig,
        page_keys: PageKeys | None,
        predictor: ChunkPredictor | None,
    ) -> None:
        self.stamp = stamp
        self.pool = pool
        self.config = config
        self.requests: dict[RequestKey, DecodeRequest] = {}
        self.deadlines: Deadlines[RequestKey] = Deadlines()
        self.commands: list[SinkCommand | SourceCommand | TierCommand] = []
        self.told: list[TracedSpan] = []
        self.starved = False
        self.outbox = Outbox(transfer, config.max_queued_requests, self._on_final_over)
        self.stores = Stores(pool, page_keys, tiers)
        self.restores = Restores(pool, page_keys, tiers)
        self.caching = Caching(pool, self.stores, lambda: self.lacking, self.commands.extend, self._on_freed)
        self.sessions = Sessions(
            pool, config.max_sessions, config.session_ttl_s, self.caching.keep_below, self._on_freed
        )
        self.waiting = WaitingRequests(pool, config, self.sessions)
        self.handoffs = Handoffs(stamp.epoch)
        self.peers = Peers(stamp)
        pacer = ItlPacer(config.itl_s) if config.itl_s and predictor is None else None
        self.steps = Steps(pool, config.chunk_tokens, predictor, pacer)

    @property
    def lacking(self) -> bool:
        """Whether somebody waits for pages."""
        return self.starved or len(self.waiting) > 0

    def forget_if_over(self, request: DecodeRequest) -> None:
        """It is, when nobody uses its pages any more, and its gateway knows how it ended or never will."""
        if request.final_over and isinstance(request.state, Done):
            del self.requests[request.key]

    def _on_freed(self) -> None:
        self.waiting.stir()

    def _on_final_over(self, request: DecodeRequest) -> None:
        request.final_over = True
        self.forget_if_over(request)
