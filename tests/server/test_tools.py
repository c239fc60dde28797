import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from fakes import byte_tokenizer
from kvboost.errors import ConfigError
from kvboost.server.tools import Prepared, ToolCall, ToolReader, knows_tools, prepare

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
WEATHER = ToolCall("weather", '{"city": "Oslo"}')
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather in a city",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
HISTORY = [
    {"role": "user", "content": "Oslo and Rome?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": f"call_{city}",
                "type": "function",
                "function": {"name": "weather", "arguments": json.dumps({"city": city})},
            }
            for city in ("Oslo", "Röm")
        ],
    },
    {"role": "tool", "tool_call_id": "call_Oslo", "content": "rain"},
    {"role": "tool", "tool_call_id": "call_Röm", "content": "sun"},
    {"role": "user", "content": "Thanks"},
]

PLAIN = (
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] + '' }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
KNOWING = (
    "{% if tools %}[tools]{% for t in tools %}{{ t | tojson }}{% endfor %}{% endif %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% for c in m.tool_calls or [] %}"
    '<tool_call>{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
    "</tool_call>{% endfor %}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
# Knows tools, but has other words for a call, which we could not read.
FOREIGN = KNOWING.replace("tool_call>", "function>")


def tokenizer_with(template: str) -> PreTrainedTokenizerFast:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def rendered(ready: Prepared, template: str) -> str:
    return tokenizer_with(template).apply_chat_template(
        ready.messages, tokenize=False, add_generation_prompt=True, **ready.arguments
    )


def read(*pieces: str) -> list[str | ToolCall]:
    """What a reader finds, texts that follow each other joined."""
    reader, found = ToolReader(), []
    for each in [part for piece in pieces for part in reader.feed(piece)] + reader.finish():
        assert each != ""
        if found and isinstance(each, str) and isinstance(found[-1], str):
            found[-1] += each
        else:
            found.append(each)
    return found


WRITTEN = st.lists(
    st.sampled_from(
        [
            CALL,
            "<tool_call>",
            "</tool_call>",
            "<tool_",
            "<",
            " ",
            "\n",
            "so ",
            "```json\n",
            "```",
            '"',
            '{"name": "f", "arguments": {}}',
            '{"name": "f", "arguments": {"tag": "</tool_call>"}}',
            '{"name": "f", "arguments": "none"}',
            "<tool_call>{broken</tool_call>",
        ]
    ),
    max_size=8,
).map("".join)


@given(WRITTEN, st.lists(st.integers(0, 300)))
def test_what_is_read_does_not_depend_on_how_the_text_is_cut(text: str, cuts: list[int]) -> None:
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[start:stop] for start, stop in itertools.pairwise(places)]
    assert read(*pieces) == read(text) == read(*text)


@given(st.text(st.sampled_from('<tool_call> \n/{}"ab')))
def test_text_without_calls_comes_back_as_it_is(text: str) -> None:
    assert "".join(map(str, read(*text))) == text


def test_text_is_passed_on_as_soon_as_it_cannot_be_a_call() -> None:
    reader = ToolReader()
    assert reader.feed("The weather") == ["The weather"]
    assert reader.feed(" <tool_") == []
    assert reader.feed("box>") == [" <tool_box>"]
    assert reader.feed(" and") == [" and"]


def test_a_call_comes_at_its_closing_tag() -> None:
    reader = ToolReader()
    assert reader.feed("Let me see.\n\n" + CALL[:-1]) == ["Let me see."]
    assert reader.feed(">") == [WEATHER]
    assert reader.finish() == []


def test_several_calls_and_text_come_in_their_order() -> None:
    assert read(f"{CALL}\n{CALL}\nDone. {CALL}\n") == [WEATHER, WEATHER, "\nDone.", WEATHER]


def test_ids_of_calls_are_unique() -> None:
    ids = [call.id for call in read(CALL * 100)]
    assert len(set(ids)) == 100 and all(each.startswith("call_") for each in ids)


@pytest.mark.parametrize(
    "body",
    [
        "",
        "{",
        '{"name": "f"}',
        '{"name": "f", "arguments": "x"}',
        '{"name": 3, "arguments": {}}',
        r'{"name": "\ud800", "arguments": {}}',
        '{"name": "f", "arguments": {"x": NaN}}',
        '["f"]',
        "[" * 100_000,
        '{"name": "f", "arguments": {}} and more',
        '{"name": "f',
    ],
)
def test_a_broken_call_is_text_and_the_next_call_is_a_call(body: str) -> None:
    broken = f"<tool_call>{body}</tool_call>"
    assert read(f"{broken}\n{CALL}") == [broken, WEATHER]


def test_a_closing_tag_in_an_argument_ends_nothing() -> None:
    call = '<tool_call>{"name": "f", "arguments": {"x": "</tool_call>"}}</tool_call>'
    assert read(*call) == [ToolCall("f", '{"x": "</tool_call>"}')]


def test_a_call_without_its_closing_tag_counts_at_the_end() -> None:
    assert read(CALL.removesuffix("</tool_call>")) == [WEATHER]


BARE = '{\n  "name": "weather",\n  "arguments": {"city": "Oslo"}\n}'


@pytest.mark.parametrize("text", [BARE, f"\n```json\n{BARE}\n```\n"])
def test_an_answer_that_is_the_json_of_a_call_is_one(text: str) -> None:
    assert read(*text) == [WEATHER]


@pytest.mark.parametrize(
    "text", [f"{BARE} is how", f"So: {BARE}", '{"name": "Ada"}', "```json\n[]\n```", BARE[:30]]
)
def test_other_json_is_text(text: str) -> None:
    assert read(*text) == [text]


def test_json_that_cannot_be_a_call_is_not_held_back() -> None:
    assert ToolReader().feed('{"age": 3') == ['{"age": 3']
    assert ToolReader().feed("```python\nx") == ["```python\nx"]


def test_a_call_that_was_cut_off_is_text() -> None:
    assert read("So: " + CALL[:40]) == ["So: " + CALL[:40]]


def test_arguments_can_be_sent() -> None:
    (call,) = read(r'<tool_call>{"name": "f", "arguments": {"x": "\ud800"}}</tool_call>')
    call.arguments.encode()
    assert json.loads(call.arguments) == {"x": "\ud800"}
    (call,) = read('<tool_call>{"name": "f", "arguments": {"x": "Röm"}}</tool_call>')
    assert call.arguments == '{"x": "Röm"}'


def test_templates_are_known_by_what_they_render() -> None:
    assert knows_tools(tokenizer_with(KNOWING))
    assert not knows_tools(tokenizer_with(PLAIN))
    assert not knows_tools(tokenizer_with(FOREIGN))
    assert not knows_tools(tokenizer_with("{{ raise_exception('roles must alternate') }}"))


def test_messages_without_tools_stay_as_they_are() -> None:
    messages = [{"role": "user", "content": "hello"}]
    for tools, choice in ((None, "auto"), ([], None), (TOOLS, "none")):
        ready = prepare(messages, tools, choice, tokenizer_with(PLAIN))
        assert ready == Prepared(messages, {})


def test_a_template_that_knows_tools_is_given_them() -> None:
    ready = prepare(HISTORY, TOOLS, "auto", tokenizer_with(KNOWING))
    text = rendered(ready, KNOWING)
    assert ready.arguments == {"tools": TOOLS}
    assert '<tool_call>{"name": "weather", "arguments": {"city": "Röm"}}</tool_call>' in text
    assert "None" not in text and "[tool]rain[tool]sun" in text


@pytest.mark.parametrize("template", [PLAIN, FOREIGN])
def test_other_templates_get_a_system_message(template: str) -> None:
    ready = prepare(HISTORY[:1], TOOLS, "required", tokenizer_with(template))
    assert ready.arguments == {}
    system, user = ready.messages
    assert system["role"] == "system" and '"The weather in a city"' in system["content"]
    assert user == HISTORY[0]


def test_the_system_message_of_a_conversation_stays_first_and_whole() -> None:
    messages = [{"role": "system", "content": "Be brief."}, *HISTORY[:1]]
    ready = prepare(messages, TOOLS, "auto", tokenizer_with(PLAIN))
    assert [message["role"] for message in ready.messages] == ["system", "user"]
    assert ready.messages[0]["content"].startswith("Be brief.\n\nYou may call")
    assert messages[0]["content"] == "Be brief."


@pytest.mark.parametrize("tools", [TOOLS, None])
def test_past_calls_become_plain_messages(tools: list | None) -> None:
    ready = prepare(HISTORY, tools, "auto", tokenizer_with(PLAIN))
    messages = ready.messages[1:] if tools else ready.messages
    assert [message["role"] for message in messages] == ["user", "assistant", "user", "user"]
    assert read(messages[1]["content"]) == [WEATHER, ToolCall("weather", '{"city": "Röm"}')]
    assert messages[2]["content"] == (
        "<tool_response>\nrain\n</tool_response>\n<tool_response>\nsun\n</tool_response>"
    )
    assert all(set(message) == {"role", "content"} for message in messages)
    assert rendered(ready, PLAIN).endswith("Thanks[assistant]")


@pytest.mark.parametrize("arguments", ["{", "3", "[]"])
def test_past_arguments_that_are_no_object_are_refused(arguments: str) -> None:
    call = {"id": "1", "function": {"name": "weather", "arguments": arguments}}
    messages = [{"role": "assistant", "content": "", "tool_calls": [call]}]
    with pytest.raises(ConfigError, match="weather"):
        prepare(messages, TOOLS, "auto", tokenizer_with(PLAIN))
