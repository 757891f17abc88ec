"""A process with one store client, driven by a test: for each JSON line on stdin, it writes one to stdout.

``main([CONFIG])`` takes a JSON object: ``redis_url``, ``slots`` and settings of the transfer engine. See
:class:`tests.integration.transfer_hosts.HostProcess`."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from tests.integration.kvstore_parts import Client, client_of
from tests.integration.transfer_host_process import die_with_parent


class StoreHost:
    """The commands: each ``do_*`` method is one; its arguments and its answer are JSON values."""

    def __init__(self, client: Client) -> None:
        self._client = client

    async def do_put(self, count: int) -> dict[str, Any]:
        result = await self._client.put(range(count))
        return {"outcomes": [outcome.value for outcome in result]}

    async def do_get(self, count: int) -> dict[str, Any]:
        """Reads the objects and checks those that arrive."""
        await self._client.until_listed(range(count))
        return {"arrived": sum(await self._client.get(range(count)))}

    async def do_fetch(self, address: str, count: int) -> dict[str, Any]:
        """Fetches without the metadata, as workers read from each other."""
        return {"arrived": await self._client.fetch(address, range(count))}

    async def do_paths(self) -> dict[str, Any]:
        """Returns the bytes moved so far by ``transport local-nic remote-nic``."""
        return {"bytes": {" ".join(one.path): one.nbytes for one in self._client.engine.stats().paths}}


async def run(config: dict[str, Any]) -> None:
    async with client_of(**config) as client:
        host = StoreHost(client)
        print(json.dumps({"ready": True}), flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            command = json.loads(line)
            try:
                answer = await getattr(host, "do_" + command.pop("op"))(**command)
            except Exception as error:
                answer = {"error": repr(error)}
            print(json.dumps(answer), flush=True)


def main(arguments: list[str]) -> None:
    die_with_parent()
    asyncio.run(run(json.loads(arguments[0])))
