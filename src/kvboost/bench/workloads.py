"""What is asked: for each workload a session of prompts, the same for all systems and rounds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from kvboost.bench.texts import Dealer, Fact

Phase: TypeAlias = Literal["cold", "warm", "moved"]
Messages: TypeAlias = list[dict[str, str]]

CAREFUL = "You are a careful assistant. Use the documents to answer in a few words."
NUM_QUESTIONS = 3  # on what was read, after the first
NUM_TURNS = 8
NEW_TOKENS = 8


@dataclass(frozen=True)
class Ask:
    """One prompt, and what it is in its session: cold, warm (begins as one before), or moved."""

    tokens: tuple[int, ...]
    phase: Phase
    num_new: int = NEW_TOKENS
    fact: str = ""  # what a right answer has in it; empty: nothing is known


@dataclass(frozen=True)
class Session:
    """Prompts that are asked one after the other, of a system that has forgotten all others."""

    workload: str
    asks: tuple[Ask, ...]


class Writer:
    """Makes prompts of texts, in the model's own chat template."""

    def __init__(self, tokenizer: Any, seed: int, num_tokens: int) -> None:
        """`num_tokens` is about the length of the shared part of a prompt."""
        self._tokenizer, self.num_tokens = tokenizer, num_tokens
        self.dealer = Dealer(seed, lambda text: len(self._tokens(text)))

    def ask(self, messages: Messages, phase: Phase, *, beginning: str = "", fact: str = "") -> Ask:
        """A prompt that ends where the answer, or the given beginning of it, ends."""
        text: str = self._tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        return Ask(tuple(self._tokens(text + beginning)), phase, fact=fact)

    def ask_fact(self, system: str, before: str, fact: Fact, phase: Phase) -> Ask:
        """The question for a fact behind `before`."""
        messages = _messages(system, f"{before}\n\nQuestion: {fact.question}")
        return self.ask(messages, phase, beginning=fact.beginning, fact=fact.answer)

    def _tokens(self, text: str) -> list[int]:
        tokens: list[int] = self._tokenizer(text, add_special_tokens=False).input_ids
        return tokens


def sessions(tokenizer: Any, names: Sequence[str], seed: int, num_tokens: int) -> list[Session]:
    """A session of each workload named; which others are named does not change it."""
    return [
        Session(name, tuple(WORKLOADS[name](Writer(tokenizer, 100 * seed + number, num_tokens))))
        for number, name in enumerate(WORKLOADS)
        if name in names
    ]


def _system_prompt(writer: Writer) -> Iterator[Ask]:
    facts = [writer.dealer.fact() for _ in range(1 + NUM_QUESTIONS)]
    rules = [writer.dealer.document(writer.num_tokens // len(facts), fact) for fact in facts]
    system = "\n\n".join([CAREFUL, *rules])
    for number, fact in enumerate(facts):
        yield writer.ask_fact(system, "Hello.", fact, _phase(number))


def _multi_turn(writer: Writer) -> Iterator[Ask]:
    messages = _messages(CAREFUL, f"Let us talk about this: {writer.dealer.prose(60)}")
    for turn in range(NUM_TURNS):
        yield writer.ask(messages, _phase(turn))
        said = writer.dealer.prose(writer.num_tokens // NUM_TURNS // 2)
        asked = f"And what of this? {writer.dealer.prose(writer.num_tokens // NUM_TURNS // 3)}"
        messages = [
            *messages,
            {"role": "assistant", "content": said},
            {"role": "user", "content": asked},
        ]


def _code(writer: Writer) -> Iterator[Ask]:
    source = writer.dealer.code(writer.num_tokens)
    names = [line.split("(")[0].split()[-1] for line in source.split("\n") if "def " in line]
    for number in range(1 + NUM_QUESTIONS):
        question = f"What does {names[number * len(names) // 4]} return?"
        asked = f"```python\n{source}\n```\n\n{question}"
        yield writer.ask(_messages("You explain code.", asked), _phase(number))


def _few_shot(writer: Writer) -> Iterator[Ask]:
    kinds = ("rule", "example", "definition", "warning")
    shots: list[str] = []
    while sum(len(shot.split()) for shot in shots) < writer.num_tokens // 2:
        shots.append(f"Text: {writer.dealer.sentence()}\nKind: {kinds[len(shots) % 4]}")
    for number in range(1 + NUM_QUESTIONS):
        asked = "\n\n".join([*shots, f"Text: {writer.dealer.sentence()}\nKind:"])
        yield writer.ask(_messages("Say of what kind each text is.", asked), _phase(number))


def _rag_first(writer: Writer) -> Iterator[Ask]:
    facts, documents = _documents(writer, 1 + NUM_QUESTIONS)
    for number, fact in enumerate(facts):
        yield writer.ask_fact(CAREFUL, _listed(documents), fact, _phase(number))


def _rag_middle(writer: Writer) -> Iterator[Ask]:
    facts, documents = _documents(writer, 1 + NUM_QUESTIONS)
    for number, fact in enumerate(facts):
        about = f"{CAREFUL} About the person who asks: {writer.dealer.prose(40)}"
        phase: Phase = "cold" if number == 0 else "moved"
        yield writer.ask_fact(about, _listed(documents), fact, phase)


def _rag_shuffled(writer: Writer) -> Iterator[Ask]:
    facts, documents = _documents(writer, 8)
    first, second = documents[:4], documents[4:]
    yield writer.ask_fact(CAREFUL, _listed(first), facts[0], "cold")
    yield writer.ask_fact(CAREFUL, _listed(second), facts[4], "cold")
    for order in ((2, 5, 0, 7), (6, 1, 4, 3), (3, 6, 5, 2)):
        chosen = [documents[each] for each in order]
        yield writer.ask_fact(CAREFUL, _listed(chosen), facts[order[1]], "moved")


def _agent(writer: Writer) -> Iterator[Ask]:
    tools = writer.dealer.tools(3 * writer.num_tokens // 4)
    system = f"You work with these tools, one call at a time:\n{tools}"
    messages = _messages(system, f"Look into this: {writer.dealer.sentence()}")
    for step in range(1 + NUM_QUESTIONS):
        yield writer.ask(messages, _phase(step))
        call = f'{{"name": "json_dumps", "arguments": {{"obj": "{step}"}}}}'
        found = f"Result: {writer.dealer.prose(50)}"
        messages = [
            *messages,
            {"role": "assistant", "content": call},
            {"role": "user", "content": found},
        ]


WORKLOADS: dict[str, Callable[[Writer], Iterator[Ask]]] = {
    "system-prompt": _system_prompt,
    "multi-turn": _multi_turn,
    "code": _code,
    "few-shot": _few_shot,
    "rag-first": _rag_first,
    "rag-middle": _rag_middle,
    "rag-shuffled": _rag_shuffled,
    "agent": _agent,
}


def _messages(system: str, user: str) -> Messages:
    return [{"role": "system", "content": system}, {"role": "user", "content": user}]


def _phase(number: int) -> Phase:
    return "cold" if number == 0 else "warm"


def _documents(writer: Writer, count: int) -> tuple[list[Fact], list[str]]:
    """As many facts and documents, of which four make the shared part of a prompt."""
    facts = [writer.dealer.fact() for _ in range(count)]
    return facts, [writer.dealer.document(writer.num_tokens // 4, fact) for fact in facts]


def _listed(documents: Sequence[str]) -> str:
    return "\n\n".join(f"Document:\n{text}" for text in documents)
