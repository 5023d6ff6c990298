"""`ReqKvInfo`: everything of the KV cache that one request owns, in one object with one owner.

Presence means ownership: `holder.kv is None` is the only way to say "owns nothing". A record is moved (`take_kv`),
never copied; the reference left behind is dead and says so when it is used. Its lengths are written by the allocation
functions of `pool.KvPool` and nobody else (a test reads the source and counts them).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn, Protocol, final

from baton.common.kv.errors import OwnershipError, UseAfterMoveError
from baton.common.kv.prefix.interface import PrefixLease

_FIELDS = (
    "req_pool_idx",
    "cache_protected_len",
    "kv_committed_len",
    "kv_allocated_len",
    "swa_evict_floor",
    "swa_evicted_seqlen",
    "swa_promised",
    "state_slot",
    "state_source",
    "prefix_lock",
)

NO_COPY = -1
"""As `state_source`: the state is in the record's own slot."""


@final
class ReqKvInfo:
    """0 <= cache_protected_len <= kv_committed_len <= kv_allocated_len <= row width.

    [0, protected) lies in the tree's pages, read under `prefix_lock`; [protected, allocated), rounded up to a page, in
    pages of its own. Content is valid below committed. Of a sliding window that is so for the pages from
    `KvLayout.live_from(committed)` on, of a recurrent state for the one at committed.
    """

    __slots__ = (*_FIELDS, "_gone")

    req_pool_idx: int
    cache_protected_len: int  # tokens; page-aligned
    kv_committed_len: int
    kv_allocated_len: int
    swa_evict_floor: int  # the window frees nothing below it
    swa_evicted_seqlen: int  # own sliding pages below it (and above what is the tree's) have been freed
    swa_promised: int  # most sliding pages that it may own and lock at one time
    state_slot: int  # its own slot of the recurrent state; 0 for models without one
    state_source: int  # slot (0: zeros) that the next step must copy into its own first, or NO_COPY
    prefix_lock: PrefixLease | None
    _gone: str  # set only when the record was moved or released; then the other fields no longer exist

    def __init__(
        self,
        *,
        req_pool_idx: int,
        cache_protected_len: int,
        kv_committed_len: int,
        kv_allocated_len: int,
        prefix_lock: PrefixLease | None,
        swa_evict_floor: int = 0,
        swa_evicted_seqlen: int = 0,
        swa_promised: int = 0,
        state_slot: int = 0,
        state_source: int = NO_COPY,
    ) -> None:
        self.req_pool_idx = req_pool_idx
        self.cache_protected_len = cache_protected_len
        self.kv_committed_len = kv_committed_len
        self.kv_allocated_len = kv_allocated_len
        self.swa_evict_floor = swa_evict_floor
        self.swa_evicted_seqlen = swa_evicted_seqlen
        self.swa_promised = swa_promised
        self.state_slot = state_slot
        self.state_source = state_source
        self.prefix_lock = prefix_lock

    @property
    def live(self) -> bool:
        """False once the record was moved or released through another reference."""
        try:
            return self.req_pool_idx >= 0
        except UseAfterMoveError:
            return False

    def take(self) -> ReqKvInfo:
        """Moves: returns the record, and this reference is dead."""
        moved = ReqKvInfo(**{name: getattr(self, name) for name in _FIELDS})
        self.retire("moved to another owner")
        return moved

    def retire(self, why: str) -> None:
        """For the pool: nothing is owned through this reference any more."""
        for name in _FIELDS:
            delattr(self, name)
        self._gone = why

    if not TYPE_CHECKING:
        # Only reached when a slot is empty: live records pay nothing for this check.
        def __getattr__(self, name):
            if name in _FIELDS:
                raise UseAfterMoveError(f"{name} of a record that was {object.__getattribute__(self, '_gone')}")
            raise AttributeError(name)

    def __repr__(self) -> str:
        if not self.live:
            return f"<ReqKvInfo {self._gone}>"
        return (
            f"<ReqKvInfo row {self.req_pool_idx}: protected {self.cache_protected_len}"
            f" committed {self.kv_committed_len} allocated {self.kv_allocated_len}>"
        )

    def __copy__(self) -> NoReturn:
        raise TypeError("a ReqKvInfo is not copied: it is moved (take_kv)")

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise TypeError("a ReqKvInfo is not copied: it is moved (take_kv)")

    def __reduce__(self) -> NoReturn:
        raise TypeError("a ReqKvInfo does not leave its process: what travels is the KV, under a hand-off")


class KvHolder(Protocol):
    """Whatever can own a record: a request, a hand-off, a session slot."""

    kv: ReqKvInfo | None


def take_kv(holder: KvHolder) -> ReqKvInfo:
    """Moves the record out of its holder, who owns nothing afterwards. Raises OwnershipError when it owned nothing."""
    record = holder.kv
    if record is None:
        raise OwnershipError(f"{holder!r} owns no KV to hand over")
    holder.kv = None
    return record.take()
