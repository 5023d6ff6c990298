"""One frame for what a step produced: outputs to one gateway travel together, everything else as it is.

Owns: which messages may share a frame. Never: changes the order of what is said to one peer.

A frame costs some 30 us on either side whatever is in it, an output in it one or two. With hundreds of streams that
is most of what a token costs between the model and the client.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from baton.common.engine.core_api import SendTo
from baton.common.ids import WorkerId
from baton.common.messages import MAX_OUTPUTS, Output, Outputs

SMALL_OUTPUT_BYTES = 4 * 16
"""Of token ids. Larger ones, which are said again after a gap, go by themselves, and so does what is said of a prompt:
no frame comes near its limit."""


def gathered(messages: Iterable[SendTo]) -> Iterator[SendTo]:
    """The same messages in fewer frames."""
    waiting: dict[tuple[WorkerId, int], list[Output]] = {}
    for message in messages:
        to, body = (message.worker, message.epoch), message.body
        if isinstance(body, Output) and _is_small(body):
            outputs = waiting.setdefault(to, [])
            outputs.append(body)
            if len(outputs) == MAX_OUTPUTS:
                yield _together(to, waiting.pop(to))
        else:
            if to in waiting:
                yield _together(to, waiting.pop(to))
            yield message
    for to, outputs in waiting.items():
        yield _together(to, outputs)


def _is_small(output: Output) -> bool:
    return len(output.tokens) <= SMALL_OUTPUT_BYTES and output.prompt_logprobs is None


def _together(to: tuple[WorkerId, int], outputs: list[Output]) -> SendTo:
    return SendTo(*to, outputs[0] if len(outputs) == 1 else Outputs(parts=tuple(outputs)))
