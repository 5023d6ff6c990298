"""What a runner asks of the device that it computes on: a stream, events, pinned memory, graphs.

Owns: one stream of the device, on which all work of the runner is done in order. Never: a wait, but in `Event.wait`.
`HostDevice` is the host as if it were one, for tests and for `gpu_check --interpret`: what is asked of it has happened
when the call returns. The CUDA one is not yet run on hardware.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Final, Protocol

import torch

WARM_UP_RUNS: Final = 2
"""Before a capture: kernels are compiled and memory is allocated by then, neither of which a graph may do."""


class CaptureFailed(Exception):
    """Work that no graph can keep; the message says why."""


class Event(Protocol):
    """A place in the order of the runner's stream."""

    def wait(self) -> None:
        """Until all that was asked for before it has been done."""
        ...


class Graph(Protocol):
    """Work that was captured, over the tensors that it was captured with."""

    def replay(self) -> torch.Tensor:
        """What the work returns: the same memory each time."""
        ...


class EngineDevice(Protocol):
    """See the module. `place` is torch's name for it."""

    place: torch.device

    def stream(self) -> AbstractContextManager[object]:
        """What is asked of torch inside goes on the runner's stream."""
        ...

    def event(self) -> Event:
        """Of now."""
        ...

    def pinned(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Host memory that copies to and from the device do not wait for."""
        ...

    def capture(self, work: Callable[[], torch.Tensor]) -> Graph:
        """Runs `work` and keeps it. Raises CaptureFailed."""
        ...


class CudaEngineDevice:
    """See EngineDevice."""

    def __init__(self, place: torch.device) -> None:
        self.place = place
        self._stream = torch.cuda.Stream(place)
        self._memory = torch.cuda.graph_pool_handle()  # of all graphs: only one runs at a time

    def stream(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._stream)

    def event(self) -> Event:
        event = torch.cuda.Event(blocking=True)  # who waits leaves its core to the I/O thread (ADR 0005)
        event.record(self._stream)
        return _CudaEvent(event)

    def pinned(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(count, dtype=dtype, pin_memory=True)

    def capture(self, work: Callable[[], torch.Tensor]) -> Graph:
        graph = torch.cuda.CUDAGraph()
        try:
            with self.stream():
                for _ in range(WARM_UP_RUNS):
                    work()
            self._stream.synchronize()
            # Of this thread alone: the I/O thread asks about its copies meanwhile, which else would end the capture.
            with torch.cuda.graph(graph, self._memory, self._stream, capture_error_mode="thread_local"):
                found = work()
        except RuntimeError as error:  # torch's word for what CUDA does not allow, memory that is not there among it
            torch.cuda.synchronize(self.place)
            raise CaptureFailed(str(error).splitlines()[0]) from error
        return _CudaGraph(graph, found)


class _CudaEvent:
    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def wait(self) -> None:
        self._event.synchronize()


class _CudaGraph:
    def __init__(self, graph: torch.cuda.CUDAGraph, found: torch.Tensor) -> None:
        self._graph = graph
        self._found = found

    def replay(self) -> torch.Tensor:
        self._graph.replay()
        return self._found


class HostDevice:
    """See EngineDevice. Its graphs compute anew, from the same tensors into the same memory."""

    place = torch.device("cpu")

    def stream(self) -> AbstractContextManager[object]:
        return nullcontext()

    def event(self) -> Event:
        return _Now()

    def pinned(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(count, dtype=dtype)

    def capture(self, work: Callable[[], torch.Tensor]) -> Graph:
        return _HostGraph(work)


class _Now:
    def wait(self) -> None:
        return


class _HostGraph:
    def __init__(self, work: Callable[[], torch.Tensor]) -> None:
        self._work = work
        self._found = work()

    def replay(self) -> torch.Tensor:
        with torch.inference_mode():
            self._found.copy_(self._work())
        return self._found
