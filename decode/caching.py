"""What of a request's KV others may find: when it is offered to the prefix tree, and from there to the tiers below it.

Owns nothing: pages and leases are the pool's, stores under way those of `storing.Stores`. Never: frees a page.
"""

from __future__ import annotations

from collections.abc import Callable

from baton.common.kv.pool import KvPool
from baton.common.kv.prefix.interface import I32
from baton.common.kv.tiers.api import StorePages
from baton.decode.request import DecodeRequest
from baton.decode.storing import Stores


class Caching:
    """`lacking`: whether somebody waits for pages. `store` takes what is to be copied to the tiers. `stir` is called
    when a request that goes on was offered: duplicates, or what its lease has left behind, are to be had."""

    def __init__(
        self,
        pool: KvPool,
        stores: Stores,
        lacking: Callable[[], bool],
        store: Callable[[list[StorePages]], None],
        stir: Callable[[], None],
    ) -> None:
        self._pool = pool
        self._stores = stores
        self._lacking = lacking
        self._store = store
        self._stir = stir

    def keep_below(self, tokens: I32) -> None:
        """Tokens were offered to the tree: the tiers may want what it has of them."""
        self._store(self._stores.cached(tokens, self._lacking()))

    def share_prompt(self, request: DecodeRequest) -> None:
        """All that it was to be filled with is there."""
        if request.session_protected_len is None:  # a later turn keeps what the first one shared
            effective_len = request.effective_kv_committed_len
            self._offer(request, request.fill_tokens, effective_len)
            self.keep_below(request.fill_tokens[:effective_len])

    def keep_checkpoint(self, request: DecodeRequest, length: int) -> None:
        """A recurrent state is only that of one length: what others may go on from is kept when it comes by."""
        shared = request.session_protected_len is None and length <= len(request.prompt)
        if shared and length < request.fill_len and length == self._pool.checkpoint_at(request.fill_len):
            self._offer(request, request.fill_tokens, length)

    def keep_answer(self, request: DecodeRequest) -> None:
        """Of a recurrent model the answer can be found later only up to where a state was kept. A conversation needs
        none: it has its own."""
        length = request.record.kv_committed_len
        wanted = self._pool.wants_checkpoint(length) and not request.session_id
        if wanted and request.effective_kv_committed_len == length:
            self._offer(request, request.known_tokens, length)

    def _offer(self, request: DecodeRequest, tokens: I32, length: int) -> None:
        self._pool.cache_finished_req(request, tokens, kv_len_to_handle=length)
        self._stir()

    def release(self, request: DecodeRequest) -> None:
        """It is over: what is valid goes to the tree, and the rest is freed."""
        effective_len, tokens = request.effective_kv_committed_len, request.known_tokens
        self._pool.release_kv_cache(request, tokens, effective_len=effective_len)
        self.keep_below(tokens[:effective_len])
