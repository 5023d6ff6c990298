"""Incremental text is the text of all tokens, and nothing shown is ever taken back."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from baton.deploy.detokenize import AnswerText, Detokenizer, StopMatcher


class ByteDecoder:
    """Every byte is a token, and tokens from 256 on are special: no text. Like a byte-level BPE's decoder."""

    def decode(self, token_ids: Sequence[int]) -> str:
        return bytes(token for token in token_ids if token < 256).decode("utf-8", errors="replace")


class ChunkDecoder:
    """Tokens are arbitrary byte strings: one token can end one character and begin the next."""

    def __init__(self, chunks: Sequence[bytes]) -> None:
        self._chunks = chunks

    def decode(self, token_ids: Sequence[int]) -> str:
        return b"".join(self._chunks[token] for token in token_ids).decode("utf-8", errors="replace")


class LeadingSpaceDecoder:
    """Drops the space before the first word, as sentence-piece decoders do; "" is a special token."""

    def __init__(self, words: Sequence[str]) -> None:
        self._words = words

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(self._words[token] for token in token_ids).removeprefix(" ")


def all_text(detokenizer: Detokenizer, token_ids: Sequence[int]) -> str:
    return "".join([*(detokenizer.push(token) for token in token_ids), detokenizer.finish()])


@settings(deadline=None)
@given(st.lists(st.integers(0, 260), max_size=120))
@example(list("aé€😀".encode()))
@example([0xE2, 0x82, 258, 0xAC])
@example([0x80] * 100)
@example([0xF0, 0x9F] * 40)
def test_bytes_give_the_text_of_all_tokens(token_ids: list[int]) -> None:
    decoder = ByteDecoder()
    assert all_text(Detokenizer(decoder), token_ids) == decoder.decode(token_ids)


@settings(deadline=None)
@given(st.text(max_size=60), st.lists(st.integers(1, 5), min_size=1, max_size=20))
@example("😀" * 30, [3])
def test_tokens_that_split_characters_give_the_whole_text(text: str, sizes: list[int]) -> None:
    data, chunks, at = text.encode(), [], 0
    while at < len(data):
        size = sizes[len(chunks) % len(sizes)]
        chunks.append(data[at : at + size])
        at += size
    assert all_text(Detokenizer(ChunkDecoder(chunks)), range(len(chunks))) == text


@settings(deadline=None)
@given(st.lists(st.sampled_from([0, 1, 2, 3, 4]), max_size=40))
@example([0, 4, 1])
@example([3, 3, 1])
def test_a_decoder_that_drops_the_first_space_keeps_the_others(token_ids: list[int]) -> None:
    decoder = LeadingSpaceDecoder([" hello", " world", "ly", " ", ""])
    assert all_text(Detokenizer(decoder), token_ids) == decoder.decode(token_ids)


def test_an_incomplete_character_is_held_back() -> None:
    detokenizer = Detokenizer(ByteDecoder())
    assert [detokenizer.push(byte) for byte in "😀!".encode()] == ["", "", "", "😀", "!"]


def test_a_character_cut_off_by_the_end_comes_out_as_the_decoder_writes_it() -> None:
    detokenizer = Detokenizer(ByteDecoder())
    assert [detokenizer.push(byte) for byte in "a😀".encode()[:3]] == ["a", "", ""]
    assert detokenizer.finish() == "\ufffd"


def test_garbage_is_released_as_it_comes_and_costs_linear_work() -> None:
    class Counting(ByteDecoder):
        decoded = 0

        def decode(self, token_ids: Sequence[int]) -> str:
            Counting.decoded += len(token_ids)
            return super().decode(token_ids)

    detokenizer = Detokenizer(Counting())
    released = sum(len(detokenizer.push(0x80)) for _ in range(10_000))
    assert released > 9_900
    assert Counting.decoded < 10_000 * 50


STOPS = st.lists(st.text("ab😀", min_size=1, max_size=4), max_size=4)


@settings(max_examples=300, deadline=None)
@given(st.text("ab😀", max_size=30), STOPS, st.data())
def test_text_is_cut_before_the_first_stop_string_and_no_part_of_one_leaks(
    text: str, stops: list[str], data: st.DataObject
) -> None:
    answer = AnswerText(ByteDecoder(), stops)
    token_ids = list(text.encode())
    shown, stop = "", None
    while token_ids and stop is None:
        size = data.draw(st.integers(1, len(token_ids)))
        piece = answer.push(token_ids[:size])
        shown, stop, token_ids = shown + piece.text, piece.stop, token_ids[size:]
        assert text.startswith(shown)
        # What may still become a stop string is not shown.
        seen = bytes(text.encode()[: len(text.encode()) - len(token_ids)]).decode(errors="ignore")
        assert stop is not None or not any(s.startswith(seen[i:]) for s in stops for i in range(len(shown)))
    if stop is None:
        last = answer.finish()
        shown, stop = shown + last.text, last.stop
    found = [(at + len(s), at) for s in stops if (at := text.find(s)) >= 0]
    assert shown == (text[: min(found)[1]] if found else text)
    assert (stop is not None) == bool(found)


def test_tokens_after_the_stop_string_are_not_counted() -> None:
    piece = AnswerText(ByteDecoder(), ["<end>"]).push(list(b"hi<end>more"))
    assert (piece.text, piece.tokens_used, piece.stop) == ("hi", 7, "<end>")


def test_a_stop_string_may_arrive_in_pieces() -> None:
    matcher = StopMatcher(["\n\nUser:"])
    assert [matcher.push(part) for part in ("Hi", "\n", "\nUs")] == [("Hi", None), ("", None), ("", None)]
    assert matcher.push("er: x") == ("", "\n\nUser:")


def test_a_false_start_is_shown_as_soon_as_it_is_known() -> None:
    matcher = StopMatcher(["abc"])
    assert matcher.push("ab") == ("", None)
    assert matcher.push("ab") == ("ab", None)
    assert matcher.finish() == "ab"


def test_the_one_that_is_complete_first_wins_however_the_text_was_cut() -> None:
    assert StopMatcher(["c", "b"]).push("abc") == ("a", "b")
    assert StopMatcher(["b", "abc"]).push("abc") == ("a", "b")
    assert StopMatcher(["c", "abc"]).push("abc") == ("", "abc")


def test_an_empty_stop_string_is_a_bug_here() -> None:
    with pytest.raises(AssertionError):
        StopMatcher([""])


def test_ten_thousand_tokens_take_a_moment() -> None:
    started = time.perf_counter()
    all_text(Detokenizer(ByteDecoder()), list(b"x" * 10_000))
    assert time.perf_counter() - started < 2
