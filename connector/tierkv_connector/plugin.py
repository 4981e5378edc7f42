"""The entry point of the group ``vllm.general_plugins``: vLLM loads it in every process."""

from __future__ import annotations

from tierkv.threads import remember_cores


def register() -> None:
    """Tell vLLM's factory about the connector, once a process."""
    remember_cores()
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if "TierKVConnector" not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector("TierKVConnector", "tierkv_connector.connector", "TierKVConnector")
