"""How good an answer is: what a full forward of the same model in fp32 thinks of its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class Judge:
    """Reads prompts and answers in full, without any cache, in fp32."""

    def __init__(self, model: str) -> None:
        import torch  # noqa: PLC0415  (slow to load)
        from transformers import AutoModelForCausalLM  # noqa: PLC0415

        self._torch = torch
        self._model: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()

    def verdict(self, prompt: Sequence[int], answer: Sequence[int]) -> dict[str, float]:
        """What it thinks of an answer.

        `top1` is the share of its tokens that the judge has as most likely, `regret` the mean of
        the nats by which the judge prefers its own.
        """
        torch = self._torch
        tokens = torch.tensor([[*prompt, *answer]])
        with torch.inference_mode():
            output = self._model(tokens, logits_to_keep=len(answer) + 1, use_cache=False)
        logprobs = output.logits[0, :-1].log_softmax(-1)
        chosen = logprobs.gather(1, torch.tensor(answer)[:, None])[:, 0]
        best = logprobs.max(-1)
        agrees = best.indices == torch.tensor(answer)
        return {
            "top1": round(agrees.double().mean().item(), 4),
            "regret": round((best.values - chosen).mean().item(), 5),
        }
