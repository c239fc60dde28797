"""A first answer with reuse on a tiny random model: is an installed kvboost whole?

Run by the Python of the environment to try, from any folder: `PYTHON scripts/smoke.py VERSION`.
"""

from __future__ import annotations

import sys

import kvboost

TEXT = "What was read once is not read again. " * 8


def main(version: str) -> None:
    """Raise unless this is `version`, loads lazily, and reuses a prompt to the token."""
    assert kvboost.__version__ == version, f"{kvboost.__file__} is {kvboost.__version__}"
    assert "torch" not in sys.modules, "import kvboost loads torch"
    # After the check above: what an engine needs does load torch.
    from tokenizers import Tokenizer, decoders, pre_tokenizers  # noqa: PLC0415
    from tokenizers.models import BPE  # noqa: PLC0415
    from transformers import (  # noqa: PLC0415
        LlamaConfig,
        LlamaForCausalLM,
        PreTrainedTokenizerFast,
    )

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    letters = Tokenizer(BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    letters.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    letters.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=letters)
    config = LlamaConfig(
        vocab_size=len(alphabet),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
    )
    with kvboost.KVBoost(LlamaForCausalLM(config).eval(), tokenizer) as engine:
        cold = engine.generate(TEXT, max_new_tokens=8)
        warm = engine.generate(TEXT, max_new_tokens=8)
    assert warm.output_text == cold.output_text, "reuse has changed an answer"
    # The last token is always computed: its logits choose the first new one.
    assert warm.cached_tokens == warm.prompt_tokens - 1, f"{warm.cached_tokens} tokens were reused"
    print(f"kvboost {version}: {warm.cached_tokens} of {warm.prompt_tokens} tokens reused")


if __name__ == "__main__":
    main(sys.argv[1])
