"""A proxy in front of a server that cuts streams in the middle, as a server does that is killed."""

from __future__ import annotations

import asyncio
import random
import re
import threading

_ID = re.compile(rb"x-request-id: ([^\r]+)")


class CuttingProxy:
    """The proxy, in a thread of its own: :meth:`start` → ``close``. It cuts each stream once, behind one of its
    first ``events_max`` events. Proxies with the same set ``cut`` cut no stream twice."""

    def __init__(self, host: str, port: int, target: int, seed: int, events_max: int, cut: set[bytes]) -> None:
        self._host, self._port, self._target = host, port, target
        self._rng, self._max = random.Random(seed), events_max
        self._cut = cut
        self._serving: set[asyncio.Task[None]] = set()
        self.cutting = False
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._listen()), daemon=True)

    @property
    def url(self) -> str:
        return f"http://{self._host}:{self._port}"

    def start(self) -> None:
        self._thread.start()
        assert self._ready.wait(10)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._ends.set)
        self._thread.join(10)

    async def _listen(self) -> None:
        self._loop, self._ends = asyncio.get_running_loop(), asyncio.Event()
        server = await asyncio.start_server(self._accept, self._host, self._port)
        self._ready.set()
        await self._ends.wait()
        server.close()
        while self._serving:
            await asyncio.wait(self._serving)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(self._serve(reader, writer))
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            theirs, ours = await asyncio.open_connection(self._host, self._target)
        except OSError:
            writer.close()
            return
        left = [0]

        async def up() -> None:
            while data := await reader.read(1 << 16):
                if b"POST /v1/" in data:
                    left[0] = 0
                    asked = _ID.search(data)
                    if self.cutting and asked is not None and asked[1] not in self._cut and b'"stream"' in data:
                        self._cut.add(asked[1])
                        left[0] = self._rng.randint(1, self._max)
                ours.write(data)

        async def down() -> None:
            while data := await theirs.read(1 << 16):
                events = data.count(b"\n\n")
                if left[0] and events >= left[0]:
                    first = b"\n\n".join(data.split(b"\n\n")[: left[0]])
                    writer.write(data[: len(first) + 2 + self._rng.randrange(40)])
                    return
                left[0] -= min(left[0], events)
                writer.write(data)

        try:
            tasks = [asyncio.ensure_future(each) for each in (up(), down(), self._ends.wait())]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        finally:
            writer.close()
            ours.close()
