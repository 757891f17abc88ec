"""One model that is served, here or in other regions, and how long its requests wait while no target answers."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from math import inf
from typing import Any, TypeVar

from pinyon.core.errors import Unavailable
from pinyon.routing.layer import Layer
from pinyon.routing.target import Target
from pinyon.routing.two_layers import TwoLayers

RETRY_AFTER_S = 1.0

T = TypeVar("T")


class ServedModel:
    """One served model. While no target of it answers, requests wait for ``wait_s``."""

    def __init__(self, name: str, layers: TwoLayers, wait_s: float) -> None:
        self.name = name
        self.by_servers = False
        """True while instances with an OpenAI-compatible server of their own serve it: its requests stay here."""
        self.layers = layers
        self._wait_s = wait_s
        self._waiting: set[asyncio.Timeout] = set()
        self._alone: asyncio.TimerHandle | None = None
        """The timer after which waiting requests are told that no target is there."""

    def own_layers(self) -> list[Layer]:
        """Returns the layers that are served from here: that of the region, and those of adopted clusters."""
        return [self.layers.local, *[layer for _, layer in self.layers.adopted.values()]]

    def targets(self) -> Iterator[Target]:
        for layer in self.own_layers():
            yield from layer
        yield from self.layers.remote

    @property
    def live(self) -> bool:
        """True if any target answers."""
        return self.others(())

    def others(self, exclude: tuple[()] | set[str]) -> bool:
        """Returns whether any target answers that is not excluded."""
        return any(target.live and target.name not in exclude for target in self.targets())

    async def patiently(self, turn: Coroutine[Any, Any, T]) -> T:
        """Returns the result of ``turn``. Raises :class:`Unavailable` when no target has been there for too long."""
        patience = asyncio.timeout(None)
        try:
            async with patience:
                self._waiting.add(patience)
                try:
                    self.look()
                    return await turn
                finally:
                    self._waiting.discard(patience)
        except TimeoutError:
            raise self.nobody() from None

    def look(self) -> None:
        """Starts or stops the timer of waiting requests, after a change to whether any target answers."""
        if self.live:
            if self._alone is not None:
                self._alone.cancel()
                self._alone = None
        elif self._waiting and self._alone is None and self._wait_s < inf:
            self._alone = asyncio.get_running_loop().call_later(self._wait_s, self._give_up)

    def nobody(self) -> Unavailable:
        return Unavailable(f"No server of the model '{self.name}' is there.", retry_after_s=RETRY_AFTER_S)

    def close(self) -> None:
        if self._alone is not None:
            self._alone.cancel()
            self._alone = None

    def _give_up(self) -> None:
        self._alone = None
        now = asyncio.get_running_loop().time()
        for patience in self._waiting:
            patience.reschedule(now)
