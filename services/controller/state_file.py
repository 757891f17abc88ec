"""The controller's knowledge in a file, which is replaced as a whole, and on the disk before anybody relies on it."""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from google.protobuf.json_format import MessageToDict, ParseDict, ParseError

from pinyon.api.controller.v1 import controller_pb2
from pinyon.core.errors import InvalidArgument, PinyonError, Unavailable
from pinyon.federation.view import Federation
from pinyon.messages.federation import federation_from_proto, federation_to_proto
from pinyon.runtime.logging import get_logger
from pinyon.runtime.tasks import ended

FORMAT = 1
BYTES_MAX = 64 << 20
FIRST_PAUSE_S = 0.5
MAX_PAUSE_S = 30.0
WRITE_S = 5.0

_log = get_logger("controller.state")


def read_state(path: Path) -> Federation | None:
    """Returns the federation in the file, or None without a file.

    A broken file is put aside as ``PATH.broken`` and counts as none: load balancers know it all, too. Raises
    :class:`InvalidArgument` (field ``state_file``) for a file that cannot be read or has a later format."""
    try:
        with path.open("rb") as file:
            data = file.read(BYTES_MAX + 1)
    except FileNotFoundError:
        if not path.parent.is_dir():
            raise InvalidArgument(f"{path.parent} is no folder", field="state_file") from None
        return None
    except OSError as error:
        raise InvalidArgument(f"cannot read {path}: {error.strerror}", field="state_file") from None
    try:
        document = json.loads(data)
        if not isinstance(document, dict) or not isinstance(document.get("format"), int):
            raise ValueError("it has no format")
        if document["format"] > FORMAT:
            raise InvalidArgument(
                f"{path} has format {document['format']}, of a later version; this one knows {FORMAT}",
                field="state_file",
            )
        said = ParseDict(document.get("federation", {}), controller_pb2.Federation(), ignore_unknown_fields=True)
        federation = federation_from_proto(said)
        if not federation.epoch:
            raise ValueError("it has no epoch")
    except (ValueError, RecursionError, ParseError, PinyonError) as error:
        if isinstance(error, PinyonError) and error.field == "state_file":
            raise
        _put_aside(path, str(error))
        return None
    return federation


def _put_aside(path: Path, why: str) -> None:
    aside = path.with_name(f"{path.name}.broken")
    _log.error("%s is broken (%s); it is kept as %s", path, why, aside)
    with suppress(OSError):
        path.replace(aside)


def _write(path: Path, federation: Federation) -> None:
    document = {"format": FORMAT, "federation": MessageToDict(federation_to_proto(federation))}
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w") as file:
            json.dump(document, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        Path(name).replace(path)
    except BaseException:
        with suppress(OSError):
            Path(name).unlink()
        raise
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)  # otherwise the name may refer to the old file after a crash
    finally:
        os.close(folder)


@dataclass(slots=True, eq=False)
class StateFile:
    """The file: ``start`` → (``keep`` with each version) → ``close``. Writes the last version and retries.

    Without a path, nothing is kept, but all counts as written. ``told`` is called after each attempt."""

    path: Path | None
    told: Callable[[bool], None] = lambda _: None
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    _next: Federation | None = field(default=None, init=False)
    _news: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _done: asyncio.Condition = field(default_factory=asyncio.Condition, init=False)
    _version: int = field(default=0, init=False)
    """The version on the disk."""
    _task: asyncio.Task[None] | None = field(default=None, init=False)
    _writing: asyncio.Future[None] | None = field(default=None, init=False)
    """The thread's write; it goes on when nobody waits for it any more."""

    def start(self) -> None:
        if self.path is not None:
            self._task = asyncio.create_task(self._run(), name="state-file")

    def keep(self, federation: Federation) -> None:
        self._next = federation
        self._news.set()

    async def wait(self, version: int) -> None:
        """Waits until that version is on the disk. Raises :class:`Unavailable` when that takes too long."""
        if self.path is None:
            return
        try:
            async with asyncio.timeout(WRITE_S), self._done:
                await self._done.wait_for(lambda: self._version >= version)
        except TimeoutError:
            raise Unavailable("it counts from now on, but could not be written to the state file") from None

    async def close(self) -> None:
        """Ends the writing task, and writes the last kept version once more if necessary."""
        if self._task is None or self.path is None:
            return
        await ended(self._task)
        self._task = None
        if self._writing is not None:
            await asyncio.wait({self._writing})  # otherwise an older version might be written last
        if self._next is not None and self._next.version > self._version:
            await self._attempt(self.path, self._next)

    async def _run(self) -> None:
        pause_s = FIRST_PAUSE_S
        while self.path is not None:
            await self._news.wait()
            self._news.clear()
            federation = self._next
            if federation is None or federation.version <= self._version:
                continue
            if await self._attempt(self.path, federation):
                pause_s = FIRST_PAUSE_S
                continue
            self._news.set()
            await self.sleep(pause_s)
            pause_s = min(MAX_PAUSE_S, 2 * pause_s)

    async def _attempt(self, path: Path, federation: Federation) -> bool:
        try:
            self._writing = asyncio.ensure_future(asyncio.to_thread(_write, path, federation))
            await asyncio.shield(self._writing)
        except Exception as error:  # a failure to write one version may not affect a later one
            defect = not isinstance(error, OSError)
            _log.error("cannot write version %d to %s: %s", federation.version, path, error, exc_info=defect)
            self.told(False)
            return False
        self.told(True)
        async with self._done:
            self._version = federation.version
            self._done.notify_all()
        return True
