"""A tokenizer of the usual kind, made on the spot: its vocabulary under a grammar, and its chat template with tools."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from baton.common.engine.batch import NO_TOKENS
from baton.common.engine.guiding import Guides, NoVocabulary, model_vocabulary
from baton.common.messages import Grammar
from baton.deploy.chat_messages import Function, Tool
from baton.deploy.detokenize import AnswerText
from baton.deploy.tokenizer import ModelTokenizer, ServedModel
from baton.deploy.tool_calls import Arguments, CallBegun, CallEvent, Said
from baton.deploy.tool_formats import FORMATS, format_named, format_of_template

QWEN = """{% if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>{% endif %}
{%- for message in messages %}<{{ message.role }}>{{ message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>{"name": "{{ call.function.name }}", "arguments": \
{{ call.function.arguments | tojson }}}</tool_call>{% endfor %}{% endfor %}"""
MESSAGES = [
    {"role": "user", "content": "Rome?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "1", "type": "function", "function": {"name": "now", "arguments": {"a": 1}}}],
    },
    {"role": "tool", "content": "noon", "tool_call_id": "1"},
]


def tokenizer(template: str = QWEN, markers: Literal["spelled", "added", "special"] = "spelled") -> Any:
    """Bytes, two words of several, two tokens that end an answer, and perhaps one for each end of a call."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: at for at, letter in enumerate(alphabet)} | {"ye": 256, "yes": 257}
    made = Tokenizer(models.BPE(vocab, [("y", "e"), ("ye", "s")]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken("<end>"), AddedToken("<turn>")])
    if markers != "spelled":
        both = [AddedToken(text, special=markers == "special") for text in ("<tool_call>", "</tool_call>")]
        (made.add_special_tokens if markers == "special" else made.add_tokens)(both)
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>", chat_template=template)


def test_masks_know_tokens_of_several_bytes_padding_and_every_end() -> None:
    words, end, turn, size = tokenizer(), 258, 259, 272
    guides = Guides(lambda: model_vocabulary(words, size, (turn, end)))
    grammar = Grammar(kind="regex", text="yes|no")
    (mask,) = guides.masks([(0, grammar, NO_TOKENS)])
    assert mask is not None
    assert len(mask) == size
    assert {words.decode([token]) for token in np.flatnonzero(mask)} == {"y", "ye", "yes", "n"}
    (mask,) = guides.masks([(0, grammar, np.array(words.encode("yes"), np.int32))])
    assert mask is not None
    assert np.flatnonzero(mask).tolist() == [end, turn]


def test_a_model_whose_answers_never_end_is_not_guided() -> None:
    with pytest.raises(NoVocabulary, match="no token that ends an answer"):
        model_vocabulary(tokenizer(), 272, ())


def served(template: str) -> ServedModel:
    own = ModelTokenizer(tokenizer(template))
    guides = Guides(lambda: model_vocabulary(tokenizer(), 260, (258,)))
    return ServedModel("m", 1000, 260, (258,), own, guides, FORMATS[format_of_template(own.chat_template)])


def test_a_chat_template_that_knows_tools_writes_them_itself() -> None:
    model = served(QWEN)
    shown = model.tokenizer.decode(
        model.encode_chat(MESSAGES, [Tool(function=Function(name="now")).as_template_input()])
    )
    assert shown.startswith("<tools>{")
    assert '"name": "now"' in shown
    assert shown.endswith('<tool_call>{"name": "now", "arguments": {"a": 1}}</tool_call><tool>noon')
    assert "<tools>" not in model.tokenizer.decode(model.encode_chat(MESSAGES))


def test_one_that_does_not_is_told_in_words() -> None:
    model = served("{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}{% endfor %}")
    shown = model.tokenizer.decode(
        model.encode_chat(MESSAGES, [Tool(function=Function(name="now")).as_template_input()])
    )
    assert shown.startswith("<system>You may call")
    assert '<tool_call>\n{"name": "now", "arguments": {"a": 1}}\n</tool_call>' in shown
    assert shown.endswith("<user><tool_response>\nnoon\n</tool_response>")


# -------------------------------------------------------------------------------- markers that are tokens

NOW = Function(name="now", parameters={"type": "object", "properties": {}, "additionalProperties": False}, strict=True)
CALL = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


@pytest.mark.parametrize("markers", ["spelled", "added", "special"])
def test_a_call_is_read_whatever_its_markers_are(
    markers: Literal["spelled", "added", "special"],
) -> None:
    words = tokenizer(markers=markers)
    own = ModelTokenizer(words)
    format = format_named("hermes", own.has_token)
    text, reader, events = AnswerText(own.showing(format.markers)), format.reader(), list[CallEvent]()
    ids = [*words.encode(f"I look. {CALL}"), 258]
    assert (260 in ids) == (markers != "spelled")
    for token in ids:
        events += reader.push(text.push([token]).text)
    events += reader.push(text.finish().text) + reader.finish()
    assert "".join(event.text for event in events if isinstance(event, Said)) == "I look. "
    assert [event for event in events if isinstance(event, CallBegun)] == [CallBegun("now")]
    assert "".join(event.text for event in events if isinstance(event, Arguments)) == "{}"


@pytest.mark.parametrize("wanted", ["forced", "strict"])
@pytest.mark.parametrize("markers", ["spelled", "added", "special"])
def test_a_grammar_lets_a_model_write_its_own_tokens(
    markers: Literal["spelled", "added", "special"], wanted: Literal["forced", "strict"]
) -> None:
    """What the model would write is allowed, token by token; and after a call's beginning nothing but a call is."""
    words = tokenizer(markers=markers)
    format = format_named("hermes", ModelTokenizer(words).has_token)
    text = (format.forced if wanted == "forced" else format.strict)([NOW], parallel=True)
    grammar = Grammar(kind="lark", text=text)
    guides = Guides(lambda: model_vocabulary(words, 262, (258,)))
    assert guides.explain(grammar) == ""
    said = f"{CALL}\n{CALL}" if wanted == "forced" else f"Well. {CALL} and {CALL} done"
    ids = words.encode(said)
    for at, token in enumerate([*ids, 258]):
        (mask,) = guides.masks([(0, grammar, np.array(ids[:at], np.int32))])
        assert mask is not None
        assert mask[token], (at, words.decode(ids[:at]))
    begun = words.encode(CALL[: CALL.index("now")])
    (mask,) = guides.masks([(0, grammar, np.array(begun, np.int32))])
    assert mask is not None
    assert {words.decode([token]) for token in np.flatnonzero(mask)} == {"n"}
