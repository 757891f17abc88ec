"""The thin edge over NIXL: its names, its errors, and what it does not do by itself.

The only file that imports NIXL, and only when an engine is told to use it. What to know of it (1.5.1, UCX):

- Without its progress thread nothing happens but in calls. With it an idle process takes a fifth of a core, so we go
  without: whoever waits for a transfer makes it go on by asking, and a peer that shall be *connected* to must ask too.
- A call lets go of the GIL; calls of several threads take turns (``NIXL_THREAD_SYNC_STRICT``).
- Where the kernel or a NIC copies (cross-memory attach, RDMA), a peer takes no part in a READ. Where it cannot (tcp),
  UCX has the peer's own thread read whatever address it is told, without looking whether that is registered; the
  pairing (:mod:`.endpoint`) tells the two apart and refuses the second.
- A transfer that does not end cannot be called back for certain, so bytes land in buffers of ours only.
- UCX does not give a connection back while the peer lives: each one that is ended and made anew leaves a descriptor
  open at both ends. So one is kept for as long as its peer lives, and those that are made anew are counted.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import mmap
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from types import SimpleNamespace
from typing import Any

import numpy as np

from pinyon.transfer.transports.nixl.process_state import closed_on_exec, ucx_environment
from pinyon.transfer.transports.nixl.wire import Place

_log = logging.getLogger(__name__)
_PACKAGES = ("nixl_cu12", "nixl_cu13")
_MOST_STRAYS = 64
"""Transfers that were given up and have not ended; with more of them nothing new begins."""
_MOST_STRAYS_OF_ONE = 8
"""Of one peer, so that it leaves room for others."""
_FAILED_S = 60.0
"""So long after it failed a transfer that was given up counts as ended."""
_MOST_IDLE = 1024
"""Peers that nobody speaks to and NIXL stays connected to; above it the one that was left first is forgotten."""
MOST_CONNECTIONS = 16
"""To one process, as long as it lives."""
MOST_FAILED_PROOFS = 3
"""One after another."""
_MOST_REMEMBERED = 1 << 14
"""Processes of which is known how often NIXL was tried; above it the one that was tried least recently is new again."""
_MOST_FREE_BUFFERS = 16
"""Kept for the next READ, whoever it is from."""
BUFFER_BYTES = 1 << 20
"""Of a READ's payload; pages that no READ has needed yet take no memory."""
_FIRST_TURNS = 4
"""In which a new agent takes up its connection to itself."""
Pieces = Sequence[tuple[int, int]]
"""``(address, bytes)``"""


class NixlError(ConnectionError):
    """NIXL says no, or is not there; the text says what was tried."""


@functools.cache
def _nixl() -> SimpleNamespace:
    """The names we use. Raises NixlError: NIXL cannot be imported."""
    found: list[str] = []
    for package in _PACKAGES:
        try:
            with ucx_environment(), closed_on_exec():
                api = importlib.import_module(f"{package}._api")
            version = metadata.version(package.replace("_", "-"))
            return SimpleNamespace(api=api, bindings=api.nixlBind, version=version)
        except ModuleNotFoundError as error:
            if error.name not in (package, f"{package}._api"):
                found.append(str(error))
        except (ImportError, AttributeError, metadata.PackageNotFoundError) as error:
            found.append(str(error))
    why = f" ({'; '.join(found)})" if found else ""
    raise NixlError(f"NIXL cannot be used{why}: pip install --no-deps 'nixl-cu12>=1.5.1,<1.6'")


def nixl_available() -> str | None:
    """Why NIXL cannot be used here, in words for people; None when it can."""
    try:
        _nixl()
    except NixlError as error:
        return str(error)
    return None


@contextlib.contextmanager
def _calling(what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # NIXL's errors have no base of their own
        raise NixlError(f"{what}: {error}") from None


class Buffer:
    """Memory of ours that NIXL may write into: page-aligned, registered, and kept until no transfer uses it."""

    __slots__ = ("_map", "address", "array", "registered", "view")

    def __init__(self, nbytes: int) -> None:
        self._map = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.view = memoryview(self._map)
        self.array = np.frombuffer(self._map, np.uint8)
        """The same for numpy."""
        self.address = int(self.array.ctypes.data)
        self.registered: Any = None


@dataclass(slots=True, eq=False)
class _Stray:
    """A READ that was given up while it ran."""

    name: str
    request: int
    buffers: Sequence[Buffer]
    failed_s: float | None = None


@dataclass(slots=True, eq=False)
class _Attempts:
    """With one process."""

    connections: int = 0
    failed_proofs: int = 0
    """That it is read without taking part."""

    def refusal(self, *, connected: bool) -> str | None:
        """Why NIXL is not used any more with this process, in words for people; None: it may be."""
        if self.failed_proofs >= MOST_FAILED_PROOFS:
            return f"{self.failed_proofs} times it was not read without taking part"
        if self.connections >= MOST_CONNECTIONS and not connected:
            return f"{self.connections} connections to it were made already, which UCX does not give back"
        return None


@dataclass(slots=True, eq=False)
class _Peer:
    metadata: bytes
    endpoints: int = 0
    """That speak to it."""
    regions: dict[tuple[int, int], bytes] = field(default_factory=dict)
    """The metadata by first address and end."""
    spoiled: bool = False
    """To be forgotten when nobody speaks to it any more, as what NIXL knows of it is of no use."""


class NixlAgent:
    """This process towards NIXL. All methods are thread-safe."""

    def __init__(self, name: str, *, loopback: bool = False) -> None:
        """``loopback``: only processes of this host are to reach it. Raises NixlError: NIXL or its UCX does not work
        here."""
        nixl = _nixl()
        self.version: str = nixl.version
        self.name = name
        self._done = nixl.bindings.NIXL_SUCCESS
        self._pending = nixl.bindings.NIXL_IN_PROG
        self._read = nixl.bindings.NIXL_READ
        self._memory = nixl.bindings.DRAM_SEG
        self._list = nixl.bindings.nixlXferDList
        with _calling("no NIXL agent"), ucx_environment(loopback=loopback), closed_on_exec():
            strict = nixl.api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
            config = nixl.api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"], sync_mode=strict)
            self._agent: Any = nixl.api.nixl_agent(name, config)
            self._backends = [self._agent.backends["UCX"]]
            self._raw = self._agent.agent
            for _ in range(_FIRST_TURNS):
                self._raw.getNotifs({}, self._backends)
        self.pairing = threading.Lock()
        """Held by whoever proves that a peer has no part in a READ, and by whoever is the peer of one that does: what
        the former does would make the latter's part go on."""
        self.turn = threading.Lock()
        """Held by whoever calls what makes transfers go on, our own and those that peers want served. Who holds it as
        the peer of a proof knows that nothing does."""
        self._lock = threading.Lock()
        self._peers: dict[str, _Peer] = {}
        """What NIXL knows of other agents, by name."""
        self._idle: OrderedDict[str, None] = OrderedDict()
        """Those of them that no endpoint speaks to; who was left last comes last."""
        self._attempts: OrderedDict[str, _Attempts] = OrderedDict()
        self._free: list[Buffer] = []
        self._strays: list[_Stray] = []

    # --- memory ---

    def register(self, address: int, nbytes: int) -> Any:
        """So that it can be read into, and by peers that get :meth:`metadata`. Raises NixlError."""
        with _calling("memory is not registered"):
            return self._agent.register_memory([(address, nbytes, 0, "")], "DRAM", ["UCX"])

    def deregister(self, registered: Any) -> None:
        with contextlib.suppress(NixlError), _calling("memory is not given back"):
            self._agent.deregister_memory(registered, ["UCX"])

    def metadata(self, registered: Any, *, connection: bool) -> bytes:
        """What a peer must know of this memory; with ``connection`` also how to reach this agent. Raises NixlError."""
        with _calling("no metadata"):
            return bytes(self._agent.get_partial_agent_metadata(registered, connection, ["UCX"]))

    def new_buffer(self, nbytes: int) -> Buffer:
        """Raises NixlError."""
        buffer = Buffer(nbytes)
        buffer.registered = self.register(buffer.address, nbytes)
        return buffer

    def drop_buffer(self, buffer: Buffer) -> None:
        """No transfer uses it any more."""
        self.deregister(buffer.registered)

    def take_buffer(self) -> Buffer:
        """One of ``BUFFER_BYTES``, which nobody else uses until :meth:`give_buffer`. Raises NixlError."""
        try:
            return self._free.pop()
        except IndexError:
            return self.new_buffer(BUFFER_BYTES)

    def give_buffer(self, buffer: Buffer) -> None:
        """No transfer uses it any more."""
        if len(self._free) < _MOST_FREE_BUFFERS:  # several at once make it some more
            self._free.append(buffer)
        else:
            self.drop_buffer(buffer)

    # --- peers ---

    def check(self, name: str) -> None:
        """Raises NixlError: it was tried with this peer often enough, or too much does not end."""
        with self._lock:
            self._check(name)

    def _check(self, name: str) -> None:
        """Lock held."""
        if len(self._strays) >= _MOST_STRAYS:
            raise NixlError(f"{len(self._strays)} transfers by NIXL do not end")
        if sum(stray.name == name for stray in self._strays) >= _MOST_STRAYS_OF_ONE:
            raise NixlError("earlier transfers from this peer do not end")
        peer = self._peers.get(name)
        connected = peer is not None and not (peer.spoiled and not peer.endpoints)
        if (reason := self._refusal(name, connected=connected)) is not None:
            raise NixlError(f"not any more with the process {name}: {reason}")

    def _refusal(self, name: str, *, connected: bool) -> str | None:
        """Lock held. See ``_Attempts.refusal``; nothing is remembered of who was only asked for."""
        attempts = self._attempts.get(name)
        return None if attempts is None else attempts.refusal(connected=connected)

    def _attempts_with(self, name: str) -> _Attempts:
        """Lock held. To count one more."""
        attempts = self._attempts.setdefault(name, _Attempts())
        self._attempts.move_to_end(name)
        if len(self._attempts) > _MOST_REMEMBERED:
            self._attempts.popitem(last=False)
        return attempts

    def meet(self, name: str, metadata: bytes) -> bool:
        """An endpoint speaks to this peer from now on, until :meth:`leave`. Whether that is by a connection that was
        kept while nobody used it. Raises NixlError."""
        with self._lock:
            peer = self._peers.get(name)
            kept = peer is not None and not peer.endpoints
            if peer is not None and kept and (peer.spoiled or peer.metadata != metadata):
                self._forget(name)
                peer, kept = None, False
            self._check(name)
            if peer is None:
                self._attempts_with(name).connections += 1
                peer = self._peers[name] = _Peer(metadata)
                try:
                    self._load(name, metadata)
                except NixlError:
                    self._forget(name)  # it may have taken in a part
                    raise
            peer.endpoints += 1
            self._idle.pop(name, None)
            return kept

    def learn(self, name: str, place: Place, most: int) -> bool:
        """That a peer which was met has this region. False: it lies where another one did that NIXL knows, or NIXL
        knows ``most`` of them already. Raises NixlError."""
        with self._lock:
            peer = self._peers.get(name)
            if peer is None:
                raise NixlError("the agent is closed")
            where = place.address, place.address + place.length
            if peer.regions.get(where) == place.metadata:
                return True  # it may be another region, but NIXL would hear nothing new
            overlaps = any(start < where[1] and place.address < stop for start, stop in peer.regions)
            if overlaps or len(peer.regions) >= most:
                return False
            self._load(name, place.metadata)
            peer.regions[where] = place.metadata
            return True

    def _load(self, name: str, metadata: bytes) -> None:
        with _calling("a peer's metadata is refused"):
            loaded = self._raw.loadRemoteMD(metadata)
        if loaded not in (name, name.encode()):
            raise NixlError("a peer's metadata is another's")

    def renew(self, name: str) -> bool:
        """Whether NIXL will have forgotten what it knows of this peer by the time that it is met again, if the only
        endpoint that speaks to it is closed."""
        with self._lock:
            peer = self._peers.get(name)
            if peer is None or peer.endpoints != 1 or self._refusal(name, connected=False) is not None:
                return False
            peer.spoiled = True
            return True

    def spoil(self, name: str) -> None:
        """Its connection broke: it is made anew when the peer is met again and nobody else speaks to it."""
        with self._lock:
            if (peer := self._peers.get(name)) is not None:
                peer.spoiled = True

    def proved(self, name: str, *, well: bool) -> None:
        """Whether this peer, which was met, is read without taking part."""
        with self._lock:
            attempts = self._attempts_with(name)
            attempts.failed_proofs = 0 if well else attempts.failed_proofs + 1
            if (reason := attempts.refusal(connected=True)) is not None:
                _log.warning("NIXL is not used any more with the process %s: %s", name, reason)

    def leave(self, name: str) -> None:
        """One endpoint less. After the last of them NIXL stays connected, unless that is of no use."""
        with self._lock:
            peer = self._peers.get(name)
            if peer is None:
                return
            peer.endpoints -= 1
            if peer.endpoints:
                return
            if peer.spoiled:
                self._forget(name)
                if (reason := self._refusal(name, connected=False)) is not None:
                    _log.warning("NIXL is not used any more with the process %s: %s", name, reason)
                return
            self._idle[name] = None
            if len(self._idle) > _MOST_IDLE:
                self._forget(next(iter(self._idle)))

    def _forget(self, name: str) -> None:
        """Lock held."""
        self._peers.pop(name, None)
        self._idle.pop(name, None)
        with contextlib.suppress(Exception):  # it does not know the peer
            self._raw.invalidateRemoteMD(name)

    # --- READs ---

    def prepare(self, here: Pieces, there: Pieces, name: str) -> int:
        """A READ of these pieces into those, to be posted any number of times, one after another. Raises NixlError."""
        near = self._list(self._memory, [(address, nbytes, 0) for address, nbytes in here])
        far = self._list(self._memory, [(address, nbytes, 0) for address, nbytes in there])
        with _calling("no READ"):
            return int(self._raw.createXferReq(self._read, near, far, name, b"", self._backends))

    def prepare_one(self, here: int, there: int, nbytes: int, name: str) -> int:
        """:meth:`prepare` for one piece, which is when each microsecond shows."""
        try:
            memory = self._memory
            return self._raw.createXferReq(  # type: ignore[no-any-return]
                self._read,
                self._list(memory, [(here, nbytes, 0)]),
                self._list(memory, [(there, nbytes, 0)]),
                name,
                b"",
                self._backends,
            )
        except Exception as error:
            raise NixlError(f"no READ: {error}") from None

    def post(self, request: int) -> bool:
        """Start it. Whether it has ended, well. Raises NixlError: it failed."""
        try:
            with self.turn:
                state = self._raw.postXferReq(request, b"")
        except Exception as error:
            raise NixlError(f"a READ failed: {error}") from None
        return self._ended(state)

    def look(self, request: int) -> bool:
        """Whether what was posted has ended, well; makes it go on. Raises NixlError: it failed."""
        try:
            with self.turn:
                state = self._raw.getXferStatus(request)
        except Exception as error:
            raise NixlError(f"a READ failed: {error}") from None
        return self._ended(state)

    def _ended(self, state: Any) -> bool:
        if state == self._done:
            return True
        if state == self._pending:
            return False
        raise NixlError(f"a READ ended as {state}")

    def release(self, request: int) -> None:
        """Forget a request that does not run."""
        try:  # not by contextlib.suppress, which would take as long as the call
            self._raw.releaseXferReq(request)
        except Exception:  # the agent is closed, and so has forgotten it
            return

    def stray(self, name: str, request: int, buffers: Sequence[Buffer]) -> None:
        """Given up while it ran; its endpoint's :meth:`leave` is ours now. NIXL would let us release it, and write into
        its buffer all the same when bytes come: so all are kept until :meth:`tend` finds that it has ended."""
        with self._lock:
            self._strays.append(_Stray(name, request, buffers))

    # --- keeping house ---

    def help(self) -> None:
        """Make go on what peers want of this agent, such as a connection."""
        with contextlib.suppress(Exception), self.turn:  # what is wrong with a peer shows where it is spoken to
            self._raw.getNotifs({}, self._backends)

    def tend(self, now_s: float) -> None:
        """Free what has ended since."""
        with self._lock:
            strays = list(self._strays)
        for stray in strays:
            if not self._is_over(stray, now_s):
                continue
            with self._lock:
                self._strays.remove(stray)
            self.release(stray.request)
            for buffer in stray.buffers:
                self.drop_buffer(buffer)
            self.leave(stray.name)

    def _is_over(self, stray: _Stray, now_s: float) -> bool:
        try:
            return self.look(stray.request)
        except NixlError:
            # Of several pieces one has failed; the others are over soon.
            if stray.failed_s is None:
                stray.failed_s = now_s
            return now_s - stray.failed_s >= _FAILED_S

    @property
    def strays(self) -> int:
        """Transfers that were given up and have not ended."""
        return len(self._strays)

    def close(self) -> None:
        """End its connections and its thread; every later call fails as :class:`NixlError` or does nothing."""
        with self._lock:  # strays stay: somebody may be in a call
            for name in list(self._idle):
                self._forget(name)
            self._peers.clear()
            self._agent = self._raw = None
            self._free.clear()
