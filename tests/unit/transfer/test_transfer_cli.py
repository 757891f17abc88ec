"""The command ``pinyon transfer``: sizes, targets, and a bench between two real processes."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pinyon.cli import main
from pinyon.cli.transfer_commands import pack_target, parse_size, parse_target, size_text
from pinyon.core.errors import InvalidArgument
from pinyon.transfer import InvalidTransfer, RegionDescriptor, SegmentDescriptor

SEGMENT = SegmentDescriptor("10.0.0.1", 7000, bytes(range(16)), (RegionDescriptor(bytes(16), "cpu:0", 1 << 20),))


def pinyon(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pinyon.cli", "transfer", *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_sizes() -> None:
    for text, nbytes in (("1", 1), ("4K", 4096), ("64KiB", 65536), ("1m", 1 << 20), ("2GB", 2 << 30)):
        assert parse_size(text) == nbytes
    for text in ("", "0", "-1", "4X", "1.5M", "M", "9" * 16):
        with pytest.raises(InvalidArgument):
            parse_size(text)
    assert [size_text(n) for n in (1, 4096, 1 << 20, 3 << 30)] == ["1 B", "4 KiB", "1 MiB", "3 GiB"]


def test_a_target_is_one_word_and_comes_back() -> None:
    word = pack_target(SEGMENT)
    assert word.split() == [word]
    assert parse_target(f" {word}\n") == SEGMENT
    for length in range(len(word)):
        with pytest.raises(InvalidTransfer, match="not a target"):
            parse_target(word[:length])
    with pytest.raises(InvalidTransfer):
        parse_target(pack_target(SegmentDescriptor("10.0.0.1", 7000, bytes(16))))


@given(st.text(max_size=80) | st.binary(max_size=80).map(lambda data: data.hex()))
def test_what_is_no_target_is_refused(word: str) -> None:
    with pytest.raises(InvalidTransfer):
        parse_target(word)


def test_bench_between_two_processes() -> None:
    done = pinyon("bench", "--seconds", "0.05", "--size", "4K,1M", "--transports", "tcp", "--nics", "lo", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert [(one["op"], one["request_bytes"]) for one in result["points"]] == [
        ("write", 4096),
        ("write", 1 << 20),
        ("read", 4096),
        ("read", 1 << 20),
    ]
    assert all(one["gb_s"] > 0 and one["p99_us"] >= one["p50_us"] > 0 for one in result["points"])
    (path,) = result["paths"]
    assert (path["transport"], path["local_nic"], path["remote_nic"]) == ("tcp", "lo", "lo")
    moved = sum(one["request_bytes"] * (one["transfers"] + 3) for one in result["points"])
    assert path["bytes"] == moved


def test_wrong_input_says_what_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    done = pinyon("bench", "nonsense")
    assert (done.returncode, len(done.stderr.splitlines())) == (1, 1), done.stderr
    for arguments, words in (
        (("bench", "nonsense"), "not a target"),
        (("bench", "--size", "big"), "not a size"),
        (("bench", "--batch", "0"), "--batch must be"),
        (("bench", "--transports", "pigeon"), "transports are"),
        (("bench", "--nics", "nic-that-is-not-there"), "no such NIC"),
        (("serve", "--cluster-secret-file", "/nonexistent/secret"), "cannot read"),
        (("serve", "--listen", "256.0.0.1:1"), "cannot listen"),
    ):
        assert main(["transfer", *arguments]) == 1
        said = capsys.readouterr().err
        assert words in said
        assert len(said.splitlines()) == 1, said
