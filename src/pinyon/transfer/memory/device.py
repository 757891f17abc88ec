"""Memory that the processor cannot address, and the drivers that can copy it: the interface to GPUs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class DeviceError(Exception):
    """The error when a device or its driver refuses, or there is none; the text is for people."""


class DeviceMemory(Protocol):
    """A range of a device's memory. Thread-safe."""

    @property
    def address(self) -> int:
        """Address of the first byte, in the device's address space."""
        ...

    @property
    def length(self) -> int:
        """Length in bytes."""
        ...

    @property
    def exportable(self) -> bool:
        """True if :meth:`dmabuf` will return a descriptor, as far as the driver knows. Costs nothing to read."""
        ...

    def copy_out(self, offset: int, host: memoryview) -> None:
        """Fills ``host`` from ``offset`` bytes into the range. On return the bytes are there. Raises DeviceError."""
        ...

    def copy_in(self, offset: int, host: memoryview) -> None:
        """Copies ``host`` into the range. On return the device's next user sees the bytes. Raises DeviceError."""
        ...

    def dmabuf(self) -> tuple[int, int] | None:
        """Returns a file descriptor by which a NIC's driver can map the range, and the range's place in it.

        None means that the device does not offer this. The caller closes the descriptor; a registration made of it
        outlives it. Raises DeviceError."""
        ...


class DeviceDriver(Protocol):
    """The driver of all devices of one kind."""

    @property
    def name(self) -> str:
        """The kind as locations spell it: ``"cuda"`` of ``"cuda:0"``."""
        ...

    def open(self, device_id: int, address: int, length: int) -> DeviceMemory:
        """Returns memory that somebody else has allocated and keeps for as long as it is used here.

        Raises DeviceError if there is no such device, or the memory does not belong to it."""
        ...

    def pin(self, host: memoryview) -> Callable[[], None]:
        """Locks host memory so that all devices of the kind copy it at full speed; returns the call that undoes it.

        Called after the first ``open``. Raises DeviceError; the memory then stays as it was, and works more slowly."""
        ...
