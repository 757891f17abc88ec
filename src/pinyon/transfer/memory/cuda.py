"""NVIDIA GPUs by the CUDA driver API alone (``libcuda.so.1``, CUDA 11.7 or newer for dmabuf).

Copies run on streams of our own that wait for nobody else's work, so a transfer never waits for a kernel. As with RDMA,
the caller must have waited for what it computed before it submits."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable, Iterator

from pinyon.transfer.memory.device import DeviceError, DeviceMemory

# Names and numbers of cuda.h.
_LIBRARY = "libcuda.so.1"
_MEMORYTYPE_DEVICE = 2
_POINTER_MEMORY_TYPE = 2
_POINTER_SYNC_MEMOPS = 6
_POINTER_IS_MANAGED = 8
_POINTER_DEVICE_ORDINAL = 9
_DEVICE_DMA_BUF_SUPPORTED = 124
_STREAM_NON_BLOCKING = 1
_HOST_REGISTER_PORTABLE = 1
_RANGE_HANDLE_DMA_BUF_FD = 1

_PAGE = 4096
"""Page size of the host: an exported range begins and ends at one."""

_int, _uint, _size, _pointer = ctypes.c_int, ctypes.c_uint, ctypes.c_size_t, ctypes.c_void_p
_address = ctypes.c_uint64
_ints = ctypes.POINTER(ctypes.c_int)
_pointers = ctypes.POINTER(ctypes.c_void_p)

_CALLS: dict[str, tuple[object, ...]] = {
    "cuInit": (_uint,),
    "cuGetErrorName": (_int, ctypes.POINTER(ctypes.c_char_p)),
    "cuGetErrorString": (_int, ctypes.POINTER(ctypes.c_char_p)),
    "cuDeviceGet": (_ints, _int),
    "cuDeviceGetAttribute": (_ints, _int, _int),
    "cuDevicePrimaryCtxRetain": (_pointers, _int),
    "cuCtxPushCurrent_v2": (_pointer,),
    "cuCtxPopCurrent_v2": (_pointers,),
    "cuPointerGetAttribute": (_pointer, _int, _address),
    "cuPointerSetAttribute": (_pointer, _int, _address),
    "cuStreamCreate": (_pointers, _uint),
    "cuStreamSynchronize": (_pointer,),
    "cuMemcpyDtoHAsync_v2": (_pointer, _address, _size, _pointer),
    "cuMemcpyHtoDAsync_v2": (_address, _pointer, _size, _pointer),
    "cuMemHostRegister_v2": (_pointer, _size, _uint),
    "cuMemHostUnregister": (_pointer,),
}
_EXPORT = "cuMemGetHandleForAddressRange"
"""A function that drivers older than CUDA 11.7 lack; all others are in every driver that is still in use."""
_EXPORT_ARGUMENTS = (_pointer, _address, _size, _int, ctypes.c_ulonglong)


class _Library:
    """The driver's functions, with a check of each call."""

    def __init__(self) -> None:
        """Loads the driver. Raises DeviceError if there is none, or it does not start."""
        try:
            library = ctypes.CDLL(_LIBRARY)
            self._functions = {name: getattr(library, name) for name in _CALLS}
        except (OSError, AttributeError) as error:
            raise DeviceError(f"the CUDA driver cannot be loaded ({error}); is the NVIDIA driver installed?") from None
        for name, arguments in _CALLS.items():
            self._functions[name].argtypes = arguments
        self.exports = hasattr(library, _EXPORT)
        if self.exports:
            export = self._functions[_EXPORT] = getattr(library, _EXPORT)
            export.argtypes = _EXPORT_ARGUMENTS
        self.call("cuInit", 0)

    def call(self, name: str, *arguments: object) -> None:
        """Calls a function. Raises DeviceError if it returns anything but CUDA_SUCCESS."""
        code = self._functions[name](*arguments)
        if code:
            raise DeviceError(f"{name}: {self._text('cuGetErrorName', code)}: {self._text('cuGetErrorString', code)}")

    def _text(self, name: str, code: int) -> str:
        text = ctypes.c_char_p()
        if self._functions[name](code, ctypes.byref(text)) or not text.value:
            return f"error {code}"
        return text.value.decode(errors="replace")


class _Gpu:
    """One device: its primary context, which every library in the process shares, and our streams.

    It is kept until the process ends, as the context's other users keep it."""

    def __init__(self, library: _Library, ordinal: int) -> None:
        """Raises DeviceError if there is no such device, or no room on it."""
        self.library = library
        self.ordinal = ordinal
        device, self._context = ctypes.c_int(), ctypes.c_void_p()
        library.call("cuDeviceGet", ctypes.byref(device), ordinal)
        supported = ctypes.c_int()
        # An older driver does not know the attribute.
        with contextlib.suppress(DeviceError):
            library.call("cuDeviceGetAttribute", ctypes.byref(supported), _DEVICE_DMA_BUF_SUPPORTED, device)
        self.exports = library.exports and bool(supported.value)
        library.call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), device)
        self.out, self.into = ctypes.c_void_p(), ctypes.c_void_p()
        with self.current():
            library.call("cuStreamCreate", ctypes.byref(self.out), _STREAM_NON_BLOCKING)
            library.call("cuStreamCreate", ctypes.byref(self.into), _STREAM_NON_BLOCKING)

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """Makes the calling thread use this device meanwhile, and afterwards whichever it used before."""
        self.library.call("cuCtxPushCurrent_v2", self._context)
        try:
            yield
        finally:
            self.library.call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))


class _CudaMemory:
    """A range that somebody else allocated on a GPU."""

    def __init__(self, gpu: _Gpu, address: int, length: int) -> None:
        self.address = address
        self.length = length
        self.exportable = gpu.exports
        self._gpu = gpu

    def copy_out(self, offset: int, host: memoryview) -> None:
        self._check(offset, host)
        self._copy("cuMemcpyDtoHAsync_v2", _host_address(host), self.address + offset, len(host), self._gpu.out)

    def copy_in(self, offset: int, host: memoryview) -> None:
        self._check(offset, host)
        self._copy("cuMemcpyHtoDAsync_v2", self.address + offset, _host_address(host), len(host), self._gpu.into)

    def _check(self, offset: int, host: memoryview) -> None:
        if offset < 0 or offset + len(host) > self.length:
            raise DeviceError(f"{len(host)} bytes at {offset} of {self.length}")

    def _copy(self, name: str, to: int, source: int, size: int, stream: ctypes.c_void_p) -> None:
        with self._gpu.current():
            self._gpu.library.call(name, to, source, size, stream)
            self._gpu.library.call("cuStreamSynchronize", stream)

    def dmabuf(self) -> tuple[int, int] | None:
        if not self.exportable:
            return None
        begin = self.address // _PAGE * _PAGE
        end = -(-(self.address + self.length) // _PAGE) * _PAGE
        fd = ctypes.c_int(-1)
        with self._gpu.current():
            # The NIC does not order its accesses after copies that have returned but not ended; this makes them end.
            on = ctypes.c_uint(1)
            self._gpu.library.call("cuPointerSetAttribute", ctypes.byref(on), _POINTER_SYNC_MEMOPS, self.address)
            self._gpu.library.call(_EXPORT, ctypes.byref(fd), begin, end - begin, _RANGE_HANDLE_DMA_BUF_FD, 0)
        return fd.value, self.address - begin


class CudaDriver:
    """A ``DeviceDriver`` for CUDA, whose library is loaded when the first memory is opened."""

    name = "cuda"

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._library: _Library | None = None
        self._gpus: dict[int, _Gpu] = {}

    def open(self, device_id: int, address: int, length: int) -> DeviceMemory:
        with self._lock:
            if self._library is None:
                self._library = _Library()
            gpu = self._gpus.get(device_id)
            if gpu is None:
                gpu = self._gpus[device_id] = _Gpu(self._library, device_id)
        for last in (address, address + length - 1):
            _check_pointer(gpu, last)
        return _CudaMemory(gpu, address, length)

    def pin(self, host: memoryview) -> Callable[[], None]:
        with self._lock:
            gpu = next(iter(self._gpus.values()), None)
        if gpu is None:
            raise DeviceError("no GPU is open")
        address = _host_address(host)
        with gpu.current():
            gpu.library.call("cuMemHostRegister_v2", address, len(host), _HOST_REGISTER_PORTABLE)

        def unpin() -> None:
            with gpu.current():
                gpu.library.call("cuMemHostUnregister", address)

        return unpin


def _check_pointer(gpu: _Gpu, address: int) -> None:
    """Raises DeviceError if the address is not plain memory of this device."""
    values = {}
    with gpu.current():
        for attribute in (_POINTER_MEMORY_TYPE, _POINTER_DEVICE_ORDINAL):
            value = ctypes.c_int(-1)
            gpu.library.call("cuPointerGetAttribute", ctypes.byref(value), attribute, address)
            values[attribute] = value.value
        managed = ctypes.c_uint(0)
        gpu.library.call("cuPointerGetAttribute", ctypes.byref(managed), _POINTER_IS_MANAGED, address)
    if managed.value or values[_POINTER_MEMORY_TYPE] != _MEMORYTYPE_DEVICE:
        raise DeviceError("the address is not plain device memory")
    if values[_POINTER_DEVICE_ORDINAL] != gpu.ordinal:
        raise DeviceError(f"the address is on device {values[_POINTER_DEVICE_ORDINAL]}, not {gpu.ordinal}")


def _host_address(host: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(host))
