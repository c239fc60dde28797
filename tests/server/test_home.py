"""What a browser and a lost client find: the page at /, /docs, and paths that are not there."""

from __future__ import annotations

import re
from html.parser import HTMLParser

from starlette.testclient import TestClient

from asking import client_of
from fake_serving import Stand
from kvboost.server.page import page

KEY = {"sha256": "0" * 64, "tenant": "a"}


class Tags(HTMLParser):
    """The elements of a page, and where its links lead."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.links: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.add(tag)
        self.links += [value or "" for name, value in attrs if name in ("href", "src")]


def test_the_page_shows_the_model_and_its_links_work(client: TestClient) -> None:
    reply = client.get("/")
    assert reply.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in reply.headers["content-security-policy"]
    assert "fake" in reply.text and "ready" in reply.text
    tags = Tags(reply.text)
    assert not tags.names & {"script", "img", "link", "iframe"}
    assert {"/health", "/metrics", "/v1/models", "/openapi.json"} <= {*tags.links}
    assert {client.get(link).status_code for link in tags.links} == {200}


def test_the_page_needs_no_key_and_shows_nothing_that_needs_one() -> None:
    client = client_of(Stand([KEY]))
    reply = client.get("/")
    assert reply.status_code == 200
    assert "fake" not in reply.text
    assert client.get("/v1/models").status_code == 401


def test_the_page_says_when_the_server_is_shutting_down(client: TestClient, stand: Stand) -> None:
    stand.app.state.running.is_draining = True
    assert "shutting down" in client.get("/").text


def test_names_of_models_are_not_markup() -> None:
    assert b"&lt;b&gt;" in page("<b>", "1", "/docs", is_ready=True).body


def test_interactive_docs_are_there_on_demand_only(client: TestClient) -> None:
    assert client.get("/docs").status_code == 404
    shown = client_of(Stand([KEY], docs=True))
    page = shown.get("/docs")
    assert page.status_code == 200
    (document,) = re.findall(r"url: '([^']+)'", page.text)
    assert shown.get(document).status_code == 200
    assert "/docs" in Tags(shown.get("/").text).links


def test_embeddings_are_refused_with_the_reason(client: TestClient) -> None:
    reply = client.post("/v1/embeddings", json={"model": "fake", "input": "hi"})
    error = reply.json()["error"]
    assert (reply.status_code, error["code"]) == (404, "not_found")
    assert "generates text" in error["message"]
    assert "generates text" not in client.post("/v1/nothing", json={}).text
    assert client_of(Stand([KEY])).post("/v1/embeddings", json={}).status_code == 401
