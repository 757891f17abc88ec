"""Which kinds of devices can be used in this process."""

from __future__ import annotations

import threading

from pinyon.transfer.memory.device import DeviceDriver, DeviceError

__all__ = ["add_driver", "driver_of", "remove_driver"]

_lock = threading.Lock()
_drivers: dict[int, DeviceDriver] = {}
_CUDA = 2


def add_driver(device_type: int, driver: DeviceDriver) -> None:
    """Make devices of a kind usable; ``device_type`` is DLPack's ``DLDeviceType``. CUDA needs no call."""
    with _lock:
        _drivers[device_type] = driver


def remove_driver(device_type: int) -> None:
    with _lock:
        _drivers.pop(device_type, None)


def driver_of(device_type: int) -> DeviceDriver:
    """
    Raises:
        DeviceError: no driver for this kind, or it does not work here.
    """
    with _lock:
        driver = _drivers.get(device_type)
        if driver is None and device_type == _CUDA:
            # Loads libcuda: only in processes that register memory of a GPU.
            from pinyon.transfer.memory.cuda import CudaDriver

            driver = _drivers[device_type] = CudaDriver()
    if driver is None:
        raise DeviceError(f"there is no driver for devices of DLPack type {device_type}")
    return driver
