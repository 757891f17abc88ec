"""The maker of the servers that requests go to by HTTP: with the settings' limits, API keys and authorities."""

from __future__ import annotations

import ssl
from collections.abc import Iterable

from pinyon.core.errors import InvalidArgument
from pinyon.frontdoor.upstreams.connection import ConnectionLimits
from pinyon.frontdoor.upstreams.server import Server
from pinyon.frontdoor.upstreams.url import UpstreamKeys, UpstreamUrl, parse_upstreams, read_upstream_keys
from pinyon.runtime.logging import get_logger
from services.lb.settings import LbSettings

_log = get_logger("lb.upstreams")


class ServerMaker:
    """The maker. With ``--upstream``, the file's key for all servers is for those that it names. With a conductor, it
    is for the servers of all instances, for which the conductor vouches."""

    def __init__(self, settings: LbSettings) -> None:
        """Reads the API keys. Raises :class:`InvalidArgument`."""
        self._settings = settings
        self.keys = read_upstream_keys(settings.upstream_api_key_file)
        self.named = frozenset(map(str, parse_upstreams(settings.upstream))) if settings.upstream else frozenset()
        self._tls: ssl.SSLContext | None = None

    def make(self, url: UpstreamUrl) -> Server:
        """Returns a server, whether the settings name it or not."""
        settings = self._settings
        if url.tls and self._tls is None:
            self._tls = _tls(settings.upstream_ca_file)
        limits = ConnectionLimits(
            settings.upstream_connect_s, settings.upstream_keep_alive_s, settings.upstream_stall_s
        )
        return Server(
            url, limits, settings.upstream_connections, settings.upstream_capacity, self._key_of(str(url)), self._tls,
            settings.upstream_sharers,
        )  # fmt: skip

    def use_keys(self, keys: UpstreamKeys, servers: Iterable[Server]) -> None:
        """Makes these servers, and all later ones, use these API keys from now on."""
        self.keys = keys
        for server in servers:
            server.use_key(self._key_of(server.name))

    def _key_of(self, server: str) -> str:
        """Returns the API key for a server; empty if there is none."""
        own = server in self.named or not self.named
        key = self.keys.of(server, own=own)
        if not key and not own and self.keys.default:
            _log.warning("%s is shown no API key: neither --upstream nor the key file names it", server)
        return key


def _tls(ca_file: str) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=ca_file or None)
    except OSError as error:  # includes ssl's errors
        raise InvalidArgument(f"cannot be used: {error.strerror or error}", field="upstream_ca_file") from None
    context.set_alpn_protocols(["http/1.1"])
    return context
