"""The models that a load balancer serves, by the names that clients use."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence

from pinyon.core.errors import NotFound
from pinyon.frontdoor.instances.prompts import Prompts

SHOWN_MAX = 8
"""Names in an error."""


class Models:
    """One or more, each name once; the first is for who names none. ``close`` ends what they have started."""

    def __init__(self, served: Sequence[Prompts]) -> None:
        self.default = served[0]
        self._by_name = {prompts.model: prompts for prompts in served}

    def __iter__(self) -> Iterator[Prompts]:
        return iter(self._by_name.values())

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._by_name)

    def of(self, name: str | None) -> Prompts:
        """Raises :class:`NotFound`."""
        if name is None:
            return self.default
        found = self._by_name.get(name)
        if found is None:
            raise NotFound(
                f"The model '{name[:128]}' does not exist or you do not have access to it. Served here: "
                f"{', '.join(self.names[:SHOWN_MAX])}{', …' if len(self.names) > SHOWN_MAX else ''}.",
                field="model",
            )
        return found

    async def close(self) -> None:
        await asyncio.gather(*(prompts.close() for prompts in self))
