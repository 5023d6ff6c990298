"""What every event means in every state of a hand-off, written down independently of the code that decides it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import get_args

import pytest

from baton.transfer.session import sink, source, table

DUPLICATE, STALE, NEVER = "ignored_duplicate", "ignored_stale", "impossible"

SINK_EVENTS = [event.__name__ for event in get_args(sink.SinkInput)]
SOURCE_EVENTS = [event.__name__ for event in get_args(source.SourceInput)]
SINK_STATES = [state.__name__ for state in get_args(sink.SinkState)]
SOURCE_STATES = [state.__name__ for state in get_args(source.SourceState)]
FRAMES = {event.__name__ for event in (*get_args(sink.SinkFrame), *get_args(source.SourceFrame))}
"""What a peer can send."""

LATE_SINK_DATA = "SinkPrepared SinkNotPrepared Landed RegionDamaged SinkLaneFailed"
LATE_SOURCE = "ShipRegion FinishSource AbortSource RegionReady SourceLaneFailed PeerSilent"

# state -> {what may come of it: events}; an event may be listed several times.
SINK: Mapping[str, Mapping[str, str]] = {
    "Preparing": {
        "Offered": "SinkPrepared",
        "Closed": "SinkNotPrepared",
        "Draining": "AbortSink DeadlinePassed PeerSilent PeerDead",
        STALE: "Accept Refuse Chunk Done Failed Cancelled",
        NEVER: "Landed RegionDamaged SinkLaneFailed SinkFenced ResendDue",
    },
    "Offered": {
        "Offered": "ResendDue",
        "Receiving": "Accept Chunk Done",
        "Draining": "Refuse Failed Chunk Done SinkLaneFailed AbortSink DeadlinePassed PeerSilent PeerDead",
        STALE: "Cancelled",
        NEVER: "SinkPrepared SinkNotPrepared Landed RegionDamaged SinkFenced",
    },
    "Receiving": {
        "Receiving": "Chunk Done Landed RegionDamaged ResendDue",
        "Committed": "Done Landed",
        "Draining": "Refuse Failed Chunk Done RegionDamaged SinkLaneFailed "
        "AbortSink DeadlinePassed PeerSilent PeerDead",
        DUPLICATE: "Accept Chunk Done",
        STALE: "Chunk Cancelled",
        NEVER: "SinkPrepared SinkNotPrepared SinkFenced Landed RegionDamaged",
    },
    "Draining": {
        "Aborted": "SinkFenced",
        "Closed": "SinkFenced",
        "Draining": "Landed PeerSilent PeerDead",
        DUPLICATE: "AbortSink PeerSilent",
        STALE: "Accept Refuse Chunk Done Failed Cancelled SinkPrepared SinkNotPrepared RegionDamaged SinkLaneFailed",
        NEVER: "Landed ResendDue DeadlinePassed",
    },
    "Committed": {
        DUPLICATE: "Chunk Done Failed",
        STALE: "Accept Refuse Cancelled AbortSink PeerSilent PeerDead SinkLaneFailed",
        NEVER: "SinkPrepared SinkNotPrepared Landed RegionDamaged SinkFenced ResendDue DeadlinePassed",
    },
    "Aborted": {
        "Aborted": "ResendDue",
        "Closed": "Cancelled Refuse PeerDead",
        STALE: f"Accept Chunk Done Failed AbortSink PeerSilent {LATE_SINK_DATA}",
        NEVER: "SinkFenced DeadlinePassed",
    },
    "Closed": {
        STALE: f"Accept Refuse Chunk Done Failed Cancelled AbortSink PeerSilent PeerDead {LATE_SINK_DATA}",
        NEVER: "SinkFenced ResendDue DeadlinePassed",
    },
}

SOURCE: Mapping[str, Mapping[str, str]] = {
    "Accepted": {
        "Sending": "ShipRegion",
        "Cancelling": "Commit Cancel PeerDead",
        "Failing": "AbortSource SourceLaneFailed DeadlinePassed PeerSilent",
        DUPLICATE: "Offer",
        STALE: "Ack Nack",
        NEVER: "ShipRegion FinishSource RegionReady SourceFenced ResendDue",
    },
    "Sending": {
        "Sending": "ShipRegion FinishSource RegionReady Ack Nack ResendDue",
        "AwaitingAck": "FinishSource RegionReady",
        "Cancelling": "Commit Cancel PeerDead",
        "Failing": "Nack AbortSource SourceLaneFailed DeadlinePassed PeerSilent",
        DUPLICATE: "Offer Ack Nack",
        STALE: "Nack",
        NEVER: "ShipRegion FinishSource RegionReady SourceFenced",
    },
    "AwaitingAck": {
        "AwaitingAck": "RegionReady Ack Nack ResendDue",
        "Releasing": "Commit",
        "Cancelling": "Cancel PeerDead",
        "Failing": "Nack AbortSource SourceLaneFailed DeadlinePassed PeerSilent",
        DUPLICATE: "Offer Ack Nack",
        STALE: "Nack",
        NEVER: "ShipRegion FinishSource SourceFenced RegionReady",
    },
    "Releasing": {
        "Released": "SourceFenced",
        DUPLICATE: "Commit",
        STALE: "Offer Ack Nack Cancel AbortSource RegionReady SourceLaneFailed PeerSilent PeerDead",
        NEVER: "ShipRegion FinishSource ResendDue DeadlinePassed",
    },
    "Cancelling": {
        "Closed": "SourceFenced",
        DUPLICATE: "Cancel",
        STALE: f"Offer Ack Nack Commit PeerDead {LATE_SOURCE}",
        NEVER: "ResendDue DeadlinePassed",
    },
    "Failing": {
        "Failing": "ResendDue",
        "Aborted": "SourceFenced",
        "Quarantined": "SourceFenced",
        "Cancelling": "Cancel Commit PeerDead",
        DUPLICATE: "Offer",
        STALE: f"Ack Nack {LATE_SOURCE}",
        NEVER: "DeadlinePassed",
    },
    "Quarantined": {
        "Quarantined": "ResendDue",
        "Closed": "Cancel Commit PeerDead",
        DUPLICATE: "Offer",
        STALE: f"Ack Nack {LATE_SOURCE}",
        NEVER: "SourceFenced DeadlinePassed",
    },
    "Aborted": {
        "Aborted": "ResendDue",
        "Closed": "Cancel Commit PeerDead",
        DUPLICATE: "Offer",
        STALE: f"Ack Nack {LATE_SOURCE}",
        NEVER: "SourceFenced DeadlinePassed",
    },
    "Released": {
        DUPLICATE: "Commit",
        STALE: "Offer Ack Nack Cancel AbortSource RegionReady SourceLaneFailed PeerSilent PeerDead",
        NEVER: "ShipRegion FinishSource SourceFenced ResendDue DeadlinePassed",
    },
    "Closed": {
        DUPLICATE: "Offer Cancel",
        STALE: f"Ack Nack Commit PeerDead {LATE_SOURCE}",
        NEVER: "SourceFenced ResendDue DeadlinePassed",
    },
    "Refused": {
        "Closed": "Cancel",
        DUPLICATE: "Offer",
        STALE: "Ack Nack Commit PeerSilent PeerDead",
        NEVER: "ShipRegion FinishSource AbortSource RegionReady SourceLaneFailed SourceFenced ResendDue DeadlinePassed",
    },
}

CELLS = {"sink": table.sink_cells(), "source": table.source_cells()}
CASES = [
    *(("sink", state, event) for state in SINK_STATES for event in SINK_EVENTS),
    *(("source", state, event) for state in SOURCE_STATES for event in SOURCE_EVENTS),
]


@pytest.mark.parametrize(("side", "state", "event"), CASES)
def test_every_cell(side: str, state: str, event: str) -> None:
    expected = {"sink": SINK, "source": SOURCE}[side]
    wanted = {outcome for outcome, events in expected[state].items() if event in events.split()}
    cell = CELLS[side][state, event]
    found = {outcome.after if outcome.verdict == "move" else outcome.verdict for outcome in cell}
    assert wanted, f"{side} {state} {event} is not written down"
    assert found == wanted


@pytest.mark.parametrize("side", CELLS)
def test_no_frame_of_a_peer_is_ever_impossible(side: str) -> None:
    for (state, event), outcomes in CELLS[side].items():
        if event in FRAMES:
            assert NEVER not in {outcome.verdict for outcome in outcomes}, f"{side} {state} {event}"


@pytest.mark.parametrize("side", CELLS)
def test_what_is_ignored_changes_nothing(side: str) -> None:
    for (state, event), outcomes in CELLS[side].items():
        for outcome in outcomes:
            if outcome.verdict in (DUPLICATE, STALE):
                assert outcome.after == state, event
                assert all(effect.startswith("send ") for effect in outcome.effects), event
