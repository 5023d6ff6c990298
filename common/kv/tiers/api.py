"""What an engine asks of the tiers below its pool, and what it hears back. Plain values; no behaviour, no I/O.

Ownership across this border, in the manner of `baton.transfer.api`:
- From `StorePages` to its one `PagesStored` the pages are read: whoever owns them keeps them as they are (a lease on
  the tree, or the record of a request that waits for it).
- From `RestorePages` to its one `PagesRestored` the pages belong to the job, which writes them. They come back with
  that event and not before: aborting only makes it come sooner.

Every `StorePages` and `RestorePages` is answered exactly once, in no particular order. Job ids are the engine's, and
never used twice; stores and restores count separately.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NewType

from baton.common.kv.tiers.keys import I32, PageKey

JobId = NewType("JobId", int)


@dataclass(frozen=True, slots=True)
class StorePages:
    """Keep copies: `page_ids[i]` holds the page named `keys[i]`. May be dropped when there is more to do than can be
    done: what is stored is a cache."""

    job: JobId
    keys: tuple[PageKey, ...]
    page_ids: I32


@dataclass(frozen=True, slots=True)
class RestorePages:
    """Fill `page_ids` with the pages named `keys`, in this order, as far as they are there. When fewer than `at_least`
    are, none is worth the copy."""

    job: JobId
    keys: tuple[PageKey, ...]
    page_ids: I32
    at_least: int = 1


@dataclass(frozen=True, slots=True)
class AbortRestore:
    """Stop at the next page. The answer is the restore's `PagesRestored`; none follows when it has been given."""

    job: JobId


@dataclass(frozen=True, slots=True)
class AbortStore:
    """Stop at the next page. The answer is the store's `PagesStored`; none follows when it has been given."""

    job: JobId


@dataclass(frozen=True, slots=True)
class PagesStored:
    """Nobody reads the pages any more. The first `pages` of them were taken; 0 when the job was dropped."""

    job: JobId
    pages: int


@dataclass(frozen=True, slots=True)
class PagesRestored:
    """Nobody writes the pages any more. The first `pages` of them are complete and verified; what lies in the others
    is undefined."""

    job: JobId
    pages: int


TierCommand = StorePages | RestorePages | AbortStore | AbortRestore
TierEvent = PagesStored | PagesRestored
