"""vLLM with its prefix cache; alone, with KVBoost's connector, or with LMCache."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import loop

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
WORKER = "kvboost.connectors.vllm.worker.KVBoostWorker"
FORGET_S = 120.0
START_S = 120.0


class Vllm(loop.System):
    """vLLM's engine, step by step."""

    def __init__(self, settings: dict[str, Any], **arguments: Any) -> None:
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        # Cores instead of a number of threads: told a number, its scheduler takes as many, too.
        os.environ.pop("OMP_NUM_THREADS", None)
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{settings['num_threads'] - 1}")
        import vllm  # noqa: PLC0415  (reads the variables above)

        self._version, self._sampling = vllm.__version__, vllm.SamplingParams
        self._llm = vllm.LLM(
            settings["model"],
            dtype=DTYPES[settings["dtype"]],
            max_model_len=settings["max_tokens"],
            enable_prefix_caching=True,
            enforce_eager=settings.get("eager", True),
            **arguments,
        )
        self._engine = self._llm.llm_engine
        self._count = 0

    def versions(self) -> dict[str, str]:
        return {"vllm": self._version, **super().versions()}

    def forget(self) -> None:
        """Empty the prefix cache, once all blocks were given back."""
        self.rest()
        until = time.monotonic() + FORGET_S
        while not self._llm.reset_prefix_cache():
            if time.monotonic() > until:
                raise RuntimeError("vLLM does not empty its prefix cache")
            time.sleep(0.05)

    def ask(self, tokens: list[int], num_new: int) -> loop.Answer:
        started = time.perf_counter()
        name = self._add(tokens, num_new)
        return self._finish({name})[name].since(started)

    def traffic(self, requests: Sequence[loop.Request]) -> list[loop.Answer]:
        """All prompts join the batch as they come: between two steps."""
        started = time.perf_counter()
        names, first_at, done = list[str](), dict[str, float](), dict[str, loop.Answer]()
        while len(done) < len(requests):
            elapsed_s = time.perf_counter() - started
            while len(names) < len(requests) and requests[len(names)].at_s <= elapsed_s:
                coming = requests[len(names)]
                names.append(self._add(coming.tokens, coming.num_new))
            if len(names) > len(done):
                done |= self._step(first_at)
            else:
                time.sleep(max(0.0, requests[len(names)].at_s - elapsed_s))
        return [
            done[name].since(started + request.at_s)
            for name, request in zip(names, requests, strict=True)
        ]

    def rest(self) -> None:
        """Let two steps go by: connectors save with the one after a request's last."""
        for _ in range(2):
            self._finish({self._add([self._count % 100 + 100], 1)})

    def _add(self, tokens: list[int], num_new: int) -> str:
        self._count += 1
        name = f"prompt-{self._count}"
        sampling = self._sampling(
            temperature=0.0,
            max_tokens=num_new,
            ignore_eos=True,
            detokenize=False,
            extra_args=self._extra(),
        )
        self._engine.add_request(name, self._prompt(tokens), sampling)
        return name

    def _prompt(self, tokens: list[int]) -> dict[str, Any]:
        return {"prompt_token_ids": tokens}

    def _extra(self) -> dict[str, Any] | None:
        return None

    def _num_cached(self, output: Any) -> int | None:
        num_cached: int | None = output.num_cached_tokens
        return num_cached

    def _finish(self, names: set[str]) -> dict[str, loop.Answer]:
        first_at, done = dict[str, float](), dict[str, loop.Answer]()
        while not names <= done.keys():
            done |= self._step(first_at)
        return done

    def _step(self, first_at: dict[str, float]) -> dict[str, loop.Answer]:
        """Answers that ended in a step, by the clock; notes which had their first token in it."""
        outputs = self._engine.step()
        now = time.perf_counter()
        done = {}
        for output in outputs:
            name = output.request_id
            if output.outputs[0].token_ids:
                first_at.setdefault(name, now)
            if output.finished:
                tokens, num_cached = list(output.outputs[0].token_ids), self._num_cached(output)
                done[name] = loop.Answer(first_at.get(name, now), now, tokens, num_cached)
        return done


class WithKVBoost(Vllm):
    """Our connector; moved text is allowed for every prompt."""

    def __init__(self, settings: dict[str, Any]) -> None:
        connector = {
            "kv_connector": "KVBoostConnector",
            "kv_connector_module_path": "kvboost.connectors.vllm",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"reuse": "auto"},
        }
        self._session = 0
        super().__init__(settings, kv_transfer_config=connector, worker_cls=WORKER)

    def versions(self) -> dict[str, str]:
        import kvboost  # noqa: PLC0415  (only this system has it)

        return {"kvboost": kvboost.__version__, **super().versions()}

    def forget(self) -> None:
        """Go on under another name: what is stored cannot be found any more, and is evicted."""
        super().forget()
        self._session += 1

    def _prompt(self, tokens: list[int]) -> dict[str, Any]:
        return {"prompt_token_ids": tokens, "cache_salt": f"session-{self._session}"}

    def _extra(self) -> dict[str, Any]:
        return {"kv_transfer_params": {"kvboost": {"reuse": "auto"}}}

    def _num_cached(self, output: Any) -> int | None:
        """With moved text vLLM counts what lies between and what is repaired, too."""
        told = (output.kv_transfer_params or {}).get("kvboost", {})
        if told.get("provenance") != "approximate":
            return super()._num_cached(output)
        supplied: int = told["exact_tokens"] + told["moved_tokens"] - told["repaired_tokens"]
        return supplied


class WithLMCache(Vllm):
    """LMCache's server beside it: its connectors inside vLLM refuse a CPU."""

    packages = ("lmcache", *Vllm.packages)

    def __init__(self, settings: dict[str, Any]) -> None:
        port, http_port = loop.free_port(), loop.free_port()
        program = Path(sys.executable).with_name("lmcache")
        options = f"--port {port} --http-port {http_port} --l1-size-gb 1 --eviction-policy LRU"
        command = [str(program), "server", *options.split(), "--supported-transfer-mode", "auto"]
        self._server = subprocess.Popen(command)
        self._http = f"http://localhost:{http_port}"
        address = "localhost", port
        loop.wait_for(self._server, lambda: _listens(address), START_S, "LMCache's server")
        connector = {
            "kv_connector": "LMCacheMPConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "lmcache.mp.host": "tcp://localhost",
                "lmcache.mp.port": port,
            },
        }
        super().__init__(settings, kv_transfer_config=connector)

    def forget(self) -> None:
        super().forget()
        request = urllib.request.Request(f"{self._http}/cache/clear", method="POST")
        with urllib.request.urlopen(request) as response:
            response.read()

    def close(self) -> None:
        self._server.terminate()
        self._server.wait()


def _listens(address: tuple[str, int]) -> bool:
    with socket.create_connection(address):
        return True


_KINDS = {None: Vllm, "kvboost": WithKVBoost, "lmcache": WithLMCache}

if __name__ == "__main__":  # vLLM starts processes that import this file again
    loop.serve(lambda settings: _KINDS[settings.get("beside")](settings))
