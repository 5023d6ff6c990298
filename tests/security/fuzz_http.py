"""Bytes for the gateway's HTTP that are more or less HTTP, from clients without a key (there is none in this arena)."""

from __future__ import annotations

import random

from fuzz_doors import dial

_PATHS = (
    b"/v1/completions", b"/v1/chat/completions", b"/v1/responses", b"/tokenize", b"/v1/files", b"/v1/batches",
    b"/v1/sessions", b"/metrics", b"/status", b"/kv/decode-0/1", b"/v1/files/..%2f..%2fetc%2fpasswd/content",
    b"/v1/batches/%00", b"/" + b"a" * 3000, b"//", b"/%ff%fe", b"*", b"http://x/", b"/v1/models/../../x", b"/trace",
)  # fmt: skip
_HEADERS = (
    b"Content-Length: -1", b"Content-Length: 99999999999999999999", b"Content-Length: 3, 3", b"Expect: 100-continue",
    b"Transfer-Encoding: gzip, chunked", b"Transfer-Encoding: chunked", b"Upgrade: websocket", b"Host: a\r\nHost: b",
    b"Idempotency-Key: " + b"k" * 500, b"traceparent: 00-zz-1-01", b" folded", b"X: " + b"y" * 2000,
    b"Authorization: Bearer \xff",
    b"Content-Type: multipart/form-data; boundary=--", b"Bad Header", b"X-Request-Id: \x00", b"Connection: close",
)  # fmt: skip
_BODIES = (
    b"", b"{}", b"[" * 3000, b'{"model":' * 200, b'{"prompt": NaN}', b'{"prompt": "a", "max_tokens": -1}', b"\xff\x00",
    b'{"model": "fake", "prompt": [1, 2, 99999999999999999999]}', b'{"prompt": {"a": 1}}', b'{"prompt": "\\ud800"}',
    b'{"model": "fake", "prompt": "x", "temperature": 1e999}', b"5\r\nhello\r\n0\r\n\r\n", b"ffffffffffffffff\r\n",
    b'{"model": "../x", "prompt": "a"}', b'{"model": "fake", "prompt": "a", "n": 1e9, "seed": 1.5}', b"--\r\n\r\n--",
)  # fmt: skip


class HttpStrangers:
    """Bytes that look more or less like HTTP."""

    def __init__(self, dice: random.Random, port: int) -> None:
        self._dice, self._port = dice, port
        self.sent = 0
        self.statuses: set[bytes] = set()

    def ask(self) -> None:
        """A few requests on one connection."""
        dice = self._dice
        try:
            with dial(self._port) as raw:
                for _ in range(dice.choice((1, 2, 4))):
                    raw.sendall(self._request())
                    self.sent += 1
                raw.settimeout(0.002)
                self.statuses.add(raw.recv(12)[9:12])
        except OSError:
            return

    def _request(self) -> bytes:
        dice = self._dice
        roll = dice.random()
        if roll < 0.1:
            return dice.randbytes(dice.choice((1, 50, 3000)))
        body = dice.choice(_BODIES)
        method = dice.choice((b"POST", b"POST", b"GET", b"DELETE", b"OPTIONS", b"PRI", b"\x00", b"G" * 300))
        head = [method + b" " + dice.choice(_PATHS) + b" HTTP/" + dice.choice((b"1.1", b"1.1", b"1.0", b"9.9", b"2"))]
        head += [b"Host: localhost"] * dice.choice((0, 1, 1, 1)) + dice.sample(_HEADERS, dice.choice((0, 0, 1, 2)))
        if dice.random() < 0.7:
            head.append(b"Content-Length: %d" % len(body))
        request = b"\r\n".join(head) + b"\r\n\r\n" + body
        if roll < 0.3:
            at = dice.randrange(len(request))
            request = request[:at] + dice.randbytes(dice.choice((0, 1, 3))) + request[at + dice.choice((0, 1, 5)) :]
        return request
