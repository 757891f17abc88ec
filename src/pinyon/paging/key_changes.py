"""The keys that were stored and removed since the last drain."""

from __future__ import annotations

from collections.abc import Sequence


class KeyChanges:
    """The net changes of a set of keys: a key that came and went between two drains, or went and came, is left out.

    So the table never holds more keys than exist now plus those that existed at the last drain, however long nobody
    drains it. The caller adds only keys that are not in the set, and removes only those that are."""

    def __init__(self) -> None:
        self._stored: dict[bytes, None] = {}
        self._removed: dict[bytes, None] = {}
        self._changed: dict[bytes, None] = {}

    def change(self, key: bytes) -> None:
        """Notes that what is known of a key in the set has changed."""
        if key not in self._stored:
            self._changed[key] = None

    def add(self, key: bytes) -> None:
        if key in self._removed:
            del self._removed[key]
            self._changed[key] = None
        else:
            self._stored[key] = None

    def add_all(self, keys: Sequence[bytes]) -> None:
        if self._removed.keys().isdisjoint(keys):
            self._stored.update(dict.fromkeys(keys))
        else:
            for key in keys:
                self.add(key)

    def remove(self, key: bytes) -> None:
        self._changed.pop(key, None)
        if key in self._stored:
            del self._stored[key]
        else:
            self._removed[key] = None

    def remove_all(self, keys: Sequence[bytes]) -> None:
        if self._stored.keys().isdisjoint(keys) and not self._changed:
            self._removed.update(dict.fromkeys(keys))
        else:
            for key in keys:
                self.remove(key)

    def drain(self, *, changed: bool = False) -> tuple[list[bytes], list[bytes]]:
        """Returns ``(stored, removed)`` since the last call, each in the order of the changes.

        With ``changed``, the keys that changed or went and came follow those that were stored."""
        stored, removed = list(self._stored), list(self._removed)
        if changed:
            stored += self._changed
        for each in (self._stored, self._removed, self._changed):
            each.clear()
        return stored, removed

    def __bool__(self) -> bool:
        return bool(self._stored or self._removed or self._changed)
