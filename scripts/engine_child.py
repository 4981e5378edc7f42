"""A vLLM engine in a process of its own, for the demo and the benchmarks: obeys JSON lines, answers in JSON lines.

    {"op": "ask", "prompt": [token ids] | "messages": [...], "max_tokens": 32}
        -> {"ttft_s", "total_s", "num_prompt", "num_cached", "tokens", "logprobs", "text"}
    {"op": "many", "prompts": [[token ids], ...], "max_tokens": 1}  -> {"total_s", "num_tokens"}
    {"op": "reset_gpu"}                                             -> {"ok": true}

The engine's own log goes to standard error.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any


def main() -> int:
    """Start the engine that the first line describes, then obey."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM writes to standard output too
    settings = json.loads(sys.stdin.readline())
    from vllm import LLM

    engine = Engine(LLM(**settings))
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        if command["op"] == "quit":
            break
        print(json.dumps(getattr(engine, command.pop("op"))(**command)), file=answers, flush=True)
    return 0


class Engine:
    """What a child does with its ``LLM``."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self._count = 0

    def ask(
        self, prompt: list[int] | None = None, messages: list[dict[str, str]] | None = None, max_tokens: int = 1
    ) -> dict[str, Any]:
        """Run one prompt alone, greedily, and say when its first token came."""
        if messages is not None:
            prompt = self._chat_tokens(messages)
        assert prompt is not None
        began = time.perf_counter()
        self._add(prompt, max_tokens, logprobs=True)
        ttft_s, final = None, None
        while self._llm.llm_engine.has_unfinished_requests():
            for output in self._llm.llm_engine.step():
                if ttft_s is None and output.outputs and output.outputs[0].token_ids:
                    ttft_s = time.perf_counter() - began
                final = output
        assert final is not None
        answer = final.outputs[0]
        tokens = list(answer.token_ids)
        return {
            "ttft_s": ttft_s,
            "total_s": time.perf_counter() - began,
            "num_prompt": len(prompt),
            "num_cached": final.num_cached_tokens or 0,
            "tokens": tokens,
            "logprobs": [entry[t].logprob for t, entry in zip(tokens, answer.logprobs or [], strict=False)],
            "text": answer.text,
        }

    def many(self, prompts: list[list[int]], max_tokens: int = 1) -> dict[str, Any]:
        """Run prompts together and say how long all of them took."""
        began = time.perf_counter()
        for prompt in prompts:
            self._add(prompt, max_tokens, logprobs=False)
        while self._llm.llm_engine.has_unfinished_requests():
            self._llm.llm_engine.step()
        return {
            "total_s": time.perf_counter() - began,
            "num_tokens": sum(map(len, prompts)) + len(prompts) * max_tokens,
        }

    def reset_gpu(self) -> dict[str, Any]:
        """Empty vLLM's own prefix cache and nothing else."""
        return {"ok": bool(self._llm.reset_prefix_cache())}

    def _add(self, prompt: list[int], max_tokens: int, logprobs: bool) -> None:
        from vllm import SamplingParams

        self._count += 1
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, logprobs=0 if logprobs else None)
        if self._llm.model_config.skip_tokenizer_init:
            params.detokenize, params.ignore_eos = False, True
        self._llm.llm_engine.add_request(str(self._count), {"prompt_token_ids": prompt}, params)

    def _chat_tokens(self, messages: list[dict[str, str]]) -> list[int]:
        tokens = self._llm.get_tokenizer().apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        return list(tokens)


if __name__ == "__main__":
    sys.exit(main())
