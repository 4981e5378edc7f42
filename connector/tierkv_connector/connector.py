"""``TierKVConnector``: what vLLM sees. Dispatches to the scheduler half or the worker half, and lets nothing raise.

Start-up faults raise (a bad setting is to be seen at once). On the serving path an unforeseen exception is logged and
answered with "nothing cached"; after it the half serves no more, because its state can no longer be trusted.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

from tierkv.config import EngineConfig
from tierkv.errors import ConfigError
from tierkv_connector import weights
from tierkv_connector.compat import (
    BlockTables,
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
    check_supported,
    hit_sources,
    scheduled,
    warn_if_untested,
)
from tierkv_connector.metadata import TierKVMetadata, TierKVWorkerMetadata
from tierkv_connector.observer import Observer
from tierkv_connector.roles import Role
from tierkv_connector.scheduler import Scheduler
from tierkv_connector.stats import TierKVPromMetrics, TierKVStats
from tierkv_connector.worker import Worker

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("tierkv")

#: The connectors of this process's workers, by the engine's id.
_WORKERS: weakref.WeakValueDictionary[str, TierKVConnector] = weakref.WeakValueDictionary()

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


class TierKVConnector(KVConnectorBase_V1, SupportsHMA):
    """vLLM's connector. See :class:`tierkv.config.EngineConfig` for its options, and :mod:`.roles` for its roles."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        _log_like_vllm()
        check_supported(vllm_config)
        config = EngineConfig.parse(vllm_config.kv_transfer_config.kv_connector_extra_config or {})
        Role.of(vllm_config.kv_transfer_config.kv_role, config.decode_blocks)  # raises where the two do not go together
        self._broken = False
        self._claims: dict[str, tuple[list[int], int]] = {}  # of this step: blocks, and tokens that are claimed
        self._tables = BlockTables()
        self._sched: Scheduler | None = None
        self._work: Worker | None = None
        self._seen: Observer | None = None
        if role == KVConnectorRole.SCHEDULER:
            warn_if_untested()
            weights.watch()
            self._sched = Scheduler(config, vllm_config, kv_cache_config)
            self._seen = Observer(self._sched, vllm_config, self._sched.hash_tokens)
        else:
            self._be_the_only_one(vllm_config.kv_transfer_config.engine_id)
            self._work = Worker(config, vllm_config, kv_cache_config)

    def _be_the_only_one(self, engine_id: str) -> None:
        """Check that no other connector in this worker is one of ours.

        Raises:
            ConfigError: a MultiConnector has two.
        """
        other = _WORKERS.get(engine_id)
        if other is not None and other._work is not None:
            raise ConfigError(
                "a MultiConnector has TierKVConnector twice, and an engine has one host pool; leave one of them out: "
                "all tiers are behind one (shared_url, disk_dir)"
            )
        _WORKERS[engine_id] = self

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
    def unregister_kv_caches(self) -> None:
        """Called by vLLM from 0.33 on before a sleep takes the caches' memory."""
        if self._work:
            self._work.unregister_kv_caches()

    @guarded(lambda: None)
    def restore_kv_caches(self) -> None:
        """Called by vLLM from 0.33 on when the memory is there again."""
        if self._work:
            self._work.restore_kv_caches()

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
        if self._seen:
            self._seen.added(request)

    @guarded(lambda: (0, False))
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        assert self._sched is not None
        if self._seen:
            self._seen.asked(request, num_computed_tokens)
        return self._sched.get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """vLLM has given blocks out for a load, which must be reported whatever happens: a fault fails the load."""
        assert self._sched is not None
        if num_external_tokens:
            self._claims[request.request_id] = blocks.get_block_ids()[0], num_external_tokens
        try:
            if not self._broken:
                if self._seen:
                    self._seen.admitting(request, num_external_tokens)
                self._sched.update_state_after_alloc(request, blocks, num_external_tokens)
                if self._seen:
                    self._seen.admitted(request, num_external_tokens)
        except Exception:
            self._break("update_state_after_alloc")

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        metadata = self._build_metadata(scheduler_output)
        claims, self._claims = self._claims, {}
        if self._broken:
            self._strand(metadata, claims, dict(scheduled(scheduler_output)))
        return metadata

    def _strand(
        self, metadata: TierKVMetadata, claims: dict[str, tuple[list[int], int]], steps: dict[str, int]
    ) -> None:
        """Have loads reported as failed that are claimed and will not be made. Before 0.30 their blocks say so.

        Args:
            metadata: of this step.
            claims: blocks of each request's first KV cache group, and tokens claimed.
            steps: the requests of this step, and how many tokens of each are said to be computed.
        """
        size = self._kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
        for req_id, (ids, num_tokens) in claims.items():
            stop = -(-steps[req_id] // size) if req_id in steps else len(ids)
            blocks = ids[max(0, stop - -(-num_tokens // size)) : stop]
            if req_id in steps:
                metadata.lost += blocks
            else:
                metadata.stranded[req_id] = tuple(blocks)

    @guarded(TierKVMetadata)
    def _build_metadata(self, scheduler_output: Any) -> TierKVMetadata:
        assert self._sched is not None
        with self._tables.shown(scheduler_output):
            metadata = self._sched.build_connector_meta(scheduler_output)
        if self._seen:
            self._seen.stepped()
        return metadata

    @guarded(lambda: None)
    def update_connector_output(self, connector_output: Any) -> None:
        if self._sched:
            meta = connector_output.kv_connector_worker_meta
            loaded, report = set(connector_output.finished_recving or ()), None
            if isinstance(meta, TierKVWorkerMetadata):
                report = meta
            if getattr(connector_output, "invalid_block_ids", None):
                self._sched.spill.spoil()
            self._sched.update_connector_output(loaded, report)
            if self._seen:
                self._seen.ended(loaded, report)

    @guarded(lambda: (False, None))
    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        if self._seen:
            self._seen.finished(request)
        return False, self._sched.request_finished(request) if self._sched else None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """What vLLM calls instead, because models with several KV cache groups are served."""
        return self.request_finished(request, block_ids[0] if block_ids else [])

    @guarded(dict)
    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[Any, int]:
        """Called by vLLM from 0.32 on, right after :meth:`update_state_after_alloc`."""
        if self._seen is None or not num_external_tokens:
            return {}
        return hit_sources(self._seen.sources(request, num_external_tokens))

    @guarded(tuple)
    def take_events(self) -> Iterable[Any]:
        return self._seen.take_events() if self._seen else ()

    @guarded(lambda: None)
    def get_kv_connector_stats(self) -> TierKVStats | None:
        """What was counted since the last call. The worker half counts nothing: it reports to the scheduler half."""
        return self._seen.take_stats() if self._seen else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> TierKVStats:
        return TierKVStats(data=data) if data else TierKVStats()

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> TierKVPromMetrics:
        return TierKVPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    @guarded(lambda: False)
    def has_pending_push_work(self) -> bool:
        return self._sched is not None and self._sched.has_pending_stores()

    @guarded(lambda: True)
    def reset_cache(self) -> bool | None:
        if self._sched:
            self._sched.reset_cache()
        return True

    @guarded(lambda: None)
    def weights_change(self) -> None:
        """Somebody is about to change the engine's weights (:mod:`tierkv_connector.weights`)."""
        if self._sched:
            self._sched.weights_change()

    @guarded(lambda: None)
    def weights_version(self, version: str) -> None:
        """vLLM was told what the engine's weights are called."""
        if self._sched:
            self._sched.weights_version(version)

    # -- both

    def shutdown(self) -> None:
        for half in (self._sched, self._work):
            if half:
                half.close()
        self._work = None


def _log_like_vllm() -> None:
    """Show our log lines beside vLLM's, in its format, unless the user set our logger up."""
    source = logging.getLogger("vllm")
    if not logger.handlers and source.handlers:
        for handler in source.handlers:
            logger.addHandler(handler)
        logger.setLevel(source.level or logging.INFO)
        logger.propagate = False
