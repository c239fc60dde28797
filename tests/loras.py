"""Random PEFT adapters for the tests, and what PEFT itself answers with them."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model
from transformers import PreTrainedModel

EVERYWHERE = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def save_adapter(
    model: PreTrainedModel,
    folder: Path,
    seed: int = 0,
    config: PeftConfig | None = None,
    **settings: Any,
) -> str:
    """A LoRA that changes answers, in a folder; `model` is of no use after that."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of tied weights, and a base model without a folder
        torch.manual_seed(seed)
        lora = {"r": 4, "target_modules": EVERYWHERE, "init_lora_weights": False, **settings}
        adapted = get_peft_model(model, config or LoraConfig(**lora))
        for name, parameter in adapted.named_parameters():
            if "modules_to_save" in name:
                parameter.data += 0.3 * torch.randn_like(parameter)
        adapted.save_pretrained(folder)
    return str(folder)


def adapted(model: PreTrainedModel, folder: str) -> PeftModel:
    """The model as PEFT alone adapts it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return PeftModel.from_pretrained(model, folder).eval()


def answer_of(model: Any, tokens: list[int], num_new: int) -> list[int]:
    """What Transformers alone answers, greedily."""
    ids = torch.tensor([tokens])
    output = model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_new, do_sample=False
    )
    return output[0, len(tokens) :].tolist()
