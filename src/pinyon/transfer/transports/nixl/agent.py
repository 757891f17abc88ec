"""The thin edge over NIXL: its names, its errors, and what it does not do by itself.

Only this file imports NIXL, and only when an engine is told to use it. What to know of it (1.5.1, UCX):

- Without its progress thread nothing happens but in calls. With it an idle process takes a fifth of a core, so we go
  without. Whoever waits for a transfer drives it by asking, and a peer to which others *connect* must ask too.
- A call lets go of the GIL; calls of several threads take turns (``NIXL_THREAD_SYNC_STRICT``).
- Where the kernel or a NIC copies (cross-memory attach, RDMA), a peer takes no part in a READ. Where it cannot (tcp),
  UCX lets the peer's own thread read any address it is told, without checking that it is registered. The
  pairing (:mod:`.transport`) tells the two apart and refuses the second.
- A transfer that does not end cannot be called back for certain, so bytes land in buffers of ours only.
- UCX does not give a connection back while the peer lives: each one that is ended and made anew leaves a descriptor
  open at both ends. So a connection is kept for as long as its peer lives, and those that are made anew are counted.
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
from pinyon.transfer.transports.nixl.wire import NixlPlace

_log = logging.getLogger(__name__)
_PACKAGES = ("nixl_cu12", "nixl_cu13")
_MOST_STRAYS = 64
"""The number of abandoned transfers that have not ended at which nothing new begins."""
_MOST_STRAYS_OF_ONE = 8
"""The number of abandoned transfers from one peer at which none begins with it, which leaves room for others."""
_FAILED_S = 60.0
"""The seconds after its failure at which an abandoned transfer counts as ended."""
_MOST_IDLE = 1024
"""The connected peers that nobody uses, at most; above it the one that was left first is forgotten."""
MOST_CONNECTIONS = 16
"""The connections to one process at most, as long as it lives."""
MOST_FAILED_PROOFS = 3
"""The failed proofs in a row at which NIXL is not used any more with a process."""
_MOST_REMEMBERED = 1 << 14
"""The processes whose attempts are counted, at most; above it the one tried least recently is new again."""
_MOST_FREE_BUFFERS = 16
"""The buffers kept at most for the next READ, from whichever peer."""
BUFFER_BYTES = 1 << 20
"""The payload of one READ at most; pages that no READ has needed yet take no memory."""
_FIRST_TURNS = 4
"""The turns in which a new agent takes up its connection to itself."""
Pieces = Sequence[tuple[int, int]]
"""Ranges of memory, ``(address, bytes)``."""


class NixlError(ConnectionError):
    """NIXL says no, or is not there; the text says what was tried."""


@functools.cache
def _nixl() -> SimpleNamespace:
    """Returns the names of NIXL that are used here. Raises NixlError if NIXL cannot be imported."""
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
        """The memory as an array, for numpy."""
        self.address = int(self.array.ctypes.data)
        self.registered: Any = None


@dataclass(slots=True, eq=False)
class _Stray:
    """A READ that was abandoned while it ran."""

    name: str
    request: int
    buffers: Sequence[Buffer]
    failed_s: float | None = None


@dataclass(slots=True, eq=False)
class _Peer:
    """One process that was tried. NIXL is connected to it while there is metadata of it."""

    metadata: bytes = b""
    endpoints: int = 0
    """The endpoints that use this peer."""
    regions: dict[tuple[int, int], bytes] = field(default_factory=dict)
    """The metadata of each region by first address and end."""
    spoiled: bool = False
    """True if NIXL is to forget the peer once no endpoint uses it, because what it knows of it is of no use."""
    connections: int = 0
    """The connections that were made."""
    failed_proofs: int = 0
    """The proofs that failed in a row; a proof shows that the process is read without taking part."""

    def refusal(self, *, connected: bool) -> str | None:
        """Returns why NIXL is not used any more with this process, in words for people; None if it may be."""
        if self.failed_proofs >= MOST_FAILED_PROOFS:
            return f"{self.failed_proofs} times it was not read without taking part"
        if self.connections >= MOST_CONNECTIONS and not connected:
            return f"{self.connections} connections to it were made already, which UCX does not give back"
        return None

    @property
    def idle(self) -> bool:
        """True if NIXL is connected to the peer and no endpoint uses it."""
        return bool(self.metadata) and not self.endpoints


class NixlAgent:
    """The agent that stands for this process in NIXL. All methods are thread-safe."""

    def __init__(self, name: str, *, loopback: bool = False) -> None:
        """Makes the agent, with ``loopback`` for processes of this host only. Raises NixlError if NIXL or UCX fails."""
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
        """The lock held during a proof that a peer has no part in a READ, at both ends.

        A proving process drives transfers. If it were the peer of another proof meanwhile, it would drive its part
        there too."""
        self.turn = threading.Lock()
        """The lock held by each call that drives transfers, our own and those that peers want served.

        The peer of a proof holds it, and so knows that nothing drives them."""
        self._lock = threading.Lock()
        self._peers: OrderedDict[str, _Peer] = OrderedDict()
        """The peers by the names of their agents; the one that was tried or left last comes last."""
        self._free: list[Buffer] = []
        self._strays: list[_Stray] = []

    # --- memory ---

    def register(self, address: int, nbytes: int) -> Any:
        """Registers memory to be read into, also for peers that get its :meth:`metadata`. Raises NixlError."""
        with _calling("memory is not registered"):
            return self._agent.register_memory([(address, nbytes, 0, "")], "DRAM", ["UCX"])

    def deregister(self, registered: Any) -> None:
        with contextlib.suppress(NixlError), _calling("memory is not given back"):
            self._agent.deregister_memory(registered, ["UCX"])

    def metadata(self, registered: Any, *, connection: bool) -> bytes:
        """Returns what a peer must know of this memory, and with ``connection`` how to reach us. Raises NixlError."""
        with _calling("no metadata"):
            return bytes(self._agent.get_partial_agent_metadata(registered, connection, ["UCX"]))

    def new_buffer(self, nbytes: int) -> Buffer:
        """Makes a registered buffer. Raises NixlError."""
        buffer = Buffer(nbytes)
        buffer.registered = self.register(buffer.address, nbytes)
        return buffer

    def take_buffer(self) -> Buffer:
        """Returns a buffer of ``BUFFER_BYTES``, which nobody else uses until :meth:`give_buffer`. Raises NixlError."""
        try:
            return self._free.pop()
        except IndexError:
            return self.new_buffer(BUFFER_BYTES)

    def give_buffer(self, buffer: Buffer) -> None:
        """Keeps a buffer that no transfer uses any more, or drops it."""
        if len(self._free) < _MOST_FREE_BUFFERS:  # several threads at once may exceed the bound a little
            self._free.append(buffer)
        else:
            self.deregister(buffer.registered)

    # --- peers ---

    def check(self, name: str) -> None:
        """Raises NixlError if NIXL was tried with this peer often enough, or too many transfers do not end."""
        with self._lock:
            self._check(name)

    def _check(self, name: str) -> None:
        if len(self._strays) >= _MOST_STRAYS:
            raise NixlError(f"{len(self._strays)} transfers by NIXL do not end")
        if sum(stray.name == name for stray in self._strays) >= _MOST_STRAYS_OF_ONE:
            raise NixlError("earlier transfers from this peer do not end")
        peer = self._peers.get(name, _Peer())
        connected = bool(peer.metadata) and not (peer.spoiled and peer.idle)
        if (reason := peer.refusal(connected=connected)) is not None:
            raise NixlError(f"not any more with the process {name}: {reason}")

    def _tried(self, name: str) -> _Peer:
        """Returns this peer, with which one more attempt is to be counted. Needs the lock."""
        peer = self._peers.setdefault(name, _Peer())
        self._peers.move_to_end(name)
        if len(self._peers) > _MOST_REMEMBERED:
            left = (each for each, other in self._peers.items() if not other.metadata and other is not peer)
            self._peers.pop(next(left, ""), None)
        return peer

    def meet(self, name: str, metadata: bytes) -> bool:
        """Notes that an endpoint uses this peer from now on, until :meth:`leave`.

        Returns whether that is by a connection that was kept while nobody used it. Raises NixlError."""
        with self._lock:
            peer = self._tried(name)
            kept = peer.idle
            if kept and (peer.spoiled or peer.metadata != metadata):
                self._forget(name)
                kept = False
            self._check(name)
            if not peer.metadata:
                peer.connections += 1
                peer.metadata = metadata
                try:
                    self._load(name, metadata)
                except NixlError:
                    self._forget(name)  # NIXL may have taken in a part of the metadata
                    raise
            peer.endpoints += 1
            return kept

    def learn(self, name: str, place: NixlPlace, most: int) -> bool:
        """Tells NIXL that a peer, which was met, has this region.

        Returns False if it overlaps one that NIXL knows, or NIXL knows ``most`` of them already. Raises NixlError."""
        with self._lock:
            peer = self._peers.get(name)
            if peer is None:
                raise NixlError("the agent is closed")
            where = place.address, place.address + place.length
            if peer.regions.get(where) == place.metadata:
                return True  # it may be another region, but NIXL would learn nothing new
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
        """Marks the peer to be forgotten when its only endpoint is closed. Returns False if that cannot be."""
        with self._lock:
            peer = self._peers.get(name)
            if peer is None or peer.endpoints != 1 or peer.refusal(connected=False) is not None:
                return False
            peer.spoiled = True
            return True

    def spoil(self, name: str) -> None:
        """Marks the connection as broken: it is made anew when the peer is met again and no endpoint uses it."""
        with self._lock:
            if (peer := self._peers.get(name)) is not None:
                peer.spoiled = True

    def proved(self, name: str, *, well: bool) -> None:
        """Counts a proof that this peer, which was met, is read without taking part, and whether it went ``well``."""
        with self._lock:
            peer = self._tried(name)
            peer.failed_proofs = 0 if well else peer.failed_proofs + 1
            if (reason := peer.refusal(connected=True)) is not None:
                _log.warning("NIXL is not used any more with the process %s: %s", name, reason)

    def leave(self, name: str) -> None:
        """Counts one endpoint less. After the last of them NIXL stays connected, unless that is of no use."""
        with self._lock:
            peer = self._peers.get(name)
            if peer is None:
                return
            peer.endpoints -= 1
            if peer.endpoints:
                return
            if peer.spoiled:
                self._forget(name)
                if (reason := peer.refusal(connected=False)) is not None:
                    _log.warning("NIXL is not used any more with the process %s: %s", name, reason)
                return
            self._peers.move_to_end(name)
            idle = [each for each, peer in self._peers.items() if peer.idle]
            if len(idle) > _MOST_IDLE:
                self._forget(idle[0])

    def _forget(self, name: str) -> None:
        """Makes NIXL forget the peer. Needs the lock."""
        peer = self._peers[name]
        peer.metadata, peer.spoiled = b"", False
        peer.regions.clear()
        with contextlib.suppress(Exception):  # NIXL may not know the peer
            self._raw.invalidateRemoteMD(name)

    # --- READs ---

    def prepare(self, here: Pieces, there: Pieces, name: str) -> int:
        """Returns a READ from ``there`` into ``here``, to be posted any number of times, in turn. Raises NixlError."""
        near = self._list(self._memory, [(address, nbytes, 0) for address, nbytes in here])
        far = self._list(self._memory, [(address, nbytes, 0) for address, nbytes in there])
        with _calling("no READ"):
            return int(self._raw.createXferReq(self._read, near, far, name, b"", self._backends))

    def prepare_one(self, here: int, there: int, nbytes: int, name: str) -> int:
        """Does :meth:`prepare` for one piece, where each microsecond shows."""
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
        """Starts the request. Returns whether it has ended well already. Raises NixlError if it failed."""
        try:
            with self.turn:
                state = self._raw.postXferReq(request, b"")
        except Exception as error:
            raise NixlError(f"a READ failed: {error}") from None
        return self._ended(state)

    def look(self, request: int) -> bool:
        """Drives the posted request. Returns whether it has ended well. Raises NixlError if it failed."""
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
        """Forgets a request that does not run."""
        try:  # not by contextlib.suppress, which would take as long as the call
            self._raw.releaseXferReq(request)
        except Exception:  # the closed agent has forgotten the request
            return

    def stray(self, name: str, request: int, buffers: Sequence[Buffer]) -> None:
        """Keeps an abandoned request that still runs, with its buffers, until :meth:`tend` finds that it has ended.

        NIXL would let us release the request, and still write into its buffer when bytes come. The endpoint does not
        call :meth:`leave`: :meth:`tend` does so then."""
        with self._lock:
            self._strays.append(_Stray(name, request, buffers))

    # --- keeping house ---

    def help(self) -> None:
        """Drives what peers want of this agent, such as a connection, or to be rid of them."""
        with contextlib.suppress(Exception), self.turn:  # a peer's errors show at the calls that use it
            self._raw.getNotifs({}, self._backends)

    def tend(self, now_s: float) -> None:
        """Frees the abandoned transfers that have ended since."""
        with self._lock:
            strays = list(self._strays)
        for stray in strays:
            if not self._is_over(stray, now_s):
                continue
            with self._lock:
                self._strays.remove(stray)
            self.release(stray.request)
            for buffer in stray.buffers:
                self.deregister(buffer.registered)
            self.leave(stray.name)

    def _is_over(self, stray: _Stray, now_s: float) -> bool:
        try:
            return self.look(stray.request)
        except NixlError:
            # One of several pieces has failed; the others end soon.
            if stray.failed_s is None:
                stray.failed_s = now_s
            return now_s - stray.failed_s >= _FAILED_S

    def close(self) -> None:
        """Ends the agent's connections and its thread; every later call raises :class:`NixlError` or does nothing."""
        with self._lock:  # strays stay, because another thread may be in a call
            for name in [name for name, peer in self._peers.items() if peer.idle]:
                self._forget(name)
            self._peers.clear()
            self._agent = self._raw = None
            self._free.clear()
