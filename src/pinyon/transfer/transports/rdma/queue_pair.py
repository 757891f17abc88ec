"""Queue pairs, each one end of a reliable connection, and the work requests that they post."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from ipaddress import IPv6Address
from typing import Any

from pinyon.transfer.transports.rdma.hca import POST_WORK, Hca
from pinyon.transfer.transports.rdma.verbs import VerbsError, free, open_channel, pyverbs, verb
from pinyon.transfer.transports.rdma.wire import Half
from pinyon.transfer.types.request import Opcode

SUCCESS = 0
REMOTE_ACCESS_ERROR = 10
"""The status ``IBV_WC_REM_ACCESS_ERR``: the peer's HCA refuses this rkey, or its use for this range or direction."""

_HOPS = 64
_MIN_RNR_TIMER = 12
"""Timer number 12 is 0.64 ms. It must be set, but one-sided work needs no receives and never waits for one."""
_ACK_TIMEOUT = 14
"""Timeout number 14 is 4.096 µs x 2^14 = 67 ms until a packet is sent again; HCAs may take up to four times that."""
_RETRIES = 6
"""The retries of a packet; with the timeout above a dead path is found after 0.5 to 2 s.

Not 7, the largest value: soft-RoCE retries for ever then."""

Work = tuple[int, int, int, int, int]
"""A work request: local address, lkey, remote address, rkey, bytes."""


class QueuePair:
    """One end of a reliable connection, for one thread at a time.

    A queue pair that posts has a completion queue of its own and two times ``hca.post_work`` requests at most. A queue
    pair that does not post only answers the other end's one-sided work, which its NIC does alone."""

    def __init__(self, hca: Hca, pd: Any, *, posts: bool) -> None:
        """Makes a queue pair that may touch the memory of ``pd``. Raises VerbsError if the HCA has no room."""
        self._names = names = pyverbs()
        self.hca = hca
        self._posts = posts
        depth = 2 * hca.post_work if posts else 1
        self._channel: Any = None
        self._queue: Any = None
        self._pair: Any = None
        self.fd = -1
        """The descriptor that a completion makes readable after :meth:`arm`; -1 if it is not known: poll instead."""
        try:
            with verb(f"no queue pair on {hca.nic.name}"):
                if posts:
                    self._channel, self.fd = open_channel(names, hca.context)
                    # every work request may end in a completion when the queue pair breaks
                    self._queue = names.CQ(hca.context, depth + 1, None, self._channel, 0)
                queue = self._queue or hca.answering_queue()
                room = names.QPCap(max_send_wr=depth, max_recv_wr=1, max_send_sge=1, max_recv_sge=1)
                wanted = names.QPInitAttr(qp_type=names.e.IBV_QPT_RC, scq=queue, rcq=queue, cap=room, sq_sig_all=0)
                self._pair = names.QP(pd, wanted)
                self.number = int(self._pair.qp_num)
        except BaseException:
            self.close()
            raise

    def half(self, first_packet: int, mtu: int, reads: int) -> Half:
        """Returns what the other end needs to know of this one."""
        hca = self.hca
        return Half(hca.gid, hca.lid, self.number, first_packet, mtu, reads, hca.max_message)

    def connect(self, remote: Half, first_packet: int, mtu: int, reads: int) -> None:
        """Connects to the other end; ``mtu`` and ``reads`` are what both agreed on.

        Raises VerbsError if there is no route, or the HCA does not take a value."""
        names = pyverbs()
        nic = self.hca.nic
        given = names.QPAttr(port_num=nic.port, path_mtu=mtu)
        if not self._posts:
            given.qp_access_flags = names.e.IBV_ACCESS_REMOTE_READ | names.e.IBV_ACCESS_REMOTE_WRITE
        given.dest_qp_num = remote.queue_pair
        given.rq_psn = remote.first_packet
        given.sq_psn = first_packet
        given.max_rd_atomic = reads if self._posts else 1
        given.max_dest_rd_atomic = 1 if self._posts else reads
        given.min_rnr_timer = _MIN_RNR_TIMER
        given.timeout = _ACK_TIMEOUT
        given.retry_cnt = given.rnr_retry = _RETRIES
        with verb(f"{nic.name} cannot be connected"):
            gid = names.GID(str(IPv6Address(remote.gid).exploded))
            route = names.GlobalRoute(dgid=gid, sgid_index=self.hca.gid_index, hop_limit=_HOPS)
            given.ah_attr = names.AHAttr(port_num=nic.port, is_global=1, gr=route, dlid=remote.lid)
            self._pair.to_rts(given)

    def post(self, opcode: Opcode, work: Sequence[Work]) -> None:
        """Posts at most ``hca.post_work`` requests in this order; the success of the last one completes them all.

        Raises VerbsError if the queue pair is broken."""
        spare = _spare_chains[opcode]
        try:
            chain = spare.pop()
        except IndexError:
            chain = _WorkChain(opcode)
        try:
            chain.post(self._pair, work)
        except self._names.PyverbsError as error:
            raise VerbsError(f"cannot post: {error}") from None
        finally:
            spare.append(chain)

    def ping(self) -> None:
        """Posts a WRITE of no bytes, which needs no memory and completes if both directions work. Raises VerbsError."""
        names = pyverbs()
        place = names.SGE(0, 0, 0)
        request = names.SendWR(opcode=names.e.IBV_WR_RDMA_WRITE, num_sge=1, sg=[place])
        try:
            request.num_sge = 0
            with verb("cannot post"):
                self._pair.post_send(request)
        finally:
            request.close()
            place.close()

    def poll(self) -> int | None:
        """Returns the next completion's ``ibv_wc_status`` (such as ``SUCCESS``), or None. Raises VerbsError."""
        try:
            count, completions = self._queue.poll(1)
        except self._names.PyverbsError as error:
            raise VerbsError(f"cannot poll: {error}") from None
        return int(completions[0].status) if count else None

    def arm(self) -> None:
        """Lets the next completion make ``fd`` readable. Poll once more before waiting. Raises VerbsError."""
        with verb("cannot arm"):
            self._queue.req_notify()

    def acknowledge(self) -> None:
        """Consumes the event that made ``fd`` readable."""
        with contextlib.suppress(VerbsError), verb("no event"):
            self._channel.get_cq_event(self._queue)
            self._queue.ack_events(1)

    def close(self) -> None:
        """Ends the queue pair: from then on the NIC neither reads nor writes memory for it. Idempotent."""
        pair, queue, channel = self._pair, self._queue, self._channel
        self._pair = self._queue = self._channel = None
        self.fd = -1
        for resource in (pair, queue, channel):
            free(resource)


class _WorkChain:
    """A chain of linked work requests, filled again for each post.

    A post uses the tail, so that the last request, the only one that makes a completion, is always the same."""

    def __init__(self, opcode: Opcode) -> None:
        names = pyverbs()
        kind = names.e.IBV_WR_RDMA_READ if opcode is Opcode.READ else names.e.IBV_WR_RDMA_WRITE
        places: list[Any] = []
        requests: list[Any] = []
        flags = names.e.IBV_SEND_SIGNALED
        for _ in range(POST_WORK):
            place = names.SGE(0, 0, 0)
            following = requests[-1] if requests else None
            request = names.SendWR(opcode=kind, num_sge=1, sg=[place], send_flags=flags, next_wr=following)
            request.sg_list = place  # the list was a copy; from now on what is set in ``place`` counts
            places.append(place)
            requests.append(request)
            flags = 0
        self._places = places[::-1]
        self._requests = requests[::-1]

    def post(self, pair: Any, work: Sequence[Work]) -> None:
        first = POST_WORK - len(work)
        at = first
        places, requests = self._places, self._requests
        for local, lkey, remote, rkey, length in work:
            place = places[at]
            place.addr = local
            place.lkey = lkey
            place.length = length
            requests[at].set_wr_rdma(rkey, remote)
            at += 1
        pair.post_send(requests[first])


_spare_chains: dict[Opcode, list[_WorkChain]] = {Opcode.READ: [], Opcode.WRITE: []}
"""The chains not in use, as many as once posted at the same time. They are kept because pyverbs never frees them."""
