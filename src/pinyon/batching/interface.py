"""What decides in the batching room: a policy, and the parts that one may be made of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar, Protocol, TypeVar

from pinyon.batching.policy import BatchRequest, Holdings, StepSeen
from pinyon.batching.rounds import Formed
from pinyon.batching.stopping import StoppingPolicy

Waiting = TypeVar("Waiting")


class Batching(Protocol):
    """A choice: who gets KV memory, and whom a step decodes of those that have it."""

    def policy(self, holdings: Holdings) -> BatchingPolicy:
        """A new one that is told and asked."""

    def rounds(self, kernel: str) -> Rounds | None:
        """For an engine with this attention kernel ("": it is not known). None: a step decodes all that run."""
        return None


class BatchingPolicy(Protocol):
    """Made with :class:`Holdings`. Owned by one thread; not re-entrant."""

    @property
    def waiting(self) -> int:
        """Requests enqueued and not yet admitted."""

    @property
    def running(self) -> int:
        """Requests admitted and not yet removed."""

    def enqueue(self, request: BatchRequest) -> None:
        """It waits from now on. Raises ``ValueError`` if its number is known."""

    def adopt(self, request: BatchRequest, now_s: float) -> None:
        """It was admitted by the policy before this one, and runs."""

    def admit(self, slots: int, room_blocks: int, now_s: float) -> list[int]:
        """Choose waiting requests whose missing blocks are at most ``room_blocks`` together, at most ``slots`` of them
        that are decoded; they count as running from here on. Asked again until it chooses nobody."""

    def claimant(self) -> int | None:
        """For whom requests that came after it should give way, as of the last ``admit``; None: for nobody."""

    def passed_over_s(self, number: int) -> float:
        """How long others that came later went before one that the last ``admit`` has chosen, where that is bounded;
        0 elsewhere."""

    def gave_way(self, number: int) -> bool:
        """It was admitted, and waits again."""

    def remove(self, number: int) -> bool:
        """A request ended, gave way or was cancelled, waiting or running. False if it is not known."""

    def observe(self, step: StepSeen) -> None:
        """What the batch that it made has brought."""


class WaitingLine(Protocol):
    """Between ``begin`` and ``end`` some are taken, and nobody comes or goes otherwise."""

    def __len__(self) -> int: ...

    def __contains__(self, number: int) -> bool: ...

    def add(self, request: BatchRequest, again: bool) -> None:
        """``again``: it was admitted already and gave way."""

    def remove(self, number: int) -> bool:
        """False: it is not here."""

    def begin(self, now_s: float, room_blocks: int) -> None:
        """They are asked now, and there is so much room."""

    def at(self, place: int) -> BatchRequest | None:
        """Of those that were not taken; None: so many are not here, or nobody from there on can fit."""

    def take(self, number: int, room_blocks: int) -> None:
        """There is room for it, and so much is left."""

    def end(self) -> None:
        """For now."""

    def claims(self, number: int) -> bool:
        """Others that came after it should give way for it, if it waits for long."""

    def adopt(self, request: BatchRequest) -> None:
        """It was taken from another line, and runs."""

    def passed_over_s(self, number: int) -> float:
        """See :meth:`BatchingPolicy.passed_over_s`."""

    def ended(self, number: int) -> None:
        """One that was taken is not among those that run any more; it may be added again."""


class Rounds(Protocol):
    """Owned by a scheduler; not thread-safe."""

    chunk_blocks: int
    """Blocks of a request that are one level of its path."""
    stopping: StoppingPolicy

    def add(self, number: int, path: Sequence[int]) -> None:
        """It is running from now on. ``path``: the last block of each level of its prompt."""

    def remove(self, number: int) -> None:
        """It is running no more."""

    def next(self) -> list[int]:
        """Those that the next step decodes, until :meth:`done`; empty only if nobody is running."""

    def done(self) -> None:
        """A step has decoded them: it is the others' turn."""

    def observe(self, step: StepSeen) -> None:
        """What that step has brought."""

    @property
    def batches(self) -> int:
        """Of the present round."""

    @property
    def share(self) -> bool:
        """There is a batch of the present round in which all share something."""

    @property
    def formed(self) -> Formed: ...


class ServiceOrder(Protocol[Waiting]):
    """Prompts that wait. Each is there once."""

    short_first: ClassVar[bool]
    """Short ones go before long ones, on the whole: a placement counts on it."""

    def add(self, waiting: Waiting, came_s: float, seconds: float, deadline_s: float) -> None:
        """It came then; computing it takes about so many ``seconds``, and its first token should be there at
        ``deadline_s``."""

    def next(self, now_s: float) -> Waiting | None:
        """Its turn; it does not wait any more. None: nobody does."""

    def turns(self, now_s: float) -> Iterator[Waiting]:
        """Whose turns would come now: what as many calls of :meth:`next` would say. All wait on; nobody may come or go
        before the last one is asked for."""

    def take(self, waiting: Waiting, now_s: float) -> None:
        """It was its turn; it does not wait any more."""

    def advance(self, waiting: Waiting, seconds: float) -> None:
        """About so many seconds of it have been computed, and it waits for the rest."""

    def remove(self, waiting: Waiting) -> None:
        """It does not wait any more, without a turn."""

    def __iter__(self) -> Iterator[Waiting]:
        """As they came."""

    def __len__(self) -> int: ...
