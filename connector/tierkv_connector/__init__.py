"""The vLLM connector of TierKV: ``kv_connector="TierKVConnector"``.

Found by vLLM through its plugin entry point, or by ``kv_connector_module_path="tierkv_connector"``. The class is
imported when it is first asked for: the API process imports this package too, and need not pay for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tierkv_connector.connector import TierKVConnector

__all__ = ["TierKVConnector"]


def __getattr__(name: str) -> Any:
    if name == "TierKVConnector":
        from tierkv_connector.connector import TierKVConnector

        return TierKVConnector
    raise AttributeError(name)
