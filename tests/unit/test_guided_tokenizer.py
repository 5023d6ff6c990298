"""A tokenizer of the usual kind, made on the spot: its vocabulary under a grammar, and its chat template with tools."""

from __future__ import annotations

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from baton.common.engine.batch import NO_TOKENS
from baton.common.engine.guiding import Guides, NoVocabulary, model_vocabulary
from baton.common.messages import Grammar
from baton.deploy.chat_messages import Function, Tool
from baton.deploy.tokenizer import ModelTokenizer, ServedModel
from baton.deploy.tool_formats import FORMATS, format_of_template

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


def tokenizer(template: str = QWEN) -> PreTrainedTokenizerFast:
    """Bytes, two words of several, and two tokens that end an answer."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: at for at, letter in enumerate(alphabet)} | {"ye": 256, "yes": 257}
    made = Tokenizer(models.BPE(vocab, [("y", "e"), ("ye", "s")]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken("<end>"), AddedToken("<turn>")])
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
