"""LangChain and LlamaIndex, their ordinary calls unchanged, against the running server."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import httpx
import pytest
from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from llama_index.core.llms import ChatMessage, CompletionResponse
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel

from servers import KVBoostServer

pytestmark = [pytest.mark.model, pytest.mark.servers]

QUESTION = "What is the capital of France?"


class Weather(BaseModel):
    """The weather in a city."""

    city: Literal["Paris", "Rome"]
    is_sunny: bool


@tool
def get_weather(city: Literal["Paris", "Rome"]) -> str:
    """The weather in a city now."""
    return f"rain in {city}"


@pytest.fixture(scope="module")
def chain(live: KVBoostServer) -> ChatOpenAI:
    return ChatOpenAI(
        model=live.model, base_url=f"{live.url}/v1", api_key="none", temperature=0, max_tokens=64
    )


@pytest.fixture(scope="module")
def index(live: KVBoostServer) -> OpenAILike:
    return OpenAILike(
        model=live.model,
        api_base=f"{live.url}/v1",
        api_key="none",
        is_chat_model=True,
        temperature=0,
        max_tokens=24,
    )


def test_langchain_invokes(chain: ChatOpenAI) -> None:
    answer = chain.invoke([SystemMessage("You are a helpful assistant."), HumanMessage(QUESTION)])
    assert "Paris" in answer.content
    assert answer.usage_metadata["output_tokens"] <= 64
    assert answer.response_metadata["finish_reason"] in ("stop", "length")


def test_langchain_streams_what_it_would_invoke(chain: ChatOpenAI) -> None:
    pieces = list(chain.stream(QUESTION, stream_usage=True))
    assert sum(bool(piece.content) for piece in pieces) > 4
    whole = pieces[0]
    for piece in pieces[1:]:
        whole += piece
    assert whole.content == chain.invoke(QUESTION).content
    assert whole.usage_metadata["output_tokens"] > 4


def test_langchain_batches(chain: ChatOpenAI) -> None:
    questions = [QUESTION, "What is the capital of Italy?"]
    alone = [chain.invoke(question).content for question in questions]
    assert [answer.content for answer in chain.batch(questions)] == alone


def test_langchain_awaits(chain: ChatOpenAI, live: KVBoostServer) -> None:
    async def ask() -> str:
        async with httpx.AsyncClient() as client:  # else it stays open
            waiting = ChatOpenAI(
                model=live.model,
                base_url=f"{live.url}/v1",
                api_key="none",
                temperature=0,
                http_async_client=client,
            )
            return (await waiting.ainvoke(QUESTION)).content

    assert asyncio.run(ask()) == chain.invoke(QUESTION).content


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_langchain_reads_structured_output(chain: ChatOpenAI, method: Any) -> None:
    structured = chain.with_structured_output(Weather, method=method)
    assert isinstance(structured.invoke("Is the sun shining in Rome?"), Weather)


def test_langchain_binds_tools_and_hands_their_results_back(chain: ChatOpenAI) -> None:
    messages: list[Any] = [HumanMessage("What is the weather in Paris?")]
    answer = chain.bind_tools([get_weather], tool_choice="get_weather").invoke(messages)
    (call,) = answer.tool_calls
    assert call["name"] == "get_weather"
    result = get_weather.invoke(call)
    assert isinstance(result, ToolMessage)
    last = chain.bind_tools([get_weather]).invoke([*messages, answer, result])
    assert last.content or last.tool_calls


def test_llama_index_completes_and_chats(index: OpenAILike) -> None:
    chatted = index.chat([ChatMessage(role="user", content=QUESTION)])
    assert "Paris" in chatted.message.content
    completed = index.complete(QUESTION)
    assert isinstance(completed, CompletionResponse)
    assert completed.text == chatted.message.content  # a chat model is asked as one


def test_llama_index_streams_what_it_would_answer(index: OpenAILike) -> None:
    messages = [ChatMessage(role="user", content=QUESTION)]
    pieces = list(index.stream_chat(messages))
    assert len(pieces) > 4
    assert "".join(piece.delta or "" for piece in pieces) == pieces[-1].message.content
    assert pieces[-1].message.content == index.chat(messages).message.content
    assert list(index.stream_complete(QUESTION))[-1].text == pieces[-1].message.content


def test_llama_index_completes_without_a_chat(live: KVBoostServer) -> None:
    plain = OpenAILike(
        model=live.model, api_base=f"{live.url}/v1", api_key="none", temperature=0, max_tokens=8
    )
    assert "Paris" in plain.complete("The capital of France is").text
    assert "Paris" in list(plain.stream_complete("The capital of France is"))[-1].text


def test_llama_index_awaits(index: OpenAILike, live: KVBoostServer) -> None:
    async def ask() -> str:
        async with httpx.AsyncClient() as client:
            waiting = OpenAILike(
                model=live.model,
                api_base=f"{live.url}/v1",
                api_key="none",
                is_chat_model=True,
                temperature=0,
                max_tokens=24,
                async_http_client=client,
            )
            return (await waiting.acomplete(QUESTION)).text

    assert asyncio.run(ask()) == index.complete(QUESTION).text
