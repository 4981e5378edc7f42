"""TierKV: a tiered KV-cache offload service for vLLM.

The core package: keys, layout, payload, host pool, policy, tiers, client and CLI. It imports neither
vllm nor torch; the connector (``tierkv_connector``) and the store server (``tierkv_server``) build on it.
"""

__version__ = "0.1.0"

__all__ = ["__version__"]
