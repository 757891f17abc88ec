"""Registered memory: a buffer, its key, and what that opens to peers."""

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
    """What peers that know a key may do with what it opens. The numbers are bits, and on the wire."""

    NONE = 0
    READ = 1
    WRITE = 2
    READ_WRITE = 3


class Region:
    """A registered buffer. Made by ``TransferEngine.register_local_memory``; treat it as read-only.

    Once it is unregistered it has no ``view`` and no ``array`` any more.
    """

    __slots__ = (
        *("_holders", "_owner", "access", "address", "alive", "array", "device", "direct", "key", "length"),
        *("location", "view"),
    )

    def __init__(
        self, view: memoryview | None, location: str, access: Access, device: DeviceMemory | None = None
    ) -> None:
        """Host memory (``view``) or a device's."""
        self.device = device
        """None: host memory. Else ``view`` and ``array`` raise: its bytes are copied by the device's driver."""
        self.direct = device is not None and device.exportable
        """A device's memory that NICs may be able to map; False as soon as one could not."""
        self._owner: object = None
        if device is not None:
            self.address, self.length = device.address, device.length
        elif view is not None:
            self.view = view
            """The buffer as flat bytes."""
            self.array: np.ndarray[Any, np.dtype[np.uint8]] = np.frombuffer(view, np.uint8)
            """The same memory for numpy, whose copies release the GIL."""
            self.address = int(self.array.ctypes.data)
            """Of the first byte, in this process or on the device."""
            self.length = len(view)
        self.key = secrets.token_bytes(KEY_BYTES)
        """Names the region here, and opens all of it to peers as far as ``access`` says."""
        self.location = location
        self.access = access
        self.alive = True
        self._holders: dict[object, Callable[[], None]] = {}

    def release(self) -> None:
        """Let go of the buffer. Once, when nobody uses it any more."""
        self._owner = None
        if self.device is None:
            del self.view, self.array

    def descriptor(self) -> RegionDescriptor:
        return RegionDescriptor(self.key, self.location, self.length)

    def __repr__(self) -> str:
        # The key is a capability: never in a log.
        return f"Region({self.location!r}, {self.length} bytes, access={self.access.name}, alive={self.alive})"


class DeviceRegion(Region):
    """Not in host memory. A class of its own, because ``__getattr__`` makes every attribute of its class slower."""

    __slots__ = ()

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:  # only for what is not set
            if name in ("view", "array"):
                raise TransferError(f"the region is on {self.location}, not in host memory")
            raise AttributeError(name)
