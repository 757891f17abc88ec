"""The common parts of both sides of the connector: settings, credentials, and the event loop of the process."""

from __future__ import annotations

import time
from typing import Any

from pinyon.core.errors import InvalidArgument
from pinyon.runtime.identity import WORKER
from pinyon.runtime.logging import get_logger, show_logs
from pinyon.runtime.loop_thread import shared_thread
from pinyon.runtime.security import Security, load_watched_security
from pinyon.runtime.watch import FileWatch
from pinyon.vllm.settings import VllmSettings, load_vllm_settings

TRIED = ("0.24", "0.29", "0.32")
"""The minor versions of vLLM that the tests were run with."""
KINDS = frozenset(("FullAttentionSpec", "MLAAttentionSpec"))
"""The kinds of KV that only the tokens before it make, and whose blocks stay for a whole prompt."""
START_S = 30.0

_log = get_logger("vllm")


class ConnectorParts:
    """The common parts. :meth:`failed` is called for each exception of one of vLLM's calls."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any) -> None:
        """Raises :class:`InvalidArgument` for settings and models that cannot be used."""
        transfer = vllm_config.kv_transfer_config
        self.settings: VllmSettings = load_vllm_settings(transfer.kv_connector_extra_config or {})
        show_logs(self.settings.log_level)
        groups = kv_cache_config.kv_cache_groups
        if len(groups) != 1:
            kinds = ", ".join(sorted({type(group.kv_cache_spec).__name__ for group in groups}))
            raise InvalidArgument(
                f"this model has {len(groups)} groups of KV ({kinds}), and only models with one are supported: serve "
                "it without the connector, with the agent beside it"
            )
        spec = groups[0].kv_cache_spec
        for each in getattr(spec, "kv_cache_specs", {"": spec}).values():
            kind = type(each).__name__
            if kind not in KINDS or getattr(each, "non_causal", False):
                raise InvalidArgument(f"this model's KV is of the kind {kind}, which other prompts cannot reuse")
        parallel = vllm_config.parallel_config
        for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
            if getattr(parallel, name, 1) > 1:
                raise InvalidArgument(f"{name} of more than 1 is not supported: a block's KV is spread over ranks")
        if getattr(transfer, "kv_load_failure_policy", "recompute") != "recompute":
            raise InvalidArgument(
                'give "kv_load_failure_policy": "recompute" in --kv-transfer-config, or requests fail where a block '
                "does not come"
            )
        self.group = groups[0]
        self.thread = shared_thread()
        self._files = FileWatch()
        loading = load_watched_security(self.settings, WORKER, self._files)
        self.security: Security = self.thread.submit(loading).result(START_S)
        self.ranks = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
        self.data_rank: int = parallel.data_parallel_rank
        self.clock = time.monotonic

    def failed(self, method: str) -> None:
        """Logs the present exception."""
        _log.exception(f"{method} failed; the engine goes on without")


def vllm_version() -> str:
    """Returns vLLM's version, and warns if the connector was never tried with it."""
    import vllm

    version = str(vllm.__version__)
    if not any(version.startswith(f"{tried}.") for tried in TRIED):
        _log.warning("this connector was tried with vLLM %s, and this is %s", ", ".join(TRIED), version)
    return version
