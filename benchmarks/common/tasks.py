"""RAG prompts with documents, a question and, where there is one, the right answer.

`pages` and `hops` need nothing but Python; the others read public sets from the folder given by
--data: musique_s.json, hotpotqa_distractor_100.jsonl, nq-open-oracle.jsonl.gz.
"""

from __future__ import annotations

import gzip
import json
import random
import re
import string
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common.material import documents

TASKS = ("pages", "hops", "musique", "hotpot", "nq")
SYSTEM = (
    "You are a careful assistant. Use the documents to answer the question. "
    "Answer with a few words only."
)


@dataclass(frozen=True)
class Item:
    documents: list[str]
    question: str
    answers: list[str]  # empty: only the distance to full prefill is measured


def items(task: str, count: int, data: Path | None, num_documents: int) -> list[Item]:
    if task == "pages":
        return _pages(count, num_documents)
    if task == "hops":
        return [_hops(number, num_documents) for number in range(count)]
    if data is None:
        raise SystemExit(f"--task {task} needs --data FOLDER with its public data set")
    makers = {"musique": _musique, "hotpot": _hotpot, "nq": _nq}
    made = makers[task](data, num_documents)
    return [item for item, _ in zip(made, range(count), strict=False)]


def prompt(item: Item, tokenizer: Any) -> str:
    listed = "\n\n".join(f"Document {i + 1}:\n{text}" for i, text in enumerate(item.documents))
    messages = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": f"{listed}\n\nQuestion: {item.question}"},
    ]
    text: str = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return text


def f1(text: str, answers: list[str]) -> float:
    """Token F1 against the best of the right answers, as SQuAD counts it."""
    return max(_f1(scored(text), scored(answer)) for answer in answers)


def _f1(said: list[str], right: list[str]) -> float:
    shared = sum((Counter(said) & Counter(right)).values())
    return 2 * shared / (len(said) + len(right)) if shared else 0.0


def scored(text: str) -> list[str]:
    """The words of an answer that count."""
    text = text.lower().translate(str.maketrans("", "", string.punctuation))
    return re.sub(r"\b(a|an|the)\b", " ", text).split()


def _cut(text: str, chance: random.Random, low: int, high: int) -> str:
    return " ".join(text.split()[: chance.randint(low, high)])


def _pages(count: int, num_documents: int) -> list[Item]:
    """Pages of the Python reference, and a question about one of them."""
    pages = [page for page in documents() if len(page.split()) > 120]
    made = []
    for number in range(count):
        chance = random.Random(number)
        chosen = [_cut(page, chance, 90, 240) for page in chance.sample(pages, num_documents)]
        about = chance.choice(chosen).split("\n")[0][:60]
        made.append(Item(chosen, f"What do the documents say about: {about}?", []))
    return made


# Of the task `hops`: at most two documents for each.
PEOPLE = (
    "Mira Tolland,Jonas Aldrick,Petra Winslow,Tobias Fenn,Helen Okafor,Ruben Castell,Ingrid Moe"
)
COMPANIES = (
    "Brenwick Foods,Halden Optics,Corvane Textiles,Lumetra,Stonegate Mills,Veridan,Oakfield Press"
)
CITIES = "Oslo,Lisbon,Toronto,Nairobi,Vienna,Osaka,Dublin"
JOBS = "an accountant,a chemist,a translator,a buyer,an engineer,a designer,a driver"
GOODS = "bread,lenses,curtains,lamps,flour,software,books"


def _hops(number: int, num_documents: int) -> Item:
    """People, the companies they work for, and the cities of these: the answer takes two pages."""
    chance, num_pairs = random.Random(number), num_documents // 2
    people, companies, cities, jobs, goods = (
        chance.sample(names.split(","), num_pairs)
        for names in (PEOPLE, COMPANIES, CITIES, JOBS, GOODS)
    )
    texts = []
    for person, company, city, job, good in zip(
        people, companies, cities, jobs, goods, strict=True
    ):
        since, founded = chance.randint(1990, 2020), chance.randint(1890, 1980)
        texts.append(
            f"{person} is {job} at {company}. Years of study and travel came before that, and"
            f" {person} has written about them in a local paper. Colleagues describe a careful"
            f" reader with a dry sense of humour, who cycles to work in all weathers and leaves"
            f" late. In {since} {company} offered a permanent position."
        )
        texts.append(
            f"{company} was founded in {founded} and makes {good}. Its office is in {city}. The"
            f" company began in a single room with four workers and a borrowed machine. It moved"
            f" twice, was sold once, and now belongs to its staff. In good years"
            f" {company} exports a third of its {good}."
        )
    chance.shuffle(texts)
    asked = chance.randrange(num_pairs)
    question = f"In which city is the office of the company where {people[asked]} works?"
    return Item(texts, question, [cities[asked]])


def _musique(data: Path, num_documents: int) -> Iterator[Item]:
    for number, row in enumerate(json.loads((data / "musique_s.json").read_text())):
        chance = random.Random(number)
        texts = [_cut(passage["text"], chance, 130, 260) for passage in row["ctxs"]]
        yield Item(texts[:num_documents], row["question"], row["answers"])


def _hotpot(data: Path, num_documents: int) -> Iterator[Item]:
    lines = (data / "hotpotqa_distractor_100.jsonl").read_text().splitlines()
    for number, line in enumerate(lines):
        row = json.loads(line)
        if row["answer"].lower() in ("yes", "no"):
            continue
        chance = random.Random(number)
        titles, sentences = row["context"]["title"], row["context"]["sentences"]
        gold = [i for i, title in enumerate(titles) if title in row["supporting_facts"]["title"]]
        rest = [i for i in range(len(titles)) if i not in gold]
        chosen = gold + chance.sample(rest, min(len(rest), num_documents - len(gold)))
        chance.shuffle(chosen)
        texts = [f"{titles[i]}. {''.join(sentences[i]).strip()}" for i in chosen]
        yield Item(texts, row["question"], [row["answer"]])


def _nq(data: Path, num_documents: int) -> Iterator[Item]:
    with gzip.open(data / "nq-open-oracle.jsonl.gz", "rt") as lines:
        rows = [json.loads(line) for line in lines]
    random.Random(5).shuffle(rows)
    for number, row in enumerate(rows):
        chance = random.Random(number)
        chosen = [row, *chance.sample(rows, num_documents - 1)]
        chance.shuffle(chosen)
        passages = [each["ctxs"][0] for each in chosen]
        texts = [f"{passage['title']}. {passage['text']}" for passage in passages]
        yield Item(texts, row["question"].capitalize() + "?", row["answers"])
