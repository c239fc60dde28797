"""Load a model on this machine, certify it, and measure all that advice is made of."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import TYPE_CHECKING

import torch

from kvboost.bench import machine
from kvboost.bench.clock import seconds
from kvboost.bench.doctor import device, tier_speed
from kvboost.bench.doctor.facts import (
    Machine,
    ModelFacts,
    MovedQuality,
    Packing,
    TierSpeed,
    Visit,
)
from kvboost.bench.doctor.quality import NUM_ANSWERED, NUM_PREFILLS, moved_quality, prompts
from kvboost.bench.doctor.rounds import Rounds
from kvboost.build import Parts, build
from kvboost.codecs.kivi import Int8Codec
from kvboost.config import Options
from kvboost.core import KVGeometry
from kvboost.errors import ConfigError, UnsupportedModel
from kvboost.models.hf import HFModel
from kvboost.models.load import limits, load_or_tell
from kvboost.models.prepack import prepack

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

QUALITY_SHARE = 0.4  # of the time, at most: without it no moved text is recommended
ROUNDS_UNTIL = 0.8  # of the time; what is left is for tiers and weights
NUM_SEQUENCES = 16  # of the step that rearranged weights are tried on
NUM_STEPS = 5
STEP_TOKENS = 4  # decoded one by one, that take as long as such a step, about

Say = Callable[[str], None]


@dataclass(frozen=True)
class Wishes:
    """What to look at, and for how long."""

    model: str
    dtype: str = "auto"
    device: str | None = None
    gguf_file: str | None = None
    disk_dir: str | None = None
    redis_url: str | None = None
    seconds: float = 60.0  # once the model is loaded and certified


def visit(wishes: Wishes, say: Say) -> Visit:
    """Load, certify and measure; `say` is told what is being done."""
    system_load = machine.load()
    say(f"loading {wishes.model}")
    started = time.perf_counter()
    arguments = {"dtype": wishes.dtype}
    if wishes.gguf_file:
        arguments["gguf_file"] = wishes.gguf_file
    model, tokenizer = load_or_tell(wishes.model, wishes.device, arguments)
    loaded = time.perf_counter()
    say("certifying it")
    facts = ModelFacts(
        name=f"{type(model).__name__} ({model.config.model_type})",
        dtype=str(model.dtype).removeprefix("torch."),
        load_s=loaded - started,
        longest_tokens=limits(model)[1],
    )
    begun = Visit(_machine(model, system_load), facts)
    try:
        hosted = HFModel(model)
    except UnsupportedModel as error:
        return replace(begun, model=replace(facts, refusal=str(error)))
    certified = time.perf_counter()
    facts = replace(facts, certify_s=certified - loaded)
    until = certified + wishes.seconds
    try:
        measured = _with_engine(hosted, tokenizer, replace(begun, model=facts), wishes, say)
    finally:
        hosted.release()
    if measured.device is not None:
        say("Transformers alone")
        return replace(measured, device=device.with_plain_steps(measured.device, model))
    packing_s = 3 * (NUM_STEPS + 1) * STEP_TOKENS * median(measured.decode_ms) / 1e3
    has_time = time.perf_counter() + packing_s < until
    return replace(measured, packing=_packing(model, say) if has_time else None)


def _machine(model: PreTrainedModel, system_load: float | None) -> Machine:
    return Machine(
        device=model.device.type,
        num_cores=machine.num_cores(),
        num_threads=torch.get_num_threads(),
        load=system_load,
        available_bytes=machine.available_bytes(),
        wait_policy=os.environ.get("OMP_WAIT_POLICY"),
        num_machine_cores=machine.num_machine_cores(),
    )


def _with_engine(
    hosted: HFModel, tokenizer: PreTrainedTokenizerBase, begun: Visit, wishes: Wishes, say: Say
) -> Visit:
    started, geometry = time.perf_counter(), hosted.geometry
    parts = build(Options(), hosted, frozenset())
    say("first prompts")
    rounds = Rounds(parts, tokenizer, begun.model.longest_tokens)
    most_tokens = int(QUALITY_SHARE * wishes.seconds / rounds.token_s)
    quality = _quality(parts, tokenizer, begun.model.longest_tokens, most_tokens, say)
    readings, decode_ms = rounds.run(started + ROUNDS_UNTIL * wishes.seconds, say)
    codec, size = Int8Codec(geometry), Options().chunk_size
    facts = replace(
        begun.model,
        bytes_per_token=geometry.bytes_per_token,
        int8_bytes_per_token=codec.size(size) // size,
        move_refusal=hosted.rotation_refusal,
    )
    seen = None
    if hosted.model.device.type != "cpu":
        say(f"{hosted.model.device.type}: launches, copies, steps of several answers")
        seen = device.look(parts, tokenizer)
    return replace(
        begun,
        model=facts,
        readings=readings,
        decode_ms=decode_ms,
        tiers=tuple(_tiers(wishes, geometry, say)),
        quality=quality,
        device=seen,
    )


def _tiers(wishes: Wishes, geometry: KVGeometry, say: Say) -> Iterator[TierSpeed]:
    frames = tier_speed.make_frames(geometry, Options().chunk_size)
    say("memory")
    yield tier_speed.memory_speed(frames)
    if wishes.disk_dir is not None:
        say("disk")
        yield tier_speed.disk_speed(wishes.disk_dir, frames)
    if wishes.redis_url is not None:
        say("redis")
        yield tier_speed.redis_speed(wishes.redis_url, frames)


def _quality(
    parts: Parts,
    tokenizer: PreTrainedTokenizerBase,
    longest: int | None,
    most_tokens: int,
    say: Say,
) -> MovedQuality | None:
    """None where it would compute more than `most_tokens`, or no text can be moved."""
    num_tokens = len(prompts(tokenizer)[-1]) + NUM_ANSWERED
    is_too_long = longest is not None and num_tokens > longest
    if is_too_long or NUM_PREFILLS * num_tokens > most_tokens or not parts.model.rotations:
        return None
    say("an answer on moved text")
    return moved_quality(parts, tokenizer)


def _packing(model: PreTrainedModel, say: Say) -> Packing | None:
    """Steps with plain weights, with rearranged ones, and with plain ones again."""
    weight_bytes = sum(each.nbytes for each in model.parameters())
    available_bytes = machine.available_bytes()
    if available_bytes is None or 2 * weight_bytes > available_bytes:
        return None
    say("rearranged weights")
    plain = _step_ms(model)
    try:
        undo = prepack(model)
    except ConfigError:  # not for this dtype or device
        return None
    packed = _step_ms(model)
    undo()
    plain += _step_ms(model)
    return Packing(median(plain), median(packed), NUM_SEQUENCES, weight_bytes)


@torch.no_grad()
def _step_ms(model: PreTrainedModel) -> list[float]:
    """A token of each sequence in one forward, without the first one."""
    tokens = torch.arange(5, 5 + NUM_SEQUENCES, device=model.device)[:, None]
    step = partial(model, input_ids=tokens, use_cache=False)
    return [1e3 * seconds(step, model.device) for _ in range(NUM_STEPS + 1)][1:]
