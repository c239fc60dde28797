import json
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from fakes import byte_tokenizer
from kvboost.errors import ConfigError
from kvboost.server import grammar as grammar_module
from kvboost.server.grammar import Grammars, TokenGrammar
from kvboost.server.tools import ToolCall, ToolReader

NUM_PADDED = 7  # rows of logits that no token has
TOKENIZER = byte_tokenizer()
VOCAB_SIZE = len(TOKENIZER) + NUM_PADDED
GRAMMARS = Grammars(TOKENIZER, VOCAB_SIZE)
TOKEN_OF = TOKENIZER.get_vocab()
BLANKS = {TOKEN_OF[blank] for blank in ("Ġ", "Ċ", "č", "ĉ", "ĠĠ")}


def allowed(grammar: TokenGrammar, dtype: torch.dtype = torch.float32) -> list[int]:
    logits = torch.zeros(VOCAB_SIZE, dtype=dtype)
    grammar.restrict(logits)
    assert ((logits == 0) | (logits == -torch.inf)).all()
    return (logits == 0).nonzero()[:, 0].tolist()


def follow(grammar: TokenGrammar, text: str) -> None:
    for token in TOKENIZER(text).input_ids:
        grammar.accept(token)


def to_the_end(free: list[int]) -> list[int]:
    """Of the allowed tokens those that bring an answer to its end soonest."""
    is_in_string = TOKEN_OF["%"] in free
    for ending in ['"', "a"] if is_in_string else ["<|end|>", *'}],"nf01a']:
        if TOKEN_OF[ending] in free:
            return [TOKEN_OF[ending]]
    return [token for token in free if token not in BLANKS] or free


def walk(grammar: TokenGrammar, seed: int, num_free: int = 60) -> str:
    """Take any of the allowed tokens, for a while; then those that lead to an end."""
    choose, tokens = random.Random(seed).choice, []
    while not grammar.is_over:
        free = allowed(grammar)
        if len(tokens) >= num_free:
            free = to_the_end(free)
        tokens.append(choose(free))
        grammar.accept(tokens[-1])
        assert len(tokens) < 3000, TOKENIZER.decode(tokens)
    return TOKENIZER.decode(tokens, skip_special_tokens=True)


def assert_fits(text: str, schema: object) -> None:
    Draft202012Validator(schema).validate(json.loads(text))


BOUNDS = st.tuples(st.integers(-50, 50), st.integers(0, 40)).map(
    lambda pair: {"minimum": pair[0], "maximum": sum(pair)}
)
LENGTHS = st.tuples(st.integers(0, 5), st.integers(0, 9)).map(
    lambda pair: {"minLength": pair[0], "maxLength": sum(pair)}
)
NAMES = st.text('abcü"\\ -', min_size=1, max_size=4)
LEAVES = st.one_of(
    st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"type": "number"}, {}]),
    st.builds(lambda bounds: {"type": "integer", **bounds}, BOUNDS),
    st.builds(lambda lengths: {"type": "string", **lengths}, LENGTHS),
    st.builds(
        lambda values: {"enum": values},
        st.lists(NAMES | st.integers(-(2**53), 2**53) | st.none(), min_size=1, max_size=4),
    ),
)


def branches(children: st.SearchStrategy) -> st.SearchStrategy:
    properties = st.dictionaries(NAMES, children, max_size=3)
    return st.one_of(
        st.builds(
            lambda each, extra: {
                "type": "object",
                "properties": each,
                "required": list(each)[::2],
                "additionalProperties": extra,
            },
            properties,
            st.booleans(),
        ),
        st.builds(
            lambda items, least: {
                "type": "array",
                "items": items,
                "minItems": least,
                "maxItems": least + 2,
            },
            children,
            st.integers(0, 2),
        ),
        st.builds(lambda each: {"anyOf": each}, st.lists(children, min_size=1, max_size=3)),
    )


@settings(deadline=None)
@given(st.recursive(LEAVES, branches, max_leaves=8), st.integers())
def test_any_way_through_a_schema_ends_in_json_that_fits_it(schema: dict, seed: int) -> None:
    assert_fits(walk(GRAMMARS.json_schema(schema), seed), schema)


TREE = {
    "$defs": {
        "tree": {
            "type": "object",
            "properties": {
                "leaf": {"type": "string"},
                "children": {"type": "array", "items": {"$ref": "#/$defs/tree"}},
            },
            "required": ["leaf", "children"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/tree",
}
MORE = [
    TREE,
    {"type": "string", "pattern": "^[a-z]{2,8}-[0-9]+$"},
    {"type": "string", "format": "date"},
    {"type": "array", "prefixItems": [{"const": "x"}, {"type": "integer"}], "items": False},
    {"type": "object", "patternProperties": {"^n_": {"type": "null"}}, "minProperties": 1},
    {"allOf": [TREE["$defs"]["tree"] | {"properties": {"leaf": {}, "children": {"maxItems": 0}}}]},
]


@pytest.mark.parametrize("schema", MORE, ids=lambda schema: next(iter(schema.values())).__str__())
def test_any_way_through_features_of_schemas_fits_them(schema: dict) -> None:
    for seed in range(20):
        assert_fits(walk(GRAMMARS.json_schema(schema), seed, num_free=20), schema)


def test_without_a_schema_any_object_and_nothing_but_an_object_fits() -> None:
    assert set(TOKENIZER.convert_ids_to_tokens(allowed(GRAMMARS.json_schema(None)))) == {"{"}
    for seed in range(20):
        assert isinstance(json.loads(walk(GRAMMARS.json_schema(None), seed)), dict)
    follow(GRAMMARS.json_schema(None), '{"a": [1, {"b": null}], "ü": "x"}')


def test_an_answer_may_end_exactly_where_the_grammar_does() -> None:
    grammar = GRAMMARS.json_schema({"type": "integer", "maximum": 12})
    assert TOKENIZER.eos_token_id not in allowed(grammar)
    follow(grammar, "1")
    assert TOKENIZER.eos_token_id in allowed(grammar) and not grammar.is_over
    grammar.accept(TOKENIZER.eos_token_id)
    assert grammar.is_over


def test_it_is_over_once_nothing_can_follow() -> None:
    grammar = GRAMMARS.json_schema({"type": "object"})
    follow(grammar, '{"a": 1')
    assert not grammar.is_over
    follow(grammar, "}")
    assert grammar.is_over
    assert allowed(grammar) == [TOKENIZER.eos_token_id]


def test_rows_that_no_token_has_are_forbidden() -> None:
    grammar = GRAMMARS.json_schema({"type": "string"})
    follow(grammar, '"')
    assert max(allowed(grammar)) < len(TOKENIZER)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_of_allowed_tokens_stay_as_they_are(dtype: torch.dtype) -> None:
    logits = torch.randn(VOCAB_SIZE).to(dtype)
    before = logits.clone()
    GRAMMARS.json_schema({"enum": ["ab"]}).restrict(logits)
    free = logits > -torch.inf
    assert TOKENIZER.convert_ids_to_tokens(free.nonzero()[:, 0].tolist()) == ['"']
    assert torch.equal(logits[free], before[free])


def test_answers_of_one_schema_do_not_see_each_other() -> None:
    one, other = (GRAMMARS.json_schema({"enum": ["a", "b"]}) for _ in range(2))
    follow(one, '"a"')
    assert one.is_over and not other.is_over
    follow(other, '"b"')


def test_a_forbidden_token_is_an_error() -> None:
    with pytest.raises(ConfigError):
        GRAMMARS.json_schema(None).accept(TOKENIZER.convert_tokens_to_ids("["))


def test_properties_come_in_the_order_of_the_schema() -> None:
    schema = {"type": "object", "properties": {"z": {}, "a": {}}, "required": ["a", "z"]}
    grammar = GRAMMARS.json_schema(schema)
    follow(grammar, '{"')
    assert TOKENIZER.convert_ids_to_tokens(allowed(grammar)) == ["z"]


def test_blanks_are_bounded_whatever_the_schema_says() -> None:
    grammar = GRAMMARS.json_schema({"type": "object", "x-guidance": {"whitespace_pattern": " +"}})
    follow(grammar, "{" + " " * 40)
    assert TOKENIZER.convert_tokens_to_ids("Ġ") not in allowed(grammar)


def nested(depth: int) -> dict:
    schema: dict = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


REFUSED = {
    "levels": nested(10_000),
    "enum has 100000 entries": {"enum": list(range(100_000))},
    "properties has": {"type": "object", "properties": {f"p{n}": {} for n in range(10_000)}},
    "anyOf has": {"anyOf": [{"type": "array", "items": {"$ref": "#"}}] * 500},
    "bytes": {"const": "x" * 1_000_000},
    "nothing can match": {"$ref": "#"},
    "not compiled": {"allOf": [{"type": "string", "pattern": f"a.{{{n}}}b"} for n in range(1, 60)]},
    "too many digits": {"type": "number", "multipleOf": 1e-300},
    "look-around": {"type": "string", "pattern": "^(?=a)b$"},
    "nested parentheses": {"type": "string", "pattern": "(" * 5000 + ")" * 5000},
    "http://127.0.0.1:1/x": {"$ref": "http://127.0.0.1:1/x"},
    "Unsatisfiable": {"type": "integer", "minimum": 5, "maximum": 3},
    "oneOf": {"oneOf": [{"type": "string"}, {"maxLength": 3}]},
    '"not"': {"not": {"type": "string"}},
    "uniqueItems": {"type": "array", "uniqueItems": True},
    "Unknown format": {"type": "string", "format": "nonsense"},
    "lose digits": {"enum": ["a", 2**53 + 1]},
    "Invalid type": {"type": "strnig"},
    "not JSON": {"const": float("nan")},
    "surrogates": {"type": "string", "pattern": "\ud800"},
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("reason", REFUSED)
def test_what_cannot_be_followed_is_refused_with_the_reason(reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        GRAMMARS.json_schema(REFUSED[reason])
    assert len(str(caught.value)) < 600


BOUNDED = {
    "repeats": {"type": "string", "pattern": "^((((a{1,100}){1,100}){1,100}){1,100})$"},
    "a million": {"type": "string", "pattern": "^a{1000000}$"},
    "states": {"type": "string", "pattern": "^[ab]*a[ab]{2000}$"},
    "longest": {"type": "string", "maxLength": 10**9},
    "long": {"type": "string", "minLength": 10**9},
    "items": {"type": "array", "minItems": 10**9},
    "constant": {"const": "x" * 100_000},
    "endless": {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
    "doubling": {
        "$defs": {
            f"d{n}": {"type": "array", "prefixItems": [{"$ref": f"#/$defs/d{n + 1}"}] * 2}
            for n in range(40)
        }
        | {"d40": {"type": "null"}},
        "$ref": "#/$defs/d0",
    },
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", BOUNDED)
def test_huge_grammars_are_followed_in_small_steps(name: str) -> None:
    grammar, choose = GRAMMARS.json_schema(BOUNDED[name]), random.Random(0).choice
    for _ in range(200):
        if not grammar.is_over:
            grammar.accept(choose(allowed(grammar)))


@pytest.mark.timeout(60)
def test_after_a_schema_that_was_given_up_the_next_one_works() -> None:
    patterns = [{"type": "string", "pattern": f"b.{{{n}}}a"} for n in range(1, 50)]
    with pytest.raises(ConfigError, match="not compiled"):
        GRAMMARS.json_schema({"allOf": patterns})
    GRAMMARS.json_schema({"type": "string", "pattern": "^b$"})


def test_a_schema_that_ends_the_compiler_is_not_compiled_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvboost.server.grammar.TRIAL", "import os; os.abort()")
    with pytest.raises(ConfigError, match="the compiler failed"):
        GRAMMARS.json_schema({"type": "string", "pattern": "^fatal$"})


def function(name: str, parameters: object = None) -> dict:
    described = {"name": name} if parameters is None else {"name": name, "parameters": parameters}
    return {"type": "function", "function": described}


TOOLS = [
    function("plant", TREE | {"type": "object"}),
    function(
        "weather",
        {"type": "object", "properties": {"city": {"enum": ["Oslo"]}}, "required": ["city"]},
    ),
    function("now"),
]


def test_any_way_through_a_tool_call_is_read_as_a_call_that_fits() -> None:
    seen = set()
    for seed in range(30):
        reader = ToolReader()
        text = walk(GRAMMARS.tool_call(TOOLS), seed, num_free=25)
        (call,) = [*reader.feed(text), *reader.finish()]
        assert isinstance(call, ToolCall)
        parameters = {tool["function"]["name"]: tool["function"] for tool in TOOLS}[call.name]
        assert_fits(call.arguments, parameters.get("parameters", {"maxProperties": 0}))
        seen.add(call.name)
    assert seen == {"plant", "weather", "now"}


def test_a_named_tool_is_the_one_that_is_called() -> None:
    text = walk(GRAMMARS.tool_call(TOOLS, "now"), seed=0)
    assert ToolReader().feed(text) == [ToolCall("now", "{}")]


def test_a_call_is_over_at_its_closing_tag() -> None:
    grammar = GRAMMARS.tool_call(TOOLS, "weather")
    follow(grammar, '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call')
    assert not grammar.is_over
    follow(grammar, ">")
    assert grammar.is_over


@pytest.mark.parametrize("parameters", [{"type": "array"}, {"$ref": "#"}, ["city"]])
def test_parameters_that_are_no_object_are_refused(parameters: object) -> None:
    with pytest.raises(ConfigError, match="weather"):
        GRAMMARS.tool_call([function("weather", parameters)])


def test_a_tokenizer_without_a_fast_form_is_refused() -> None:
    class SlowTokenizer:
        def __len__(self) -> int:
            return 5

    with pytest.raises(ConfigError, match="fast"):
        Grammars(SlowTokenizer(), 5)


def test_a_refused_schema_is_not_compiled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = []

    def refuse(text: str, tokens: object) -> None:
        compiled.append(text)
        raise ConfigError("schema: not compiled within 2 s")

    monkeypatch.setattr("kvboost.server.grammar._compile", refuse)
    grammars = Grammars(TOKENIZER, VOCAB_SIZE)
    for _ in range(3):
        with pytest.raises(ConfigError, match="not compiled"):
            grammars.json_schema({"type": "object"})
    assert len(compiled) == 1


def test_a_compiler_that_waits_for_a_busy_machine_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slow = "import time; time.sleep(2.5)\n" + grammar_module.TRIAL
    slow = slow.replace(f", {grammar_module.MAX_COMPILE_S})", ", 1.0)")  # seldom enough for both
    monkeypatch.setattr(grammar_module, "TRIAL", slow)
    fresh = Grammars(TOKENIZER, VOCAB_SIZE)
    fresh.json_schema({"type": "string", "format": "date"})
    endless = {"allOf": [{"type": "string", "pattern": f"(.*{c}.*)"} for c in "abcdefghijklmnopq"]}
    with pytest.raises(ConfigError, match="not compiled within 2 s"):
        fresh.json_schema(endless)
