"""A recording: bounded, off unless asked for, and drawn as something a viewer can open."""

from __future__ import annotations

from trace_checks import check_chrome_trace, names_of

from baton.common.trace import Interval, Passage, ProcessTrace, Recorder, Slice, ThreadTrace
from baton.deploy.chrome_trace import chrome_trace


def worker(name: str, offset_s: float, engine: Recorder, io: Recorder) -> ProcessTrace:
    return ProcessTrace(process=name, pid=7, wall_offset_s=offset_s, threads={"engine": engine.take(), "io": io.take()})


def recorded() -> list[ProcessTrace]:
    """One hand-off between two hosts whose clocks began at different times."""
    asks, computes, copies, lands = (Recorder() for _ in range(4))
    asks.passage("h1", 10.1)
    asks.slice("plan", 10.0, 10.2, {})
    computes.passage("h1", 1000.35)
    computes.slice("plan", 1000.3, 1000.4, {})
    computes.slice("prefill", 1000.4, 1000.9, {"rows": 1, "tokens": 128})
    computes.passage("h1", 1000.95)
    computes.slice("outcome", 1000.9, 1001.0, {})
    copies.slice("gather", 1001.0, 1001.1, {"seq": 0})
    lands.slice("scatter", 11.2, 11.3, {"seq": 0})
    lands.interval("wire zmq", 11.1, 11.3, {"seq": 0})
    lands.interval("wire zmq", 11.2, 11.4, {"seq": 1})  # overlaps
    asks.passage("h1", 11.45)
    asks.slice("plan", 11.4, 11.5, {})
    return [worker("decode-0", 1000.0, asks, lands), worker("prefill-0", 10.0, computes, copies)]


def test_a_recording_becomes_events_that_a_viewer_can_draw() -> None:
    trace = chrome_trace(recorded())
    check_chrome_trace(trace)
    assert names_of(trace) == {1: "decode-0", 2: "prefill-0"}
    assert trace["otherData"] == {"began_at_s": 1010.0, "forgotten_spans": 0}
    arc = [event for event in trace["traceEvents"] if event["ph"] in "stf"]
    assert [(event["ph"], event["pid"]) for event in arc] == [("s", 1), ("t", 2), ("t", 2), ("f", 1)]
    [gather] = [event for event in trace["traceEvents"] if event["name"] == "gather"]
    assert (gather["ts"], gather["args"]) == (1e6, {"seq": 0})
    assert sum(event["name"] == "wire zmq" for event in trace["traceEvents"]) == 4


def test_nothing_recorded_is_an_empty_picture() -> None:
    check_chrome_trace(chrome_trace([]))
    check_chrome_trace(chrome_trace([worker("decode-0", 0.0, Recorder(), Recorder())]))


def test_an_arc_needs_a_slice_around_each_of_its_ends_and_two_of_them() -> None:
    engine, io = Recorder(), Recorder()
    engine.passage("h1", 0.5)  # before the recording's first slice
    engine.slice("plan", 1.0, 2.0, {})
    engine.passage("h1", 1.5)
    engine.passage("h1", 3.0)  # after its last
    trace = chrome_trace([worker("decode-0", 0.0, engine, io)])
    check_chrome_trace(trace)
    assert not [event for event in trace["traceEvents"] if event["ph"] in "stf"]


def test_a_recorder_keeps_the_latest_and_counts_what_it_forgot() -> None:
    recorder = Recorder(capacity=3)
    for number in range(5):
        recorder.slice(f"s{number}", number, number + 1, {})
    recorder.interval("t", 0.0, 1.0, {})
    recorder.passage("h", 0.5)
    assert recorder.take() == ThreadTrace(
        items=(Slice("s4", 4, 5, {}), Interval("t", 0.0, 1.0, {}), Passage("h", 0.5)), forgotten=4
    )
