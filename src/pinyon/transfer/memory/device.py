"""Memory that the processor cannot address, and who knows how to copy it: the port behind which GPUs are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class DeviceError(Exception):
    """A device or its driver said no, or there is none; the text is for people."""


class DeviceMemory(Protocol):
    """A range of a device's memory. Thread-safe."""

    @property
    def address(self) -> int:
        """Of the first byte, in the device's address space."""
        ...

    @property
    def length(self) -> int:
        """Bytes."""
        ...

    @property
    def exportable(self) -> bool:
        """Will :meth:`dmabuf` answer, as far as the driver knows? Costs nothing to ask."""
        ...

    def copy_out(self, offset: int, host: memoryview) -> None:
        """Fill ``host`` from the device, ``offset`` bytes into the range. On return the bytes are there. Raises
        DeviceError."""
        ...

    def copy_in(self, offset: int, host: memoryview) -> None:
        """The other way round. On return whoever uses the device next sees the bytes. Raises DeviceError."""
        ...

    def dmabuf(self) -> tuple[int, int] | None:
        """A file descriptor by which a NIC's driver can map the range, and where in it the range begins; None when the
        device does not offer this. The caller closes the descriptor (a registration made of it outlives it). Raises
        DeviceError."""
        ...


class DeviceDriver(Protocol):
    """All devices of one kind."""

    @property
    def name(self) -> str:
        """The kind as locations spell it: ``"cuda"`` of ``"cuda:0"``."""
        ...

    def open(self, device_id: int, address: int, length: int) -> DeviceMemory:
        """Memory that somebody else has allocated, and keeps as long as this is used. Raises DeviceError: no such
        device, or not its memory."""
        ...

    def pin(self, host: memoryview) -> Callable[[], None]:
        """Lock host memory so that all devices of the kind copy it at full speed; returns what undoes it.

        Called after the first ``open``. Raises DeviceError: it stays as it was, and works more slowly."""
        ...
