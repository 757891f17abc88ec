"""FEATHER's oracle (§5.3.1), which discovers nothing: the caller names the groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from pinyon.batching.policy import BatchRequest, StepSeen
from pinyon.batching.prefix_line import BySharedPrefix, SharedPrefixSettings
from pinyon.batching.rounds import BATCHES_MAX, Formed
from pinyon.batching.stopping import Always, StoppingPolicy
from pinyon.core.policies import check_bounds

NO_GROUP: Final = -1


@dataclass(frozen=True, slots=True)
class OracleSettings:
    """The settings: requests with equal first ``group_blocks`` form a group; ``passed_over_s`` is as in ``feather``."""

    group_blocks: int = 4
    passed_over_s: float = 10.0

    def __post_init__(self) -> None:
        check_bounds(self, group_blocks=(1, 4096))
        self.line()

    def line(self) -> SharedPrefixSettings:
        return SharedPrefixSettings(self.group_blocks, self.passed_over_s)


class ByFirstLevel(BySharedPrefix):
    """A waiting line that looks only at the first level of prompts."""

    def _path(self, request: BatchRequest) -> tuple[bytes, ...]:
        chunk = self._settings.chunk_blocks
        return request.block_keys[chunk - 1 : chunk]


class GroupRounds:
    """Rounds whose batches are groups, see :class:`pinyon.batching.interface.Rounds`.

    A request's group is the first level of its path; requests without one form a group. Each of the largest groups is a
    batch; the last batch holds all other groups."""

    def __init__(self, group_blocks: int) -> None:
        self.chunk_blocks = group_blocks
        self.stopping: StoppingPolicy = Always()
        self._paths: dict[int, Sequence[int]] = {}
        """The paths of the running requests."""
        self._members: dict[int, dict[int, None]] = {}
        """The members of each group, in order of arrival."""
        self._batches: list[list[int]] = []
        """The groups of each batch of the present round."""
        self._place = 0

    def add(self, number: int, path: Sequence[int]) -> None:
        self._paths[number] = path
        self._members.setdefault(_group(path), {})[number] = None

    def remove(self, number: int) -> None:
        path = self._paths.pop(number, None)
        if path is None:
            return
        group = _group(path)
        del self._members[group][number]
        if not self._members[group]:
            del self._members[group]

    def next(self) -> list[int]:
        while True:
            if self._place >= len(self._batches):
                if not self._members:
                    return []
                self._form()
            if batch := self._batch():
                return batch
            self._place += 1

    def done(self) -> None:
        self._place += 1

    def observe(self, step: StepSeen) -> None:
        """Does nothing: the oracle does not learn."""

    @property
    def batches(self) -> int:
        return len(self._batches)

    @property
    def share(self) -> bool:
        return any(groups != [NO_GROUP] and len(groups) == 1 for groups in self._batches)

    @property
    def formed(self) -> Formed:
        if self._place >= len(self._batches):
            return Formed()
        groups, batch = self._batches[self._place], self._batch()
        shared = len(groups) == 1 and groups[0] != NO_GROUP
        levels = sum([len(self._paths[number]) for number in batch])
        homogeneity = len(batch) / levels if shared and levels else 0.0
        return Formed(len(self._batches), len(batch), self.chunk_blocks if shared else 0, homogeneity)

    def _batch(self) -> list[int]:
        return [number for group in self._batches[self._place] for number in self._members.get(group, ())]

    def _form(self) -> None:
        members = self._members
        groups = sorted(members, key=lambda group: -len(members[group]))
        self._batches = [[group] for group in groups[: BATCHES_MAX - 1]]
        if len(groups) >= BATCHES_MAX:
            self._batches.append(groups[BATCHES_MAX - 1 :])
        self._place = 0


def _group(path: Sequence[int]) -> int:
    return path[0] if path else NO_GROUP
