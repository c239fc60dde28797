"""Structured output: JSON schemas and tool calls -> the tokens that may come next."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.hf import from_tokenizer

from kvboost.errors import ConfigError
from kvboost.models.upload import sent
from kvboost.server.bodies import MOST_SCHEMA_BYTES
from kvboost.server.tools import CLOSE, OPEN

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Schemas come from clients. Where these figures come from: docs/adr/0018-structured-output.md.
MAX_DEPTH = 64  # lists and objects within each other
MAX_ENTRIES = 1000  # of one list or object: properties, enum
MAX_BRANCHES = 100  # of one anyOf, allOf or oneOf
MAX_COMPILE_S = 2.0  # of processor time: a busy machine is no reason to refuse a schema
MAX_WAIT_S = 10.0
MAX_CACHED = 32  # grammars, compiled or refused
LIMITS = LLParserLimits(
    step_lexer_fuel=50_000,  # a mask takes some 50 ms at most; usual ones a thousandth of it
    max_lexer_states=20_000,  # about 40 MB
    verbose_errors=False,
)

# Intersections of regular expressions can take time that is exponential in their number.
INTERSECTING = re.compile(r'"(allOf|format|multipleOf|pattern|patternProperties)":')
TRIAL = f"""
import os, signal, sys
if hasattr(signal, "setitimer"):  # not on Windows
    os.nice(10)  # answers go first
    signal.alarm({int(MAX_WAIT_S) + 2})  # should the server be gone
from llguidance import LLMatcher
if hasattr(signal, "setitimer"):
    signal.setitimer(signal.ITIMER_PROF, {MAX_COMPILE_S})
sys.stdout.write(LLMatcher.validate_grammar(sys.stdin.read()))
"""
OUT_OF_TIME = -getattr(signal, "SIGPROF", 0)

# Text that must follow is not looked for ahead: we decode token by token, and a constant of
# 100 KB would be walked through for every token of it.
OPTIONS = '%llguidance {"no_forcing": true}\n'
# A model that has lost its way writes blanks for ever if it may. 40: a line break and nine levels.
LAYOUT = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,40}"}
ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


class Grammars:
    """Compiles the grammars of one model's answers, each once. Thread-safe."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> None:
        try:
            tokens = from_tokenizer(tokenizer, n_vocab=max(vocab_size, len(tokenizer)))
        except ValueError as error:
            raise ConfigError(f"no structured output with this tokenizer: {error}") from error
        self._vocab_size = vocab_size
        self._compile = lru_cache(MAX_CACHED)(lambda text: _compiled(text, tokens))

    def json_schema(self, schema: Mapping[str, Any] | None) -> TokenGrammar:
        """JSON that fits a schema; any JSON object for None.

        Raises:
            ConfigError: the schema is wrong, too big, or has features that are not supported.
        """
        return self._grammar(["@part0"], [ANY_OBJECT if schema is None else schema])

    def tool_call(
        self, tools: Sequence[Mapping[str, Any]], name: str | None = None
    ) -> TokenGrammar:
        """One call of one of the tools, or of the one with that name.

        Raises:
            ConfigError: as `json_schema`, for the parameters of a tool.
        """
        rules: list[str] = []
        schemas: list[Mapping[str, Any]] = []
        for function in (tool["function"] for tool in tools):
            if name not in (None, function["name"]):
                continue
            schema = function.get("parameters") or NO_PARAMETERS
            if not isinstance(schema, Mapping) or schema.get("type") != "object":
                raise ConfigError(f"the parameters of {function['name']} must have type object")
            head = f'{OPEN}\n{{"name": {_json(function["name"])}, "arguments": '
            rules.append(f"{_json(head)} @part{len(rules)} {_json('}' + chr(10) + CLOSE)}")
            schemas.append(schema)
        return self._grammar(rules, schemas)

    def _grammar(self, rules: list[str], schemas: list[Mapping[str, Any]]) -> TokenGrammar:
        check_schema(schemas)
        grammars: list[dict[str, Any]] = [
            {"lark_grammar": f"{OPTIONS}start: {' | '.join(rules)}"},
            *(
                {"name": f"part{number}", "json_schema": {**schema, "x-guidance": LAYOUT}}
                for number, schema in enumerate(schemas)
            ),
        ]
        # Keys are not sorted: properties come in the order of the schema.
        compiled = self._compile(_json({"grammars": grammars}))
        if isinstance(compiled, ConfigError):
            raise compiled.with_traceback(None)
        return TokenGrammar(compiled, self._vocab_size)


class TokenGrammar:
    """A `kvboost.core.Grammar`: the state of one output in its grammar."""

    def __init__(self, compiled: LLMatcher, vocab_size: int) -> None:
        self._matcher, self._vocab_size = compiled.deep_copy(), vocab_size

    @property
    def is_over(self) -> bool:
        """Whether the answer is complete, and nothing may follow."""
        return self._matcher.is_stopped()

    def restrict(self, logits: torch.Tensor) -> None:
        """Set the logits [vocabulary] of all tokens that may not come next to -inf, in place.

        Raises:
            ConfigError: the grammar takes too much work from here on.
        """
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        _check(self._matcher)
        allowed = np.unpackbits(bits, count=self._vocab_size, bitorder="little")
        logits.masked_fill_(sent(torch.from_numpy(allowed == 0), logits.device), float("-inf"))

    def accept(self, token: int) -> None:
        """Advance by a chosen token; a forbidden one is a ConfigError."""
        self._matcher.consume_token(token)
        _check(self._matcher)


def check_schema(schema: object) -> None:
    """Refuse a schema that is too big, before anything recurses into it."""
    level: list[tuple[str, object]] = [("", schema)]
    for _ in range(MAX_DEPTH):
        level = [entry for key, part in level for entry in _entries(key, part)]
    if level:
        raise ConfigError(f"schema: more than {MAX_DEPTH} nested levels")
    try:
        size_bytes = len(_json(schema).encode())
    except (TypeError, ValueError) as error:
        raise ConfigError(f"schema: not JSON: {error}") from error
    if size_bytes > MOST_SCHEMA_BYTES:
        raise ConfigError(f"schema: {size_bytes} bytes; the limit is {MOST_SCHEMA_BYTES}")


def _entries(key: str, part: object) -> Iterable[tuple[str, object]]:
    """The entries of a list or object, each with its keyword."""
    if isinstance(part, int) and key in ("const", "enum") and abs(part) > 2**53:
        raise ConfigError(f"schema: {key} has {part}; integers above 2^53 lose digits")
    if not isinstance(part, Mapping | list):
        return ()
    most = MAX_BRANCHES if key in ("allOf", "anyOf", "oneOf") else MAX_ENTRIES
    if len(part) > most:
        raise ConfigError(f"schema: {key or 'a list'} has {len(part)} entries; the limit is {most}")
    return part.items() if isinstance(part, Mapping) else [(key, each) for each in part]


def _compiled(text: str, tokens: LLTokenizer) -> LLMatcher | ConfigError:
    """Compile; refusals are cached as well, so that a repeated schema does not cost seconds."""
    try:
        return _compile(text, tokens)
    except ConfigError as error:
        return error


def _compile(text: str, tokens: LLTokenizer) -> LLMatcher:
    if INTERSECTING.search(text):
        _try_elsewhere(text)
    matcher = LLMatcher(tokens, text, log_level=0, limits=LIMITS)
    _check(matcher)
    matcher.compute_bitmask()  # a schema that nothing fits is found here, not by the engine
    _check(matcher)
    return matcher


def _try_elsewhere(text: str) -> None:
    """Compile in a process, which can be killed; a thread could not be."""
    command = [sys.executable, "-c", TRIAL]
    try:
        done = subprocess.run(command, input=text.encode(), capture_output=True, timeout=MAX_WAIT_S)
    except subprocess.TimeoutExpired:
        raise ConfigError(f"schema: not compiled within {MAX_WAIT_S:g} s") from None
    if done.returncode and done.returncode == OUT_OF_TIME:
        raise ConfigError(f"schema: not compiled within {MAX_COMPILE_S:g} s")
    if done.returncode:  # it would end this process too
        raise ConfigError("schema: the compiler failed")


def _check(matcher: LLMatcher) -> None:
    if matcher.is_error():
        # It may show a whole pattern, or advise options that clients do not have.
        reason = matcher.get_error().removesuffix("<non-verbose/>").strip()
        reason = reason.rpartition("\nerror: ")[2].partition(". Enable")[0][:500]
        reason = "nothing can match it" if "NoExtension" in reason else reason
        raise ConfigError(f"schema: {reason}")


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)
