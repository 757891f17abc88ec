"""Files that are read again when they have changed: certificates, API keys."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from pinyon.core.errors import PinyonError
from pinyon.runtime.logging import get_logger
from pinyon.runtime.tasks import ended

PERIOD_S = 2.0

_log = get_logger("files")

T = TypeVar("T")
_Stamp = tuple[tuple[int, int, int], ...]


@dataclass(eq=False)
class _Watched:
    name: str
    paths: tuple[Path, ...]
    load: Callable[[], Any]
    take: Callable[[Any], None]
    stamp: _Stamp = field(default=())
    failed: bool = False
    """True if the file could not be used at the last look."""


class FileWatch:
    """A watch over files: ``add`` → ``start`` → ``close``.

    A file that cannot be used is logged once and tried again, since the reason may lie elsewhere (no descriptor left,
    for one). Until then, the last good content stays."""

    def __init__(self) -> None:
        self._watched: list[_Watched] = []
        self._task: asyncio.Task[None] | None = None

    def add(self, name: str, paths: Iterable[Path], load: Callable[[], T], take: Callable[[T], None]) -> None:
        """Adds files; after a change of one, ``load`` is called in a thread (it may raise), then ``take`` on the loop.

        The present files count as read: call this before reading them, so that no change is missed."""
        watched = _Watched(name, tuple(paths), load, take)
        watched.stamp = _stamp(watched.paths)
        self._watched.append(watched)

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="file-watch")

    async def close(self) -> None:
        await ended(self._task)

    async def look(self) -> None:
        """Looks at all files now."""
        for watched in self._watched:
            stamp = await asyncio.to_thread(_stamp, watched.paths)
            told = watched.failed and stamp == watched.stamp
            if stamp == watched.stamp and not watched.failed:
                continue
            watched.stamp, watched.failed = stamp, True
            try:
                watched.take(await asyncio.to_thread(watched.load))
            except (PinyonError, OSError) as error:
                if not told:
                    _log.warning("the new %s cannot be used, the old one stays: %s", watched.name, error)
            except Exception:
                if not told:
                    _log.exception("the new %s cannot be used, the old one stays", watched.name)
            else:
                watched.failed = False
                _log.info("%s renewed", watched.name)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(PERIOD_S)
            await self.look()


def _stamp(paths: Iterable[Path]) -> _Stamp:
    stamps = []
    for path in paths:
        try:
            status = os.stat(path)
        except OSError:
            stamps.append((0, 0, 0))
        else:
            stamps.append((status.st_mtime_ns, status.st_size, status.st_ino))
    return tuple(stamps)
