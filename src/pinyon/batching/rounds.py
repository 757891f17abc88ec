"""Which of the running requests a step decodes: batches that share a prefix, one after the other (FEATHER §4).

The paper's loop (Algorithm 7) makes a batch for each step and asks before each addition whether the batch is better
left as it is. What happens to running requests that are not in it, it does not say. Here batches are made until each
running request is in one, and steps take them in turn: a *round*, in which everybody gets one token. So nobody starves,
a decision lasts for a round and not for the hundreds of steps for which a request runs, and what it has brought can be
measured: the round's decode throughput, which with the same requests is as well the time between their tokens.

Requests that share as much as the one in question come into the batch together with it, by one decision: they cost the
shared prefix nothing more. So a round has about as many decisions as there are prefixes, and one where nobody shares.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from pinyon.batching.chunked_hash_tree import ChunkedHashTree
from pinyon.batching.policy import StepSeen
from pinyon.batching.stopping import ADD, STOP, BatchState, StoppingPolicy, Taken

BATCHES_MAX: Final = 16
"""Of a round: the last one takes all who are left. Nobody waits for more steps than that for his next token."""
PROMPT_WEIGHT: Final = 0.1


class Formed(NamedTuple):
    """What is to be known of the batches that were made."""

    batches: int = 0
    """Of the present round."""
    requests: int = 0
    """In the present batch."""
    shared_blocks: int = 0
    """Blocks that all of them share: the depth of the shared prefix."""
    homogeneity: float = 0.0
    """Of their prompts' full blocks, the share that those are."""
    reward_tokens_s: float = 0.0
    """Decode throughput of the last round that taught something."""
    exploring: float = 0.0
    """Share of decisions that are for the sake of knowing more."""
    shifts: int = 0
    """How often what was known stopped being true."""


class DecodeTime:
    """How long a step's decodes took of it: a step with prompts would speak against whoever was added to it, otherwise.
    Where the engine does not say, what prompt tokens take is known from steps that had nothing else."""

    def __init__(self) -> None:
        self._prompt_token_s = 0.0

    def of(self, step: StepSeen) -> float:
        """Seconds; 0: that cannot be said."""
        if not step.decoded:
            if step.prefill_tokens:
                token_s = step.seconds / step.prefill_tokens
                weight = PROMPT_WEIGHT if self._prompt_token_s else 1.0
                self._prompt_token_s += weight * (token_s - self._prompt_token_s)
            return 0.0
        if not step.prefill_tokens:
            return step.seconds
        if step.decode_s > 0.0:
            return step.decode_s
        if not self._prompt_token_s:
            return 0.0
        return max(0.0, step.seconds - self._prompt_token_s * step.prefill_tokens)


class PrefixRounds:
    """See :class:`Rounds`."""

    def __init__(self, stopping: StoppingPolicy, chunk_blocks: int, tree: ChunkedHashTree[int] | None = None) -> None:
        """The ``tree`` says who is offered next."""
        self.chunk_blocks = chunk_blocks
        self.stopping = stopping
        self._tree: ChunkedHashTree[int] = ChunkedHashTree(1) if tree is None else tree
        """All waiting, but while batches are made."""
        self._paths: dict[int, Sequence[int]] = {}
        """Of those that run."""
        self._batches: list[list[int]] = []
        self._depths: list[int] = []
        """Levels that each of them shares."""
        self._decisions: list[Taken] = []
        """Of these batches."""
        self._place = 0
        """Of the next batch of the round."""
        self._changed = False
        """Somebody came since."""
        self._decode_time = DecodeTime()
        self._tokens, self._seconds = 0, 0.0
        """Of the round so far."""
        self._measured = True
        """All of its steps are."""
        self.reward = 0.0
        """Of the last round, in tokens/s."""

    def add(self, number: int, path: Sequence[int]) -> None:
        self._paths[number] = path
        self._tree.insert_hashes(number, path)
        self._changed = True

    def remove(self, number: int) -> None:
        if self._paths.pop(number, None) is not None:
            self._tree.remove(number)

    @property
    def batches(self) -> int:
        return len(self._batches)

    @property
    def share(self) -> bool:
        return any(self._depths)

    @property
    def formed(self) -> Formed:
        if not self._batches:
            return Formed()
        place = min(self._place, len(self._batches) - 1)
        batch, depth = self._batches[place], self._depths[place]
        levels = sum([len(self._paths[number]) for number in batch if number in self._paths])
        homogeneity = depth * len(batch) / levels if levels else 0.0
        return Formed(
            len(self._batches),
            len(batch),
            depth * self.chunk_blocks,
            min(1.0, homogeneity),
            self.reward,
            self.stopping.exploring,
            self.stopping.shifts,
        )

    def next(self) -> list[int]:
        paths = self._paths
        while True:
            if self._place >= len(self._batches):
                self._round()
                if not self._batches:
                    return []
            before = self._batches[self._place]
            batch = [number for number in before if number in paths]
            if len(batch) < len(before):  # what those had in common that have left is not looked at any more
                self._batches[self._place] = batch
                self._depths[self._place] = self._shared(batch)
            if batch:
                return list(batch)
            self._place += 1

    def _shared(self, batch: list[int]) -> int:
        """Levels that all of them share. A path's level is of all that is before it."""
        paths = [self._paths[number] for number in batch]
        low, high = 0, min(map(len, paths), default=0)
        while low < high:
            level = (low + high + 1) // 2
            if len({path[level - 1] for path in paths}) == 1:
                low = level
            else:
                high = level - 1
        return low

    def done(self) -> None:
        self._place += 1

    def observe(self, step: StepSeen) -> None:
        if not step.decoded:
            self._decode_time.of(step)
            return
        seconds = self._decode_time.of(step)
        self._measured = self._measured and seconds > 0.0
        self._tokens += step.decoded
        self._seconds += seconds

    def _round(self) -> None:
        """The last one is over."""
        if self._decisions and self._measured and self._seconds > 0.0:
            self.reward = self._tokens / self._seconds
            self.stopping.learn(self._decisions, self.reward)
        self._tokens, self._seconds, self._measured, self._place = 0, 0.0, True, 0
        kept = [place for place, batch in enumerate(self._batches) if batch]
        self._batches = [self._batches[place] for place in kept]
        self._depths = [self._depths[place] for place in kept]
        told: dict[tuple[int, ...], bool] = {}
        if self._changed or not self._stands(told):
            self._form(told)

    def _stands(self, told: dict[tuple[int, ...], bool]) -> bool:
        """Asked again, the policy says the same. Those that have left make a batch smaller, not worse."""
        for state, action in self._decisions:
            if self._adds(state, told) != (action == ADD):
                return False
        return bool(self._batches)

    def _adds(self, state: BatchState, told: dict[tuple[int, ...], bool]) -> bool:
        """In a round it says the same of what it sees as the same: a trial is one of all batches like that. One that
        is left as it is among others that are not shows nothing of what it would be worth (it reads its prefix for
        itself then, and the others read theirs as before)."""
        seen = self.stopping.seen(state)
        adds = told.get(seen)
        if adds is None:
            adds = told[seen] = self.stopping.adds(state)
        return adds

    def _form(self, told: dict[tuple[int, ...], bool]) -> None:
        """``told``: what it has said in this round already."""
        self._changed = False
        tree = self._tree
        batches: list[list[int]] = []
        depths: list[int] = []
        decisions: list[Taken] = []
        while tree.waiting:
            batch = self._batch(tree.branches()[0], len(batches) + 1 >= BATCHES_MAX, decisions, told)
            depths.append(tree.tip_depth)
            for number in batch:
                tree.finish(number)
            batches.append(batch)
        self._batches, self._depths, self._decisions = batches, depths, decisions
        for number, path in self._paths.items():
            tree.insert_hashes(number, path)

    def _batch(self, first: int, last: bool, decisions: list[Taken], told: dict[tuple[int, ...], bool]) -> list[int]:
        tree = self._tree
        tree.add_to_batch(first)
        batch = [first]
        while True:
            best = tree.find_best()
            if best is None:
                return batch
            if not last:
                state = BatchState(len(batch), best.depth_before - best.depth_after, best.peers - 1)
                adds = self._adds(state, told)
                decisions.append(Taken(state, ADD if adds else STOP))
                if not adds:
                    return batch
            for number in tree.peers(best):
                tree.add_to_batch(number)
                batch.append(number)
