"""The batches of running requests that steps decode one after the other, each sharing a prefix (FEATHER §4).

The paper's loop (Algorithm 7) makes a batch for each step and asks before each addition whether the batch is better
left as it is. It does not say what happens to running requests that are not in it. Here batches are made until each
running request is in one, and steps take them in turn: a *round*, in which every request gets one token. So none
starves, and a decision lasts for a round, not for the hundreds of steps for which a request runs. Its effect can be
measured: the round's decode throughput, which with the same requests is also the time between their tokens.

Requests that share as much as the one in question enter the batch with it, by one decision: they cost the shared prefix
nothing more. So a round has about as many decisions as there are prefixes, and one where none is shared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from pinyon.batching.chunked_hash_tree import ChunkedHashTree
from pinyon.batching.policy import StepSeen
from pinyon.batching.stopping import ADD, STOP, BatchState, StoppingPolicy, Taken

BATCHES_MAX: Final = 16
"""Batches of a round; the last one takes all requests left. None waits for more steps than that for its next token."""
PROMPT_WEIGHT: Final = 0.1


class Formed(NamedTuple):
    """Figures of the batches that were made."""

    batches: int = 0
    """Batches of the present round."""
    requests: int = 0
    """Requests in the present batch."""
    shared_blocks: int = 0
    """Blocks that all of them share: the depth of the shared prefix."""
    homogeneity: float = 0.0
    """Share that these are of the full blocks of their prompts."""
    reward_tokens_s: float = 0.0
    """Decode throughput of the last round that taught something."""
    exploring: float = 0.0
    """Share of decisions that are made to learn more."""
    shifts: int = 0
    """Times that what was known stopped being true."""


class DecodeTime:
    """The time that decoding takes of a step: a step with prompts must not speak against requests added to it.

    Where the engine does not say, the time of prompt tokens is known from steps that had nothing else."""

    def __init__(self) -> None:
        self._prompt_token_s = 0.0

    def of(self, step: StepSeen) -> float:
        """Returns the seconds that decoding took; 0 if unknown."""
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
    """Rounds of batches that share prefixes; see :class:`Rounds`."""

    def __init__(self, stopping: StoppingPolicy, chunk_blocks: int, tree: ChunkedHashTree[int] | None = None) -> None:
        """Takes the ``tree`` that says which request is offered next."""
        self.chunk_blocks = chunk_blocks
        self.stopping = stopping
        self._tree: ChunkedHashTree[int] = ChunkedHashTree(1) if tree is None else tree
        """Tree in which all requests wait, except while batches are made."""
        self._paths: dict[int, Sequence[int]] = {}
        """Paths of running requests."""
        self._batches: list[list[int]] = []
        self._depths: list[int] = []
        """Levels that each batch shares."""
        self._decisions: list[Taken] = []
        """Decisions that made these batches."""
        self._place = 0
        """Place of the next batch of the round."""
        self._changed = False
        """True if a request came since."""
        self._decode_time = DecodeTime()
        self._tokens, self._seconds = 0, 0.0
        """Sums over the round so far."""
        self._measured = True
        """True if all steps of the round are measured."""
        self.reward = 0.0
        """Throughput of the last round, in tokens/s."""

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
            if len(batch) < len(before):  # requests that left do not limit the shared prefix any more
                self._batches[self._place] = batch
                self._depths[self._place] = self._shared(batch)
            if batch:
                return list(batch)
            self._place += 1

    def _shared(self, batch: list[int]) -> int:
        """Returns the levels that the batch shares. A path's level stands for all that is before it."""
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
        seconds = self._decode_time.of(step)
        if not step.decoded:
            return
        self._measured = self._measured and seconds > 0.0
        self._tokens += step.decoded
        self._seconds += seconds

    def _round(self) -> None:
        """Ends the last round, learns from it, and makes new batches if need be."""
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
        """Returns whether the policy says the same again. Requests that left make a batch smaller, not worse."""
        for state, action in self._decisions:
            if self._adds(state, told) != (action == ADD):
                return False
        return bool(self._batches)

    def _adds(self, state: BatchState, told: dict[tuple[int, ...], bool]) -> bool:
        """Returns the policy's answer, which is the same within a round for all that it sees as the same.

        So a trial covers all batches like that. A single one that stops among others that do not shows nothing of
        its worth: it reads its prefix for itself then, and the others read theirs as before."""
        seen = self.stopping.seen(state)
        adds = told.get(seen)
        if adds is None:
            adds = told[seen] = self.stopping.adds(state)
        return adds

    def _form(self, told: dict[tuple[int, ...], bool]) -> None:
        """Makes the batches of a round. ``told``: the policy's answers in this round so far."""
        self._changed = False
        tree = self._tree
        batches: list[list[int]] = []
        depths: list[int] = []
        decisions: list[Taken] = []
        while tree.waiting:
            batch = self._batch(tree.of_most(), len(batches) + 1 >= BATCHES_MAX, decisions, told)
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
