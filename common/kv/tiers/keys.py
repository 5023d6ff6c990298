"""The names of pages below the pool: what a page holds, not where it lies.

Owns: `PageKey` and how it is made. Never: bytes of a page, or a place to keep them.

The KV of a page follows from the model and from all tokens up to the page's end. So its key is a hash over these, made
as a chain: key(page) = H(key(page before), tokens of the page), from a root that is the hash of the layout's and the
model's fingerprint. Two pages with one key are interchangeable, on any worker and after any restart.

The hash is a cryptographic one: users choose tokens, and with a hash whose collisions can be computed one user could
make another read the KV of a prompt of his choosing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NewType

import numpy as np
import numpy.typing as npt

from baton.common.units import page_floor, whole_pages

I32 = npt.NDArray[np.int32]
PageKey = NewType("PageKey", bytes)
KEY_BYTES = 16

_ROOT = b"baton kv root"
_PAGE = b"baton kv page"


@dataclass(frozen=True, slots=True)
class PageKeys:
    """`root` stands for everything but the tokens. `page_size` in tokens."""

    root: PageKey
    page_size: int

    @classmethod
    def of_model(cls, fingerprint: Mapping[str, str], page_size: int) -> PageKeys:
        """`fingerprint` names the bytes' layout (`KvMemory.fingerprint`) *and the weights*: a store outlives the
        process, and KV of other weights of the same shape would be read without an error."""
        hasher = hashlib.blake2b(digest_size=KEY_BYTES, person=_ROOT)
        for text in (str(page_size), *(part for item in sorted(fingerprint.items()) for part in item)):
            data = text.encode()
            hasher.update(len(data).to_bytes(8, "little"))
            hasher.update(data)
        return cls(PageKey(hasher.digest()), page_size)

    def of(self, tokens: I32, known: Sequence[PageKey] = ()) -> list[PageKey]:
        """A key for each whole page of `tokens`. `known` are the first ones, if the caller has them: of the same
        tokens, and not made again. Linear in the tokens that are not known."""
        assert len(known) <= whole_pages(len(tokens), self.page_size), (len(known), len(tokens))
        start = len(known) * self.page_size
        # Stores are shared between hosts: the byte order is part of the name.
        data = tokens[start : page_floor(len(tokens), self.page_size)].astype("<i4").tobytes()
        step = 4 * self.page_size
        keys = list(known)
        last: bytes = keys[-1] if keys else self.root
        for at in range(0, len(data), step):
            last = hashlib.blake2b(last + data[at : at + step], digest_size=KEY_BYTES, person=_PAGE).digest()
            keys.append(PageKey(last))
        return keys
