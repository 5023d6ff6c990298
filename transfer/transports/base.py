"""What a lane is: the interface every transport implements, and the events it reports. No lane is special to its users.

Terms. A *link* is one peer process reached over one lane, seen from the receiver, who opens it: whoever owns the
destination memory asks for the bytes, in every lane. An *operation* (`op`, a number chosen by the caller, never used
twice) is one region on its way. A *tag* names a region on both sides and is never used twice either.

Rules that every transport keeps, and `baton.transfer.testing` checks:
- Each operation ends exactly once: `Received`, `Placed`, `Sent` or `Ended`. Until then the transport may touch its
  memory, and afterwards never again. That is what a quarantined staging slot waits for.
- Bytes are only written where a `receive` for their tag is open. Everything else from a peer is counted and dropped.
- A receive ends by itself when its peer dies. A send ends by then, or when it is cancelled: it reads memory that is
  kept until it ends, so nothing is lost by waiting.
- `cancel` asks for an end; the end is reported by `poll`. Cancelling what has ended is harmless.
- A transport proves who its peer is before a byte is exchanged (`LinkUp`); one that is not on the allow-list never is.
- All calls come from one owner thread; none of them waits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import zmq

from baton.common.ids import Stamp
from baton.common.kv.layout import Component
from baton.common.messages import LaneAddress

Bytes = npt.NDArray[np.uint8]
UnitIds = npt.NDArray[np.int32]
"""Rows of a pool as what travels (`staging.unit_rows`): pages, or pieces of states."""
WakeSource = int | zmq.Socket[bytes]
"""A descriptor or ZMQ socket that becomes readable when `poll` has something to report."""


@dataclass(frozen=True, slots=True)
class Rows:
    """What travels of a pool: bytes [begin, end) of each of `units` of `component`'s pool, one after the other. The
    whole of a unit, or the layers that a group of them takes in it."""

    component: Component
    units: UnitIds
    begin: int
    end: int

    def of(self, pool: Bytes) -> Bytes:
        """The bytes that count of every unit of `pool`, uint8 [units, bytes of one]; a view."""
        return pool[:, self.begin : self.end]

    @property
    def row_bytes(self) -> int:
        return self.end - self.begin

    @property
    def nbytes(self) -> int:
        return len(self.units) * self.row_bytes


class Watcher(Protocol):
    """Whoever waits on behalf of a transport (`baton.transfer.mesh.Mesh`), and polls it when a source is readable."""

    def register(self, source: WakeSource) -> None: ...

    def unregister(self, source: WakeSource) -> None: ...


@dataclass(frozen=True, slots=True)
class Received:
    """All bytes of the region are in `data` (the memory given to `receive`, or the transport's own, given away)."""

    op: int
    data: Bytes


@dataclass(frozen=True, slots=True)
class Placed:
    """All bytes of the region are in the rows that a direct lane's `receive` was given."""

    op: int


@dataclass(frozen=True, slots=True)
class Sent:
    """The payload's memory is the caller's again. Not that anybody received it."""

    op: int


TAG_TAKEN = "another region waits under its tag"
"""Why a send ends at once. Honest peers name each tag once; one that does not spoils its own hand-off."""


@dataclass(frozen=True, slots=True)
class Ended:
    """Over without success; the memory is the caller's again."""

    op: int
    reason: str
    peer_lost: bool


@dataclass(frozen=True, slots=True)
class LinkUp:
    """The peer is proven, and may be asked for regions."""

    peer: Stamp


@dataclass(frozen=True, slots=True)
class LinkDown:
    """The link could not be opened, or broke. `open` may be called again."""

    peer: Stamp
    reason: str


@dataclass(frozen=True, slots=True)
class PullFailed:
    """Why a pull did not happen, or not wholly."""

    reason: str
    peer_lost: bool


OperationEnd = Received | Placed | Sent | Ended
TransportEvent = OperationEnd | LinkUp | LinkDown


class Transport(Protocol):
    """Common to all lanes. `open` is answered by LinkUp or LinkDown; a link that is up can still go down."""

    lane: str

    @property
    def stray(self) -> int:
        """Callers that were turned away, and what came that nobody had asked for or that made no sense."""
        ...

    def address(self) -> LaneAddress:
        """What peers need for `open`; published with the membership, so only members see it."""
        ...

    def open(self, peer: Stamp, address: LaneAddress) -> None: ...

    def close_link(self, peer: Stamp) -> None:
        """Ends what is received from the peer. What it asks for here goes on: that is another direction."""
        ...

    def shut_out(self, peer: Stamp) -> None:
        """`close_link`, and what is sent to the peer ends, too: it is not answered any more."""
        ...

    def poll(self) -> list[TransportEvent]: ...

    @property
    def busy(self) -> bool:
        """Something is on its way whose end no wake source announces: poll again within milliseconds."""
        ...

    def close(self) -> None:
        """Gives up everything at once and returns when no memory of a caller is touched any more."""
        ...


class StagedTransport(Transport, Protocol):
    """Bytes travel from a contiguous payload at the source to a contiguous slot at the receiver."""

    def receive(self, op: int, peer: Stamp, tag: int, slot: Bytes) -> None:
        """Asks `peer` for the region `tag` of exactly `len(slot)` bytes. A size that differs ends the operation."""
        ...

    def send(self, op: int, peer: Stamp, tag: int, payload: Bytes) -> None:
        """Holds `payload` ready under `tag` until `peer` asks for it. Ends when something else is."""
        ...

    def cancel(self, op: int) -> None: ...


class DirectTransport(Transport, Protocol):
    """Bytes travel from the source's rows to the receiver's, without a copy in between."""

    def receive(self, op: int, peer: Stamp, tag: int, rows: Rows) -> None:
        """Asks `peer` for the region `tag` of exactly `rows.nbytes` bytes. A size that differs ends the operation.
        Until all of it is there, and after an end without success, these bytes of the rows are anything."""
        ...

    def send(self, op: int, peer: Stamp, tag: int, rows: Rows) -> None:
        """Holds `rows` ready under `tag` until `peer` asks for it. Ends when something else is."""
        ...

    def cancel(self, op: int) -> None:
        """Immediate: nothing touches the rows when this returns, though the end is reported by `poll`."""
        ...


class Pulling(Protocol):
    """A pull under way. Until it is done its source is read and its target written: it cannot be called back."""

    def done(self) -> bool:
        """Never waits. Stays true."""
        ...

    @property
    def failed(self) -> PullFailed | None:
        """Once done: why the target holds anything; None when it holds what the source did."""
        ...


class LatePullTransport(Transport, Protocol):
    """The receiver has a device copy the source's units into its own, and such a copy ends later. Nobody may have the
    target's units before, whatever becomes of link, peer or hand-off meanwhile."""

    def begin_pull(self, peer: Stamp, source: Rows, target: Rows) -> Pulling | PullFailed:
        """The same stretch of each unit of both, row for row. PullFailed: nothing was touched."""
        ...


class PullTransport(Transport, Protocol):
    """The receiver reads the source's units itself, straight into its own. Done when it returns: nothing to cancel."""

    def pull(self, peer: Stamp, source: Rows, target: Rows) -> PullFailed | None:
        """Copies `source` of the peer's pools into `target` of ours, row for row. After a failure the rows hold
        anything."""
        ...
