"""A Transformers causal LM as one sparse prefill plus Transformers' own `generate()`."""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import DynamicCache, StoppingCriteria, StoppingCriteriaList

from kvboost.core import KVGeometry, Rotation, Span
from kvboost.errors import UnsupportedModel, reason_of
from kvboost.models import certify, install, kernels
from kvboost.models.adapters import Adapter, Adapters, num_embeddings, unwrapped
from kvboost.models.fingerprint import fingerprint
from kvboost.models.kept import certificate
from kvboost.models.numerics import numerics
from kvboost.models.packed import (
    ForwardCache,
    GenerateCache,
    RowObserver,
    Segment,
    run,
    run_last,
)
from kvboost.models.prepack import prepack
from kvboost.models.rows import Rows, private_rows
from kvboost.models.upload import upload

if TYPE_CHECKING:
    from transformers import Cache, PreTrainedModel

log = logging.getLogger(__name__)

# Entries of a generation config that do not change the output.
HARMLESS_SETTINGS = {
    "_from_model_config",
    "bos_token_id",
    "cache_implementation",
    "eos_token_id",
    "max_length",
    "output_attentions",
    "output_hidden_states",
    "pad_token_id",
    "transformers_version",
    "use_cache",
}


class HFModel:
    """Runs a model. Not thread-safe: one forward at a time."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        strict: bool = True,
        prepacked: bool = False,
        bitwise: bool = False,
        kept_in: Path | None = None,
    ) -> None:
        """Certify `model`, as it came, and switch it to our attention functions.

        `prepacked` gives its linear layers a second copy of their weights that is faster.
        `bitwise` gives it another fingerprint wherever its K/V may differ in the last bits.
        `kept_in` is a folder of earlier certifications; None: certify in any case.

        Raises:
            UnsupportedModel: with the reason, if `strict`; else `refusal` holds the reason. The
                model's own attention is left as it was.
        """
        model = unwrapped(model)
        self.name = f"{type(model).__name__} ({model.config.model_type})"
        if model in install.in_engines:
            raise UnsupportedModel(f"{self.name}: an engine has it already; close that one first")
        self.num_embeddings = num_embeddings(model)  # it can read the ids below this number
        self.adapters = Adapters(model)
        self.adapter = self.adapters.default  # of every forward
        self._native_attention: str | None = model.config._attn_implementation  # noqa: SLF001
        self._was_training = model.training
        self.model = model.eval()
        self.refusal = ""  # why nothing can be reused
        self.pack_refusal = "it was not certified"  # why a forward has one sequence, if so
        self.geometry = KVGeometry(num_layers=0, groups=(), dtype="float32", itemsize=4)
        self._bitwise = bitwise
        self._fingerprint = b""
        self._numerics = b""
        self._rotations = certify.Rotations()
        # Longer sequences cannot share K/V with shorter ones (None: no such limit).
        self.position_limit: int | None = None
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._unpack = prepack(model) if prepacked else None
        self._is_released = False
        self._may_join = True  # attention may be computed for several sequences at once
        self.joins = False  # whether attention to several runs of rows can be computed separately
        install.in_engines.add(model)
        try:
            self._certify(kept_in)
        except Exception as error:  # a foreign model may raise anything
            self.refusal = f"{self.name}: {reason_of(error)}"
            if strict:
                self.release()
                raise UnsupportedModel(self.refusal) from error
            self._restore_forward()
            is_foreseen = isinstance(error, UnsupportedModel)
            log.warning("no reuse for %s", self.refusal, exc_info=not is_foreseen)

    @property
    def fingerprint(self) -> bytes:
        """Differs whenever the K/V of the same tokens would differ."""
        if not (self._numerics or self.adapter.digest):
            return self._fingerprint
        return sha256(self._fingerprint + self._numerics + self.adapter.digest).digest()

    def under(self, adapter: Adapter) -> HFModel:
        """The same model with the forwards and the fingerprint that it has under an adapter."""
        other = copy.copy(self)
        other.adapter = adapter
        return other

    @torch.no_grad()
    def load_adapter(self, name: str, folder: str) -> None:
        """Load an adapter in addition to others.

        Raises:
            ConfigError: it cannot be used.
        """
        self.adapters.load(name, folder, self._check_adapter)

    @property
    def rotations(self) -> Mapping[int, Rotation | None]:
        """Per plane, how it rotates with position; empty if that could not be certified."""
        return self._rotations.planes

    @property
    def rotation_refusal(self) -> str:
        """Why K/V cannot be moved; empty if it can."""
        return self._rotations.refusal

    @property
    def packs(self) -> bool:
        """Whether several sequences, or rows in several runs, can be computed in one forward."""
        return not (self.pack_refusal or self._bitwise)

    def is_alone(self, num_tokens: int) -> bool:
        """Whether a sequence of this length rotates its keys unlike shorter ones."""
        return self.position_limit is not None and num_tokens > self.position_limit

    def fresh_rows(self, num_tokens: int) -> Rows:
        """Rows of a sequence outside the pool."""
        return private_rows(self.geometry, num_tokens, self.model.device)

    @torch.no_grad()
    def forward(
        self,
        rows: Rows,
        tokens: Sequence[int],
        positions: Sequence[int],
        *,
        num_logits: int = 1,
        corrected: Iterable[Span] = (),
        observer: RowObserver | None = None,
    ) -> torch.Tensor:
        """Run `tokens` at `positions` and write their rows.

        Returns the logits of the last `num_logits` of them [num_logits, vocabulary]. Each token
        attends to all rows at or before its own position. Other rows of `corrected` moved text
        follow how those that are computed have changed.
        """
        self.adapters.use(self.adapter)
        segment = Segment(rows, tokens, positions, corrected, observer)
        cache = ForwardCache(self.geometry, [segment], packs=self.packs, may_join=self._may_join)
        return run(self.model, cache, num_logits)[-num_logits:]

    @torch.no_grad()
    def forward_packed(self, segments: Sequence[Segment]) -> dict[Segment, torch.Tensor]:
        """Run tokens of several sequences; the logits [vocabulary] of each one's last.

        In one forward if the model `packs`; else one by one.
        """
        self.adapters.use(self.adapter)
        together = [list(segments)] if self.packs else [[each] for each in segments]
        logits: dict[Segment, torch.Tensor] = {}
        for each in together:
            cache = ForwardCache(self.geometry, each, packs=self.packs, may_join=self._may_join)
            logits |= run_last(self.model, cache)
        return logits

    def wait(self) -> None:
        """Wait until a device has finished; otherwise clocks would only measure launches."""
        if self.model.device.type != "cpu":
            torch.accelerator.synchronize(self.model.device)

    def generate(
        self,
        rows: Rows | None,
        tokens: Sequence[int],
        arguments: dict[str, Any],
        pending: Sequence[int] = (),
        corrected: Iterable[Span] = (),
    ) -> Any:
        """Transformers' `generate()` on top of the rows that are filled already.

        It computes the prompt's remaining tokens itself, those at the `pending` positions, so
        every sampling, stopping and streaming argument works as documented there. Returns its
        output object. Without `rows` Transformers uses a cache of its own, and it goes on with
        one where it computes several sequences.
        """
        self.adapters.use(self.adapter)
        counts = [self.setting(n, arguments) for n in ("num_beams", "num_return_sequences")]
        num_sequences = max(count or 1 for count in counts)
        input_ids = upload(self.model.device, tokens)[0][None]
        ours = {
            "input_ids": input_ids,
            "attention_mask": torch.ones_like(input_ids),
            "return_dict_in_generate": True,
        }
        cache: Cache | None = None
        if rows is not None and num_sequences > 1:
            rest = list(pending)[:-1]
            if rest:
                self.forward(rows, [tokens[p] for p in rest], _as_range(rest), corrected=corrected)
            cache = self._dynamic_cache(rows)
            cache.batch_repeat_interleave(num_sequences)
        elif rows is not None:
            cache = GenerateCache(
                self.geometry,
                rows,
                tokens,
                pending,
                corrected,
                packs=self.packs,
                may_join=self._may_join,
            )
        if cache is not None:
            ours |= {"past_key_values": cache, "cache_implementation": None}
        output = self.model.generate(**(arguments | ours))
        if isinstance(cache, GenerateCache) and cache.pending:
            raise UnsupportedModel(f"{self.name}: generate() runs it in a way that skips our hook")
        return output

    def _dynamic_cache(self, rows: Rows) -> DynamicCache:
        """A copy of the rows in Transformers' own cache."""
        cache = DynamicCache()
        for layer in range(self.geometry.num_layers):
            cache.update(*(part.clone() for part in rows.whole(layer, 0, rows.length)), layer)
        return cache

    def setting(self, name: str, arguments: dict[str, Any]) -> Any:
        """The effective value of a generation setting, given these arguments of `generate()`."""
        configs = (arguments.get("generation_config"), self.model.generation_config)
        values = [arguments.get(name), *(getattr(config, name, None) for config in configs)]
        return next((value for value in values if value is not None), None)

    def special_settings(self) -> set[str]:
        """Names of this model's generation settings that change the output."""
        return set(self.model.generation_config.to_diff_dict()) - HARMLESS_SETTINGS

    def end_tokens(self, arguments: dict[str, Any]) -> frozenset[int]:
        """Tokens that end an output, for these arguments of `generate()`."""
        ends = self.setting("eos_token_id", arguments)
        return frozenset(
            ends if isinstance(ends, list | tuple) else () if ends is None else (ends,)
        )

    def release(self) -> None:
        """Restore the model as it was. Only once: another engine may have it by then."""
        if self._is_released:
            return
        self._is_released = True
        self._restore_forward()
        self.adapters.release()
        self.model.train(self._was_training)
        install.in_engines.discard(self.model)

    def _restore_forward(self) -> None:
        for hook in self._hooks:
            hook.remove()
        if self._unpack is not None:
            self._unpack()
            self._unpack = None
        if self._native_attention is not None:
            self.model.set_attn_implementation(self._native_attention)

    @torch.no_grad()
    def _certify(self, kept_in: Path | None) -> None:
        started = time.perf_counter()
        model = self.model
        certify.check_placement(model)
        if model.device.type == "cuda":
            torch.cuda.set_device(model.device)  # of the thread that will run it
        choices = install.implementations(model)
        model.set_attn_implementation(install.own_attention(model))
        self.geometry = certify.measure_geometry(model)
        self._fingerprint = fingerprint(model, self.geometry)
        self.position_limit = certify.position_limit(model)
        kept = None
        if kept_in is not None:
            versions = numerics(model, prepacked=self._unpack is not None)
            kept = certificate(model, self._fingerprint, versions, kept_in, choices)
        self._hooks = [
            model.register_forward_pre_hook(_fit_tokens_to_rows, with_kwargs=True),
            model.register_forward_hook(_count_rows, with_kwargs=True),
        ]
        found = None if kept is None else kept.read(self.geometry)
        if found is None:
            self._measure(choices)
            if kept is not None and self._is_flawless(choices[0]):
                kept.write(self._rotations.planes, joins=self.joins)
        else:
            planes, self.joins = found
            self._rotations, self.pack_refusal = certify.Rotations(planes), ""
            install.switch(model, choices[0])
        if self._bitwise:
            self._numerics = numerics(model, prepacked=self._unpack is not None)
        how = "certified" if found is None else "certified earlier:"
        log.info("%s %s in %.1f s", how, self.name, time.perf_counter() - started)

    def _measure(self, choices: Sequence[str]) -> None:
        model = self.model
        native = certify.run_native(model, self.geometry)
        self._rotations = certify.measure_rotations(model, self.geometry)
        self._choose_attention(choices, native)
        self.pack_refusal, self.joins = certify.check_packed(model, self.geometry, native)
        if self.pack_refusal:  # perhaps by the kernel for all sequences
            log.info("%s: not in one kernel: %s", self.name, self.pack_refusal)
            self._may_join = False
            self.pack_refusal, self.joins = certify.check_packed(
                model, self.geometry, native, may_join=False
            )
        if self._rotations.refusal:
            log.info("%s: exact reuse only: %s", self.name, self._rotations.refusal)
        if self.pack_refusal:
            log.warning("%s: the batch runs one by one: %s", self.name, self.pack_refusal)

    def _is_flawless(self, attention: str) -> bool:
        """Whether no step failed that might succeed the next time."""
        has_it = self.model.config._attn_implementation == attention  # noqa: SLF001
        has_flex = self.model.device not in kernels.flex_refusals
        is_certified = not (self._rotations.refusal or self.pack_refusal)
        return has_it and has_flex and self._may_join and is_certified

    def _check_adapter(self) -> None:
        """Whether the certification still holds for the base model and under an adapter."""
        if self.refusal:
            return
        if certify.measure_geometry(self.model) != self.geometry:
            raise UnsupportedModel("it changes the shape of K/V")
        if fingerprint(self.model, self.geometry) != self._fingerprint:
            self.adapters.defect = "an adapter has changed the base model's weights: load it anew"
            raise UnsupportedModel(self.adapters.defect)

    def _choose_attention(
        self, choices: Sequence[str], native: certify.Native, *, without_flex: bool = False
    ) -> None:
        """Switch to the first of our implementations that gives the model's own logits."""
        first, *others = choices
        device, refusals = self.model.device, kernels.flex_refusals
        try:
            install.switch(self.model, first)
            certify.check_sparse_prefill(self.model, self.geometry, native)
        except Exception as error:  # third-party kernels may raise anything
            reason = reason_of(error)
            if device.type != "cpu" and device not in refusals:  # perhaps there is no compiler
                refusals[device] = reason
                self._choose_attention(choices, native, without_flex=True)
                return
            if without_flex:
                refusals.pop(device, None)  # something else is wrong
            if not others:
                raise
            log.warning("%s: not with %s: %s", self.name, first, reason)
            self._choose_attention(others, native)
            return
        if device in refusals:
            log.warning("%s: no FlexAttention, repair is slower: %s", self.name, refusals[device])


def _fit_tokens_to_rows(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Give a forward of `generate()` the tokens whose rows the cache lacks, and no others.

    Tokens whose rows are there are cut off the front: Transformers' assisted decoding passes the
    whole prompt in its first step even when the cache holds most of it (seen in 5.19 and 5.22),
    and would append those rows a second time. Tokens further back that are still to be computed
    are put in front, so that gaps, repairs and the rest of the prompt are one forward.
    """
    cache, positions = kwargs.get("past_key_values"), kwargs.get("position_ids")
    tokens = kwargs.get("input_ids")
    if not isinstance(cache, GenerateCache) or tokens is None or positions is None:
        return None
    first, pending = cache.get_seq_length(), cache.pending
    if tokens.shape[1] == 1 and not pending:
        cache.next(range(first, first + 1))
        return None
    num_known = max(0, first - int(positions[..., 0].min()))
    tokens, positions = tokens[:, num_known:], positions[..., num_known:]
    computed: Sequence[int] = range(first, first + tokens.shape[1])
    if pending:
        before = torch.tensor(pending, device=tokens.device)
        tokens = torch.cat([cache.pending_tokens.to(tokens)[None], tokens], dim=-1)
        positions = torch.cat([before.expand(*positions.shape[:-1], -1), positions], dim=-1)
        computed = [*pending, *computed]
    cache.next(computed)
    return args, kwargs | {"input_ids": tokens, "position_ids": positions}


def _count_rows(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
) -> None:
    """After a forward of `generate()`."""
    cache = kwargs.get("past_key_values")
    if isinstance(cache, GenerateCache):
        cache.finish()


def _as_range(positions: Sequence[int]) -> Sequence[int]:
    first, last = positions[0], positions[-1]
    return range(first, last + 1) if last - first + 1 == len(positions) else positions


class StepWatch(StoppingCriteria):
    """Calls `after_token` after each token of `generate()`; stops nothing."""

    def __init__(self, after_token: Callable[[], object]) -> None:
        self._after_token, self._is_first = after_token, True

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """Called by Transformers; false for every sequence."""
        if self._is_first and input_ids.device.type != "cpu":
            torch.accelerator.synchronize(input_ids.device)  # its time is reported
        self._is_first = False
        self._after_token()
        return torch.zeros(input_ids.shape[:1], device=input_ids.device, dtype=torch.bool)


def stopping_criteria(watch: StepWatch, others: Any) -> StoppingCriteriaList:
    """The caller's criteria and ours."""
    return StoppingCriteriaList([watch, *(others or [])])
