"""The thin edge over pyverbs: its names, its errors, and workarounds for what it does not show.

Only this file imports pyverbs, and only when something here is called. pyverbs (44 to 59) keeps the GIL in every call,
so nothing here may block. It shows no file descriptors. Its ``SGE`` and ``SendWR`` never free what they allocate, so
they are made once and filled again (24 times cheaper, too)."""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from pinyon.transfer.memory.device import DeviceError

_log = logging.getLogger(__name__)

_UVERBS = Path("/sys/class/infiniband_verbs")
_DEV = Path("/dev/infiniband")


class VerbsError(Exception):
    """A verb failed, or there is nothing to call it on."""


@functools.cache
def pyverbs() -> SimpleNamespace:
    """Returns the names of pyverbs that are used here. Raises VerbsError if pyverbs cannot be imported."""
    wanted = {
        "addr": ("AHAttr", "GID", "GlobalRoute"),
        "cq": ("CQ", "CompChannel"),
        "device": ("Context", "get_device_list"),
        "fork": ("fork_init",),
        "mr": ("MR", "DmaBufMR"),
        "pd": ("PD",),
        "pyverbs_error": ("PyverbsError",),
        "qp": ("QP", "QPAttr", "QPCap", "QPInitAttr"),
        "wr": ("SGE", "SendWR"),
    }
    names = SimpleNamespace()
    try:
        names.e = importlib.import_module("pyverbs.enums")
        for module, members in wanted.items():
            loaded = importlib.import_module(f"pyverbs.{module}")
            for member in members:
                setattr(names, member, getattr(loaded, member))
    except (ImportError, AttributeError) as error:
        raise VerbsError(
            f"pyverbs cannot be used ({error}): pip install pyverbs, or the distribution's python3-pyverbs"
        ) from None
    with contextlib.suppress(names.PyverbsError):
        names.fork_init()  # registered pages stay ours when the process forks; nothing to do on kernels from 5.12
    return names


@contextlib.contextmanager
def verb(what: str) -> Iterator[None]:
    try:
        yield
    except (pyverbs().PyverbsError, OSError, DeviceError) as error:
        raise VerbsError(f"{what}: {str(error).strip()}") from None


def rdma_available() -> str | None:
    """Returns why RDMA cannot be used here, in words for people; None if it can."""
    try:
        names = pyverbs()
        with verb("HCAs cannot be listed"):
            hcas = [hca.name.decode() for hca in names.get_device_list()]
    except VerbsError as error:
        return str(error)
    entries = [entry for name in hcas if (entry := character_device(name)) is not None]
    if not entries:
        return "this host has no HCA (RDMA NIC) that libibverbs knows"
    if not any(os.access(_DEV / entry.name, os.R_OK | os.W_OK) for entry in entries):
        return f"no permission to open {', '.join(str(_DEV / entry.name) for entry in entries)}"
    return None


def _event_fds() -> set[int]:
    """Returns our descriptors for the kernel's reports of completions. pyverbs does not say which is a channel's."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}") == "anon_inode:[infinibandevent]":
                found.add(int(name))
    return found


_channels = threading.Lock()


def open_channel(names: SimpleNamespace, context: Any) -> tuple[Any, int]:
    """Returns a completion channel and its descriptor, or -1 if it cannot be told which one that is."""
    with _channels:
        before = _event_fds()
        channel = names.CompChannel(context)
        new = _event_fds() - before
    if len(new) != 1:
        return channel, -1
    fd = new.pop()
    os.set_blocking(fd, False)  # pyverbs would wait with the GIL held
    return channel, fd


def free(resource: Any) -> None:
    if resource is None:
        return
    try:
        resource.close()
    except Exception:  # a removed HCA answers with errors; there is nothing left to free then
        _log.warning("closing %s failed", type(resource).__name__, exc_info=True)


def character_device(name: str) -> Path | None:
    """Returns the HCA's entry in sysfs, or None if it has none.

    The entry goes away as soon as somebody removes the HCA, while the HCA stays until it is closed."""
    with contextlib.suppress(OSError):
        for entry in _UVERBS.iterdir():
            with contextlib.suppress(OSError):
                if (entry / "ibdev").read_text().strip() == name:
                    return entry
    return None
