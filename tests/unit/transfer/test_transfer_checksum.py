"""Checksums: what they cover, when they are taken, and what a wrong one does."""

from __future__ import annotations

import random

import pytest

from pinyon.transfer import InvalidTransfer
from pinyon.transfer.transports.tcp.checksum import ChecksumPolicy, Digest, checksum, seed_of

DATA = random.Random(5).randbytes(100_000)


def test_pieces_do_not_matter() -> None:
    view = memoryview(DATA)
    whole = checksum([view], 7)
    assert whole == checksum([view[:1], view[1:50_000], view[50_000:]], 7)
    digest = Digest(seed=7)
    for start in range(0, len(view), 999):
        digest.update(view[start : start + 999])
    assert digest.intdigest() == whole


def test_a_flipped_bit_an_exchanged_piece_and_another_request_show() -> None:
    view = memoryview(DATA)
    whole = checksum([view], seed_of(b"this request"))
    flipped = bytearray(DATA)
    flipped[77_777] ^= 1
    assert checksum([memoryview(flipped)], seed_of(b"this request")) != whole
    assert checksum([view[50_000:], view[:50_000]], seed_of(b"this request")) != whole
    assert checksum([view], seed_of(b"that request")) != whole


def test_modes() -> None:
    assert ChecksumPolicy("on").wanted(1 << 30, 1000)
    assert not ChecksumPolicy("off").wanted(1, 1)
    with pytest.raises(InvalidTransfer):
        ChecksumPolicy("sometimes")


Kind = tuple[int, float, float]
"""Bytes, seconds without a checksum, seconds with."""


def shares(policy: ChecksumPolicy, kinds: list[Kind], frames: int, rng: random.Random) -> list[float]:
    """Send frames of these kinds in turn; which share got a checksum. Now and then a frame takes ten times as long, as
    on a machine that does other things too."""
    got = [0] * len(kinds)
    for _ in range(frames):
        for index, (nbytes, without_s, with_s) in enumerate(kinds):
            wanted = policy.wanted(nbytes, 1)
            got[index] += wanted
            if policy.watch:
                seconds = with_s if wanted else without_s
                seconds *= 10.0 if rng.random() < 0.3 else 1.0 + 0.02 * rng.random()
                policy.observe(nbytes, 1, wanted, seconds)
    return [count / frames for count in got]


@pytest.mark.parametrize("seed", range(5))
def test_auto_takes_what_costs_little(seed) -> None:
    rng = random.Random(seed)
    policy = ChecksumPolicy("auto")
    cheap, dear = (4096, 100e-6, 101e-6), (1 << 20, 200e-6, 260e-6)
    shares(policy, [cheap, dear], 500, rng)
    cheap_share, dear_share = shares(policy, [cheap, dear], 2000, rng)
    assert cheap_share > 0.9
    assert dear_share < 0.1
    # The same bytes over a slower network: the checksum is hidden behind the wire.
    slow = (1 << 20, 2e-3, 2.01e-3)
    shares(policy, [slow], 20_000, rng)
    assert shares(policy, [slow], 2000, rng)[0] > 0.9


def test_the_first_frame_has_one() -> None:
    assert ChecksumPolicy("auto").wanted(1, 1)
