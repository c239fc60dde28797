"""Answers prompts with vLLM: run by a Python that has it, a JSON document a line in and out."""

from __future__ import annotations

import argparse
import json
import os
import sys

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("dtype")
    parser.add_argument("max_tokens", type=int)
    parser.add_argument("--eager", action="store_true", help="do not compile")
    options = parser.parse_args()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else prints does not get between the answers

    import torch  # noqa: PLC0415
    import vllm  # noqa: PLC0415

    model = vllm.LLM(
        options.model,
        dtype=options.dtype,
        max_model_len=options.max_tokens,
        enable_prefix_caching=True,
        enforce_eager=options.eager,
    )
    about = {"vllm": vllm.__version__, "is_eager": options.eager}
    print(json.dumps(about | {"threads": torch.get_num_threads()}), file=answers, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        sampling = vllm.SamplingParams(
            temperature=0.0, max_tokens=asked["num_new"], ignore_eos=True, detokenize=False
        )
        prompts = [{"prompt_token_ids": prompt} for prompt in asked["prompts"]]
        outputs = model.generate(prompts, sampling, use_tqdm=False)
        tokens = [list(output.outputs[0].token_ids) for output in outputs]
        print(json.dumps({"answers": tokens}), file=answers, flush=True)


if __name__ == "__main__":  # vLLM starts processes that import this file again
    main()
