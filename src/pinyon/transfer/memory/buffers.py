"""Buffers that can be registered: objects with the buffer protocol, and DLPack tensors on the CPU or a device."""

from __future__ import annotations

import contextlib
import threading
from typing import NamedTuple

import numpy as np

from pinyon.transfer.memory.device import DeviceDriver, DeviceError, DeviceMemory
from pinyon.transfer.memory.dlpack import HOST_TYPES, DlpackTensor, is_dlpack
from pinyon.transfer.types.errors import InvalidTransfer

DEFAULT_LOCATION = "cpu:0"
HOST_PREFIX = "cpu:"
"""Prefix of locations that are always host memory; others may be of a device."""
DRIVERS: dict[int, DeviceDriver] = {}
"""Drivers of devices that this process can use, by DLPack's ``DLDeviceType``. CUDA's is made when first needed."""
_CUDA = 2
_lock = threading.Lock()


class OpenedBuffer(NamedTuple):
    """A buffer of host memory (``view``) or of a device (``device`` and the rest)."""

    view: memoryview | None
    device: DeviceMemory | None = None
    driver: DeviceDriver | None = None
    owner: object = None
    """The owner whose reference keeps the device's memory; a view does that itself."""
    location: str = DEFAULT_LOCATION
    """The location of the memory, as far as is known."""


def open_buffer(buffer: object) -> OpenedBuffer:
    """Returns the buffer as flat, writable bytes, which keep it alive.

    Raises InvalidTransfer if it is neither a buffer nor DLPack, read-only, not C-contiguous, empty, or on a device that
    cannot be used here."""
    try:
        view = memoryview(buffer)  # type: ignore[arg-type]
    except (TypeError, ValueError, BufferError) as error:
        if is_dlpack(buffer):
            return _open_tensor(DlpackTensor(buffer))
        raise InvalidTransfer(f"not a buffer: {error}", field="buffer") from None
    if view.readonly:
        raise InvalidTransfer("the buffer is read-only", field="buffer")
    if not view.c_contiguous or not view.nbytes:
        raise InvalidTransfer("the buffer must be C-contiguous and not empty", field="buffer")
    with contextlib.suppress(TypeError, ValueError):
        return OpenedBuffer(view.cast("B"))
    return OpenedBuffer(np.frombuffer(view, np.uint8).data)  # its format is one that memoryview cannot cast


def _open_tensor(tensor: DlpackTensor) -> OpenedBuffer:
    if tensor.device_type in HOST_TYPES:
        return OpenedBuffer(np.asarray(tensor).data)
    try:
        driver = _driver_of(tensor.device_type)
        device = driver.open(tensor.device_id, tensor.address, tensor.nbytes)
    except DeviceError as error:
        raise InvalidTransfer(f"the tensor's device cannot be used: {error}", field="buffer") from None
    return OpenedBuffer(None, device, driver, tensor, f"{driver.name}:{tensor.device_id}")


def _driver_of(device_type: int) -> DeviceDriver:
    """Returns the driver. Raises DeviceError if there is none for this kind, or it does not work here."""
    with _lock:
        driver = DRIVERS.get(device_type)
        if driver is None and device_type == _CUDA:
            # Loads libcuda: only in processes that register memory of a GPU.
            from pinyon.transfer.memory.cuda import CudaDriver

            driver = DRIVERS[device_type] = CudaDriver()
    if driver is None:
        raise DeviceError(f"there is no driver for devices of DLPack type {device_type}")
    return driver
