"""A fake server: finds planted facts, has a prefix cache, and any fault that one plants.

It answers by reading, so that its answers are right until a fault spoils them. Times are those of
a model that takes a fixed time for each token that is not cached, with some jitter. They run on a
clock of its own that the probe reads, so that nobody waits and a busy machine changes nothing.
"""

from __future__ import annotations

import json
import random
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from unittest.mock import patch

BLOCK = 16  # words
JITTER = 0.05  # of a time
STALL_S = 1.0
LEAST_S = 0.003  # of a request
LATE = 20  # requests: what a fault does not spoil
HANGS_S = 60.0  # by its own clock; by the test's, a little longer than the probe waits
FACT = re.compile(r"access code of the (\w+) office is (\d+)")
ASKED = re.compile(r"code of the (\w+) office[?]")


@dataclass
class Engine:
    """What it does, and what is wrong with it."""

    fault: str = ""
    word_s: float = 5e-4  # of prefill
    share: float = 0.1  # of hits that a fault spoils
    noise: float = 0.0  # of texts that near-ties change
    has_logprobs: bool = False
    part: str = "content"  # of a message that has the answer
    template: int = 0  # words in front of every prompt
    seed: int = 0
    jitter: float = JITTER
    stalls: float = 0.0  # share of requests that others on the machine hold up, for STALL_S
    num_requests: int = 0
    num_salted: int = 0
    cached: dict[str, set[str]] = field(default_factory=dict)
    answers: dict[str, str] = field(default_factory=dict)  # by the beginning of a prompt
    last: str = ""
    now: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)

    def wait(self, seconds: float) -> None:
        """Let so much time pass, more or less."""
        with self.lock:
            self.now += (LEAST_S + seconds) * self.chance.lognormvariate(0, self.jitter)
            if self.chance.random() < self.stalls:
                self.now += self.chance.expovariate(1 / STALL_S)

    def restart(self) -> None:
        """As a process that comes back with what its disk holds."""
        if self.fault == "stale after restart":
            self.fault = "stale"

    def failure(self, body: dict[str, Any]) -> int:
        """The status of this request if it is refused, else 0."""
        if "logprobs" in body and not self.has_logprobs:
            return 400
        if self.fault == "busy once":
            text = json.dumps(body)
            is_first = text not in self.answers
            self.answers.setdefault(text, "")
            return 429 if is_first else 0
        if self.fault == "breaks with salt":
            self.num_salted += "cache_salt" in body
            return 500 if self.num_salted > LATE else 0
        status = {"busy": 429, "breaks": 500}.get(self.fault, 0)
        return status if self.num_requests > LATE and self.chance.random() < 0.3 else 0

    def hangs(self, share_hit: float) -> bool:
        """Whether this request was not answered until the probe gave up."""
        if self.fault != "hangs" or share_hit < 0.3:
            return False
        self.now += HANGS_S
        time.sleep(1.5)
        return True

    def streamed(self, events: list[Any], share_hit: float) -> list[Any]:
        """The events of a stream."""
        return events[:1] * 10_000 if self.fault == "endless" and share_hit > 0.3 else events

    def answer(self, body: dict[str, Any], key: str) -> tuple[str, int, int, float]:
        """The text, the prompt's tokens, those that were cached, and the time to wait."""
        prompt = "\n".join(
            [
                "system " * self.template,
                json.dumps(body.get("tools", "")),
                *(m["content"] for m in body["messages"]),
            ]
        )
        words = prompt.split()
        space = "" if self.fault == "salt ignored" else f"{key}/{body.get('cache_salt', '')}"
        with self.lock:
            self.num_requests += 1
            known = self.cached.setdefault(space, set())
            heads = [" ".join(words[:end]) for end in range(BLOCK, len(words), BLOCK)]
            num_hit = 0
            for head in heads if self.fault != "cache off" else ():
                if head not in known:
                    break
                num_hit += BLOCK
            known.update(heads)
            text = self._text(prompt, num_hit / len(words))
            self.last = text
        prefill_s = self.word_s * (len(words) - num_hit)
        if self.fault == "slow hits":
            prefill_s = self.word_s * (len(words) + 0.5 * num_hit)
        counted = {"usage lies": 0, "usage invents": len(words)}.get(self.fault, num_hit)
        if self.fault == "usage without hits":
            counted, prefill_s = num_hit, self.word_s * len(words)
        return text, len(words), counted, prefill_s

    def _text(self, prompt: str, share_hit: float) -> str:
        facts, asked = dict(FACT.findall(prompt)), ASKED.search(prompt)
        place = asked.group(1) if asked else ""
        text = f"The access code of the {place} office is {facts.get(place, 'not known')}."
        if self.chance.random() < self.noise:
            text = f"Its code is {facts.get(place, 'not known')}, as the record says."
        is_hit = share_hit > 0.3
        begins = " ".join(prompt.split()[self.template :][:BLOCK])
        if self.fault == "errs" and random.Random(prompt).random() < self.share:
            return f"It is {facts.get(place, '')[:4]}, I believe, and the office is a quiet one."
        stored = self.answers.setdefault(begins, text)
        if self.fault == "damaged" and is_hit and self.chance.random() < self.share:
            return "the the of of 1 1 the harbour, and and and"
        if self.fault == "stale" and is_hit:
            return stored if stored != text else "I do not know such a record; it says nothing."
        if self.fault == "old blocks":
            return stored
        if self.fault == "mixed up" and is_hit and self.chance.random() < self.share:
            return self.last
        return text


def _handler(engine: Engine) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = -1

        def do_GET(self) -> None:
            self._send(200, {"data": [{"id": "fake"}]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if status := engine.failure(body):
                return self._send(status, {"error": "not now"})
            text, num_words, num_hit, wait_s = engine.answer(
                body, self.headers.get("Authorization", "")
            )
            engine.wait(wait_s)
            if engine.hangs(num_hit / num_words):
                self.close_connection = True
                return None
            usage = {
                "prompt_tokens": num_words,
                "prompt_tokens_details": {"cached_tokens": num_hit},
            }
            choice: dict[str, Any] = {}
            if "logprobs" in body:
                logprob = -0.5 if engine.fault == "shifted" and num_hit else -0.01
                choice = {"logprobs": {"content": [{"token": "a", "logprob": logprob}]}}
            message = {engine.part: text}
            if not body["stream"]:
                return self._send(
                    200, {"choices": [{**choice, "message": message}], "usage": usage}
                )
            events = [{"choices": [{**choice, "delta": message}]}, {"choices": [], "usage": usage}]
            events = engine.streamed(events, num_hit / num_words)
            lines = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
            return self._reply(f"{lines}data: [DONE]\n\n".encode(), "text/event-stream")

        def _send(self, status: int, value: dict[str, Any]) -> None:
            self._reply(json.dumps(value).encode(), "application/json", status)

        def _reply(self, content: bytes, kind: str, status: int = 200) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
            self.send_header("Retry-After", "0")
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: Any) -> None:
            pass

    return Handler


@contextmanager
def serving(engine: Engine) -> Iterator[str]:
    """The base URL of a server with this engine."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(engine))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        with patch("kvboost.probe.client.perf_counter", lambda: engine.now):
            yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        server.server_close()
