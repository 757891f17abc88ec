"""The tables of docs/use/configuration.md: ``python -m tools.settings_page`` writes them anew from the settings.

A table stands between ``<!-- settings: NAME -->`` and ``<!-- end -->``. NAME is ``every service``, ``transfer``, a
service, or ``policies``."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from pinyon.batching import BATCHING_POLICIES
from pinyon.batching.service_order import SERVICE_ORDERS
from pinyon.core.policies import Registry
from pinyon.eviction import EVICTION_POLICIES
from pinyon.placement.policies import PLACEMENT_POLICIES
from pinyon.routing.policies import ROUTING_POLICIES
from pinyon.routing.pushing import PUSHING_RULES
from pinyon.runtime.setting_sources import default_in_words, option
from pinyon.runtime.settings import ServiceSettings
from pinyon.runtime.transfer_engine import TransferSettings
from services.agent.settings import AgentSettings
from services.conductor.settings import ConductorSettings
from services.controller.settings import ControllerSettings
from services.kvstore.settings import KvStoreSettings
from services.lb.settings import LbSettings
from services.worker.settings import WorkerSettings

PAGE = Path(__file__).resolve().parent.parent / "docs" / "use" / "configuration.md"

SERVICES: tuple[type[ServiceSettings], ...] = (
    AgentSettings,
    ConductorSettings,
    ControllerSettings,
    KvStoreSettings,
    LbSettings,
    WorkerSettings,
)
POLICIES: dict[str, Registry] = {
    "conductor `--placement`": PLACEMENT_POLICIES,
    "load balancer `--routing`": ROUTING_POLICIES,
    "load balancer `--pushing`": PUSHING_RULES,
    "worker, store node `--eviction`": EVICTION_POLICIES,
    "worker `--batching`": BATCHING_POLICIES,
    "worker `--service-order`": SERVICE_ORDERS,
}
TABLE = re.compile(r"(<!-- settings: ([a-z ]+) -->\n).*?(<!-- end -->)", re.DOTALL)
LINK = re.compile(r"docs/(use|design)/([\w-]+\.md)")


def tables() -> dict[str, str]:
    """Returns each table by its name."""
    every, transfer = set(ServiceSettings.model_fields), set(TransferSettings.model_fields)
    found = {
        "every service": _table(ServiceSettings, set()),
        "transfer": _table(TransferSettings, every),
        "policies": _policies(),
    }
    for cls in SERVICES:
        found[cls.service()] = _table(cls, transfer if issubclass(cls, TransferSettings) else every)
    return found


def with_tables(text: str) -> str:
    """Returns the page with its tables as the settings are now. Raises ``KeyError`` for a table of no such name."""
    known = tables()
    return TABLE.sub(lambda match: match[1] + known[match[2]] + match[3], text)


def _table(cls: type[ServiceSettings], left_out: set[str]) -> str:
    """Returns the settings of a class, in the groups of its ``--help-all``; everyday ones are bold."""
    everyday = cls.everyday_fields()
    rows = ["| setting | default | meaning |", "|---|---|---|"]
    for title, names in cls.grouped_fields().items():
        own = [name for name in names if name not in left_out]
        rows += [f"| *{title}* | | |"] * bool(own)
        for name in own:
            field = cls.model_fields[name]
            shown = f"**`{option(name)}`**" if name in everyday else f"`{option(name)}`"
            rows.append(f"| {shown} | {_default(name, field)} | {_meaning(field)} |")
    return "\n".join(rows) + "\n"


def _default(name: str, field: FieldInfo) -> str:
    words = default_in_words(name, field)
    return f"`{words}`" if isinstance(field.default, str) and field.default else words


def _meaning(field: FieldInfo) -> str:
    text = (field.description or "").replace("|", "\\|").replace("*", "\\*")
    text = LINK.sub(lambda match: _linked(match[1], match[2]), text)
    if get_origin(field.annotation) is Literal:
        *most, last = (f"`{word}`" for word in get_args(field.annotation))
        text += f" ({', '.join(most)} or {last})"
    return text


def _linked(folder: str, file: str) -> str:
    return f"[{file}]({file if folder == PAGE.parent.name else f'../{folder}/{file}'})"


def _policies() -> str:
    rows = ["| setting | policies, with their options' defaults |", "|---|---|"]
    for setting, registry in POLICIES.items():
        rows.append(f"| {setting} | `{registry.described}` |")
    return "\n".join(rows) + "\n"


def main(argv: list[str]) -> int:
    """Writes the page; with ``--check``, returns 1 if it is not as it would be written."""
    text = PAGE.read_text(encoding="utf-8")
    if argv == ["--check"]:
        return int(with_tables(text) != text)
    PAGE.write_text(with_tables(text), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
