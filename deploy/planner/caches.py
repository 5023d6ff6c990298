"""A prefix cache as the planner sees it: which blocks of prompts a worker has kept, the least recently used first out.
Pure."""

from __future__ import annotations

from collections import OrderedDict


class BlockCache:
    """Blocks are named by what lies before them too: a prompt has the first blocks of another one or none of it."""

    def __init__(self) -> None:
        self._kept: OrderedDict[int, int] = OrderedDict()  # block -> tokens; oldest first
        self._tokens = 0

    def __contains__(self, block: int) -> bool:
        return block in self._kept

    def cached_tokens(self, blocks: tuple[int, ...], block_tokens: int, prompt_tokens: int) -> int:
        """Of a prompt. Its last token is always computed: it is asked what comes next."""
        count = 0
        for block in blocks:
            if block not in self._kept:
                break
            count += 1
        return min(count * block_tokens, prompt_tokens - 1)

    def keep(self, blocks: tuple[int, ...], block_tokens: int, room_tokens: int) -> None:
        """A prompt was computed or came in. At most `room_tokens` stay in all, the ends of prompts go first."""
        for block in reversed(blocks):
            if block not in self._kept:
                self._kept[block] = block_tokens
                self._tokens += block_tokens
            self._kept.move_to_end(block)
        while self._tokens > room_tokens and self._kept:
            _, tokens = self._kept.popitem(last=False)
            self._tokens -= tokens
