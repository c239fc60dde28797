"""What a GPU, and the way to it, can do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.metadata import distributions, version
from statistics import median
from typing import TYPE_CHECKING

import torch

from kvboost.bench.clock import seconds
from kvboost.bench.doctor.facts import DeviceFacts, Step
from kvboost.bench.doctor.rounds import request_of
from kvboost.build import Parts
from kvboost.config import MIB
from kvboost.core import Sampling
from kvboost.engine.batch.front import BatchFront
from kvboost.engine.worker import Worker
from kvboost.models import kernels

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

NUM_ANSWERS = (1, 16)
NUM_TOKENS, NUM_NEW = 64, 32
NUM_KERNELS = 200
COPIED_BYTES = 32 * MIB
NUM_TIMES = 5
PACKAGES = ("torch", "transformers", "triton", "flash-attn")


def look(parts: Parts, tokenizer: PreTrainedTokenizerBase) -> DeviceFacts:
    """All but what needs the model without the engine; see `with_plain_steps`."""
    device = parts.model.model.device
    is_cuda = device.type == "cuda"
    return DeviceFacts(
        name=torch.cuda.get_device_name(device) if is_cuda else device.type,
        capability=".".join(map(str, torch.cuda.get_device_capability(device))) if is_cuda else "",
        total_bytes=torch.cuda.mem_get_info(device)[1] if is_cuda else None,
        versions={name: version(name) for name in PACKAGES if any(distributions(name=name))}
        | ({"cuda": torch.version.cuda} if torch.version.cuda else {}),
        attention=_attention(parts),
        launch_us=_launch_us(device),
        copy_bytes_per_s=_copy_speeds(device),
        steps=tuple(_step(parts, tokenizer, num_answers) for num_answers in NUM_ANSWERS),
        peak_bytes=torch.cuda.max_memory_allocated(device) if is_cuda else None,
    )


@torch.no_grad()
def with_plain_steps(facts: DeviceFacts, model: PreTrainedModel) -> DeviceFacts:
    """Add the steps of Transformers alone."""
    steps = [
        replace(step, transformers_ms=_plain_step_ms(model, step.num_answers))
        for step in facts.steps
    ]
    return replace(facts, steps=tuple(steps))


def _attention(parts: Parts) -> str:
    """What certification has chosen, and what it has refused."""
    model = parts.model
    said = [str(model.model.config._attn_implementation)]  # noqa: SLF001
    said.append("sequences in one kernel" if model.joins else "sequences one by one")
    if (refusal := kernels.flex_refusals.get(model.model.device)) is not None:
        said.append(f"no FlexAttention: {refusal}")
    if model.pack_refusal:
        said.append(f"no batch: {model.pack_refusal}")
    return "; ".join(said)


def _timed(work: Callable[[], object], device: torch.device) -> float:
    """Seconds, the median of a few after one that is not counted."""
    return median([seconds(work, device) for _ in range(NUM_TIMES + 1)][1:])


def _launch_us(device: torch.device) -> float:
    value = torch.zeros(1, device=device)

    def launch() -> None:
        for _ in range(NUM_KERNELS):
            value.add_(1)

    return 1e6 * _timed(launch, device) / NUM_KERNELS


def _copy_speeds(device: torch.device) -> dict[str, float]:
    """Bytes per second by kind of host memory and direction."""
    there = torch.zeros(COPIED_BYTES, dtype=torch.uint8, device=device)
    hosts = {"pageable": torch.zeros(COPIED_BYTES, dtype=torch.uint8)}
    if device.type == "cuda":
        hosts["pinned"] = hosts["pageable"].pin_memory()
    speeds = {}
    for kind, host in hosts.items():
        to_device_s = _timed(partial(there.copy_, host, non_blocking=True), device)
        to_host_s = _timed(partial(host.copy_, there, non_blocking=True), device)
        speeds[f"{kind} to device"] = COPIED_BYTES / to_device_s
        speeds[f"{kind} to host"] = COPIED_BYTES / to_host_s
    return speeds


def _step(parts: Parts, tokenizer: PreTrainedTokenizerBase, num_answers: int) -> Step:
    """A decode step of the batch."""
    worker = Worker()
    front = BatchFront(parts, tokenizer, worker)
    sampling = Sampling(max_new_tokens=NUM_NEW + 1, ignore_eos=True)

    def answer_ms() -> float:
        tickets = [
            front.enqueue(request_of(parts, _prompt(number), "off"), sampling, waits=True)
            for number in range(num_answers)
        ]
        times = [ticket.result().token_times for ticket in tickets]
        # The last to join decodes beside all others.
        return 1e3 * min(each[-1] - each[0] for each in times) / NUM_NEW

    try:
        answer_ms()
        return Step(num_answers, engine_ms=median(answer_ms() for _ in range(NUM_TIMES)))
    finally:
        worker.close()


def _prompt(number: int) -> list[int]:
    return [5 + (number + each) % 97 for each in range(NUM_TOKENS)]


def _plain_step_ms(model: PreTrainedModel, num_answers: int) -> float:
    tokens = torch.tensor([_prompt(number) for number in range(num_answers)], device=model.device)

    def taken_s(num_new: int) -> float:
        rules = {"min_new_tokens": num_new, "max_new_tokens": num_new, "do_sample": False}
        mask = torch.ones_like(tokens)
        return _timed(lambda: model.generate(tokens, attention_mask=mask, **rules), model.device)

    return 1e3 * (taken_s(NUM_NEW + 1) - taken_s(1)) / NUM_NEW
