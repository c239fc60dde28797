"""`kvboost` as a model of the LM Evaluation Harness: its `hf` model, run with reuse.

`python -m kvboost.integrations.lm_eval --model kvboost --model_args pretrained=FOLDER ...` takes
all that `lm_eval` takes; in Python, importing this module registers the model. Tokens, truncation,
stop sequences and chat templates are those of `hf`, so that scores can be compared.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from lm_eval.__main__ import cli_evaluate
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils_hf import stop_sequences_criteria
from tqdm.auto import tqdm

from kvboost.config import option_names
from kvboost.engine.engine import KVBoost
from kvboost.engine.request import SAMPLING
from kvboost.errors import ConfigError

# Arguments of `hf` that options of ours have the names of.
SHARED_NAMES = ("backend", "max_batch_size")
# Arguments of `hf` for computations that the engine does in its place.
WITHOUT_EFFECT = ("mixed_precision_dtype", "softmax_dtype")

log = logging.getLogger(__name__)


@register_model("kvboost")
class KVBoostLM(HFLM):
    """The harness's `hf` model in an engine. Model arguments are those of `hf` and our options.

    Where both have a name, it is that of `hf`.
    """

    def __init__(
        self,
        pretrained: Any,
        batch_size: int | str | None = 1,
        device: str | None = None,
        **arguments: Any,
    ) -> None:
        """Load the model as `hf` does, and put it to work in an engine.

        Requests are computed one after the other, whatever `batch_size` says: what they share is
        computed once, which is where the time of few-shot prompts goes.

        Raises:
            ConfigError: an argument of `hf` that would have no effect, or a wrong option.
        """
        for name in WITHOUT_EFFECT:
            if arguments.get(name) is not None:
                raise ConfigError(f"{name}={arguments[name]}: has no effect in kvboost; give dtype")
        if str(batch_size) != "1":
            log.warning("batch_size=%s: kvboost computes one request at a time", batch_size)
        names = [name for name in option_names() if name not in SHARED_NAMES]
        own = {name: arguments.pop(name) for name in names if name in arguments}
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        super().__init__(pretrained, batch_size=1, device=device, **arguments)
        self.engine = KVBoost(self.model, self.tokenizer, **own)

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[tuple[str, str] | None, list[int], list[int]]],
        disable_tqdm: bool = False,  # noqa: FBT001, FBT002
        override_bs: int | None = None,
    ) -> list[tuple[float, bool]]:
        """The continuations of each context together; contexts that begin alike in a row."""
        by_context = defaultdict(list)
        for number, (_, context, continuation) in enumerate(requests):
            kept = (context + continuation)[-(self.max_length + 1) :]
            if len(kept) <= len(continuation):
                raise ValueError(
                    f"a continuation of {len(continuation)} tokens does not fit into the model's "
                    f"{self.max_length}"
                )
            by_context[tuple(kept[: -len(continuation)])].append(number)
        answers: list[Any] = [None] * len(requests)
        # Rolling windows come one by one, and have a bar of their own.
        is_silent = disable_tqdm or override_bs is not None
        for context, members in tqdm(
            sorted(by_context.items()), desc="Running loglikelihood requests", disable=is_silent
        ):
            result = self.engine.score(context, [requests[number][2] for number in members])
            for number, score in zip(members, result.scores, strict=True):
                answers[number] = (score.logprob, score.is_greedy)
                texts = requests[number][0]
                if texts is not None:
                    self.cache_hook.add_partial("loglikelihood", texts, answers[number])
        return answers

    def _model_generate(
        self, context: torch.Tensor, max_length: int, stop: list[str], **arguments: Any
    ) -> torch.Tensor:
        """One context [1, tokens] and its answer, in one row."""
        arguments.pop("attention_mask", None)  # a single context has no padding
        if arguments.get("do_sample") is False:  # `hf` ignores what tasks set beside it
            arguments = {key: value for key, value in arguments.items() if key not in SAMPLING}
        tokens = context[0].tolist()
        criteria = stop_sequences_criteria(self.tokenizer, stop, len(tokens), 1)
        result = self.engine.generate(
            tokens,
            max_length - len(tokens),
            stopping_criteria=criteria,
            pad_token_id=self.tokenizer.pad_token_id,
            **arguments,
        )
        sequences: torch.Tensor = result.output.sequences
        return sequences


if __name__ == "__main__":
    cli_evaluate()
