"""What do quantised frames cost? Size and KL of the answer; no store involved.

How long storing and loading them takes is the question `memory` of `kvboost bench`.
"""

from __future__ import annotations

import argparse
import statistics
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.common.material import documents, model, tokenizer
from benchmarks.common.measure import Row
from kvboost.bench.questions.frontier import greedy
from kvboost.codecs.base import Codec
from kvboost.codecs.kivi import Int4Codec, Int8Codec
from kvboost.codecs.raw import RawCodec
from kvboost.core import Span
from kvboost.engine.verify import compare
from kvboost.models.hf import HFModel
from kvboost.models.rows import Rows

if TYPE_CHECKING:
    from kvboost.codecs.base import KV


class NudgedCodec(RawCodec):
    """The least that can be lost: one number of each plane and head, by one unit of its dtype.

    What an answer changes by then is the noise of the model's own arithmetic.
    """

    name = "nudged"

    def encode(self, kv: KV, payload: memoryview) -> None:
        super().encode(kv, payload)
        for tensor in self.decode(payload, kv[0].shape[2]):
            tensor[:, :, 0, 0] *= 1 + torch.finfo(tensor.dtype).eps


CODECS: tuple[type[Codec], ...] = (RawCodec, NudgedCodec, Int8Codec, Int4Codec)
CHUNK_TOKENS = 128
QUESTION = "\n\nWhat does this text explain? Name its most important points."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--docs", type=Path, help="folder of .txt files (default: Python's own)")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=1000, help="of a prompt's text")
    parser.add_argument("--new", type=int, default=32)


def run(options: argparse.Namespace) -> Iterator[Row]:
    words, ours = tokenizer(options.model), HFModel(model(options))
    codecs = [kind(ours.geometry) for kind in CODECS]
    seen = defaultdict(list)
    for prompt in _prompts(words, options):
        for what, check in _distances(prompt, ours, codecs, options.new).items():
            seen[what].append(check)
    ours.release()
    sizes = {codec.name: _size(codec) for codec in codecs}
    for what, checks in seen.items():
        yield {"path": what, **_quality(checks), **sizes.get(what, {})}


def _texts(options: argparse.Namespace) -> list[str]:
    if options.docs is None:
        return documents()
    return [path.read_text() for path in sorted(options.docs.glob("*.txt"))]


def _prompts(words: Any, options: argparse.Namespace) -> Iterator[list[int]]:
    """A text and a question about it, of about the asked length; short texts are left out."""
    texts = [words(text, add_special_tokens=False).input_ids for text in _texts(options)]
    long_ones = [tokens for tokens in texts if len(tokens) >= options.tokens]
    for tokens in long_ones[: options.prompts]:
        message = {"role": "user", "content": words.decode(tokens[: options.tokens]) + QUESTION}
        text = words.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
        yield words(text, add_special_tokens=False).input_ids


def _distances(
    prompt: list[int], ours: HFModel, codecs: list[Codec], num_new: int
) -> dict[str, Any]:
    """How far the answer's logits are from those on raw K/V, for each codec and without reuse."""
    num_stored = len(prompt) - 1  # the last token is always computed
    source = ours.fresh_rows(len(prompt))
    ours.forward(source, prompt[:-1], range(num_stored))
    rows = _through(codecs[0], source, num_stored, ours)
    first = ours.forward(rows, prompt[-1:], range(num_stored, len(prompt)))
    answer, _ = greedy(rows, first, ours, num_new)
    rest = [prompt[-1], *answer[:-1]]
    places = range(num_stored, num_stored + num_new)
    logits = {}
    for codec in codecs:
        rows = _through(codec, source, num_stored, ours)
        logits[codec.name] = ours.forward(rows, rest, places, num_logits=num_new).float()
    everything = prompt + answer[:-1]
    rows = ours.fresh_rows(len(everything))
    fresh = ours.forward(rows, everything, range(len(everything)), num_logits=num_new)
    logits["cold"] = fresh.float()
    return {
        what: compare(logits["raw"], those, len(prompt), num_stored)
        for what, those in logits.items()
    }


def _through(codec: Codec, source: Rows, num_tokens: int, ours: HFModel) -> Rows:
    """The rows of `source` after a codec had them, with room for an answer."""
    rows = ours.fresh_rows(source.capacity + CHUNK_TOKENS)
    for span in _spans(num_tokens):
        payload = memoryview(bytearray(codec.size(len(span))))
        codec.encode(source.read(span), payload)
        rows.write(span, codec.decode(payload, len(span)))
    return rows


def _spans(num_tokens: int) -> list[Span]:
    starts = range(0, num_tokens, CHUNK_TOKENS)
    return [Span(start, min(num_tokens, start + CHUNK_TOKENS)) for start in starts]


def _size(codec: Codec) -> dict[str, float]:
    size = codec.size(CHUNK_TOKENS) / CHUNK_TOKENS
    return {
        "bytes_per_token": round(size, 1),
        "ratio": round(size / codec.geometry.bytes_per_token, 4),
    }


def _quality(checks: list[Any]) -> dict[str, Any]:
    return {
        "prompts": len(checks),
        "prompt_tokens": round(statistics.mean(check.prompt_tokens for check in checks)),
        "mean_kl": round(statistics.mean(check.mean_kl for check in checks), 6),
        "max_kl": round(max(check.max_kl for check in checks), 6),
        "top1": round(statistics.mean(check.top1_ratio for check in checks), 4),
    }
