"""What a request on instances of ours is routed by."""

from __future__ import annotations

from pinyon.frontdoor.instances.ask import Ask
from pinyon.frontdoor.served_models import ServedModels
from pinyon.routing.routing_keys import keys_of_blocks, routing_root, token_keys
from pinyon.routing.target_policy import Routed

ROOTS_MAX = 4096


class Routing:
    """What requests are routed by: keys of their prompts, and whose they are. Keys start from ``secret``, the
    cluster's."""

    def __init__(self, models: ServedModels, secret: bytes) -> None:
        self._models = models
        self._secret = secret
        self._roots: dict[tuple[str, str, str], bytes] = {}

    def routed(self, ask: Ask) -> Routed:
        """Returns what the target of a request is chosen by. It is remembered of every request, whoever chooses, so it
        must cost little."""
        whose = ask.request_class
        key = whose.session or whose.user
        return Routed(self._keys(ask), f"{whose.tenant}/{key}" if key else "")

    def _keys(self, ask: Ask) -> bytes:
        """Where a conductor chooses and there are no other regions, those that are made for it will do."""
        if not self._models.selective and ask.block_keys:
            return keys_of_blocks(ask.block_keys)
        whose = ask.request_class
        name = ask.model, whose.tenant, whose.cache_salt
        root = self._roots.get(name)
        if root is None:
            if len(self._roots) >= ROOTS_MAX:
                self._roots.clear()
            root = self._roots[name] = routing_root(ask.model, whose.tenant, self._secret, whose.cache_salt)
        return token_keys(root, ask.tokens_le32)
