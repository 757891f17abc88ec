"""The connector with a record of vLLM's calls: one line for each, in the file that ``PINYON_TRACED`` names."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

from launch.vllm import VERSION
from pinyon.vllm import PinyonConnector as Plain
from tests.vllm_double import recorded


def _traced(name: str) -> Callable[..., Any]:
    plain = getattr(Plain, name)

    @functools.wraps(plain)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        subject = next((each.request_id for each in args if hasattr(each, "request_id")), "-")
        with open(os.environ["PINYON_TRACED"], "a") as file:
            file.write(f"{self.role.name} {name} {subject}\n")
        return plain(self, *args, **kwargs)

    return call


NAMES = [*recorded(VERSION)["KVConnectorBase_V1"], "clear_connector_metadata"]
PinyonConnector = type("PinyonConnector", (Plain,), {name: _traced(name) for name in NAMES})
