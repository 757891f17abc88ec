"""Tenants' quotas: the bytes of a node's memory that a tenant may hold, and which of its objects go first. Pure."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterable, Mapping

from pinyon.core.errors import InvalidArgument
from pinyon.store.allocator import OffsetAllocator
from pinyon.store.kv_object import KvObject

OTHERS = "*"
"""The name whose quota each tenant has that is not named."""
_QUOTA = re.compile(r"(.*)=(\d{1,9})(%?)")


def parse_quotas(text: str) -> dict[str, int | float]:
    """Parses ``NAME=MIB`` or ``NAME=PERCENT%``, with commas between; returns bytes or shares of the pool by tenant.

    Raises :class:`InvalidArgument`."""
    quotas: dict[str, int | float] = {}
    for part in filter(None, map(str.strip, text.split(","))):
        found = _QUOTA.fullmatch(part)
        if found is None or found[1] in quotas or (found[3] and int(found[2]) > 100):
            raise InvalidArgument(f"{part!r} is no NAME=MIB or NAME=PERCENT%, once a name", field="tenant_quotas")
        quotas[found[1]] = int(found[2]) / 100 if found[3] else int(found[2]) << 20
    return quotas


class _Account(OrderedDict[bytes, KvObject]):
    """A tenant's objects that nobody reads, the one that was used longest ago first."""

    held = idle_bytes = 0
    """The bytes of all its objects, those being put among them, and of the idle ones."""


_NOTHING = _Account()


class TenantQuotas:
    """The accounts of the tenants with a quota: what each holds here, and in which order it would go.

    A quota in bytes is for the whole pool. A node enforces its part, by its share of the pool's capacity."""

    def __init__(self, quotas: Mapping[str, int | float], allocator: OffsetAllocator) -> None:
        self._quotas, self._allocator = quotas, allocator
        self.accounts: dict[str, _Account] = {}
        """The accounts of those that hold something here."""
        self.pool_bytes = 0
        """The capacity of all live nodes; as long as it is not known, this node counts as the only one."""
        self.evicted = dict.fromkeys(quotas, 0)
        """The objects that went because of a quota, by its name."""

    def limit(self, tenant: str) -> int | None:
        """Returns the bytes that the tenant may hold on this node; None: no quota."""
        quota, capacity = self._quotas.get(tenant, self._quotas.get(OTHERS)), self._allocator.capacity_bytes
        if isinstance(quota, float):
            return int(quota * capacity)
        return None if quota is None else quota * capacity // max(self.pool_bytes, capacity)

    def count(self, each: KvObject, change: int) -> None:
        """Counts an object that got room (``change`` 1) or whose room is given back (-1)."""
        if self._quotas and self.limit(each.tenant) is not None:
            account = self.accounts.setdefault(each.tenant, _Account())
            account.held += change * self._allocator.rounded(each.size)
            if not account.held:
                del self.accounts[each.tenant]

    def idle(self, objects: Iterable[KvObject]) -> None:
        """Takes note of objects that nobody reads any more, in the order in which they should go."""
        for each in objects if self._quotas else ():
            if (account := self.accounts.get(each.tenant)) is not None:
                account[each.key] = each
                account.idle_bytes += self._allocator.rounded(each.size)

    def busy(self, objects: Iterable[KvObject]) -> None:
        """Takes note of objects that are read from now on, or go."""
        for each in objects if self._quotas else ():
            account = self.accounts.get(each.tenant)
            if account is not None and account.pop(each.key, None) is not None:
                account.idle_bytes -= self._allocator.rounded(each.size)

    def excess(self, tenant: str, size_bytes: int = 0) -> list[KvObject] | None:
        """Returns the idle objects that must go, the coldest first, before the tenant holds so many bytes more.

        None if it cannot: the objects that may not go take its quota."""
        if not self._quotas:
            return []
        limit, account = self.limit(tenant), self.accounts.get(tenant, _NOTHING)
        over = 0 if limit is None else account.held + self._allocator.rounded(size_bytes) - limit
        if size_bytes and over > account.idle_bytes:
            return None
        going: list[KvObject] = []
        for each in account.values():
            if over <= 0:
                break
            going.append(each)
            over -= self._allocator.rounded(each.size)
        return going

    def label(self, tenant: str) -> str:
        """Returns the name of the quota that counts for a tenant who has one."""
        return tenant if tenant in self._quotas else OTHERS

    def held_bytes(self) -> dict[str, int]:
        """Returns the bytes held under each quota, by its name."""
        held = dict.fromkeys(self._quotas, 0)
        for tenant, account in list(self.accounts.items()):
            held[self.label(tenant)] += account.held
        return held

    def limits(self) -> dict[str, int]:
        """Returns the bytes that each quota allows a tenant on this node, by its name."""
        return {name: self.limit(name) or 0 for name in self._quotas}
