"""Buffers that can become regions: objects with the buffer protocol, and DLPack tensors on the CPU or a device."""

from __future__ import annotations

import threading

import numpy as np

from pinyon.transfer.memory.device import DeviceDriver, DeviceError
from pinyon.transfer.memory.dlpack import HOST_TYPES, DlpackTensor, is_dlpack
from pinyon.transfer.memory.region import Access, DeviceRegion, Region
from pinyon.transfer.types.errors import InvalidTransfer

DEFAULT_LOCATION = "cpu:0"
HOST_PREFIX = "cpu:"
"""Prefix of locations that are always host memory; others may be of a device."""
DRIVERS: dict[int, DeviceDriver] = {}
"""Drivers of devices that this process can use, by DLPack's ``DLDeviceType``. CUDA's is made when first needed."""
_CUDA = 2
_lock = threading.Lock()


def open_buffer(buffer: object, location: str | None, access: Access) -> tuple[Region, DeviceDriver | None]:
    """Returns a region of the buffer's bytes, which keeps it alive, and the driver if it is on a device.

    Raises InvalidTransfer if it is neither a buffer nor DLPack, read-only, not C-contiguous, empty, or on a device that
    cannot be used here, and for a bad location."""
    try:
        view = memoryview(buffer)  # type: ignore[arg-type]
    except (TypeError, ValueError, BufferError) as error:
        if is_dlpack(buffer):
            return _open_tensor(DlpackTensor(buffer), location, access)
        raise InvalidTransfer(f"not a buffer: {error}", field="buffer") from None
    if view.readonly:
        raise InvalidTransfer("the buffer is read-only", field="buffer")
    if not view.c_contiguous or not view.nbytes:
        raise InvalidTransfer("the buffer must be C-contiguous and not empty", field="buffer")
    try:
        view = view.cast("B")
    except (TypeError, ValueError):
        view = np.frombuffer(view, np.uint8).data  # its format is one that memoryview cannot cast
    return Region(view, DEFAULT_LOCATION if location is None else location, access), None


def _open_tensor(tensor: DlpackTensor, location: str | None, access: Access) -> tuple[Region, DeviceDriver | None]:
    if tensor.device_type in HOST_TYPES:
        return Region(np.asarray(tensor).data, DEFAULT_LOCATION if location is None else location, access), None
    try:
        driver = _driver_of(tensor.device_type)
        device = driver.open(tensor.device_id, tensor.address, tensor.nbytes)
    except DeviceError as error:
        raise InvalidTransfer(f"the tensor's device cannot be used: {error}", field="buffer") from None
    place = f"{driver.name}:{tensor.device_id}"
    if location is not None and location.startswith(HOST_PREFIX):
        raise InvalidTransfer(f"the buffer is on {place}", field="location")
    region = DeviceRegion(None, place if location is None else location, access, device)
    region._owner = tensor
    return region, driver


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
