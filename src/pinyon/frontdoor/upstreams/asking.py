"""Small questions to a server: GET, and an answer that is read whole, up to a bound."""

from __future__ import annotations

import asyncio
from typing import Any, NamedTuple

from pydantic_core import from_json

from pinyon.frontdoor.failures import Broke
from pinyon.frontdoor.upstreams.server import Server


class Said(NamedTuple):
    status: int
    body: bytes


async def ask(server: Server, path: bytes, within_s: float, bytes_max: int) -> Said:
    """Raises :class:`Unavailable`: :class:`Absent` where nobody is there, :class:`Broke` for what is no answer, is too
    long, or comes too late."""
    try:
        async with asyncio.timeout(within_s):
            answer = await server.probe(path)
            try:
                pieces, size = [], 0
                while piece := await answer.read():
                    pieces.append(piece)
                    size += len(piece)
                    if size > bytes_max:
                        raise Broke(f"The answer to {path.decode()} is longer than {bytes_max} bytes.", begun=True)
                return Said(answer.status, b"".join(pieces))
            finally:
                answer.close()
    except TimeoutError:
        raise Broke(f"{path.decode()} is not answered in {within_s:g} s.", begun=False, silent=True) from None


async def ask_json(server: Server, path: bytes, within_s: float, bytes_max: int) -> Any:
    """The JSON of an answer 200; None for any other status, and for what is none. Raises as :func:`ask`."""
    said = await ask(server, path, within_s, bytes_max)
    if said.status != 200:
        return None
    try:
        return from_json(said.body)
    except ValueError:
        return None
