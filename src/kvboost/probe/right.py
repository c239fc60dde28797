"""Are answers from the cache right? Planted facts, greedy texts and log-probabilities.

A prompt is new the first time it is sent, because its record number is. That answer is what later
answers to the same prompt are judged by. The same document behind another record number, its twin,
is new as well: how often those two texts differ tells how little it takes to change a text.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from difflib import SequenceMatcher
from statistics import median
from typing import Any

from kvboost.probe.client import BudgetSpent, Reply, RequestFailed, Server
from kvboost.probe.findings import Finding, Light
from kvboost.probe.statistics import more_p
from kvboost.probe.texts import Document, Texts, says

NUM_WORDS = 200  # more than a block of any cache
MAX_TOKENS = 20
GROUP = 4  # documents; a slow server is asked about fewer of them, but everything
ALIKE = 0.6  # texts below that share little: no near-tie explains it
CONFIRMED = 2  # damaged answers; one may be an accident
CHANCE = 0.01
LARGE_SHIFT = 0.2  # of a log-probability, in nats
SAME_PROMPT = ("again", "warm", "not streamed", "beside others", "confirmed")  # as the new one


@dataclass(frozen=True)
class Asked:
    """A prompt about a document, and its answer."""

    document: Document
    kind: str
    reply: Reply


class Right:
    """One check of a server's answers; findings are of what was asked so far."""

    def __init__(self, server: Server, texts: Texts) -> None:
        self.server, self.texts = server, texts
        self.asked: list[Asked] = []
        self.failures: list[RequestFailed] = []
        self.documents: list[Document] = []

    def run(self, num_documents: int, load: int, rounds: int) -> None:
        """Ask until done or until the budget is spent."""
        try:
            for first in range(0, num_documents, GROUP):
                self._ask_group(min(GROUP, num_documents - first))
                self._ask_beside(load)
            for _ in range(rounds):
                self._ask_beside(load)
            if len(self._damaged()) == 1:
                for document in self.documents:
                    self.ask(document, "confirmed")
        except BudgetSpent:
            pass

    def ask(self, document: Document, kind: str, *, stream: bool = True) -> None:
        """Ask one question; a failure is recorded."""
        try:
            reply = self.server.ask(document.prompt, MAX_TOKENS, stream=stream)
            self.asked.append(Asked(document, kind, reply))
        except RequestFailed as error:
            self.failures.append(error)

    def ask_edited(self, document: Document) -> None:
        """Ask about the document with another fact, first behind a new record number."""
        edited = self.texts.with_other_code(document)
        self.ask(edited.salted(self.texts.salt()), "edited twin")
        self.ask(edited, "edited")

    def pairs(self) -> list[tuple[float, float]]:
        """Times to first token of prompts, new and repeated at once."""
        again = {each.document: each.reply.ttft_s for each in self._of("again")}
        new = self._of("new")
        return [(x.reply.ttft_s, again[x.document]) for x in new if x.document in again]

    @property
    def num_cached(self) -> int:
        """Repeated prompts of which usage counts tokens as cached, beyond those of new ones."""
        counts = [each.reply.cached_tokens or 0 for each in self._of("new")]
        most = max(counts, default=0)
        return sum((each.reply.cached_tokens or 0) > most for each in self._of(*SAME_PROMPT))

    def findings(self, *, has_hits: bool) -> list[Finding]:
        """All of them, in the order of the report; `has_hits`: repeated prompts are faster."""
        if self.asked and not any(each.reply.text for each in self.asked):
            return [Finding("right", "facts", "grey", "All answers are empty: nothing to judge.")]
        found = [self._facts(), self._stale(), self._mixed_up(), self._texts()]
        if self._shifts("again"):
            found.append(self._logprobs())
        if not (has_hits or self.num_cached):
            said = "Neither time nor usage shows a hit, so answers above may all be computed anew."
            found.append(Finding("right", "hits seen", "grey", said))
        return found

    def _ask_group(self, num_documents: int) -> None:
        new = [self.texts.document(NUM_WORDS) for _ in range(num_documents)]
        for document in new:
            self.ask(document, "new")
            self.ask(document, "again")
            self.ask(document.salted(self.texts.salt()), "twin")
            self.documents.append(document)
        for document in new:
            self.ask(document, "warm")
            self.ask(document, "not streamed", stream=False)
            self.ask_edited(document)

    def _ask_beside(self, load: int) -> None:
        """Each document once more, `load` requests at a time."""
        with ThreadPoolExecutor(load) as pool:
            asked = [pool.submit(self.ask, each, "beside others") for each in self.documents]
            for each in asked:
                each.result()

    def _of(self, *kinds: str) -> list[Asked]:
        return [each for each in self.asked if each.kind in kinds]

    def _by_document(self, kind: str) -> dict[str, Asked]:
        return {each.document.seed: each for each in self._of(kind)}

    def _known(self) -> dict[str, str]:
        """New answers with the fact, of documents whose twin's answer has it too."""
        twins = self._by_document("twin")
        return {
            seed: each.reply.text
            for seed, each in self._by_document("new").items()
            if _is_found(each) and seed in twins and _is_found(twins[seed])
        }

    def _judged(self) -> list[tuple[Asked, str]]:
        """Answers that ought to have the fact, each with a new prompt's answer."""
        known = self._known()
        same = [x for x in self._of(*SAME_PROMPT) if x.document.seed in known]
        return [(each, known[each.document.seed]) for each in same] + self._edited()

    def _edited(self) -> list[tuple[Asked, str]]:
        """Answers about edited documents whose twin has the fact.

        They were never asked before, and a model errs about some: unless more have lost the fact
        than among new prompts, none counts.
        """
        twins, new = self._by_document("edited twin"), self._known()
        found = [(x, twins[x.document.seed]) for x in self._of("edited")
                 if x.document.seed in twins and _is_found(twins[x.document.seed])]  # fmt: skip
        num_lost = sum(not _is_found(each) for each, _ in found)
        num_split = len(self._split())
        is_clear = more_p(num_lost, len(found), num_split, num_split + len(new)) < CHANCE
        return [(each, twin.reply.text) for each, twin in found if is_clear or _is_found(each)]

    def _split(self) -> list[str]:
        """Documents whose fact is found, but not behind another record number."""
        new, twins = self._by_document("new"), self._by_document("twin")
        both = new.keys() & twins.keys()
        return [seed for seed in both if _is_found(new[seed]) and not _is_found(twins[seed])]

    def _damaged(self) -> list[Asked]:
        return [each for each, new in self._judged() if not _is_found(each) and unlike(each, new)]

    def _facts(self) -> Finding:
        num_judged, bad, num_known = len(self._judged()), self._damaged(), len(self._known())
        new, split = self._by_document("new"), self._split()
        figures: dict[str, Any] = {
            "repeated": num_judged, "damaged": len(bad), "found": num_known, "new": len(new),
            "twins_without": len(split),
        }  # fmt: skip
        if bad:
            kinds = ", ".join(sorted({each.kind for each in bad}))
            figures["examples"] = [each.reply.text[:120] for each in bad[:3]]
            said = (
                f"{len(bad)} of {num_judged} repeated answers lost the planted fact that the new "
                f"prompt's answer has ({kinds})"
            )
            if len(bad) >= CONFIRMED:
                said += ": cached K/V is damaged, or belongs to other text."
                return Finding("right", "facts", "red", said, figures)
            return Finding("right", "facts", "yellow", f"{said}; only once: run again.", figures)
        if len(split) >= CONFIRMED:
            said = (
                f"In {len(split)} of {len(new)} documents the fact is found, but not behind "
                "another record number: the model errs, or text that was moved is damaged."
            )
            return Finding("right", "facts", "yellow", said, figures)
        if num_known < max(2, len(new) / 3):
            said = (
                f"The model finds the planted fact in {num_known} of {len(new)} new prompts: too "
                "few to judge by."
            )
            return Finding("right", "facts", "grey", said, figures)
        if not num_judged:
            return Finding("right", "facts", "grey", "No prompt was answered twice.", figures)
        said = f"All {num_judged} repeated answers have the planted fact."
        return Finding("right", "facts", "green", said, figures)

    def _stale(self) -> Finding:
        old = {each.seed: each.code for each in self.documents}
        edited = self._of("edited", "edited twin")
        bad = [each for each in edited if says(each.reply.text, old[each.document.seed])]
        figures = {"edited": len(edited), "stale": len(bad)}
        if bad:
            said = (
                f"{len(bad)} of {len(edited)} answers about an edited document have the fact from "
                "before the edit, which is not in their prompt: keys ignore part of the text."
            )
            return Finding("right", "edits", "red", said, figures)
        if not edited:
            said = "No time for questions about edited documents."
            return Finding("right", "edits", "grey", said, figures)
        said = f"None of {len(edited)} answers about an edited document is from before the edit."
        return Finding("right", "edits", "green", said, figures)

    def _mixed_up(self) -> Finding:
        codes = {each.document.code: each.document.seed for each in self.asked}
        bad = [
            each
            for each in self.asked
            if any(
                seed != each.document.seed and says(each.reply.text, code)
                for code, seed in codes.items()
            )
        ]
        figures = {"answers": len(self.asked), "mixed_up": len(bad)}
        if bad:
            said = (
                f"{len(bad)} of {len(self.asked)} answers have a fact of another prompt: streams "
                "or cached blocks of requests are mixed up."
            )
            return Finding("right", "own answers", "red", said, figures)
        said = f"None of {len(self.asked)} answers has a fact of another prompt."
        return Finding("right", "own answers", "green", said, figures)

    def _texts(self) -> Finding:
        new = {seed: each.reply.text for seed, each in self._by_document("new").items()}
        repeated = [each for each in self._of(*SAME_PROMPT) if each.document.seed in new]
        num_other = _num_other(repeated, new)
        twins = [each for each in self._of("twin") if each.document.seed in new]
        noise = _num_other(twins, new)
        figures = {
            "repeated": len(repeated), "other": num_other, "twins": len(twins), "noise": noise
        }  # fmt: skip
        if not repeated:
            return Finding("right", "texts", "grey", "No prompt was answered twice.", figures)
        if not num_other:
            said = f"All {len(repeated)} repeated greedy texts equal the new prompt's text."
            return Finding("right", "texts", "green", said, figures)
        said = (
            f"{num_other} of {len(repeated)} repeated greedy texts differ from the new prompt's; "
            f"behind another record number, {noise} of {len(twins)}"
        )
        if more_p(num_other, len(repeated), noise, len(twins)) < CHANCE:
            return Finding("right", "texts", "yellow", f"{said}: more than that explains.", figures)
        return Finding("right", "texts", "green", f"{said}: no more than noise.", figures)

    def _shifts(self, kind: str) -> list[float]:
        new = self._by_document("new")
        pairs = [(new[x.document.seed].reply.logprob, x.reply.logprob)
                 for x in self._of(kind) if x.document.seed in new]  # fmt: skip
        return [abs(a - b) for a, b in pairs if a is not None and b is not None]

    def _logprobs(self) -> Finding:
        shifts, twins = self._shifts("again"), self._shifts("twin")
        middle, noise = median(shifts), median(twins) if twins else 0.0
        figures = {"median": round(middle, 4), "most": round(max(shifts), 4)}
        figures["twins"] = round(noise, 4)
        said = (
            f"The first token's log-probability shifts by {middle:.3f} (median) when a prompt is "
            f"repeated; behind another record number by {noise:.3f}."
        )
        light: Light = "yellow" if middle > max(LARGE_SHIFT, noise) else "green"
        return Finding("right", "log-probabilities", light, said, figures)


def unlike(asked: Asked, other: str) -> bool:
    """Whether an answer shares so little with another text that no near-tie explains it."""
    return SequenceMatcher(None, asked.reply.text, other, autojunk=False).ratio() < ALIKE


def _is_found(asked: Asked) -> bool:
    return asked.document.holds(asked.reply.text)


def _num_other(asked: Iterable[Asked], new: dict[str, str]) -> int:
    return sum(each.reply.text != new[each.document.seed] for each in asked)


def remember(server: Server, texts: Texts, num_documents: int) -> dict[str, Any]:
    """Ask new prompts, each twice, and return what a probe after a restart compares with."""
    kept = []
    for _ in range(num_documents):
        document = texts.document(NUM_WORDS)
        reply = server.ask(document.prompt, MAX_TOKENS)
        server.ask(document.prompt, MAX_TOKENS)
        kept.append({"document": asdict(document), "text": reply.text})
    return {"model": server.model, "asked": kept}


def compare(server: Server, texts: Texts, before: dict[str, Any]) -> Right:
    """Ask again what `remember` asked, and the same documents with another fact."""
    checked = Right(server, texts)
    for each in before["asked"]:
        document = Document(**each["document"])
        checked.documents.append(document)
        reply = Reply(each["text"], 0.0, None, None, None)
        checked.asked.append(Asked(document, "new", reply))
    try:
        for document in checked.documents:
            checked.ask(document, "warm")
            checked.ask(document.salted(texts.salt()), "twin")
            checked.ask_edited(document)
    except BudgetSpent:
        pass
    return checked
