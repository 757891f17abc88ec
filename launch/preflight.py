"""What would keep a suite from starting, found before anything is: options, taken ports, files that are not there."""

from __future__ import annotations

import errno
import os
import pwd
import shlex
import socket
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from pinyon.core.address import is_loopback
from pinyon.core.errors import PinyonError

__all__ = ["Port", "file_faults", "holder", "option_faults", "port_faults"]

COMMAND_CHARS = 120
_ANY = ("0.0.0.0", "::")
_LISTEN = "0A"
"""The state in ``/proc/net/tcp``."""


@dataclass(frozen=True, slots=True)
class Port:
    """One that a suite is to listen at. ``option`` chooses it; 0 takes a free one."""

    what: str
    option: str
    host: str
    port: int


def port_faults(ports: Iterable[Port]) -> list[str]:
    """A sentence for each option whose port cannot be had, or the first of them: who has it, and what to do."""
    faults: dict[str, str] = {}
    wanted: dict[int, Port] = {}
    for one in ports:
        if not one.port or one.option in faults:
            continue
        if not 0 < one.port < 1 << 16:
            why = "is none"
        elif (first := wanted.setdefault(one.port, one)) is not one:
            why = f"is wanted for {first.what}, too"
        elif (number := _refused(one.host, one.port)) == errno.EADDRINUSE:
            by = holder(one.port, one.host)
            why = f"is taken{f' by {by}' if by else ''}"
        elif number:
            why = f"cannot be had on {one.host}: {os.strerror(number)}"
        else:
            continue
        faults[one.option] = f"port {one.port} for {one.what} {why}; {one.option} N takes another one, 0 a free one"
    return list(faults.values())


def _refused(host: str, port: int) -> int:
    """The errno of listening there, 0 if that is fine; names that mean nothing are left to the services."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)[0]
    except OSError:
        return 0
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            return error.errno or 0
    return 0


def holder(port: int, host: str = "") -> str:
    """Who listens at a port of this machine, as far as ``/proc`` says: process and command, or the user; or nothing.
    Rather who does so on ``host`` (an address) or on all addresses, where others do on others."""
    tables = ("/proc/net/tcp", "/proc/net/tcp6")
    found = [each for table in tables for each in _listeners(table) if each[0] == port]
    for _, _, inode, user in sorted(found, key=lambda each: (each[1] != host.strip("[]"), each[1] not in _ANY)):
        return _process_with(inode) or f"a process of user {_user(user)}"
    return ""


def _listeners(table: str) -> Iterator[tuple[int, str, str, int]]:
    """Port, address, inode and user id of each socket that listens."""
    try:
        lines = Path(table).read_text().splitlines()[1:]
    except OSError:
        return
    for line in lines:
        fields = line.split()
        if len(fields) > 9 and fields[3] == _LISTEN:
            address, _, port = fields[1].rpartition(":")
            yield int(port, 16), _address(address), fields[9], int(fields[7])


def _address(text: str) -> str:
    """Of words in hexadecimal, each in the machine's order of bytes."""
    words = [int(text[at : at + 8], 16).to_bytes(4, sys.byteorder) for at in range(0, len(text), 8)]
    return socket.inet_ntop(socket.AF_INET if len(words) == 1 else socket.AF_INET6, b"".join(words))


def _process_with(inode: str) -> str:
    """Empty if it is of another user, whose open files are not for us."""
    wanted = f"socket:[{inode}]"
    for entry in filter(str.isdecimal, os.listdir("/proc")):
        try:
            if any(os.readlink(f"/proc/{entry}/fd/{fd}") == wanted for fd in os.listdir(f"/proc/{entry}/fd")):
                words = Path(f"/proc/{entry}/cmdline").read_bytes().rstrip(b"\0").split(b"\0")
                command = shlex.join(word.decode(errors="replace") for word in words)
                return f"pid {entry} ({command[:COMMAND_CHARS]}{'…' * (len(command) > COMMAND_CHARS)})"
        except OSError:  # it has ended, or is not ours
            continue
    return ""


def _user(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)


def file_faults(models: Iterable[tuple[str, str]], engine_profile: str, api_keys_file: str) -> list[str]:
    """A sentence for each file that services would refuse. ``models``: options, and the folders that they name."""
    from pinyon.model.card import load_card
    from pinyon.profiles.engine_profile import load_profile
    from pinyon.runtime.api_keys import read_api_keys

    faults: list[str] = []
    for option, folder in models:
        try:
            load_card(folder)
        except PinyonError as error:
            faults.append(f"{option}: {error.message}")
    if engine_profile:
        try:
            load_profile(engine_profile)
        except PinyonError as error:
            faults.append(f"--engine-profile: {error.message}")
    if api_keys_file:
        try:
            read_api_keys(api_keys_file)
        except PinyonError as error:
            faults.append(f"--api-keys-file: {error.message}")
    return faults


def option_faults(given: Mapping[str, object], defaults: Mapping[str, object]) -> list[str]:
    """A sentence for each option of ``up`` that would have no effect, and one for a host that would be refused.

    Both mappings are from the names of options to values, as argparse has them."""

    def is_given(name: str) -> bool:
        return given[name] != defaults[name]

    needs = {
        "engine_profile": ("--engine paced", given["engine"] == "paced"),
        "attention_kernel": ("--engine numpy", given["engine"] == "numpy"),
        "region_delay_ms": ("--regions", is_given("regions")),
        "static_peers": ("--regions", is_given("regions")),
        "controller_port": ("--regions, and without --static-peers", is_given("regions") and not given["static_peers"]),
        "tls_dir": ("--tls", bool(given["tls"])),
        "redis_url": ("--stores 1 or more", bool(given["stores"])),
        "store_mib": ("--stores 1 or more", bool(given["stores"])),
    }
    faults = [
        f"--{name.replace('_', '-')} is of use only with {need}"
        for name, (need, met) in needs.items()
        if is_given(name) and not met
    ]
    host = str(given["host"])
    if not is_loopback(host.strip("[]")) and not given["allow_insecure"]:
        lacking = [
            option for option, name in (("--tls", "tls"), ("--api-keys-file", "api_keys_file")) if not given[name]
        ]
        if lacking:
            faults.append(f"--host {host} needs {' and '.join(lacking)}, or --allow-insecure: others reach it")
    return faults
