"""DLPack: the memory behind a tensor of any array library, without copying it and without importing the library.

Layouts and rules are those of the DLPack C API 1.x (``dlpack.h``) and its Python specification. ``numpy.from_dlpack``
is not enough here: arrays made of capsules without a version are read-only, and it knows only the CPU."""

from __future__ import annotations

import ctypes
import weakref
from typing import Any

from pinyon.transfer.types.errors import InvalidTransfer
from pinyon.transfer.types.segment import MAX_LENGTH

CPU = 1
HOST_TYPES = (CPU, 3, 11)
"""Types of memory that the processor may read and write: ``kDLCPU``, ``kDLCUDAHost``, ``kDLROCMHost``."""

_VERSION = (1, 0)
_READ_ONLY = 1
_IS_COPIED = 2
_MAX_DIMENSIONS = 64
_ANY_STREAM = -1
"""The producer need not wait for anything: registering reads no byte."""


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Managed(ctypes.Structure):
    _fields_ = (("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


class _ManagedVersioned(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    )


_Deleter = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)
"""The deleter's type. It is called with the GIL held, as some libraries' deleters touch Python objects."""
_UNVERSIONED, _VERSIONED = b"dltensor", b"dltensor_versioned"
_USED = {name: ctypes.create_string_buffer(b"used_" + name) for name in (_UNVERSIONED, _VERSIONED)}
"""A capsule keeps the pointer to its name, so these names live as long as the process."""

_is_valid = ctypes.pythonapi.PyCapsule_IsValid
_is_valid.argtypes, _is_valid.restype = (ctypes.py_object, ctypes.c_char_p), ctypes.c_int
_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.argtypes, _pointer.restype = (ctypes.py_object, ctypes.c_char_p), ctypes.c_void_p
_rename = ctypes.pythonapi.PyCapsule_SetName
_rename.argtypes, _rename.restype = (ctypes.py_object, ctypes.c_void_p), ctypes.c_int


def is_dlpack(value: object) -> bool:
    return hasattr(value, "__dlpack__") and hasattr(value, "__dlpack_device__")


class DlpackTensor:
    """A consumed capsule; it holds the producer's memory until it is itself collected.

    numpy sees it as an object with the array interface, so an array made of it keeps it alive."""

    def __init__(self, producer: Any) -> None:
        """Takes the producer's capsule over.

        Raises InvalidTransfer if the tensor cannot be exported, or is read-only, a copy, empty or not C-contiguous."""
        capsule = _export(producer)
        name = next((name for name in _USED if _is_valid(capsule, name)), None)
        if name is None:
            raise _invalid("__dlpack__ did not return an unused DLPack capsule")
        at = _pointer(capsule, name)
        managed: _Managed | _ManagedVersioned
        if name is _VERSIONED:
            managed = _ManagedVersioned.from_address(at)
            # The version comes first in all layouts; the rest may differ.
            if managed.major != _VERSION[0]:
                raise _invalid(f"DLPack version {managed.major} is not supported")
            if managed.flags & _READ_ONLY:
                raise _invalid("the tensor is read-only")
            if managed.flags & _IS_COPIED:
                raise _invalid("the tensor was copied for the export, so peers would not see the original")
        else:
            managed = _Managed.from_address(at)
        tensor = managed.tensor
        self.nbytes = _nbytes(tensor)
        self.device_type = int(tensor.device_type)
        self.device_id = int(tensor.device_id)
        self.address = int(tensor.data or 0) + int(tensor.byte_offset)
        if not tensor.data or self.address + self.nbytes > 1 << 64:
            raise _invalid("the tensor's data pointer makes no sense")
        # Up to here, an error leaves the capsule alone, whose destructor frees the tensor. From here on, we do.
        if _rename(capsule, ctypes.addressof(_USED[name])):
            raise _invalid("the DLPack capsule cannot be taken over")
        if managed.deleter:
            weakref.finalize(self, _Deleter(managed.deleter), at).atexit = False

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return {"version": 3, "typestr": "|u1", "shape": (self.nbytes,), "data": (self.address, False)}


def _export(producer: Any) -> object:
    try:
        device_type = int(producer.__dlpack_device__()[0])
        stream = {} if device_type in HOST_TYPES else {"stream": _ANY_STREAM}
        try:
            return producer.__dlpack__(**stream, max_version=_VERSION, copy=False)
        except TypeError:  # a producer from before version 1.0
            return producer.__dlpack__(**stream)
    except Exception as error:
        raise _invalid(f"the tensor cannot be exported: {error}") from None


def _nbytes(tensor: _Tensor) -> int:
    """Returns the bytes of a tensor; raises InvalidTransfer unless it is in row-major order without gaps."""
    item_bits = tensor.bits * tensor.lanes
    if not item_bits or item_bits % 8:
        raise _invalid(f"elements of {item_bits} bits")
    if not 0 <= tensor.ndim <= _MAX_DIMENSIONS or (tensor.ndim and not tensor.shape):
        raise _invalid(f"a tensor of {tensor.ndim} dimensions")
    count = 1
    for axis in reversed(range(tensor.ndim)):
        size = tensor.shape[axis]
        if size < 1:
            raise _invalid("the tensor is empty" if not size else "a dimension is negative")
        if tensor.strides and size > 1 and tensor.strides[axis] != count:
            raise _invalid("the tensor must be C-contiguous")
        count *= size
        if count * item_bits // 8 > MAX_LENGTH:
            raise _invalid("the tensor is larger than any memory")
    return int(count * item_bits // 8)


def _invalid(text: str) -> InvalidTransfer:
    return InvalidTransfer(text, field="buffer")
