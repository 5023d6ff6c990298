"""Answers every message with itself: the other end of a bare ZMQ round trip. No thread, no poller, no keys."""

from __future__ import annotations

import zmq

from benchmarks.transfer.control import Control

QUIT = b"quit"


def main() -> None:
    control = Control()
    router = zmq.Context().socket(zmq.ROUTER)
    router.bind(control.spec["address"])
    control.send({"hello": router.getsockopt_string(zmq.LAST_ENDPOINT)})
    while True:
        sender, body = router.recv_multipart()
        if body == QUIT:
            break
        router.send_multipart((sender, body))
    router.close(0)
    control.serve({})


if __name__ == "__main__":
    main()
