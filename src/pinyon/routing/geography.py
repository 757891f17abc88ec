"""Law and contracts: which region may send requests to which (SkyWalker §4.1, §7). Load never overrides them.

There are three allow lists, and a request goes only where all of them let it:

- the request's own (and its API key's): names of regions, or of tags that regions have;
- its tenant's, where one is written down;
- the sending region's, by the first rule that speaks of it.

A region's *tags* say what it is: ``eu``, ``gdpr``. A *pattern* is a region's name, a tag, or ``*``."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pinyon.core.errors import InvalidArgument
from pinyon.core.request import check_geographies

EVERYONE = "*"
REGIONS_MAX = 256
RULES_MAX = 256
TENANTS_MAX = 65_536


class Verdict(NamedTuple):
    """An answer with its ``reason``, which is one sentence, also where the answer is yes."""

    allowed: bool
    reason: str


_FREE = Verdict(True, "nothing speaks against it")


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule that lets regions matching ``senders`` send to regions matching ``receivers``, and to no others."""

    senders: tuple[str, ...]
    receivers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Geography:
    """The rules, the allow lists of tenants, and the ``tags`` of regions by name; a region not listed has none.

    A region that no rule speaks of may send anywhere."""

    tags: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    rules: tuple[Rule, ...] = ()
    tenants: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def serves(self, region: str, geographies: Collection[str], tenant: str) -> Verdict:
        """Returns whether a request may be served in a region at all, including the one it came to."""
        if not geographies and tenant not in self.tenants:
            return _FREE
        if geographies and not self._speaks_of(geographies, region):
            return Verdict(False, f"the request may be served in {_listed(geographies)} only")
        allowed = self.tenants.get(tenant)
        if allowed is not None and not self._speaks_of(allowed, region):
            return Verdict(False, f"tenant {tenant!r} may be served in {_listed(allowed)} only")
        return _FREE

    def sends(self, sender: str, receiver: str) -> Verdict:
        """Returns whether a region's requests may go to another region."""
        if sender == receiver:
            return Verdict(True, "it is the region the request came to")
        for rule in self.rules:
            if self._speaks_of(rule.senders, sender):
                said = f"{_listed(rule.senders)} may send to {_listed(rule.receivers)}"
                if self._speaks_of(rule.receivers, receiver):
                    return Verdict(True, f"a rule says: {said}")
                return Verdict(False, f"a rule says: {said} only")
        return Verdict(True, f"no rule speaks of {sender}")

    def may(self, sender: str, receiver: str, geographies: Collection[str], tenant: str) -> Verdict:
        """Returns whether a request that came to ``sender`` may go to ``receiver`` and be served there."""
        verdict = self.sends(sender, receiver)
        return self.serves(receiver, geographies, tenant) if verdict.allowed else verdict

    def _speaks_of(self, patterns: Collection[str], region: str) -> bool:
        if EVERYONE in patterns or region in patterns:
            return True
        return any(tag in patterns for tag in self.tags.get(region, ()))


ANYWHERE = Geography()


def parse_geography(document: Any) -> Geography:
    """Returns the geography in a file's JSON. Raises an :class:`InvalidArgument` that names what is wrong.

    The form is ``{"regions": {NAME: [TAG, …]}, "rules": [{"from": [PATTERN, …], "to": [PATTERN, …]}],
    "tenants": {TENANT: [PATTERN, …]}}``, each member optional."""
    document = _table(document, "the policy", ("regions", "rules", "tenants"))
    regions = _table(document.get("regions", {}), "regions")
    tenants = _table(document.get("tenants", {}), "tenants")
    rules = document.get("rules", [])
    if not isinstance(rules, list):
        raise InvalidArgument("rules must be a list", field="rules")
    if len(regions) > REGIONS_MAX or len(rules) > RULES_MAX or len(tenants) > TENANTS_MAX:
        raise InvalidArgument(
            f"at most {REGIONS_MAX} regions, {RULES_MAX} rules and {TENANTS_MAX} tenants may be named"
        )
    for name in regions:
        check_geographies((name,), "regions")
    tags = {name: _names(given, f"regions.{name}") for name, given in regions.items()}
    known = {EVERYONE, *tags}
    for names in tags.values():
        known.update(names)
    parsed = []
    for place, given in enumerate(rules):
        rule = _table(given, f"rules[{place}]", ("from", "to"))
        senders = _patterns(rule.get("from"), f"rules[{place}].from", known)
        parsed.append(Rule(senders, _patterns(rule.get("to"), f"rules[{place}].to", known)))
    allowed = {tenant: _patterns(given, f"tenants.{tenant}", known) for tenant, given in tenants.items()}
    return Geography(tags, tuple(parsed), allowed)


def _table(given: Any, what: str, known: Sequence[str] = ()) -> Mapping[str, Any]:
    if not isinstance(given, dict):
        raise InvalidArgument(f"{what} must be an object", field=what)
    unknown = [name for name in given if known and name not in known]
    if unknown:
        raise InvalidArgument(f"{what}: only {', '.join(known)} are known, not {', '.join(unknown)}", field=what)
    return given


def _names(given: Any, what: str) -> tuple[str, ...]:
    if not isinstance(given, list) or not all(isinstance(each, str) for each in given):
        raise InvalidArgument(f"{what} must be a list of strings", field=what)
    return check_geographies(tuple(given), what) if given else ()


def _patterns(given: Any, what: str, known: Collection[str]) -> tuple[str, ...]:
    """Returns the patterns. Raises for unknown names, lest a misspelt one make a rule that speaks of no region."""
    if not isinstance(given, list) or not given or not all(isinstance(each, str) for each in given):
        raise InvalidArgument(f"{what} must be a list of regions, tags or {EVERYONE!r}", field=what)
    unknown = [each for each in given if each not in known]
    if unknown:
        raise InvalidArgument(f"{what}: {', '.join(unknown)} is no region or tag of one", field=what)
    return tuple(given)


def _listed(names: Collection[str]) -> str:
    return ", ".join(["anywhere" if name == EVERYONE else name for name in names])
