"""Checks of options and files before anything starts, for faults that would keep a suite from starting."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from pinyon.core.address import is_loopback
from pinyon.core.errors import PinyonError


def file_faults(models: Iterable[tuple[str, str]], engine_profile: str, api_keys_file: str) -> list[str]:
    """Returns a sentence for each file that services would refuse; ``models`` are options with their folders."""
    from pinyon.model.card import load_card
    from pinyon.profiles.engine_profile import load_profile
    from pinyon.runtime.api_keys import read_api_keys

    checks: list[tuple[str, Callable[[str], object], str]] = [
        *((option, load_card, folder) for option, folder in models),
        ("--engine-profile", load_profile, engine_profile),
        ("--api-keys-file", read_api_keys, api_keys_file),
    ]
    faults: list[str] = []
    for option, read, name in checks:
        try:
            if name:
                read(name)
        except PinyonError as error:
            faults.append(f"{option}: {error.message}")
    return faults


def option_faults(given: Mapping[str, object], defaults: Mapping[str, object]) -> list[str]:
    """Returns a sentence for each option of ``up`` without effect, and one for a host that would be refused.

    Both mappings are from names of options to values, as argparse has them.
    """

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
