"""A tree of chunk hashes: the waiting request closest to the batch, and the batch's shared prefix (FEATHER §4.2).

A request is a vector of cumulative hashes, one for each chunk of its tokens. Two requests have the same hash at a level
only if all that comes before is equal, too. So what the active requests cover is a set of paths from the root. The
levels that a waiting request *misses* are all those behind its deepest covered one.

The paper keeps a count of missing levels for each request and goes through all requests at each hash that an addition
covers: O(C · W_h · log W). Here levels at which no request branches off or ends are one node. A node knows its
*best* waiting request, the shortest one and of those the first to come. At its deepest covered node, a request misses
its length less the node's level; counted from a covered node further up, it would miss more. So the smallest (length of
its best - level) over all covered nodes belongs to the request that misses least.

An operation takes O(D · log W) for the D nodes on one request's path, and O(C) where hashes are added or go. D is at
most the number of requests that branch off from the path or end on it."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from heapq import heapify, heappop, heappush
from typing import Final, Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import xxhash

R = TypeVar("R", bound=Hashable)

_ARRIVAL_BITS: Final = 40
"""Bits for the arrival in a rank, below its levels. Both fit into a small integer."""
ARRIVALS: Final = (1 << _ARRIVAL_BITS) - 1
"""Mask of these bits."""
LEVELS_MAX: Final = 1 << 20
_NOBODY: Final = -1
"""A node's best if no request waits there."""
_STALE_MIN: Final = 32
"""Least number of void entries in a heap before it is made anew."""


class BestRequest(NamedTuple, Generic[R]):
    """The waiting request that misses least, and what the batch's shared prefix would become with it."""

    request: R
    depth_before: int
    """Levels that all active requests share; 0 if there are none."""
    depth_after: int
    """Levels shared with this request; its own levels if there are no others."""
    peers: int
    """Waiting requests that are equal to it at ``depth_after``, itself included (Algorithm 4, line 12)."""


class ActiveGroup(NamedTuple):
    """Active requests that share a prefix."""

    tip: Hashable
    """The last hash of the prefix."""
    depth: int
    """Levels of the prefix."""
    requests: int


class _TreeNode:
    """The levels behind its parent's up to ``level``: requests that pass one of them pass all."""

    __slots__ = ("active", "best", "children", "ends", "hashes", "heap", "level", "parent", "ranks", "waiting")

    def __init__(self, parent: _TreeNode | None, level: int, hashes: list[Hashable]) -> None:
        self.parent = parent
        self.level = level
        self.hashes = hashes
        self.children: dict[Hashable, _TreeNode] = {}
        """Children by their first hash."""
        self.ends = 0
        """Active requests that end here."""
        self.active = 0
        """Active requests that pass or end here."""
        self.ranks: set[int] = set()
        """Ranks of the waiting requests that end here."""
        self.waiting = 0
        """Waiting requests that pass or end here."""
        self.best = _NOBODY
        """The smallest rank of those that pass or end here."""
        self.heap: list[int] = []
        """Heap with at least the ranks that end here and the best of each child."""


class _Entry:
    __slots__ = ("node", "rank")

    def __init__(self, node: _TreeNode, rank: int) -> None:
        self.node = node
        self.rank = rank
        """Levels and arrival; ``_NOBODY`` if it is active."""


class ChunkedHashTree(Generic[R]):
    """Waiting and active requests by id. An unknown one raises ``KeyError``. Not thread-safe.

    Memory is taken for the different hashes of the requests that are here, and for nothing else."""

    def __init__(self, chunk: int) -> None:
        """Takes the tokens of one level, ``chunk``. Raises ``ValueError`` if that is less than 1."""
        if chunk < 1:
            raise ValueError(f"a chunk has at least one token, not {chunk}")
        self.chunk = chunk
        self._root = _TreeNode(None, 0, [])
        self._entries: dict[R, _Entry] = {}
        self._by_arrival: dict[int, R] = {}
        """Waiting requests."""
        self._by_hash: dict[Hashable, _TreeNode] = {}
        self._active: dict[R, _TreeNode] = {}
        """The node where each request ends."""
        self._tip: _TreeNode = self._root
        """The deepest node that all active requests pass; without any, the root."""
        self._arrivals = 0
        self._nodes = 1
        self._heap: list[int] = []
        """Heap of missing levels and arrival: the best of each covered node, if covered no deeper, and others."""
        self._found: BestRequest[R] | None = None

    def __len__(self) -> int:
        """Returns the number of waiting and active requests."""
        return len(self._entries)

    def __contains__(self, request: object) -> bool:
        return request in self._entries

    @property
    def waiting(self) -> int:
        return self._root.waiting

    @property
    def active(self) -> int:
        return len(self._active)

    @property
    def tip_depth(self) -> int:
        """Levels that all active requests share."""
        return self._tip.level

    def levels(self, request: R) -> int:
        return self._entries[request].node.level

    def insert(self, request: R, tokens: Sequence[int] | npt.NDArray[np.generic]) -> None:
        """Inserts a waiting request. If it is here already, it is taken out first and counts as new.

        Raises ``ValueError`` for a token that is not a 32-bit number, or more than ``LEVELS_MAX`` chunks."""
        self.insert_hashes(request, chunk_hashes(tokens, self.chunk))

    def insert_hashes(self, request: R, hashes: Sequence[Hashable]) -> None:
        """Inserts a request by known hashes: cumulative ones, as a prompt's block keys are."""
        levels = len(hashes)
        if levels > LEVELS_MAX:
            raise ValueError(f"{levels} levels are too many, at most {LEVELS_MAX} are possible")
        if request in self._entries:
            self.remove(request)
        node = self._end_of(hashes)
        arrival = self._arrivals
        self._arrivals = arrival + 1
        rank = (levels << _ARRIVAL_BITS) + arrival
        self._entries[request] = _Entry(node, rank)
        self._by_arrival[arrival] = request
        node.ranks.add(rank)
        self._push(node, rank)
        better = True
        up: _TreeNode | None = node
        while up is not None:
            up.waiting += 1
            if better:
                if up is not node:
                    self._push(up, rank)
                better = up.best == _NOBODY or rank < up.best
                if better:
                    up.best = rank
                    self._offer(up)
            up = up.parent
        self._changed()

    def find_best(self) -> BestRequest[R] | None:
        """Returns the waiting request that misses least, among equals the first to come; None if none waits."""
        if self._found is None and self._root.waiting:
            self._found = self._find()
        return self._found

    def look(self, request: R) -> BestRequest[R]:
        """Returns what :meth:`find_best` would say of this waiting request."""
        entry = self._entries[request]
        if entry.rank == _NOBODY:
            raise KeyError(request)
        node = self._shared_above(entry.node) if self._active else entry.node
        return BestRequest(request, self._tip.level, node.level, node.waiting)

    def peers(self, best: BestRequest[R]) -> list[R]:
        """Returns the requests that ``best`` counts as its peers, itself included, in order of arrival."""
        node = self._entries[best.request].node
        while node.parent is not None and node.level > best.depth_after:
            node = node.parent
        ranks: list[int] = []
        nodes = [node]
        while nodes:
            each = nodes.pop()
            if each.waiting:
                ranks.extend(each.ranks)
                nodes.extend(each.children.values())
        return [self._by_arrival[arrival] for arrival in sorted([rank & ARRIVALS for rank in ranks])]

    def of_most(self) -> R:
        """Returns the best of the largest set of waiting requests that share their first level; one must wait."""
        nodes = [node for node in self._root.children.values() if node.waiting]
        if not nodes:
            return self._by_arrival[min(self._root.ranks) & ARRIVALS]
        most = min(nodes, key=lambda node: (-node.waiting, node.best & ARRIVALS))
        return self._by_arrival[most.best & ARRIVALS]

    def groups(self, most: int) -> list[ActiveGroup]:
        """Returns prefixes that two active requests or more share, the largest group first; none is part of another.

        These are at most ``most``, by which most levels are read once instead of once for each request. O(nodes that
        two active requests pass)."""
        order = [node for node in self._root.children.values() if node.active > 1]
        for node in order:  # grows meanwhile: parents before their children
            order.extend([child for child in node.children.values() if child.active > 1])
        saved: dict[_TreeNode, int] = {}
        below: dict[_TreeNode, int] = {}
        for node in reversed(order):
            saved[node] = max((node.active - 1) * node.level, below.get(node, 0))
            if node.parent is not None:
                below[node.parent] = below.get(node.parent, 0) + saved[node]
        tips: list[_TreeNode] = []
        nodes = [node for node in self._root.children.values() if node.active > 1]
        while nodes:
            node = nodes.pop()
            if saved[node] > below.get(node, 0):
                tips.append(node)
            else:
                nodes.extend([child for child in node.children.values() if child.active > 1])
        tips.sort(key=lambda node: (1 - node.active) * node.level)
        found = [ActiveGroup(node.hashes[len(node.hashes) - 1], node.level, node.active) for node in tips[:most]]
        found.sort(key=lambda group: -group.requests)
        return found

    def add_to_batch(self, request: R) -> None:
        """Makes a waiting request active."""
        entry = self._entries[request]
        if entry.rank == _NOBODY:
            raise KeyError(request)
        self._wait_no_more(entry)
        end = entry.node
        end.ends += 1
        node: _TreeNode | None = end
        while node is not None:
            node.active += 1
            if node.active == 1:
                self._offer(node)
            node = node.parent
        self._active[request] = end
        self._tip = self._shared_above(end if len(self._active) == 1 else self._tip)
        self._changed()

    def finish(self, request: R) -> None:
        """Removes an active request."""
        end = self._active.pop(request)
        del self._entries[request]
        end.ends -= 1
        uncovered = False
        node: _TreeNode | None = end
        while node is not None:
            node.active -= 1
            if node.active == 0:
                uncovered = True
            elif uncovered:
                uncovered = False
                self._offer(node)  # what was covered deeper counts from here now
            node = node.parent
        if uncovered:
            self._offer(self._root)
        # The tip changes before nodes go, so that it is none that does.
        self._tip = self._root
        for any_end in self._active.values():
            self._tip = self._shared_above(any_end)
            break
        self._prune(end)
        self._changed()

    def remove(self, request: R) -> None:
        """Removes a waiting or active request."""
        entry = self._entries[request]
        if entry.rank == _NOBODY:
            self.finish(request)
            return
        self._wait_no_more(entry)
        del self._entries[request]
        self._prune(entry.node)
        self._changed()

    # -- the request that misses least

    def _find(self) -> BestRequest[R]:
        heap = self._heap
        while not self._counts(heap[0]):
            heappop(heap)
        return self.look(self._by_arrival[heap[0] & ARRIVALS])

    def _counts(self, offered: int) -> bool:
        """Returns whether an entry is of a waiting request, and has the levels which that one misses."""
        arrival = offered & ARRIVALS
        if arrival not in self._by_arrival:
            return False
        entry = self._entries[self._by_arrival[arrival]]
        covered = entry.node
        while covered.active == 0 and covered.parent is not None:
            covered = covered.parent
        return offered == entry.rank - (covered.level << _ARRIVAL_BITS)

    def _shared_above(self, node: _TreeNode) -> _TreeNode:
        """Returns the deepest node, this one or above, that all active requests pass."""
        count = len(self._active)
        while node.active < count and node.parent is not None:
            node = node.parent
        return node

    def _offer(self, node: _TreeNode) -> None:
        """Offers the best of a covered node, after the cover or the best has changed."""
        if node.best == _NOBODY or (node.active == 0 and node.parent is not None):
            return
        heappush(self._heap, node.best - (node.level << _ARRIVAL_BITS))

    def _changed(self) -> None:
        """Forgets the answer. Makes the heap anew once most entries are void: O(nodes), after as many pushes."""
        self._found = None
        if len(self._heap) <= 2 * self._nodes + _STALE_MIN:
            return
        heap: list[int] = []
        nodes = [self._root]
        while nodes:
            node = nodes.pop()
            if node.best != _NOBODY:
                heap.append(node.best - (node.level << _ARRIVAL_BITS))
            nodes.extend(child for child in node.children.values() if child.active)
        heapify(heap)
        self._heap = heap

    # -- waiting requests below a node

    def _push(self, node: _TreeNode, rank: int) -> None:
        heappush(node.heap, rank)
        if len(node.heap) > 2 * (len(node.children) + len(node.ranks)) + _STALE_MIN:
            heap = list(node.ranks)
            heap.extend(child.best for child in node.children.values() if child.best != _NOBODY)
            heapify(heap)
            node.heap = heap

    def _wait_no_more(self, entry: _Entry) -> None:
        """Takes a request out of the counts and bests on its path. It has a place there still."""
        rank = entry.rank
        entry.rank = _NOBODY
        del self._by_arrival[rank & ARRIVALS]
        end = entry.node
        end.ranks.discard(rank)
        below = _NOBODY
        node: _TreeNode | None = end
        while node is not None:
            node.waiting -= 1
            if below != _NOBODY:
                self._push(node, below)
                below = _NOBODY
            # The best of a node stays if it is another one, and so do those above it.
            if node.best == rank:
                below = node.best = self._first(node)
                self._offer(node)
            node = node.parent

    def _first(self, node: _TreeNode) -> int:
        """Returns the smallest rank of the requests that wait below a node."""
        heap = node.heap
        while heap and (heap[0] & ARRIVALS) not in self._by_arrival:
            heappop(heap)
        return heap[0] if heap else _NOBODY

    # -- nodes

    def _end_of(self, hashes: Sequence[Hashable]) -> _TreeNode:
        """Returns the node that ends with the last hash, made if need be."""
        known = self._known_levels(hashes)
        node = self._by_hash[hashes[known - 1]] if known else self._root
        if known < node.level:
            node = self._split(node, known)
        if known == len(hashes):
            return node
        rest = list(hashes[known:])
        leaf = _TreeNode(node, len(hashes), rest)
        node.children[rest[0]] = leaf
        self._nodes += 1
        self._by_hash.update(dict.fromkeys(rest, leaf))
        return leaf

    def _known_levels(self, hashes: Sequence[Hashable]) -> int:
        """Returns how many leading hashes are here. They are cumulative: behind one that is missing there is none."""
        low, high = 0, len(hashes)
        while low < high:
            middle = (low + high) // 2
            if hashes[middle] in self._by_hash:
                low = middle + 1
            else:
                high = middle
        return low

    def _split(self, lower: _TreeNode, level: int) -> _TreeNode:
        """Returns a new node that ends at ``level``, above ``lower``, which keeps what is behind."""
        parent = lower.parent
        assert parent is not None
        count = level - parent.level
        upper = _TreeNode(parent, level, lower.hashes[:count])
        lower.hashes = lower.hashes[count:]
        lower.parent = upper
        parent.children[upper.hashes[0]] = upper
        upper.children[lower.hashes[0]] = lower
        upper.active, upper.waiting, upper.best = lower.active, lower.waiting, lower.best
        if lower.best != _NOBODY:
            upper.heap.append(lower.best)
        self._nodes += 1
        self._by_hash.update(dict.fromkeys(upper.hashes, upper))
        return upper

    def _prune(self, node: _TreeNode) -> None:
        """Removes nodes where no request ends or branches off."""
        while node.parent is not None and not node.ends and not node.ranks:
            parent = node.parent
            first = node.hashes[0]
            if len(node.children) == 1:
                for lower in node.children.values():
                    lower.hashes = node.hashes + lower.hashes
                    lower.parent = parent
                    parent.children[first] = lower
                    self._by_hash.update(dict.fromkeys(node.hashes, lower))
                self._nodes -= 1
                return
            if node.children:
                return
            del parent.children[first]
            for each in node.hashes:
                del self._by_hash[each]
            self._nodes -= 1
            node = parent


def chunk_hashes(tokens: Sequence[int] | npt.NDArray[np.generic], chunk: int) -> list[int]:
    """Returns one hash for each ``chunk`` tokens, and one for what is left; each is of all tokens up to there.

    A chunk's hash has the one before as its seed: one call each (Algorithm 2's chain, without hashing chunks apart).
    Raises ``ValueError`` for a token that is not a 32-bit number."""
    known = np.asarray(tokens)
    if known.dtype != np.uint32:
        if known.size and (known.dtype.kind not in "iu" or int(known.min()) < 0 or int(known.max()) >= 1 << 32):
            raise ValueError("tokens must be numbers from 0 to 2**32 - 1")
        known = known.astype(np.uint32)
    data = memoryview(known.tobytes())
    size = 4 * chunk
    digest = xxhash.xxh3_64_intdigest
    previous = 0
    hashes = []
    for start in range(0, len(data), size):
        previous = digest(data[start : start + size], previous)
        hashes.append(previous)
    return hashes
