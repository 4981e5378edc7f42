"""The vLLM versions that TierKV is tested with. Imports nothing: tools read it where there is no vLLM."""

#: Minor versions (scripts/test-matrix runs the engine tests on each).
TESTED_VLLM = ("0.26", "0.27", "0.28", "0.29", "0.30", "0.31", "0.32", "0.33")
