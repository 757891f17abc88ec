"""The connector by which stock vLLM becomes an instance of the suite: ``--kv-transfer-config`` names this module.

vLLM makes one object in its scheduler and one in each worker, and imports the class in its server's process too. So
this module imports no more than vLLM's interface, and each side imports its own parts. Whatever fails here must not
raise into vLLM, which would end the server: each method has an answer that only costs a recomputation."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole

T = TypeVar("T")
Method = TypeVar("Method", bound=Callable[..., Any])


def guarded(make_answer: Callable[[], Any]) -> Callable[[Method], Method]:
    """Returns a decorator: ``make_answer`` makes the answer after an exception, which is logged, and before the side
    of the connector is there."""

    def around(method: Method) -> Method:
        @functools.wraps(method)
        def call(self: PinyonConnector, *args: Any, **kwargs: Any) -> Any:
            try:
                return make_answer() if self._parts.side is None else method(self, *args, **kwargs)
            except Exception:
                self._parts.failed(method.__name__)
                return make_answer()

        return call  # type: ignore[return-value]

    return around


def _nothing() -> None:
    return None


def _no_jobs() -> Any:
    from pinyon.vllm.jobs import StepJobs

    return StepJobs()


class PinyonConnector(KVConnectorBase_V1):  # type: ignore[misc]  # vLLM is not there where types are checked
    """The connector. Its settings are ``kv_connector_extra_config`` or ``PINYON_VLLM_...`` variables."""

    requires_kv_delivery = False
    """A save that is lost is only a miss."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        """Raises :class:`ValueError` for settings and models that cannot be used: at its start vLLM shows why."""
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self._failed_blocks: set[int] = set()
        from pinyon.core.errors import PinyonError

        try:
            if role is KVConnectorRole.SCHEDULER:
                from pinyon.vllm.scheduler_parts import SchedulerParts

                self._parts: Any = SchedulerParts(vllm_config, kv_cache_config)
            else:
                from pinyon.vllm.worker_parts import WorkerParts

                self._parts = WorkerParts(vllm_config, kv_cache_config)
        except PinyonError as error:
            raise ValueError(f"PinyonConnector: {error.message}") from error

    # -- the scheduler's side

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self._parts.bind(gpu_block_pool)

    def set_xfer_handshake_metadata(self, metadata: dict[int, Any]) -> None:
        self._parts.begin([metadata[rank] for rank in sorted(metadata)])

    set_xfer_handshake_metadata_pp_aware = set_xfer_handshake_metadata

    @guarded(_nothing)
    def on_new_request(self, request: Any) -> None:
        self._parts.side.arrived(request)

    @guarded(lambda: (0, False))
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._parts.side.matched(request, num_computed_tokens)  # type: ignore[no-any-return]

    @guarded(_nothing)
    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        try:
            self._parts.side.allocated(request, blocks, num_external_tokens)
        except Exception:  # the request waits for a load, and would wait for ever
            self._parts.side.not_allocated(request, blocks, num_external_tokens)
            raise

    @guarded(_no_jobs)
    def build_connector_meta(self, scheduler_output: Any) -> Any:
        try:
            return self._parts.side.step(scheduler_output)
        except Exception:  # jobs that were made before go on
            self._parts.failed("build_connector_meta")
            return self._parts.side.step_failed()

    @guarded(_nothing)
    def update_connector_output(self, connector_output: Any) -> None:
        self._parts.side.news(connector_output)

    @guarded(lambda: (False, None))
    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        self._parts.side.ended(request)
        return False, None

    @guarded(lambda: False)
    def has_pending_push_work(self) -> bool:
        return self._parts.side.saving  # type: ignore[no-any-return]

    @guarded(lambda: False)
    def has_pending_block_frees(self) -> bool:
        return self._parts.side.frees  # type: ignore[no-any-return]

    @guarded(lambda: False)
    def reset_cache(self) -> bool | None:
        return self._parts.reset()  # type: ignore[no-any-return]

    # -- the workers' side

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        from pinyon.core.errors import PinyonError

        try:
            self._parts.register(kv_caches)
        except PinyonError as error:
            raise ValueError(f"PinyonConnector: {error.message}") from error

    def get_handshake_metadata(self) -> Any:
        return self._parts.facts

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        super().bind_connector_metadata(connector_metadata)
        self._begin(connector_metadata)

    @guarded(_nothing)
    def _begin(self, jobs: Any) -> None:
        self._parts.side.begin(jobs)

    @guarded(_nothing)
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._parts.side.load(self._get_connector_metadata())

    def wait_for_layer_load(self, layer_name: str) -> None:
        return

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        return

    @guarded(_nothing)
    def wait_for_save(self) -> None:
        self._parts.side.end(self._get_connector_metadata())

    @guarded(lambda: (None, None))
    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        received, self._failed_blocks = self._parts.side.take()
        return None, received or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    @guarded(_nothing)
    def build_connector_worker_meta(self) -> Any:
        return self._parts.side.news()

    # -- both

    def shutdown(self) -> None:
        try:
            self._parts.close()
        except Exception:
            self._parts.failed("shutdown")
