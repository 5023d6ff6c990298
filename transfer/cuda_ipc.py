"""CUDA's driver for `device_ipc.py`, by ctypes: handles of allocations, mappings, and copies on a stream of their own.

Owns: one stream, the events of copies under way, and a hold on the device's primary context (torch's own). Never: an
allocation, or a wait but in `IpcCopy.wait` and where an event cannot be recorded. Calls come from one thread at a time,
which need not be the one that made it: a context is a thread's own, and is set for each that calls. Not yet run on a
GPU.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Sequence
from ctypes import byref, c_char, c_int, c_size_t, c_uint, c_uint64, c_void_p

from baton.transfer.device_ipc import DEVICE_BYTES, HANDLE_BYTES, Exported, IpcCopy, IpcRefused, Mapped, Move

_NOT_READY = 600  # CUDA_ERROR_NOT_READY
_LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS: the one flag that there is, and it has to be given
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: does not wait for the default stream
_NO_TIMING = 2  # CU_EVENT_DISABLE_TIMING


class _Handle(ctypes.Structure):
    """CUipcMemHandle, which calls take by value."""

    _fields_ = (("reserved", c_char * HANDLE_BYTES),)


_ARGUMENTS: dict[str, tuple[type, ...]] = {
    "cuInit": (c_uint,),
    "cuDeviceGet": (c_void_p, c_int),
    "cuDeviceGetUuid": (c_void_p, c_int),
    "cuDevicePrimaryCtxRetain": (c_void_p, c_int),
    "cuCtxSetCurrent": (c_void_p,),
    "cuMemGetAddressRange_v2": (c_void_p, c_void_p, c_uint64),
    "cuIpcGetMemHandle": (c_void_p, c_uint64),
    "cuIpcOpenMemHandle_v2": (c_void_p, _Handle, c_uint),
    "cuIpcCloseMemHandle": (c_uint64,),
    "cuStreamCreate": (c_void_p, c_uint),
    "cuStreamSynchronize": (c_void_p,),
    "cuMemcpyDtoDAsync_v2": (c_uint64, c_uint64, c_size_t, c_void_p),
    "cuEventCreate": (c_void_p, c_uint),
    "cuEventRecord": (c_void_p, c_void_p),
    "cuEventQuery": (c_void_p,),
    "cuEventSynchronize": (c_void_p,),
    "cuEventDestroy_v2": (c_void_p,),
    "cuGetErrorName": (c_int, c_void_p),
}


class CudaIpc:
    """See IpcDevice. `ordinal` is torch's: one of the devices that this process sees. Raises IpcRefused where there is
    no driver, or no such device."""

    def __init__(self, ordinal: int) -> None:
        self._driver = _load()
        self._context: c_void_p | None = None  # none is needed yet
        self._current_in: int | None = None  # the thread whose context it is
        self._must("cuInit", 0)
        device, context, self._stream = c_int(), c_void_p(), c_void_p()
        self._must("cuDeviceGet", byref(device), ordinal)
        uuid = ctypes.create_string_buffer(DEVICE_BYTES)
        self._must("cuDeviceGetUuid", uuid, device)
        self._uuid = uuid.raw
        self._must("cuDevicePrimaryCtxRetain", byref(context), device)
        self._context = context
        self._must("cuStreamCreate", byref(self._stream), _NON_BLOCKING)

    def device_id(self) -> bytes:
        return self._uuid

    def export(self, pointer: int) -> Exported:
        handle = _Handle()
        try:
            base = self._range(pointer).base
            self._must("cuIpcGetMemHandle", byref(handle), base)
        except IpcRefused as error:
            way_out = "no handle for this memory; is PYTORCH_CUDA_ALLOC_CONF free of expandable_segments?"
            raise IpcRefused(f"{error}: {way_out}") from error
        return Exported(bytes(handle), pointer - base)

    def open(self, handle: bytes, owner: int) -> Mapped:
        if owner == os.getpid():
            raise IpcRefused("this process itself: CUDA opens handles of other processes only")
        base = c_uint64()
        self._must("cuIpcOpenMemHandle_v2", byref(base), _Handle.from_buffer_copy(handle), _LAZY_PEER_ACCESS)
        try:
            mapped = self._range(base.value)
        except IpcRefused:
            self._call("cuIpcCloseMemHandle", base)
            raise
        return Mapped(base.value, mapped.base + mapped.nbytes - base.value)

    def close(self, mapped: Mapped) -> None:
        self._call("cuIpcCloseMemHandle", mapped.base)

    def copy(self, moves: Sequence[Move]) -> IpcCopy:
        event, failure = c_void_p(), ""
        self._must("cuEventCreate", byref(event), _NO_TIMING)
        for target, source, nbytes in moves:
            failure = self._call("cuMemcpyDtoDAsync_v2", target, source, nbytes, self._stream)
            if failure:
                break
        unmarked = self._call("cuEventRecord", event, self._stream)
        if unmarked:  # nothing else can tell when what has begun is over
            self._call("cuStreamSynchronize", self._stream)
        return _EventCopy(self, event, failure or unmarked)

    def query(self, event: c_void_p) -> str | None:
        """None: under way. An error of the driver's is of its whole context, where nothing runs any more."""
        status = self._status("cuEventQuery", event)
        return None if status == _NOT_READY else self._name(status)

    def synchronize(self, event: c_void_p) -> str:
        return self._call("cuEventSynchronize", event)

    def destroy(self, event: c_void_p) -> None:
        self._call("cuEventDestroy_v2", event)

    def _range(self, pointer: int) -> Mapped:
        """The whole allocation that `pointer` lies in."""
        base, nbytes = c_uint64(), c_size_t()
        self._must("cuMemGetAddressRange_v2", byref(base), byref(nbytes), pointer)
        return Mapped(base.value, nbytes.value)

    def _must(self, name: str, *arguments: object) -> None:
        failure = self._call(name, *arguments)
        if failure:
            raise IpcRefused(failure)

    def _call(self, name: str, *arguments: object) -> str:
        """Empty when it went well."""
        failure = self._name(self._status(name, *arguments))
        return f"{name}: {failure}" if failure else ""

    def _status(self, name: str, *arguments: object) -> int:
        """Raises IpcRefused, the call not made, where the context cannot be had: no answer of the driver's, who might
        seem to say that a copy is over."""
        thread = threading.get_ident()
        if self._context is not None and self._current_in != thread:
            failure = self._name(self._driver.cuCtxSetCurrent(self._context))
            if failure:
                raise IpcRefused(f"cuCtxSetCurrent: {failure}")
            self._current_in = thread
        answer: int = getattr(self._driver, name)(*arguments)
        return answer

    def _name(self, status: int) -> str:
        if status == 0:
            return ""
        name = ctypes.c_char_p()
        self._driver.cuGetErrorName(status, byref(name))
        return (name.value or b"").decode() or f"error {status}"


class _EventCopy:
    """See IpcCopy."""

    def __init__(self, owner: CudaIpc, event: c_void_p, failure: str) -> None:
        self._owner, self._event, self.failure = owner, event, failure
        self._over = False

    def ended(self) -> bool:
        if not self._over:
            failure = self._owner.query(self._event)
            if failure is not None:
                self._end(failure)
        return self._over

    def wait(self) -> None:
        if not self._over:
            self._end(self._owner.synchronize(self._event))

    def _end(self, failure: str) -> None:
        self.failure = self.failure or failure
        self._owner.destroy(self._event)
        self._over = True


def _load() -> ctypes.CDLL:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        for name, arguments in _ARGUMENTS.items():
            function = getattr(driver, name)
            function.argtypes, function.restype = arguments, c_int
    except (OSError, AttributeError) as error:
        raise IpcRefused(f"no CUDA driver here: {error}") from error
    return driver
