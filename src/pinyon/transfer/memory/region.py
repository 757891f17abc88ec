"""Regions of registered memory: a buffer, its key, and what the key opens to peers."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import numpy as np

from pinyon.transfer.memory.device import DeviceMemory
from pinyon.transfer.types.errors import TransferError
from pinyon.transfer.types.segment import KEY_BYTES, RegionDescriptor


class Access(IntEnum):
    """The rights of peers that know a key. The numbers are bits, and on the wire."""

    NONE = 0
    READ = 1
    WRITE = 2
    READ_WRITE = 3


class Region:
    """A registered buffer. Made by ``TransferEngine.register_local_memory``; treat it as read-only.

    Once it is unregistered it has no ``view`` and no ``array`` any more."""

    __slots__ = (
        *("_holders", "_owner", "access", "address", "alive", "array", "device", "direct", "key", "length"),
        *("location", "view"),
    )

    def __init__(
        self, view: memoryview | None, location: str, access: Access, device: DeviceMemory | None = None
    ) -> None:
        """Wraps host memory (``view``) or a device's memory."""
        self.device = device
        """The device's memory; None for host memory. If set, ``view`` and ``array`` raise, and its driver copies."""
        self.direct = device is not None and device.exportable
        """True for a device's memory that NICs may be able to map; False as soon as one could not."""
        self._owner: object = None
        if device is not None:
            self.address, self.length = device.address, device.length
        elif view is not None:
            self.view = view
            """The buffer as flat bytes."""
            self.array: np.ndarray[Any, np.dtype[np.uint8]] = np.frombuffer(view, np.uint8)
            """An array over the buffer, for numpy, whose copies release the GIL."""
            self.address = int(self.array.ctypes.data)
            """Address of the first byte, in this process or on the device."""
            self.length = len(view)
        self.key = secrets.token_bytes(KEY_BYTES)
        """Names the region here. As a key it opens all of the region to peers, as far as ``access`` says."""
        self.location = location
        self.access = access
        self.alive = True
        self._holders: dict[object, Callable[[], None]] = {}

    def release(self) -> None:
        """Lets go of the buffer. Must be called once, when nobody uses it any more."""
        self._owner = None
        if self.device is None:
            del self.view, self.array

    def descriptor(self) -> RegionDescriptor:
        return RegionDescriptor(self.key, self.location, self.length)

    def __repr__(self) -> str:
        # The key is a capability: it must never be in a log.
        return f"Region({self.location!r}, {self.length} bytes, access={self.access.name}, alive={self.alive})"


class DeviceRegion(Region):
    """A region not in host memory; a class of its own, as ``__getattr__`` makes every attribute of a class slower."""

    __slots__ = ()

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:  # called only for attributes that are not set
            if name in ("view", "array"):
                raise TransferError(f"the region is on {self.location}, not in host memory")
            raise AttributeError(name)
