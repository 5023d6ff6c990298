"""One contract, kept by the job store on SQLite and on a real PostgreSQL server."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from postgres_rig import find_server, running_server

from baton.common.errors import ConfigError, ErrorCode, RequestError
from baton.deploy.jobs.databases import SqliteDatabase, open_database
from baton.deploy.jobs.lines import answered
from baton.deploy.jobs.records import BatchRecord, ClaimedLine, FileRecord
from baton.deploy.jobs.schema import MIGRATIONS
from baton.deploy.jobs.store import JobStore

ME, OTHER = "me", "somebody else"
CHAT = "/v1/chat/completions"
DAY_S = 86_400.0
LEASE_S = 30.0
GIB = 1 << 30


@pytest.fixture(scope="module")
def postgres() -> Iterator[str]:
    pytest.importorskip("psycopg", reason="PostgreSQL needs the package psycopg: pip install 'baton-pd[postgres]'")
    programs = find_server()
    if programs is None:
        pytest.skip("no PostgreSQL server on this machine (its initdb is not on PATH)")
    with running_server(programs) as url:
        yield url


@pytest.fixture(params=["sqlite", "postgres"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """An empty database."""
    if request.param == "sqlite":
        yield str(tmp_path / "jobs" / "jobs.sqlite")
        return
    yield emptied(request.getfixturevalue("postgres"))


def emptied(url: str) -> str:
    database = open_database(url)
    with database.transaction() as tx:
        tx.run("DROP SCHEMA public CASCADE")
        tx.run("CREATE SCHEMA public")
    database.close()
    return url


@pytest.fixture
def another(place: str) -> Iterator[Callable[[], JobStore]]:
    """Each is the store of another process."""
    made: list[JobStore] = []

    def make() -> JobStore:
        made.append(JobStore(open_database(place)))
        return made[-1]

    yield make
    for store in made:
        store.close()


@pytest.fixture
def store(another: Callable[[], JobStore]) -> JobStore:
    return another()


def request_line(custom_id: str, url: str = CHAT, **body: Any) -> bytes:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body}).encode()


def upload(
    store: JobStore,
    content: bytes,
    owner: str = ME,
    now_s: float = 0.0,
    part_bytes: int = 100,
    key: str | None = None,
) -> FileRecord:
    parts = [content[at : at + part_bytes] for at in range(0, len(content), part_bytes)]
    return store.add_file(owner, "batch", "in.jsonl", parts, now_s, GIB, key)


def submit(store: JobStore, count: int, *, owner: str = ME, now_s: float = 0.0, key: str | None = None) -> BatchRecord:
    """A batch with lines "0", "1", ... that waits to be begun."""
    file = upload(store, b"\n".join(request_line(str(n)) for n in range(count)), owner, now_s)
    return store.create_batch(owner, CHAT, file.id, ("24h", DAY_S), {"for": "test"}, now_s, key)


def create(store: JobStore, file_id: str, owner: str = ME) -> BatchRecord:
    return store.create_batch(owner, CHAT, file_id, ("24h", DAY_S), {}, 0.0, None)


def begun(store: JobStore, count: int, *, owner: str = ME, now_s: float = 0.0) -> BatchRecord:
    batch = submit(store, count, owner=owner, now_s=now_s)
    tend(store, now_s)
    return store.batch(owner, batch.id)


def tend(store: JobStore, now_s: float = 0.0) -> None:
    store.tend(now_s, 1000, 4096)


def claim(store: JobStore, runner: str, most: int = 100, now_s: float = 0.0, **own: int) -> list[ClaimedLine]:
    return store.claim(runner, most, now_s, now_s + LEASE_S, own)


def answer(store: JobStore, lines: list[ClaimedLine], text: str = "{}", status: int = 200, now_s: float = 1.0) -> None:
    store.record([answered(line, "req", status, text.encode(), (3, 2)) for line in lines], now_s)


def whole(store: JobStore, file: FileRecord) -> bytes:
    content, place = b"", -1
    while True:
        part, after = store.content(file, place)
        if after is None:
            return content
        content, place = content + part, after


def custom_ids(store: JobStore, file_id: str | None) -> list[str]:
    if file_id is None:
        return []
    file = store.file(ME, file_id)
    content = whole(store, file)
    assert len(content) == file.nbytes
    return [json.loads(line)["custom_id"] for line in content.splitlines()]


def refused(work: Callable[[], object]) -> ErrorCode:
    with pytest.raises(RequestError) as caught:
        work()
    return caught.value.code


# --------------------------------------------------------------------------------------------------- files


def test_a_file_comes_back_as_it_was(store: JobStore) -> None:
    content = bytes(range(256)) * 3
    file = upload(store, content)
    assert (file.nbytes, file.filename, file.purpose) == (768, "in.jsonl", "batch")
    assert store.file(ME, file.id) == file
    assert whole(store, file) == content
    assert whole(store, upload(store, b"")) == b""


def test_files_are_their_owners_alone(store: JobStore) -> None:
    file = upload(store, b"x")
    assert refused(lambda: store.file(OTHER, file.id)) == ErrorCode.NOT_FOUND
    assert refused(lambda: store.delete_file(OTHER, file.id)) == ErrorCode.NOT_FOUND
    assert store.files(OTHER, None, None, 10, newest_first=True) == ([], False)
    store.delete_file(ME, file.id)
    assert refused(lambda: store.file(ME, file.id)) == ErrorCode.NOT_FOUND
    assert whole(store, file) == b""


def test_an_upload_that_breaks_off_leaves_nothing(store: JobStore) -> None:
    def parts() -> Iterator[bytes]:
        yield b"some"
        raise ConnectionError

    with pytest.raises(ConnectionError):
        store.add_file(ME, "batch", "broken", parts(), 0.0, GIB)
    assert store.files(ME, None, None, 10, newest_first=True) == ([], False)


def test_a_full_store_takes_no_more(store: JobStore) -> None:
    store.add_file(ME, "batch", "a", [b"x" * 60], 0.0, 100)
    assert refused(lambda: store.add_file(ME, "batch", "b", [b"x" * 41], 0.0, 100)) == ErrorCode.OVERLOADED
    store.add_file(ME, "batch", "c", [b"x" * 40], 0.0, 100)


def test_lists_come_in_pages(store: JobStore) -> None:
    ids = [upload(store, b"x", now_s=float(n // 2)).id for n in range(5)]  # some of them in the same moment
    for newest_first in (True, False):
        seen: list[str] = []
        more = True
        while more:
            page, more = store.files(ME, "batch", seen[-1] if seen else None, 2, newest_first=newest_first)
            seen += [file.id for file in page]
        assert sorted(seen) == sorted(ids)
        assert (seen[0] == ids[4]) == newest_first
    assert store.files(ME, "batch_output", None, 10, newest_first=True) == ([], False)


# ------------------------------------------------------------------------------------------------- batches


def test_a_batch_from_its_file_to_its_outcomes(store: JobStore) -> None:
    batch = begun(store, 3)
    assert (batch.status, batch.total, batch.started_at) == ("in_progress", 3, 0.0)
    lines = claim(store, "a")
    assert [(line.custom_id, line.line, line.attempts, line.endpoint) for line in lines] == [
        ("0", 1, 1, CHAT),
        ("1", 2, 1, CHAT),
        ("2", 3, 1, CHAT),
    ]
    answer(store, lines[2:])
    answer(store, lines[:1], '{"error":1}', 400)
    assert store.batch(ME, batch.id).output_file_id is None
    answer(store, lines[1:2], now_s=7.0)
    ended = store.batch(ME, batch.id)
    assert (ended.status, ended.completed, ended.failed, ended.ended_at) == ("completed", 2, 1, 7.0)
    assert (ended.input_tokens, ended.output_tokens) == (9, 6)
    assert custom_ids(store, ended.output_file_id) == ["1", "2"]
    assert custom_ids(store, ended.error_file_id) == ["0"]
    assert ended.output_file_id is not None
    first = json.loads(whole(store, store.file(ME, ended.output_file_id)).splitlines()[0])
    assert first["response"] == {"status_code": 200, "request_id": "req", "body": {}}
    assert first["error"] is None


def test_a_line_has_one_outcome_whoever_tells_how_often(store: JobStore, another: Callable[[], JobStore]) -> None:
    batch = begun(store, 2)
    lines = claim(store, "a")
    answer(store, lines[:1])
    answer(another(), lines[:1], '{"late":1}', 500)
    answer(store, [*lines, *lines])
    ended = store.batch(ME, batch.id)
    assert (ended.completed, ended.failed, ended.output_tokens) == (2, 0, 4)
    assert custom_ids(store, ended.output_file_id) == ["0", "1"]
    answer(store, lines, status=500)
    assert store.batch(ME, batch.id) == ended


def test_the_same_key_gives_the_same_batch(store: JobStore, another: Callable[[], JobStore]) -> None:
    first = submit(store, 1, key="k")
    assert submit(another(), 1, key="k").id == first.id
    assert submit(store, 1, key="k", owner=OTHER).id != first.id
    assert submit(store, 1).id != submit(store, 1).id
    assert refused(lambda: store.batch(OTHER, first.id)) == ErrorCode.NOT_FOUND
    assert first.id in [batch.id for batch in store.batches(ME, None, 10)[0]]


def test_a_key_is_for_one_piece_of_work(store: JobStore, another: Callable[[], JobStore]) -> None:
    first = submit(store, 1, key="k")
    assert refused(lambda: submit(store, 2, key="k")) == ErrorCode.IDEMPOTENCY_MISMATCH
    again = upload(store, request_line("0"))
    for endpoint, window, metadata in (
        ("/v1/completions", ("24h", DAY_S), {"for": "test"}),
        (CHAT, ("1h", DAY_S / 24), {"for": "test"}),
        (CHAT, ("24h", DAY_S), {"for": "production"}),
    ):
        asked = (ME, endpoint, again.id, window, metadata, 0.0, "k")
        assert refused(lambda asked=asked: another().create_batch(*asked)) == ErrorCode.IDEMPOTENCY_MISMATCH  # type: ignore[misc]
    store.delete_file(ME, first.input_file_id)
    assert store.create_batch(ME, CHAT, again.id, ("24h", DAY_S), {"for": "test"}, 9.0, "k").id == first.id
    named = [
        store.create_batch(ME, CHAT, again.id, ("24h", DAY_S), names, 9.0, "two names").id
        for names in ({"a": "1", "b": "2"}, {"b": "2", "a": "1"})
    ]
    assert named[0] == named[1], "the order of fields is nothing that was asked for"


def test_the_same_key_gives_the_same_file(store: JobStore, another: Callable[[], JobStore]) -> None:
    first = upload(store, b"some lines", key="k")
    assert upload(another(), b"some lines", key="k", part_bytes=3) == first
    assert refused(lambda: upload(store, b"other lines", key="k")) == ErrorCode.IDEMPOTENCY_MISMATCH
    assert upload(store, b"other lines", OTHER, key="k").id != first.id
    assert upload(store, b"some lines", key="l").id != upload(store, b"some lines").id
    assert len(store.files(ME, None, None, 10, newest_first=True)[0]) == 3
    store.delete_file(ME, first.id)
    assert upload(store, b"other lines", key="k").id != first.id, "what is gone has no key any more"


def test_events_tell_of_each_line_once_in_the_order_of_their_ends(
    store: JobStore, another: Callable[[], JobStore]
) -> None:
    batch = begun(store, 6)
    lines = claim(store, "a")
    assert store.events(ME, batch.id, 0, 10) == (batch, [])
    answer(store, [lines[4]], now_s=5.0)
    answer(another(), [lines[1]], status=404, now_s=6.0)
    answer(store, [lines[4], lines[0]], now_s=7.0)
    _, seen = store.events(ME, batch.id, 0, 10)
    assert [(end.place, end.custom_id, end.result, end.ended_at) for end in seen] == [
        (1, "4", "completed", 5.0),
        (2, "1", "failed", 6.0),
        (3, "0", "completed", 7.0),
    ]
    assert json.loads(seen[1].answer or b"")["response"]["status_code"] == 404
    store.cancel(ME, batch.id, 8.0)
    ended, rest = another().events(ME, batch.id, 3, 2)
    assert (ended.status, [(end.place, end.line, end.result) for end in rest]) == (
        "cancelled",
        [(4, 3, "failed"), (5, 4, "failed")],
    )
    assert [end.place for end in store.events(ME, batch.id, 5, 2)[1]] == [6]
    assert refused(lambda: store.events(OTHER, batch.id, 0, 10)) == ErrorCode.NOT_FOUND
    store.delete_file(ME, ended.error_file_id or "")
    assert [end.answer is None for end in store.events(ME, batch.id, 0, 10)[1]] == [False, True, False] + [True] * 3


@pytest.mark.parametrize(
    ("content", "codes"),
    [
        (b"", [("empty_file", None)]),
        (b"\n \n", [("empty_file", None)]),
        (b"{\n" + request_line("a"), [("invalid_json_line", 1)]),
        (request_line("a") + b"\r\n\r\n" + request_line("a"), [("duplicate_custom_id", 3)]),
        (request_line("a", "/v1/completions"), [("mismatched_url", 1)]),
        (b'{"custom_id": "", "method": "POST", "url": "x", "body": {}}', [("invalid_line", 1)]),
        (b'{"custom_id": "a", "method": "GET", "url": "x", "body": {}}', [("invalid_line", 1)]),
        (request_line("a").replace(b"{}}", b"[]}"), [("invalid_line", 1)]),
        (request_line("a", pad="x" * 4096) + b"\n" + request_line("b"), [("line_too_long", 1)]),
        (b"\xff\xfe", [("invalid_json_line", 1)]),
        (request_line("a\0b"), [("invalid_line", 1)]),
        (request_line("\ud800"), [("invalid_json_line", 1)]),
        (b"\n".join(request_line(str(n)) for n in range(1001)), [("too_many_lines", None)]),
    ],
)
def test_a_bad_file_fails_the_batch_and_says_why(
    store: JobStore, content: bytes, codes: list[tuple[str, int | None]]
) -> None:
    file = upload(store, content, part_bytes=1000)
    batch = create(store, file.id)
    tend(store)
    failed = store.batch(ME, batch.id)
    assert (failed.status, failed.total, failed.output_file_id) == ("failed", 0, None)
    assert [(fault["code"], fault["line"]) for fault in json.loads(failed.errors or "")] == codes
    assert claim(store, "a") == []


def test_a_batch_wants_a_file_of_its_owner(store: JobStore) -> None:
    file = upload(store, request_line("a"))
    assert refused(lambda: create(store, file.id, OTHER)) == ErrorCode.NOT_FOUND
    batch = create(store, file.id)
    store.delete_file(ME, file.id)
    tend(store)
    assert "input_file_gone" in (store.batch(ME, batch.id).errors or "")
    outcomes = begun(store, 1)
    answer(store, claim(store, "a"))
    output = store.batch(ME, outcomes.id).output_file_id or ""
    assert refused(lambda: create(store, output)) == ErrorCode.INVALID_REQUEST


# -------------------------------------------------------------------------------------------------- leases


def test_a_line_is_one_runners_until_its_lease_ends(store: JobStore, another: Callable[[], JobStore]) -> None:
    begun(store, 4)
    other = another()
    first = claim(store, "a", 2)
    assert [line.custom_id for line in claim(other, "b", 5)] == ["2", "3"]
    assert claim(other, "b", now_s=LEASE_S - 1) == []
    kept = store.renew("a", [first[0].key], 2 * LEASE_S)
    assert kept == {first[0].key}
    taken = claim(other, "b", now_s=LEASE_S)
    assert [(line.custom_id, line.attempts) for line in taken] == [("1", 2), ("2", 2), ("3", 2)]
    assert store.renew("a", [line.key for line in first], 3 * LEASE_S) == {first[0].key}


def test_lines_that_are_given_back_may_be_claimed_from_then_on(store: JobStore) -> None:
    begun(store, 2)
    lines = claim(store, "a")
    store.release("a", [lines[0].key], 5.0)
    store.release("b", [lines[1].key], 5.0)  # not its own
    assert claim(store, "b", now_s=4.9) == []
    assert [line.custom_id for line in claim(store, "b", now_s=5.0)] == ["0"]
    assert store.renew("a", [line.key for line in lines], 99.0) == {lines[1].key}


def test_batches_get_equal_shares(store: JobStore) -> None:
    big, small = begun(store, 20, now_s=0.0), begun(store, 3, now_s=1.0)

    def of(lines: list[ClaimedLine]) -> tuple[int, int]:
        return sum(line.batch_id == big.id for line in lines), sum(line.batch_id == small.id for line in lines)

    assert of(claim(store, "a", 4, now_s=2.0)) == (2, 2)
    assert of(claim(store, "a", 1, now_s=2.0, **{big.id: 5, small.id: 2})) == (0, 1)
    assert of(claim(store, "a", 4, now_s=2.0, **{big.id: 5, small.id: 3})) == (4, 0), "what one leaves is the other's"


def test_runners_never_have_the_same_line(store: JobStore, another: Callable[[], JobStore]) -> None:
    begun(store, 200)
    got: list[str] = []

    def work(own: JobStore, name: str) -> None:
        while lines := claim(own, name, 7):
            got.extend(line.custom_id for line in lines)
            answer(own, lines)

    threads = [threading.Thread(target=work, args=(another(), name)) for name in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(got) == sorted(map(str, range(200)))
    (ended,) = store.batches(ME, None, 10)[0]
    assert (ended.status, ended.completed) == ("completed", 200)
    assert custom_ids(store, ended.output_file_id) == list(map(str, range(200)))


# ---------------------------------------------------------------------------------------------------- ends


def test_cancelling_ends_it_at_once(store: JobStore) -> None:
    batch = begun(store, 700)
    lines = claim(store, "a", 2)
    answer(store, lines[:1])
    assert refused(lambda: store.cancel(OTHER, batch.id, 5.0)) == ErrorCode.NOT_FOUND
    cancelled = store.cancel(ME, batch.id, 5.0)
    assert (cancelled.status, cancelled.completed, cancelled.failed) == ("cancelled", 1, 699)
    answer(store, lines[1:])  # it was on its way
    assert store.renew("a", [line.key for line in lines], 9.0) == set()
    assert store.cancel(ME, batch.id, 6.0) == cancelled
    assert custom_ids(store, cancelled.output_file_id) == ["0"]
    assert custom_ids(store, cancelled.error_file_id) == [str(n) for n in range(1, 700)]
    (line, told), *_ = store.failures(ME, batch.id, 0, 2)
    assert (line, json.loads(told)["error"]["code"]) == (2, "batch_cancelled")


def test_what_has_not_begun_or_has_ended(store: JobStore) -> None:
    waiting = submit(store, 1)
    assert store.cancel(ME, waiting.id, 1.0).status == "cancelled"
    tend(store)
    assert store.batch(ME, waiting.id).total == 0
    done = begun(store, 1)
    answer(store, claim(store, "a"))
    assert refused(lambda: store.cancel(ME, done.id, 9.0)) == ErrorCode.CONFLICT


def test_a_batch_whose_time_is_over_expires(store: JobStore) -> None:
    batch = begun(store, 3)
    answer(store, claim(store, "a", 1))
    tend(store, DAY_S - 1)
    assert store.batch(ME, batch.id).status == "in_progress"
    late = submit(store, 1)
    tend(store, DAY_S)
    expired = store.batch(ME, batch.id)
    assert (expired.status, expired.completed, expired.failed, expired.ended_at) == ("expired", 1, 2, DAY_S)
    assert json.loads(store.failures(ME, batch.id, 0, 1)[0][1])["error"]["code"] == "batch_expired"
    assert (store.batch(ME, late.id).status, store.batch(ME, late.id).total) == ("expired", 0)


def test_deleting_outcomes_deletes_their_text(store: JobStore) -> None:
    batch = begun(store, 1)
    answer(store, claim(store, "a"), '{"secret":1}')
    output = store.file(ME, store.batch(ME, batch.id).output_file_id or "")
    store.delete_file(ME, output.id)
    assert refused(lambda: store.file(ME, output.id)) == ErrorCode.NOT_FOUND
    assert whole(store, output) == b""
    assert store.batch(ME, batch.id).completed == 1


def test_what_is_old_is_forgotten(store: JobStore) -> None:
    old, running = begun(store, 1), begun(store, 1)
    answer(store, claim(store, "a", 1), now_s=10.0)
    unused = upload(store, b"x", now_s=20.0)
    store.sweep(15.0)
    assert refused(lambda: store.batch(ME, old.id)) == ErrorCode.NOT_FOUND
    assert store.batch(ME, running.id).status == "in_progress"
    left = {file.id for file in store.files(ME, None, None, 10, newest_first=True)[0]}
    assert left == {unused.id, running.input_file_id}


# ------------------------------------------------------------------------------------------------ databases


def test_what_was_told_is_there_after_a_restart(place: str) -> None:
    store = JobStore(open_database(place))
    batch = begun(store, 1)
    store.close()
    store = JobStore(open_database(place))
    assert store.batch(ME, batch.id) == batch
    store.close()


def test_tables_of_an_older_version_are_brought_up_to_date(place: str, store: JobStore) -> None:
    database = open_database(place)
    with database.transaction() as tx:
        tx.run("CREATE TABLE schema_version (version BIGINT NOT NULL)")
        tx.run("INSERT INTO schema_version VALUES (1)")
        for statement in MIGRATIONS[0]:
            tx.run(statement)
        tx.run("INSERT INTO files VALUES ('file-old', ?, 'batch', 'in', 0, 0, NULL, NULL)", (ME,))
    database.close()
    old = store.file(ME, "file-old")
    assert (old.digest, create(store, old.id).input_file_id) == (None, old.id)
    assert submit(store, 1, key="k").id == submit(store, 1, key="k").id


def test_tables_of_a_newer_version_are_left_alone(place: str, store: JobStore) -> None:
    store.migrate()
    database = open_database(place)
    with database.transaction() as tx:
        assert tx.rows("SELECT version FROM schema_version") == [(len(MIGRATIONS),)]
        tx.run("UPDATE schema_version SET version = 99")
    with pytest.raises(ConfigError, match="version 99"):
        JobStore(database).migrate()
    database.close()


def test_a_server_that_went_away_is_found_again(postgres: str) -> None:
    server, store = open_database(emptied(postgres)), JobStore(open_database(postgres))
    store.files(ME, None, None, 1, newest_first=True)
    with server.transaction() as tx:
        tx.rows("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid()")
    assert refused(lambda: store.files(ME, None, None, 1, newest_first=True)) == ErrorCode.STORE_UNAVAILABLE
    store.files(ME, None, None, 1, newest_first=True)
    server.close()
    store.close()


def test_a_place_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no database, but longer than a header of one" * 10)
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigError, match="cannot be opened"):
            SqliteDatabase(path)
    pytest.importorskip("psycopg")
    with pytest.raises(ConfigError):
        open_database("postgresql://?nonsense=1")


def test_names_that_no_database_can_keep(store: JobStore) -> None:
    strange = (ErrorCode.NOT_FOUND, ErrorCode.INVALID_REQUEST)
    assert refused(lambda: store.file(ME, "file-\0")) in strange
    assert refused(lambda: store.batch(ME, "\0")) in strange
    assert upload(store, b"x").nbytes == 1, "and goes on"


def test_records_have_the_columns_that_there_are(store: JobStore) -> None:
    assert msgspec.json.decode(begun(store, 1).metadata) == {"for": "test"}


def documented(what: str, **values: str) -> str:
    """The command that docs/OPERATIONS.md has under this name, with these values."""
    text = (Path(__file__).parents[2] / "docs" / "OPERATIONS.md").read_text()
    (command,) = re.findall(rf"^{what}[^\n]*\n```\n(.*?)\n```$", text, re.MULTILINE | re.DOTALL)
    for name, value in values.items():
        assert name in command
        command = command.replace(name, value)
    return str(command)


def test_what_was_backed_up_while_it_was_used_is_there_again(store: JobStore, place: str, tmp_path: Path) -> None:
    kind, name = ("PostgreSQL", "DATABASE") if place.startswith("postgres") else ("SQLite", "jobs.sqlite")
    values = {name: place, "BACKUP": str(tmp_path / "copy"), "python3": sys.executable}
    if kind == "PostgreSQL":
        values.pop("python3")
        if shutil.which("pg_dump") is None:
            pytest.skip("no pg_dump on this machine")
    batch = begun(store, 5)
    answer(store, claim(store, "runner", 2))
    writing = open_database(place)
    with writing.transaction() as tx:
        tx.run("UPDATE batches SET metadata = ?", ("half written",))
        subprocess.run(["bash", "-ec", documented(f"{kind}, backup", **values)], check=True, timeout=60)
    answer(store, claim(store, "runner"))
    store.close()
    writing.close()
    if kind == "SQLite":
        values.pop("python3")
    subprocess.run(["bash", "-ec", documented(f"{kind}, restore", **values)], check=True, timeout=60)
    restored = JobStore(open_database(place))
    try:
        found = restored.batch(ME, batch.id)
        assert (found.completed, found.status, found.metadata) == (2, "in_progress", batch.metadata)
        answer(restored, claim(restored, "another", now_s=LEASE_S))
        assert restored.batch(ME, batch.id).status == "completed"
    finally:
        restored.close()
