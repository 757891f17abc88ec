"""The interfaces of the batching room: a policy, and the parts that a policy may be made of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar, Protocol, TypeVar

from pinyon.batching.policy import BatchRequest, HeldBlocks, StepSeen
from pinyon.batching.rounds import Formed
from pinyon.batching.stopping import StoppingPolicy

Waiting = TypeVar("Waiting")


class Batching(Protocol):
    """A choice of which requests get KV memory, and which of these a step decodes."""

    def policy(self, holdings: HeldBlocks) -> BatchingPolicy:
        """Returns a new policy over these holdings."""

    def rounds(self, kernel: str) -> Rounds | None:
        """Returns rounds for an engine's attention ``kernel`` ("": unknown), or None: a step decodes all that run."""
        return None


class BatchingPolicy(Protocol):
    """A policy that admits requests to KV memory, made with :class:`HeldBlocks`. Not re-entrant; one thread owns it."""

    @property
    def waiting(self) -> int:
        """Requests enqueued and not yet admitted."""

    @property
    def running(self) -> int:
        """Requests admitted and not yet removed."""

    def enqueue(self, request: BatchRequest) -> None:
        """Adds a waiting request. Raises ``ValueError`` if its number is known."""

    def adopt(self, request: BatchRequest, now_s: float) -> None:
        """Adds a running request that the policy before this one admitted."""

    def admit(self, slots: int, room_blocks: int, now_s: float) -> list[int]:
        """Chooses waiting requests, at most ``slots`` of them decoded, whose missing blocks fit into ``room_blocks``.

        They count as running from here on. Called again until it chooses none."""

    def claimant(self) -> int | None:
        """Returns the request for which later ones should give way, as of the last ``admit``; None if for none."""

    def passed_over_s(self, number: int) -> float:
        """Returns the seconds that later ones went before one chosen by the last ``admit``; 0 where not bounded."""

    def gave_way(self, number: int) -> bool:
        """Returns whether the request was admitted and waits again."""

    def remove(self, number: int) -> bool:
        """Removes a request that ended, gave way or was cancelled, waiting or running. Returns False if unknown."""

    def observe(self, step: StepSeen) -> None:
        """Records how a step of a batch that this policy made went."""


class WaitingLine(Protocol):
    """A line of waiting requests. Between ``begin`` and ``end`` some are taken, and none comes or goes otherwise."""

    def __len__(self) -> int: ...

    def __contains__(self, number: int) -> bool: ...

    def add(self, request: BatchRequest, again: bool) -> None:
        """Adds a request; ``again`` if it was admitted already and gave way."""

    def remove(self, number: int) -> bool:
        """Removes a request. Returns False if it is not here."""

    def begin(self, now_s: float, room_blocks: int) -> None:
        """Begins to ask for requests, with ``room_blocks`` of room."""

    def at(self, place: int) -> BatchRequest | None:
        """Returns the request at this place among those not taken; None if none is there, or none from there fits."""

    def take(self, number: int, room_blocks: int) -> None:
        """Takes a request that has room; ``room_blocks`` are left afterwards."""

    def end(self) -> None:
        """Ends what ``begin`` began."""

    def claims(self, number: int) -> bool:
        """Returns whether later requests should give way for this one if it waits for long."""

    def adopt(self, request: BatchRequest) -> None:
        """Records a running request that was taken from another line."""

    def passed_over_s(self, number: int) -> float:
        """Returns what :meth:`BatchingPolicy.passed_over_s` does."""

    def ended(self, number: int) -> None:
        """Records that a taken request does not run any more; it may be added again."""


class Rounds(Protocol):
    """The batches of running requests that steps decode in turn. Owned by a scheduler; not thread-safe."""

    chunk_blocks: int
    """Blocks of a request that are one level of its path."""
    stopping: StoppingPolicy

    def add(self, number: int, path: Sequence[int]) -> None:
        """Adds a running request. ``path``: the last block of each level of its prompt."""

    def remove(self, number: int) -> None:
        """Removes a request that runs no more."""

    def next(self) -> list[int]:
        """Returns the requests that the next step decodes, until :meth:`done`; empty only if none is running."""

    def done(self) -> None:
        """Ends the turn of these requests, which a step has decoded."""

    def observe(self, step: StepSeen) -> None:
        """Records how that step went."""

    @property
    def batches(self) -> int:
        """Batches of the present round."""

    @property
    def share(self) -> bool:
        """True if the present round has a batch in which all share something."""

    @property
    def formed(self) -> Formed: ...


class ServiceOrder(Protocol[Waiting]):
    """Waiting prompts, each there once, in the order in which they are computed."""

    short_first: ClassVar[bool]
    """True if short prompts mostly go before long ones: a placement counts on it."""

    def add(self, waiting: Waiting, came_s: float, seconds: float, deadline_s: float) -> None:
        """Adds a prompt that came at ``came_s`` and takes about ``seconds``; its token is due at ``deadline_s``."""

    def turns(self, now_s: float) -> Iterator[Waiting]:
        """Yields all prompts, the one whose turn it is first; they still wait. None may come or go meanwhile."""

    def take(self, waiting: Waiting, now_s: float) -> None:
        """Removes a prompt whose turn it was."""

    def advance(self, waiting: Waiting, seconds: float) -> None:
        """Records that about ``seconds`` of a prompt have been computed; it waits for the rest."""

    def remove(self, waiting: Waiting) -> None:
        """Removes a prompt without a turn."""

    def __iter__(self) -> Iterator[Waiting]:
        """Yields the prompts in order of arrival."""

    def __len__(self) -> int: ...
