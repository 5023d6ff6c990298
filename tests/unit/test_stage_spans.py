"""The spans that workers tell of a traced request: of its stay on a decode worker, and of each hand-off, both sides."""

from __future__ import annotations

import pytest
from core_rig import Rig, decode_engine, prefill_engine, prompt_of
from msgspec import structs

from baton.common.messages import SamplingParams
from baton.common.spans import TracedSpan, below, span_id_of
from baton.transfer.api import FinishSource, OpenSink
from baton.transfer.handoff_spans import handoff_spans
from baton.transfer.reports import HandoffTimes

ABOVE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"

TAKEN = HandoffTimes(
    handoff="00000000000000aa/0", direction="in", request_id="r", peer="prefill-0", lane="zmq", tokens=16,
    begun_at_s=10.0, outcome="committed", nbytes=77, region_count=1, scatter_s=0.25, trace=ABOVE,
    marks={"offered": 0.5, "accepted": 0.6, "first region": 1.0, "committed": 3.0, "over": 3.0},
)  # fmt: skip
GIVEN = structs.replace(
    TAKEN,
    direction="out",
    peer="decode-0",
    queued_s=0.25,
    scatter_s=0.0,
    marks={"first computed": 0.9, "first region": 1.0, "all computed": 2.0, "committed": 3.0, "over": 3.5},
)


def spans_of(rig: Rig) -> list[TracedSpan]:
    return [effect for effect in rig.log if isinstance(effect, TracedSpan)]


def times_of(spans: list[TracedSpan]) -> dict[str, tuple[float, float]]:
    return {span.name: (span.begin_s, span.end_s) for span in spans}


# --------------------------------------------------------------------------------------- on a decode worker


def test_a_stay_has_its_stages_under_it_and_hands_its_own_context_on() -> None:
    rig = Rig()
    rig.submit("r", prompt_of(21), trace=ABOVE)
    rig.submit("other", prompt_of(21, 5))
    rig.settle()
    whole, *stages = spans_of(rig)
    assert (whole.name, whole.context) == ("decode_worker", below(ABOVE, "decode_worker"))
    assert whole.parent == span_id_of(ABOVE)
    assert [stage.name for stage in stages] == ["queue", "decode_queue", "decode"]
    assert {stage.parent for stage in stages} == {span_id_of(whole.context)}
    assert all(whole.begin_s <= stage.begin_s <= stage.end_s <= whole.end_s for stage in stages)
    assert whole.attributes["baton.prompt.transferred_tokens"] == whole.attributes["baton.prompt.tokens"] == 21
    opened = {effect.request_id: effect.trace for effect in rig.log if isinstance(effect, OpenSink)}
    assert opened == {"r": whole.context, "other": ""}


def test_what_is_computed_here_and_pushed_back_shows() -> None:
    rig = Rig(decode_engine(pages=24, num_reserved_decode_tokens=0, local_prefill_max_tokens=100))
    for index in range(4):
        rig.submit(f"r{index}", prompt_of(14, index), SamplingParams(max_tokens=40), trace=below(ABOVE, str(index)))
    rig.settle()
    whole = next(span for span in spans_of(rig) if span.attributes.get("baton.retractions"))
    stages = [span for span in spans_of(rig) if span.parent == span_id_of(whole.context)]
    names = [span.name for span in stages]
    assert names.count("queue") >= 2, "again, after it was pushed back"
    assert names.count("prefill") >= 2
    assert len({span.context for span in stages}) == len(stages)


def test_a_cancelled_request_says_so_and_what_the_end_cut_short_ends_with_it() -> None:
    rig = Rig()
    rig.submit("r", prompt_of(21), SamplingParams(max_tokens=40), trace=ABOVE)
    while len(rig.gateway.tokens.get("r", ())) < 3:
        for engine in (rig.prefill, rig.decode):
            rig.run(engine.step() or [])
    rig.cancel("r")
    whole, *stages = spans_of(rig)
    assert whole.error == "cancelled"
    assert [stage.name for stage in stages] == ["queue", "decode_queue", "decode"]
    assert stages[-1].end_s == whole.end_s


def test_a_prompt_that_waits_for_others_says_how_long() -> None:
    rig = Rig(prefill=prefill_engine(chunk_tokens=16))
    for number in range(2):
        rig.submit(f"r{number}", prompt_of(60, number))
    rig.settle()
    first, second = (effect.queued_s for effect in rig.log if isinstance(effect, FinishSource))
    assert first == 0.0
    assert second > 0.0


# ------------------------------------------------------------------------------------------- of a hand-off


def test_both_sides_of_a_hand_off_fit_together() -> None:
    taken, given = handoff_spans(TAKEN), handoff_spans(GIVEN)
    assert times_of(taken) == {
        "handoff": (10.0, 13.0),
        "staging": (10.0, 10.5),
        "transfer": (11.0, 13.0),
        "scatter": (12.75, 13.0),
    }
    assert times_of(given) == {
        "prefill_worker": (10.0, 13.5),
        "queue": (10.0, 10.25),
        "prefill": (10.25, 12.0),
        "transfer": (11.0, 13.0),
    }
    assert given[0].parent == span_id_of(taken[0].context), "asked for over there"
    assert {span.parent for span in given[1:]} == {span_id_of(given[0].context)}
    assert (taken[2].attributes["baton.transfer.bytes"], taken[2].attributes["baton.lane"]) == (77, "zmq")
    assert len({span.context for span in (*taken, *given)}) == 8


@pytest.mark.parametrize("times", [TAKEN, GIVEN])
def test_one_that_failed_before_it_began_says_why(times: HandoffTimes) -> None:
    marks = {"failed": 0.75, "over": 0.75}
    failed = structs.replace(times, outcome="failed", code="no_worker", queued_s=None, marks=marks)
    whole, *rest = handoff_spans(failed)
    assert (whole.error, whole.end_s) == ("no_worker", 10.75)
    assert [(span.name, span.end_s) for span in rest] == ([("staging", 10.75)] if times is TAKEN else [])


@pytest.mark.parametrize("times", [TAKEN, GIVEN])
def test_nobody_tells_of_what_nobody_traces(times: HandoffTimes) -> None:
    assert handoff_spans(structs.replace(times, trace="")) == []
