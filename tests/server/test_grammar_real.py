from unittest.mock import Mock

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvboost.core import Grammar
from kvboost.server.bodies import CacheBody, ChatBody
from kvboost.server.grammar import Grammars
from kvboost.server.options import ServerOptions
from kvboost.server.plans import Planner, Served
from kvboost.server.tools import ToolCall, ToolReader, knows_tools, prepare

pytestmark = pytest.mark.model

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
DAYS = {"type": "object", "properties": {"days": {"type": "integer"}}, "required": ["days"]}
TOOLS = [
    {
        "type": "function",
        "function": {"name": name, "description": use, "parameters": parameters},
    }
    for name, use, parameters in (
        ("get_weather", "The weather in a city", CITY),
        ("book_leave", "Ask for days off", DAYS),
    )
]
QUESTION = [{"role": "user", "content": "What is the weather in Oslo now?"}]


@pytest.fixture(scope="module", params=["smol", "coder"])
def parts(request: pytest.FixtureRequest) -> tuple:
    folder = request.getfixturevalue(request.param)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return model, tokenizer, Grammars(tokenizer, model.config.vocab_size)


@torch.inference_mode()
def answer(parts: tuple, messages: list, grammar: Grammar | None, **arguments: object) -> str:
    """Greedy, step by step, with the grammar by hand."""
    model, tokenizer, _ = parts
    new = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", **arguments
    )["input_ids"]
    cache, tokens = None, []
    while len(tokens) < 200 and not (grammar and grammar.is_over):
        output = model(new, past_key_values=cache)
        logits, cache = output.logits[0, -1], output.past_key_values
        if grammar:
            grammar.restrict(logits)
        tokens.append(int(logits.argmax()))
        if grammar:
            grammar.accept(tokens[-1])
        elif tokens[-1] == tokenizer.eos_token_id:
            break
        new = torch.tensor([tokens[-1:]])
    return tokenizer.decode(tokens, skip_special_tokens=True)


def test_a_call_of_the_model_s_own_accord_is_read(parts: tuple) -> None:
    if not knows_tools(parts[1]):
        pytest.skip("this model was not trained for tools")
    ready, reader = prepare(QUESTION, TOOLS, "auto", parts[1]), ToolReader()
    found = [*reader.feed(answer(parts, ready.messages, None, **ready.arguments))]
    assert [*found, *reader.finish()] == [ToolCall("get_weather", '{"city": "Oslo"}')]


def test_every_token_of_the_padding_is_forbidden(parts: tuple) -> None:
    model, tokenizer, grammars = parts
    grammar = grammars.json_schema({"type": "string"})
    grammar.accept(tokenizer('"').input_ids[0])
    logits = torch.zeros(model.config.vocab_size)
    grammar.restrict(logits)
    free = (logits == 0).nonzero()[:, 0]
    assert len(free) > 1000 and int(free.max()) < len(tokenizer)
    assert not set(free.tolist()) & set(tokenizer.all_special_ids)


def test_conversations_with_calls_are_rendered(parts: tuple) -> None:
    _, tokenizer, _ = parts
    call = {"name": "get_weather", "arguments": '{"city": "Oslo"}'}
    messages = [
        *QUESTION,
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": call}]},
        {"role": "tool", "tool_call_id": "1", "content": "4 degrees, rain"},
    ]
    ready = prepare(messages, TOOLS, "auto", tokenizer)
    text = tokenizer.apply_chat_template(ready.messages, tokenize=False, **ready.arguments)
    reader = ToolReader()
    found = [*reader.feed(text), *reader.finish()]
    assert ToolCall("get_weather", '{"city": "Oslo"}') in found
    assert "<tool_response>\n4 degrees, rain\n</tool_response>" in text
    assert text.count("Ask for days off") == 1


def test_which_templates_know_tools(smol: str, coder: str) -> None:
    assert not knows_tools(AutoTokenizer.from_pretrained(smol))
    assert knows_tools(AutoTokenizer.from_pretrained(coder))


@pytest.mark.parametrize("folder", ["smol", "coder"])
def test_a_conversation_is_stored_with_the_tokens_of_its_chat(
    folder: str, request: pytest.FixtureRequest
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(request.getfixturevalue(folder))
    served = Served("m", len(tokenizer), 8192)
    planner = Planner(tokenizer, ServerOptions(model="m"), served, Mock(), lambda *_: None)
    call = {"name": "get_weather", "arguments": '{"city": "Oslo"}'}
    messages = [
        *QUESTION,
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": call}]},
        {"role": "tool", "tool_call_id": "1", "content": "4 degrees, rain"},
        {"role": "assistant", "content": "It rains."},
    ]
    chat = planner.chat(ChatBody(messages=messages, max_tokens=1), [None], "").asks[0].tokens
    stored = planner.stored(CacheBody(messages=messages))
    assert chat[: len(stored)] == stored
