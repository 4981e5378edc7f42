"""``TierKVConnector``: what vLLM sees. Dispatches to the scheduler half or the worker half, and lets nothing raise.

Start-up faults raise (a bad setting is to be seen at once). On the serving path an unforeseen exception is logged and
answered with "nothing cached"; after it the half serves no more, because its state can no longer be trusted.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)

try:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
except ImportError:  # before 0.30
    KVConnectorTransferResults = None

from tierkv.config import EngineConfig
from tierkv_connector.compat import check_supported
from tierkv_connector.metadata import TierKVMetadata, TierKVWorkerMetadata
from tierkv_connector.scheduler import Scheduler
from tierkv_connector.worker import Worker

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("tierkv")

F = TypeVar("F", bound=Callable[..., Any])


def guarded(default: Callable[[], Any]) -> Callable[[F], F]:
    """Make a method of the serving path answer ``default()`` where it would raise, and stop the half."""

    def decorate(method: F) -> F:
        @functools.wraps(method)
        def call(self: TierKVConnector, *args: Any, **kwargs: Any) -> Any:
            if self._broken:
                return default()
            try:
                return method(self, *args, **kwargs)
            except Exception:
                self._break(method.__name__)
                return default()

        return call  # type: ignore[return-value]

    return decorate


class TierKVConnector(KVConnectorBase_V1):
    """vLLM's connector (``kv_role="kv_both"``). See :class:`tierkv.config.EngineConfig` for its options."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        _log_like_vllm()
        check_supported(vllm_config)
        config = EngineConfig.parse(vllm_config.kv_transfer_config.kv_connector_extra_config or {})
        self._broken = False
        self._stranded: list[str] = []
        self._sched: Scheduler | None = None
        self._work: Worker | None = None
        if role == KVConnectorRole.SCHEDULER:
            self._sched = Scheduler(config, vllm_config, kv_cache_config)
        else:
            self._work = Worker(config, vllm_config, kv_cache_config)

    def _break(self, where: str) -> None:
        self._broken = True
        logger.exception("TierKV failed in %s and caches nothing more in this process; serving goes on", where)

    @property
    def requires_kv_delivery(self) -> bool:
        """A cache delivers nothing that must arrive: a dropped save is a miss later."""
        return False

    # -- worker half

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        assert self._work is not None
        self._work.register_kv_caches(kv_caches)

    @guarded(lambda: None)
    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        if self._work and isinstance(kv_connector_metadata, TierKVMetadata):
            self._work.before_forward(kv_connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        metadata = self._connector_metadata
        if self._work and isinstance(metadata, TierKVMetadata):
            self._work.start_loads(metadata)

    def wait_for_layer_load(self, layer_name: str) -> None:
        return

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        return

    @guarded(lambda: None)
    def wait_for_save(self) -> None:
        metadata = self._connector_metadata
        if self._work and isinstance(metadata, TierKVMetadata):
            self._work.after_forward(metadata)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        return None, (self._work.take_loaded() if self._work else None) or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        loaded = self._work.take_loaded() if self._work else set()
        failed = self._work.take_failed() if self._work else set()
        return KVConnectorTransferResults(finished_recving=loaded, failed_recving=failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._work.take_bad_blocks() if self._work else set()

    @guarded(lambda: None)
    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        return self._work.take_report() if self._work else None

    # -- scheduler half

    @guarded(lambda: None)
    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        if self._sched:
            self._sched.bind_block_pool(gpu_block_pool)

    @guarded(lambda: None)
    def on_new_request(self, request: Any) -> None:
        if self._sched:
            self._sched.on_new_request(request)

    @guarded(lambda: (0, False))
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        assert self._sched is not None
        return self._sched.get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """vLLM has given blocks out for a load, which must be reported whatever happens: a fault fails the load."""
        assert self._sched is not None
        try:
            if not self._broken:
                self._sched.update_state_after_alloc(request, blocks, num_external_tokens)
                return
        except Exception:
            self._break("update_state_after_alloc")
        if num_external_tokens:
            self._stranded.append(request.request_id)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        metadata = self._build_metadata(scheduler_output)
        metadata.stranded, self._stranded = self._stranded, []
        return metadata

    @guarded(TierKVMetadata)
    def _build_metadata(self, scheduler_output: Any) -> TierKVMetadata:
        assert self._sched is not None
        return self._sched.build_connector_meta(scheduler_output)

    @guarded(lambda: None)
    def update_connector_output(self, connector_output: Any) -> None:
        if self._sched:
            report = connector_output.kv_connector_worker_meta
            self._sched.update_connector_output(
                set(connector_output.finished_recving or ()),
                report if isinstance(report, TierKVWorkerMetadata) else None,
            )

    @guarded(lambda: (False, None))
    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return False, self._sched.request_finished(request) if self._sched else None

    @guarded(lambda: False)
    def has_pending_push_work(self) -> bool:
        return self._sched is not None and self._sched.has_pending_stores()

    @guarded(lambda: True)
    def reset_cache(self) -> bool | None:
        if self._sched:
            self._sched.reset_cache()
        return True

    # -- both

    def shutdown(self) -> None:
        for half in (self._sched, self._work):
            if half:
                half.close()


def _log_like_vllm() -> None:
    """Show our log lines beside vLLM's, in its format, unless the user set our logger up."""
    source = logging.getLogger("vllm")
    if not logger.handlers and source.handlers:
        for handler in source.handlers:
            logger.addHandler(handler)
        logger.setLevel(source.level or logging.INFO)
        logger.propagate = False
