"""A fake device, and tensors of it and of the CPU, exported by hand-made DLPack capsules.

The device's memory lies behind unusable addresses, and only its driver copies it."""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from pinyon.transfer.memory import dlpack
from pinyon.transfer.memory.buffers import DRIVERS
from pinyon.transfer.memory.device import DeviceError

DEVICE_TYPE = 12  # kDLExtDev
_BASE = 1 << 52  # in no process's address space


class FakeMemory:
    exportable = False

    def __init__(self, driver: FakeDriver, address: int, length: int, backing: memoryview) -> None:
        self.address, self.length = address, length
        self._driver, self._backing = driver, backing

    def copy_out(self, offset: int, host: memoryview) -> None:
        self._driver.count("out", len(host))
        host[:] = self._backing[offset : offset + len(host)]

    def copy_in(self, offset: int, host: memoryview) -> None:
        self._driver.count("in", len(host))
        self._backing[offset : offset + len(host)] = host

    def dmabuf(self) -> tuple[int, int] | None:
        return None


class FakeDriver:
    name = "fake"

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._backings: dict[int, memoryview] = {}
        self._next = itertools.count(1)
        self.copies = {"out": 0, "in": 0}
        self.copied_bytes = {"out": 0, "in": 0}
        self.fail_after = {"out": 1 << 60, "in": 1 << 60}
        """The number of copies that still work, by direction."""
        self.on_copy: Callable[[str], None] = lambda direction: None
        self.pinned = 0
        self.pin_fails = False

    def count(self, direction: str, nbytes: int) -> None:
        self.on_copy(direction)
        with self._lock:
            if self.fail_after[direction] <= 0:
                raise DeviceError(f"the fake device fails to copy {direction}, as told")
            self.fail_after[direction] -= 1
            self.copies[direction] += 1
            self.copied_bytes[direction] += nbytes

    def allocate(self, backing: bytearray) -> int:
        """Makes the bytes of ``backing`` the device's, and returns their address there."""
        with self._lock:
            address = _BASE + (next(self._next) << 40)
            self._backings[address] = memoryview(backing)
            return address

    def open(self, device_id: int, address: int, length: int) -> FakeMemory:
        base = address >> 40 << 40
        backing = self._backings.get(base)
        if backing is None or address - base + length > len(backing):
            raise DeviceError("the address is not the fake device's")
        return FakeMemory(self, address, length, backing[address - base :])

    def pin(self, host: memoryview) -> Callable[[], None]:
        if self.pin_fails:
            raise DeviceError("the fake device pins nothing, as told")
        self.pinned += len(host)

        def unpin() -> None:
            self.pinned -= len(host)

        return unpin

    def tensor(self, backing: bytearray) -> Tensor:
        return Tensor(self.allocate(backing), (len(backing),), device=(DEVICE_TYPE, 0))


@contextmanager
def fake_device() -> Iterator[FakeDriver]:
    driver = FakeDriver()
    DRIVERS[DEVICE_TYPE] = driver
    try:
        yield driver
    finally:
        del DRIVERS[DEVICE_TYPE]


_alive: dict[int, Any] = {}
"""The owners by address of the managed tensor, as a real exporter's ``manager_ctx`` would hold them."""
_DELETER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_DESTRUCTOR = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.argtypes, _new_capsule.restype = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p), ctypes.py_object
_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)(("PyCapsule_IsValid", ctypes.pythonapi))
_get_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)
_NAMES = {False: b"dltensor", True: b"dltensor_versioned"}


@_DESTRUCTOR
def _destroy(capsule: int) -> None:
    """Frees the tensor of a capsule that was not consumed, as the specification demands."""
    for name in _NAMES.values():
        if _is_valid(capsule, name):
            _alive[_get_pointer(capsule, name)].delete()


class _Export:
    def __init__(self, tensor: Tensor, *, versioned: bool) -> None:
        self._tensor = tensor
        managed: Any = dlpack._ManagedVersioned() if versioned else dlpack._Managed()
        inner = managed.tensor
        inner.data, inner.byte_offset = tensor.data, tensor.byte_offset
        inner.device_type, inner.device_id = tensor.device
        inner.ndim = len(tensor.shape) if tensor.ndim is None else tensor.ndim
        inner.code, inner.bits, inner.lanes = 1, tensor.bits, 1
        self._shape = (ctypes.c_int64 * len(tensor.shape))(*tensor.shape)
        inner.shape = ctypes.cast(self._shape, ctypes.POINTER(ctypes.c_int64))
        if tensor.strides is not None:
            self._strides = (ctypes.c_int64 * len(tensor.strides))(*tensor.strides)
            inner.strides = ctypes.cast(self._strides, ctypes.POINTER(ctypes.c_int64))
        self._deleter = _DELETER(lambda _: self.delete())
        managed.deleter = ctypes.cast(self._deleter, ctypes.c_void_p).value if tensor.has_deleter else None
        if versioned:
            managed.major, managed.flags = tensor.major, tensor.flags
        self._managed = managed
        self.address = ctypes.addressof(managed)
        _alive[self.address] = self
        name = _NAMES[versioned]
        self.capsule = _new_capsule(self.address, name, ctypes.cast(_destroy, ctypes.c_void_p))

    def delete(self) -> None:
        self._tensor.deleted += 1
        # The export's own callback is running: the next export releases it.
        _graves.append(_alive.pop(self.address))
        del _graves[:-4]


_graves: list[_Export] = []


class Tensor:
    """A tensor that exports a range of memory in every way that there is, and in some that should not be."""

    def __init__(
        self,
        data: int,
        shape: tuple[int, ...],
        *,
        device: tuple[int, int] = (dlpack.CPU, 0),
        versioned: bool = True,
        strides: tuple[int, ...] | None = None,
        byte_offset: int = 0,
        bits: int = 8,
        flags: int = 0,
        major: int = 1,
        ndim: int | None = None,
        has_deleter: bool = True,
        owner: object = None,
    ) -> None:
        self.data, self.shape, self.device, self.versioned = data, shape, device, versioned
        self.strides, self.byte_offset, self.bits, self.flags = strides, byte_offset, bits, flags
        self.major, self.ndim, self.has_deleter, self.owner = major, ndim, has_deleter, owner
        self.exported = 0
        self.deleted = 0
        self.streams: list[object] = []

    @classmethod
    def over(cls, buffer: bytearray, shape: tuple[int, ...] | None = None, **arguments: Any) -> Tensor:
        """Returns a tensor in the CPU's memory."""
        address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
        return cls(address, (len(buffer),) if shape is None else shape, owner=buffer, **arguments)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device

    def __dlpack__(self, stream: object = None, **arguments: Any) -> object:
        if arguments and not self.versioned:
            raise TypeError("unexpected keyword arguments")
        self.streams.append(stream)
        self.exported += 1
        capsule = _Export(self, versioned=self.versioned)
        made, capsule.capsule = capsule.capsule, None
        return made
