"""What a grammar lets an answer go on with: through the fake model's vocabulary, where every byte is a token."""

from __future__ import annotations

import json
import random
import re
import threading

import numpy as np
import pytest

from baton.common.engine.fake_model import FAKE_VOCAB_SIZE, fake_vocabulary
from baton.common.engine.guiding import MAX_COMPILED, MAX_COMPILED_CHARS, Guides, NoVocabulary, TokenMask, Vocabulary
from baton.common.ids import Epoch, HandoffId, HandoffKey, RequestId, Stamp, WorkerId
from baton.common.messages import Body, Frame, Grammar, Heartbeat, Offer, SamplingParams, Submit, pack_tokens
from baton.transfer.compiling import MAX_WAITING, Compiling

END = FAKE_VOCAB_SIZE - 1
PERSON = {
    "type": "object",
    "properties": {"name": {"enum": ["Ada", "Bo"]}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
AMBIGUOUS = Grammar(
    kind="ebnf",
    text="start: a0\n"
    + "".join(f"a{i}: {' | '.join(f'a{j} a{(i + j) % 8}' for j in range(8))} | /x/\n" for i in range(8)),
)
WORD = Grammar(kind="regex", text="ab|ac+")


def of_schema(schema: object) -> Grammar:
    return Grammar(kind="json_schema", text=json.dumps(schema))


def ids(text: bytes) -> np.ndarray:
    return np.frombuffer(text, dtype=np.uint8).astype(np.int32)


def allowed(mask: TokenMask | None) -> set[int]:
    assert mask is not None
    assert len(mask) == FAKE_VOCAB_SIZE
    return set(np.flatnonzero(mask).tolist())


def written(guides: Guides, grammar: Grammar, seed: int, key: int = 0) -> bytes:
    """An answer of a model that chooses at random among what is allowed, and prefers to end."""
    dice, text = random.Random(seed), b""
    while True:
        (mask,) = guides.masks([(key, grammar, ids(text))])
        tokens = allowed(mask)
        if END in tokens:
            return text
        text += bytes([dice.choice(sorted(tokens - {ord(" "), ord("\t"), ord("\n"), ord("\r")}))])
        assert len(text) < 500


def test_a_vocabulary_that_was_prepared_is_not_read_by_the_first_request() -> None:
    read: list[int] = []

    def vocabulary() -> Vocabulary:
        read.append(1)
        return fake_vocabulary()

    guides = Guides(vocabulary)
    guides.prepare()
    assert read == [1]
    guides.prepare()
    assert guides.explain(WORD) == ""
    assert read == [1]


def test_only_what_continues_a_word_of_the_grammar_is_allowed_and_the_end_only_at_its_end() -> None:
    guides = Guides(fake_vocabulary)
    for text, expected in ((b"", b"a"), (b"a", b"bc"), (b"ab", b""), (b"ac", b"c"), (b"accc", b"c")):
        (mask,) = guides.masks([(1, WORD, ids(text))])
        ends = {END} if re.fullmatch(WORD.text, text.decode()) else set()
        assert allowed(mask) == set(expected) | ends, text


@pytest.mark.parametrize(
    ("grammar", "good"),
    [
        (of_schema(PERSON), lambda text: set(json.loads(text)) == {"name", "age"}),
        (of_schema({"type": "array", "items": {"type": "null"}}), lambda text: isinstance(json.loads(text), list)),
        (Grammar(kind="regex", text=r"\d{3}-[a-f]{2}/x"), re.compile(r"\d{3}-[a-f]{2}/x").fullmatch),
        (
            Grammar(kind="choice", text='["yes", "no \\"\\n/.", "n", "\u4e2d"]'),
            ["yes", 'no "\n/.', "n", "\u4e2d"].__contains__,
        ),
        (Grammar(kind="ebnf", text='root ::= "a" more\nmore ::= "b" | "c"'), ["ab", "ac"].__contains__),
        (Grammar(kind="ebnf", text='start: "x" NUMBER\nNUMBER: /[0-9]{2}/'), re.compile("x[0-9]{2}").fullmatch),
        (Grammar(kind="lark", text='start: "<" %json {"const": 5} ">"'), ["<5>"].__contains__),
    ],
    ids=["schema", "array", "regex", "choice", "gbnf", "lark as ebnf", "lark"],
)
def test_every_kind_of_grammar_makes_answers_that_follow_it(grammar: Grammar, good: object) -> None:
    guides = Guides(fake_vocabulary)
    assert not guides.knows(grammar)
    assert guides.explain(grammar) == ""
    assert guides.knows(grammar)
    for seed in range(5):
        text = written(guides, grammar, seed).decode()
        assert good(text), text  # type: ignore[operator]


def test_a_mask_follows_from_the_tokens_alone_however_they_came() -> None:
    """Step by step, from the middle on, with other rows in between, and when a row's name is used again."""
    guides, schema = Guides(fake_vocabulary), of_schema(PERSON)
    text = b'{"name": "Ada", "age": 7}'
    for end in range(len(text) + 1):
        fresh = Guides(fake_vocabulary).masks([(0, schema, ids(text[:end]))])
        stepped = guides.masks([(0, schema, ids(text[:end])), (7, WORD, ids(b"a"))])
        assert allowed(stepped[0]) == allowed(fresh[0]), text[:end]
        assert allowed(stepped[1]) == set(b"bc")
        if end % 5 == 0:
            guides.masks([(7, WORD, ids(b"a"))])  # pushed back for a step
    other = b'{"name": "Bo",'
    assert allowed(guides.masks([(0, schema, ids(other))])[0]) == allowed(
        Guides(fake_vocabulary).masks([(0, schema, ids(other))])[0]
    )
    assert allowed(guides.masks([(0, WORD, ids(b"a"))])[0]) == set(b"bc")


def test_outputs_that_do_not_follow_the_grammar_have_no_mask() -> None:
    guides = Guides(fake_vocabulary)
    assert guides.masks([(0, WORD, ids(b"ax")), (1, WORD, ids(b"a"))])[0] is None
    assert guides.masks([(0, Grammar(kind="regex", text="("), ids(b""))]) == [None]


@pytest.mark.parametrize(
    ("grammar", "says"),
    [
        (Grammar(kind="regex", text="a("), "unclosed group"),
        (Grammar(kind="regex", text="(?=a)b"), "look-around"),
        (of_schema({"type": "objct"}), "objct"),
        (of_schema({"type": "string", "format": "swiss-phone"}), "swiss-phone"),
        (of_schema({"not": {"type": "string"}}), "not"),
        (of_schema({"$ref": "http://example.com/x"}), "example.com"),
        (of_schema(False), "object"),
        (of_schema([1]), "object"),
        (Grammar(kind="json_schema", text="{"), ""),
        (Grammar(kind="ebnf", text="start: missing"), "missing"),
        (Grammar(kind="ebnf", text="root ::= )"), ""),
        (Grammar(kind="regex", text="[^\\x00-\\x{10FFFF}]"), ""),
    ],
)
def test_what_is_wrong_is_said_briefly(grammar: Grammar, says: str) -> None:
    guides = Guides(fake_vocabulary)
    told = guides.explain(grammar)
    assert says in told
    assert 0 < len(told) < 500
    assert "\n" not in told
    assert guides.knows(grammar)


def test_a_model_whose_tokens_are_unknown_says_so_and_is_asked_once() -> None:
    asked: list[int] = []

    def vocabulary() -> Vocabulary:
        asked.append(1)
        raise NoVocabulary("a tokenizer of its own kind")

    guides = Guides(vocabulary)
    assert guides.explain(WORD) == guides.explain(of_schema(PERSON)) == "a tokenizer of its own kind"
    assert len(asked) == 1


def test_compiled_grammars_are_bounded_and_the_oldest_goes() -> None:
    guides = Guides(fake_vocabulary)
    guides.explain(WORD)
    for n in range(MAX_COMPILED - 1):
        guides.explain(Grammar(kind="choice", text=f'["{n}"]'))
    assert guides.knows(WORD)
    guides.explain(WORD)  # used: younger than all others
    guides.explain(Grammar(kind="choice", text='["one more"]'))
    assert guides.knows(WORD)
    assert not guides.knows(Grammar(kind="choice", text='["0"]'))
    (mask,) = guides.masks([(0, Grammar(kind="choice", text='["0"]'), ids(b""))])  # compiled anew where it is needed
    assert allowed(mask) == {ord("0")}


def test_of_large_grammars_fewer_are_kept() -> None:
    guides = Guides(fake_vocabulary)
    large = [Grammar(kind="regex", text=f"{n}(" + "x" * 60_000) for n in range(20)]
    for grammar in large:
        assert guides.explain(grammar) != "", "which is known of it, and found soon"
    kept = [grammar for grammar in large if guides.knows(grammar)]
    assert kept == large[-len(kept) :]
    assert sum(len(grammar.text) for grammar in kept) <= MAX_COMPILED_CHARS < 20 * 60_000


def test_a_grammar_that_outgrows_a_step_ends_in_no_token() -> None:
    """Ambiguity without bound: the parser gives up, and says so."""
    guides = Guides(fake_vocabulary)
    assert guides.explain(AMBIGUOUS) == ""
    masks = [guides.masks([(0, AMBIGUOUS, ids(b"x" * end))])[0] for end in range(5)]
    assert masks[0] is not None
    assert masks[-1] is None


# ------------------------------------------------------------------------------------------ frames that wait

PEER = Stamp(WorkerId("gateway-0"), 1, Epoch(5))
KEY = HandoffKey(HandoffId(1), 0)


def submit(grammar: Grammar | None) -> Submit:
    sampling = SamplingParams(grammar=grammar)
    return Submit(request_id=RequestId("r"), placement=0, prompt=pack_tokens([1]), sampling=sampling, ttl_s=1.0)


def offer(grammar: Grammar, *, sample: bool) -> Offer:
    return Offer(
        key=KEY,
        request_id=RequestId("r"),
        tokens=pack_tokens([1]),
        start=0,
        sample=sample,
        sampling=SamplingParams(grammar=grammar),
        ttl_s=1.0,
        lane="zmq",
        credit=1,
        region_units=(1,),
        tag_base=0,
    )


def frame(body: Body) -> Frame:
    return Frame(PEER, Epoch(0), body)


def test_frames_wait_until_their_grammar_is_known_and_no_others_do() -> None:
    woken, go_on = threading.Event(), threading.Event()

    def vocabulary() -> Vocabulary:
        assert go_on.wait(10)
        return fake_vocabulary()

    compiling = Compiling(Guides(vocabulary), woken.set)
    try:
        for body in (submit(None), Heartbeat(), offer(WORD, sample=False)):
            assert not compiling.holds(frame(body))
        assert compiling.holds(frame(submit(WORD)))
        assert compiling.holds(frame(offer(WORD, sample=True)))
        go_on.set()
        given: list[Frame] = []
        while len(given) < 2:
            assert woken.wait(10)
            woken.clear()
            given += compiling.take()
        assert given == [frame(submit(WORD)), frame(offer(WORD, sample=True))]
        assert not compiling.holds(frame(submit(WORD)))
    finally:
        compiling.stop()


def test_too_many_waiting_frames_are_dropped() -> None:
    """The compiler is busy with the first one for as long as the test wants."""
    busy, go_on = threading.Event(), threading.Event()

    def vocabulary() -> Vocabulary:
        busy.set()
        assert go_on.wait(10)
        return fake_vocabulary()

    compiling = Compiling(Guides(vocabulary), lambda: None)
    try:
        for _ in range(MAX_WAITING):
            assert compiling.holds(frame(submit(WORD)))
        assert busy.wait(10)
        assert compiling.take() == []
        assert compiling.holds(frame(submit(WORD)))
        assert compiling.dropped == 1
    finally:
        go_on.set()
        compiling.stop()


def test_a_compiler_that_breaks_is_no_secret() -> None:
    def vocabulary() -> Vocabulary:
        raise ZeroDivisionError

    woken = threading.Event()
    compiling = Compiling(Guides(vocabulary), woken.set)
    assert compiling.holds(frame(submit(WORD)))
    assert woken.wait(10)
    with pytest.raises(ZeroDivisionError):
        compiling.take()
    compiling.stop()
