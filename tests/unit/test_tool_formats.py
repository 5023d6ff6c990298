"""How models write calls, read back: whatever the pieces in which an answer comes, and nothing of it is lost."""

from __future__ import annotations

import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from baton.common.engine.fake_model import fake_vocabulary
from baton.common.engine.guiding import Guides
from baton.common.messages import Grammar
from baton.deploy.chat_messages import Function
from baton.deploy.tool_calls import Arguments, CallBegun, Said
from baton.deploy.tool_formats import FORMATS, ToolFormat, ToolFormatName, format_of_template, spelled_out

HERMES, JSON = FORMATS["hermes"], FORMATS["json"]
ROME = '{"name": "weather", "arguments": {"city": "Rome"}}'
NOW = '{"name": "now", "arguments": {}}'
CALLED_ROME, CALLED_NOW = ("weather", '{"city": "Rome"}'), ("now", "{}")

Told = tuple[str, list[tuple[str, str]]]


def read(format: ToolFormat, pieces: list[str]) -> Told:
    """(text, [(name, arguments)])"""
    reader, text, calls = format.reader(), "", list[tuple[str, str]]()
    for event in [*(event for piece in pieces for event in reader.push(piece)), *reader.finish()]:
        match event:
            case Said(said):
                assert said
                text += said
            case CallBegun(name):
                calls.append((name, ""))
            case Arguments(more):
                calls[-1] = (calls[-1][0], calls[-1][1] + more)
    return text, calls


ANSWERS: list[tuple[ToolFormatName, str, Told]] = [
    ("hermes", "Just text.", ("Just text.", [])),
    ("hermes", "  text with spaces around \n", ("  text with spaces around \n", [])),
    ("hermes", "a < b, <tool_ and <tool_call", ("a < b, <tool_ and <tool_call", [])),
    ("hermes", f"<tool_call>\n{ROME}\n</tool_call>", ("", [CALLED_ROME])),
    ("hermes", f"<tool_call>{ROME}</tool_call>", ("", [CALLED_ROME])),
    ("hermes", f"I look. \n<tool_call>\n{ROME}\n</tool_call>\n", ("I look. \n", [CALLED_ROME])),
    ("hermes", f"<tool_call>{ROME}</tool_call>\n<tool_call>{NOW}</tool_call>", ("", [CALLED_ROME, CALLED_NOW])),
    (
        "hermes",
        f"a <tool_call>{ROME}</tool_call> b <tool_call>{NOW}</tool_call> c",
        ("a  b  c", [CALLED_ROME, CALLED_NOW]),
    ),
    ("hermes", f"<tool_call>\n{ROME}", ("", [CALLED_ROME])),
    ("hermes", f"<tool_call>\n{ROME}\n</tool", ("", [CALLED_ROME])),
    ("hermes", f"<tool_call>{ROME}<tool_call>{NOW}", ("", [CALLED_ROME, CALLED_NOW])),
    ("hermes", '<tool_call>{"name": "weather", "arguments": {"city": "Ro', ("", [("weather", '{"city": "Ro')])),
    (
        "hermes",
        '<tool_call>{"name": "x", "arguments": {"a": "}</tool_call>\\""}}</tool_call>!',
        ("!", [("x", '{"a": "}</tool_call>\\""}')]),
    ),
    ("hermes", '<tool_call>{"arguments": {"a": [1, {}]}, "name": "x"}</tool_call>', ("", [("x", '{"a": [1, {}]}')])),
    ("hermes", '<tool_call>{"name": "x", "arguments": {}, "id": 3}</tool_call>', ("", [("x", "{}")])),
    ("hermes", '<tool_call>{"name": "x", "arguments": "{\\"a\\": 1}"}</tool_call>', ("", [("x", '{"a": 1}')])),
    ("hermes", '<tool_call>{"name": "x"}</tool_call>', ("", [("x", "{}")])),
    ("hermes", '<tool_call>{"name": "x", "parameters": {"é": "中"}}</tool_call>', ("", [("x", '{"é": "中"}')])),
    ("hermes", "<tool_call>weather Rome</tool_call>", ("<tool_call>weather Rome</tool_call>", [])),
    ("hermes", '<tool_call>{"city": "Rome"}</tool_call>', ('<tool_call>{"city": "Rome"}</tool_call>', [])),
    ("hermes", "<tool_call>{bad json}", ("<tool_call>{bad json}", [])),
    ("hermes", f"<tool_call>no<tool_call>{ROME}</tool_call>", ("<tool_call>no", [CALLED_ROME])),
    ("hermes", "text <tool_call>", ("text <tool_call>", [])),
    ("json", "Just text.", ("Just text.", [])),
    ("json", ROME, ("", [CALLED_ROME])),
    ("json", f"\n {ROME}\n", ("", [CALLED_ROME])),
    ("json", f"[{ROME}, {NOW}]", ("", [CALLED_ROME, CALLED_NOW])),
    ("json", f"{ROME}; {NOW}", ("", [CALLED_ROME, CALLED_NOW])),
    ("json", '{"name": "x", "parameters": {"a": 1}}', ("", [("x", '{"a": 1}')])),
    ("json", '{"city": "Rome"}', ('{"city": "Rome"}', [])),
    ("json", '[{"city": "Rome"}, 5]', ('[{"city": "Rome"}, 5]', [])),
    ("json", "[1, 2]", ("[1, 2]", [])),
    ("json", "{", ("{", [])),
    ("json", "  ", ("  ", [])),
    ("json", f"{NOW} and more", ("and more", [CALLED_NOW])),
]


@pytest.mark.parametrize(("name", "answer", "told"), ANSWERS)
def test_calls_and_text_are_told_apart(name: ToolFormatName, answer: str, told: Told) -> None:
    assert read(FORMATS[name], [answer]) == told


@pytest.mark.parametrize(("name", "answer", "told"), ANSWERS)
def test_the_pieces_in_which_an_answer_comes_change_nothing(name: ToolFormatName, answer: str, told: Told) -> None:
    assert read(FORMATS[name], list(answer)) == told
    for cut in range(len(answer)):
        assert read(FORMATS[name], [answer[:cut], answer[cut:]]) == told, (answer[:cut], answer[cut:])


@settings(max_examples=300, deadline=None)
@given(
    name=st.sampled_from(sorted(FORMATS)),
    parts=st.lists(
        st.sampled_from(
            ["<tool_call>", "</tool_call>", "<tool_", ROME, NOW, '{"name": ', '"x"', "{", "}", "[", "]", ",", " ", "\n"]
        )
        | st.text('<>{}[]"\\, ab', max_size=4),
        max_size=8,
    ),
    seed=st.randoms(use_true_random=False),
)
@example(name="hermes", parts=["<tool_call>", "{", "}"], seed=None)
def test_any_answer_is_read_alike_in_any_pieces(name: ToolFormatName, parts: list[str], seed: object) -> None:
    answer = "".join(parts)
    whole = read(FORMATS[name], [answer])
    assert read(FORMATS[name], parts) == whole
    assert read(FORMATS[name], list(answer)) == whole
    if not whole[1]:
        assert whole[0] == answer, "what is no call is text, all of it"


def test_arguments_are_told_as_they_come() -> None:
    reader = HERMES.reader()
    told = [
        reader.push(piece) for piece in ('<tool_call>{"name": "x", "arg', 'uments": {"a": ', '"long ', 'text"}', "}")
    ]
    assert told == [[], [CallBegun("x"), Arguments('{"a": ')], [Arguments('"long ')], [Arguments('text"}')], []]


TOOLS = [
    Function(
        name="weather",
        parameters={
            "type": "object",
            "properties": {"city": {"enum": ["Rome", "Oslo"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
        strict=True,
    ),
    Function(name="now"),
]
BONN = ROME.replace("Rome", "Bonn")
TWO = {"hermes": f"<tool_call>\n{ROME}\n</tool_call>\n<tool_call>\n{NOW}\n</tool_call>", "json": f"[{ROME}, {NOW}]"}
ONE = {"hermes": f"<tool_call>\n{NOW}\n</tool_call>", "json": NOW}
WRONG = {"hermes": f"<tool_call>\n{BONN}\n</tool_call>", "json": BONN}


def follows(grammar: str, text: str) -> bool:
    asked, guides = Grammar(kind="lark", text=grammar), Guides(fake_vocabulary)
    assert guides.explain(asked) == ""
    import numpy as np

    (mask,) = guides.masks([(0, asked, np.frombuffer(text.encode(), np.uint8).astype(np.int32))])
    return mask is not None and bool(mask[-1])


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_forced_answers_call_what_they_may_and_are_read_back(name: ToolFormatName) -> None:
    format = FORMATS[name]
    several, single = format.forced(TOOLS, parallel=True), format.forced(TOOLS, parallel=False)
    assert follows(several, ONE[name])
    assert follows(single, ONE[name])
    assert follows(several, TWO[name])
    assert not follows(single, TWO[name])
    for other in (WRONG[name], "some text", "", ONE[name] + " and text"):
        assert not follows(several, other)
        assert not follows(single, other)
    assert read(format, [TWO[name]]) == ("", [CALLED_ROME, CALLED_NOW])
    assert not follows(format.forced(TOOLS[:1], parallel=True), ONE[name])


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_strict_tools_leave_the_model_free_to_say_something_else(name: ToolFormatName) -> None:
    grammar = FORMATS[name].strict(TOOLS, parallel=True)
    for good in (ONE[name], TWO[name], "Some text.", "", "a < b {"):
        assert follows(grammar, good), good
    assert name == "json" or not follows(grammar, WRONG[name])
    loose = ONE[name].replace("{}", '{"anything": [1]}')
    assert follows(grammar, loose), "the other tool is not strict"


def test_a_chat_template_without_tools_is_told_of_them_in_words() -> None:
    call = {"function": {"name": "weather", "arguments": {"city": "Rome"}}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Rome?"},
        {"role": "assistant", "content": "", "tool_calls": [call, call]},
        {"role": "tool", "content": "sunny", "tool_call_id": "1"},
        {"role": "tool", "content": "warm", "tool_call_id": "2"},
        {"role": "assistant", "content": "Nice."},
    ]
    spelled = spelled_out(messages, [{"type": "function", "function": {"name": "weather"}}], HERMES)
    assert [message["role"] for message in spelled] == ["system", "user", "assistant", "user", "assistant"]
    assert all(set(message) == {"role", "content"} for message in spelled)
    assert spelled[0]["content"].startswith("Be brief.\n\n")
    assert '"name": "weather"' in spelled[0]["content"]
    assert read(HERMES, [spelled[2]["content"]]) == ("", [CALLED_ROME, CALLED_ROME])
    assert spelled[3]["content"].index("sunny") < spelled[3]["content"].index("warm")
    assert spelled_out(messages[:2], [], HERMES) == messages[:2]
    assert json.loads(JSON.write([call])) == {"name": "weather", "arguments": {"city": "Rome"}}


def test_the_format_follows_from_the_chat_template() -> None:
    assert format_of_template('... <tool_call> {"name": ..., "parameters": ...}') == "hermes"
    assert format_of_template('Respond in the format {"name": function name, "parameters": dictionary}') == "json"
    assert format_of_template("no tools at all") == format_of_template("") == "hermes"
