"""Memory that the processor cannot address, and its drivers, which can copy it: the port behind which GPUs are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class DeviceError(Exception):
    """A device or its driver refused, or there is none; the text is for people."""


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
        """True if :meth:`dmabuf` will answer, as far as the driver knows. Costs nothing to ask."""
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
        """Returns memory that somebody else has allocated, and keeps as long as this is used.

        Raises DeviceError if there is no such device, or it is not its memory."""
        ...

    def pin(self, host: memoryview) -> Callable[[], None]:
        """Locks host memory so that all devices of the kind copy it at full speed; returns the call that undoes it.

        Called after the first ``open``. Raises DeviceError; the memory then stays as it was, and works more slowly."""
        ...
