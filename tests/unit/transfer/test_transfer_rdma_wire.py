"""RDMA without an HCA: control messages, and the errors where RDMA cannot be used."""

from __future__ import annotations

import subprocess
import sys

import pytest

from pinyon.transfer import WireError
from pinyon.transfer.transports.rdma import verbs
from pinyon.transfer.transports.rdma import wire as rdma_wire
from pinyon.transfer.transports.rdma.verbs import rdma_available
from pinyon.transfer.transports.rdma.wire import Half, RdmaCode, RdmaOp, RegionGrant
from pinyon.transfer.types.limits import MAX_FRAME_REQUESTS
from pinyon.transfer.types.spans import MAX_SPANS, Spans

GID = bytes(10) + b"\xff\xff\x0a\x00\x00\x01"
HALF = Half(GID, 0, 17, 4711, 3, 16, 8 << 20)
KEYS = [bytes([number]) * 16 for number in range(3)]
SPANS = Spans((0, 8192), (4096, 8200))
GRANTS = [RegionGrant(0, 2, SPANS, ((0xABCDEF01, 1 << 47), (7, 1 << 40))), RegionGrant(1), RegionGrant(0)]
HEAD = rdma_wire.HEADER_BYTES


def split_request(message: bytes) -> tuple[rdma_wire.RdmaHeader, bytes]:
    header, body = rdma_wire.parse_request(message[:HEAD]), message[HEAD:]
    assert rdma_wire.body_bytes(header, reply=False) == len(body)
    return header, body


def split_reply(message: bytes, op: RdmaOp, parts: int) -> tuple[rdma_wire.RdmaHeader, bytes]:
    header, body = rdma_wire.parse_reply(message[:HEAD], op, parts), message[HEAD:]
    assert rdma_wire.body_bytes(header, reply=True) == len(body)
    return header, body


def test_pairing_round_trips() -> None:
    header, body = split_request(rdma_wire.pack_pair("mlx5_1", HALF))
    assert header.op is RdmaOp.PAIR
    assert rdma_wire.parse_pair(body) == ("mlx5_1", HALF)
    header, body = split_reply(rdma_wire.pack_paired(RdmaCode.OK, HALF), RdmaOp.PAIR, 1)
    assert rdma_wire.parse_half(body) == HALF
    header, body = split_reply(rdma_wire.pack_paired(RdmaCode.NO_HCA, None), RdmaOp.PAIR, 1)
    assert (header.code, body) == (RdmaCode.NO_HCA, b"")


def test_resolving_round_trips() -> None:
    header, body = split_request(rdma_wire.pack_resolve(KEYS))
    assert (header.op, header.parts) == (RdmaOp.RESOLVE, 3)
    assert rdma_wire.parse_keys(body) == KEYS
    header, body = split_reply(rdma_wire.pack_resolved(RdmaCode.OK, GRANTS), RdmaOp.RESOLVE, 3)
    assert header.parts == 4
    assert rdma_wire.parse_grants(body, 3) == GRANTS
    header, body = split_reply(rdma_wire.pack_resolved(RdmaCode.NO_ROOM, []), RdmaOp.RESOLVE, 3)
    assert (header.code, body) == (RdmaCode.NO_ROOM, b"")


def test_a_touch_has_no_body() -> None:
    assert split_request(rdma_wire.pack_touch()) == (rdma_wire.RdmaHeader(RdmaOp.TOUCH, RdmaCode.OK, 0), b"")


@pytest.mark.parametrize(
    "fields",
    [
        (0x5051, 1, 0, 1),  # magic
        (rdma_wire.MAGIC, 0, 0, 1),  # operation
        (rdma_wire.MAGIC, 4, 0, 0),
        (rdma_wire.MAGIC, 1, 1, 1),  # a request has no code
        (rdma_wire.MAGIC, 1, 0, 2),  # parts
        (rdma_wire.MAGIC, 2, 0, 0),
        (rdma_wire.MAGIC, 2, 0, MAX_FRAME_REQUESTS + 1),
        (rdma_wire.MAGIC, 3, 0, 1),
    ],
)
def test_bad_requests(fields: tuple[int, ...]) -> None:
    with pytest.raises(WireError):
        rdma_wire.parse_request(rdma_wire._HEADER.pack(*fields))


@pytest.mark.parametrize(
    "fields",
    [
        (rdma_wire.MAGIC, RdmaOp.RESOLVE, 0, 2),  # a request
        (rdma_wire.MAGIC, RdmaOp.PAIR | 0x80, 0, 2),  # to another operation
        (rdma_wire.MAGIC, RdmaOp.RESOLVE | 0x80, 9, 0),  # unknown code
        (rdma_wire.MAGIC, RdmaOp.RESOLVE | 0x80, 0, 1),  # fewer than asked for
        (rdma_wire.MAGIC, RdmaOp.RESOLVE | 0x80, 0, 3 + MAX_SPANS),
        (rdma_wire.MAGIC, RdmaOp.RESOLVE | 0x80, 1, 2),  # a refusal with parts
    ],
)
def test_bad_replies(fields: tuple[int, ...]) -> None:
    with pytest.raises(WireError):
        rdma_wire.parse_reply(rdma_wire._HEADER.pack(*fields), RdmaOp.RESOLVE, 2)


@pytest.mark.parametrize(
    "change",
    [
        {"gid": bytes(16)},
        {"queue_pair": 0},
        {"queue_pair": 1},
        {"queue_pair": 1 << 24},
        {"first_packet": 1 << 24},
        {"mtu": 0},
        {"mtu": 6},
        {"reads": 0},
        {"max_message": 0},
        {"max_message": (1 << 16) - 1},
        {"max_message": (1 << 31) + 1},
    ],
)
def test_bad_halves(change: dict[str, object]) -> None:
    with pytest.raises(WireError):
        rdma_wire.parse_half(rdma_wire._HALF.pack(*HALF._replace(**change)))


@pytest.mark.parametrize("name", [b"", b"\xff", b"x" * 65, "é".encode() * 65])
def test_bad_hca_names(name: bytes) -> None:
    with pytest.raises(WireError):
        rdma_wire.parse_pair(rdma_wire._NAME.pack(len(name), name) + rdma_wire._HALF.pack(*HALF))


def test_an_hca_name_has_nothing_behind_it() -> None:
    with pytest.raises(WireError):
        rdma_wire.parse_pair(rdma_wire._NAME.pack(1, b"ab") + rdma_wire._HALF.pack(*HALF))


@pytest.mark.parametrize(
    "parts",
    [
        [(0, 5, 0, 0, 0, 0, 0)],  # unknown refusal
        [(0, 0, 4, 1, 1, 0, 1)],  # unknown access
        [(0, 0, 1, 1, 1, 0, 0)],  # no bytes
        [(0, 0, 1, 1, (1 << 64) - 4, 0, 8)],  # around the end of the address space
        [(0, 0, 1, 1, 0, 0, 1 << 63)],
        [(0, 0, 1, 1, 0, (1 << 64) - 1, 1)],
        [(0, 1, 0, 5, 0, 0, 0)],  # a refusal with a key
        [(0, 0, 0, 0, 7, 0, 0)],  # an address although it is not open to peers
        [(0, 1, 0, 0, 0, 0, 0)] * 2,  # refused twice
        [(0, 0, 1, 1, 0, 0, 8), (0, 0, 3, 1, 0, 16, 8)],  # two rights for one key
        [(0, 0, 1, 1, 0, 0, 8), (0, 0, 1, 1, 0, 8, 8)],  # one range in two
        [(0, 0, 1, 1, 0, 16, 8), (0, 0, 1, 1, 0, 0, 8)],  # out of order
        [],  # no answer
        [(1, 1, 0, 0, 0, 0, 0)],  # for a key that was not named
    ],
)
def test_bad_grants(parts: list[tuple[int, ...]]) -> None:
    with pytest.raises(WireError):
        rdma_wire.parse_grants(b"".join(rdma_wire._PART.pack(*part) for part in parts), 1)


def test_without_pyverbs_the_reason_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    verbs.pyverbs.cache_clear()
    monkeypatch.setitem(sys.modules, "pyverbs", None)
    monkeypatch.setitem(sys.modules, "pyverbs.enums", None)
    reason = rdma_available()
    verbs.pyverbs.cache_clear()
    assert reason is not None
    assert "pip install pyverbs," in reason
    assert "python3-pyverbs" in reason


def test_the_engine_does_not_import_pyverbs() -> None:
    script = (
        "import sys, pinyon.transfer.engine, pinyon.transfer.transports.rdma.transport;"
        "print([name for name in sys.modules if name.split('.')[0] == 'pyverbs'])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.strip() == "[]"
