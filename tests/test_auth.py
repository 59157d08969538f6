"""Resumption behind the SDK's bearer authentication: a session, and all that is in it, is its owner's alone.

Whoever is authenticated as someone else is answered as if the session had never been, byte for byte, whatever of it
they know: its id, its cursors, the request ids that are in flight. A token is not an owner: a refreshed one of the same
user goes on where the old one stopped.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from importlib import import_module
from importlib.metadata import version
from typing import Any

import anyio
import pytest
from anyio.abc import TaskGroup
from mcp.server.auth.provider import AccessToken
from mcp.server.auth.settings import AuthSettings

from mcp_resumable import ResumableEventStore

from .sdk_host import HEADERS, PATIENCE_SECONDS, Client, Host, Request, Tool

pytestmark = pytest.mark.anyio

RESOURCE = "http://127.0.0.1/mcp"


def token(client_id: str, subject: str, issuer: str, name: str) -> AccessToken:
    return AccessToken(
        token=name,
        client_id=client_id,
        subject=subject,
        claims={"iss": issuer},
        scopes=["use"],
        resource=RESOURCE,
    )


# By the token's text. Alice has two: the second is what a refresh gives her.
TOKENS = {
    made.token: made
    for made in (
        token("app", "alice", "https://a.example", "alice-1"),
        token("app", "alice", "https://a.example", "alice-2"),
        token("app", "bob", "https://a.example", "another-subject"),
        token("other-app", "alice", "https://a.example", "another-client"),
        token("app", "alice", "https://b.example", "another-issuer"),
    )
}
OTHERS = ["another-subject", "another-client", "another-issuer"]


class Verifier:
    """Knows the tokens above."""

    async def verify_token(self, token: str) -> AccessToken | None:
        return TOKENS.get(token)


class AuthenticatedHost(Host):
    """A host whose requests go through the SDK's whole app, with a bearer token where the request brings one."""

    def __init__(self, store: ResumableEventStore | None, task_group: TaskGroup) -> None:
        self.task_group = task_group
        self.tools: dict[tuple[str, str], Tool] = {}
        self.requests: list[Request] = []
        # The last is unknown to, and ignored by, mcp 1.29.1 and 2.0.0.
        auth = AuthSettings.model_validate(
            {
                "issuer_url": "https://a.example",
                "resource_server_url": RESOURCE,
                "required_scopes": ["use"],
                "validate_token_resource": True,
            }
        )
        # By name, since each line of the SDK has only one of the two.
        if version("mcp").startswith("1."):
            module: Any = import_module("mcp.server.fastmcp")
            self.server = module.FastMCP("host", event_store=store, auth=auth, token_verifier=Verifier())
            self.app = self.server.streamable_http_app()
        else:
            module = import_module("mcp.server.mcpserver")
            self.server = module.MCPServer("host", auth=auth, token_verifier=Verifier())
            self.app = self.server.streamable_http_app(event_store=store)
        self.manager = self.server.session_manager

        async def work(ctx: Any) -> str:
            return await self._work(ctx)

        work.__annotations__["ctx"] = module.Context
        self.server.add_tool(work)

    def start(self, method: str, headers: dict[str, str], body: bytes = b"") -> Request:
        request = Request(method, headers, body)
        self.requests.append(request)
        self.task_group.start_soon(request.run, self.app)
        return request


class UserClient(Client):
    """A session, from the side of a user who has a token; an empty one is not sent."""

    token = ""

    def request(self, method: str, *, body: Any = None, cursor: str | None = None, **headers: str) -> Request:
        if self.token:
            headers["authorization"] = f"Bearer {self.token}"
        return super().request(method, body=body, cursor=cursor, **headers)

    def of(self, token: str) -> UserClient:
        """Return the same session in the hands of whoever has this token."""
        client = UserClient(self.host, self.session_id)
        client.token = token
        return client


async def open_session(host: Host, token: str) -> UserClient:
    params = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "test", "version": "1"}}
    body = {"jsonrpc": "2.0", "id": "init", "method": "initialize", "params": params}
    request = host.start("POST", {**HEADERS, "authorization": f"Bearer {token}"}, json.dumps(body).encode())
    assert (await request.frames())[-1].message["id"] == "init"
    client = UserClient(host, request.headers["mcp-session-id"]).of(token)
    await client.request("POST", body={"jsonrpc": "2.0", "method": "notifications/initialized"}).until_done()
    return client


@asynccontextmanager
async def authenticated(store: ResumableEventStore | None) -> AsyncGenerator[AuthenticatedHost]:
    async with anyio.create_task_group() as requests:
        host = AuthenticatedHost(store, requests)
        async with host.manager.run():
            yield host
            for tool in host.tools.values():
                tool.finish()
            await anyio.wait_all_tasks_blocked()
            for request in host.requests:
                request.disconnect()
            requests.cancel_scope.cancel()


Answer = tuple[int, dict[str, str], Any]


async def answer_to(request: Request) -> Answer:
    """Return all that a request was answered with."""
    body = await request.json()
    return request.status, request.headers, body


async def answer_for_an_unknown_session(client: UserClient, method: str, body: Any, cursor: str | None) -> Answer:
    stranger = UserClient(client.host, "0" * 32).of(client.token)
    return await answer_to(stranger.request(method, body=body, cursor=cursor))


def call_body(request_id: int) -> Any:
    params = {"name": "work", "arguments": {}}
    return {"jsonrpc": "2.0", "id": request_id, "method": "tools/call", "params": params}


@pytest.mark.parametrize("rejection", ["status", "stream"])
@pytest.mark.parametrize("other", OTHERS)
async def test_another_user_is_answered_as_if_the_session_had_never_been(other: str, rejection: Any) -> None:
    store = ResumableEventStore(rejection=rejection)
    async with authenticated(store) as host:
        alice = await open_session(host, "alice-1")
        post = await alice.call(1)
        await alice.tool(1).emit("one", "two")
        cursors = [frame.id for frame in (await post.frame(), await post.frame()) if frame is not None]
        assert len(cursors) == 2
        standalone = alice.get()
        primed = await standalone.frame()
        assert primed is not None
        decisions = store.stats().decisions

        thief = alice.of(other)
        attempts: list[tuple[str, Any, str | None]] = [
            ("GET", None, None),
            *(("GET", None, cursor) for cursor in (*cursors, primed.id, "garbage")),
            ("POST", call_body(1), None),  # In flight.
            ("POST", call_body(2), None),  # Not in flight.
            ("POST", {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": 1}}, None),
            ("DELETE", None, None),
        ]
        for method, body, cursor in attempts:
            answer = await answer_to(thief.request(method, body=body, cursor=cursor))
            assert answer[0] == 404
            assert "text/event-stream" not in answer[1]["content-type"]
            assert alice.session_id not in str(answer)
            unknown = await answer_for_an_unknown_session(thief, method, body, cursor)
            assert without_ids(answer) == without_ids(unknown), (method, body, cursor)

        # The store was not even asked, and what alice has open goes on, on the same connections.
        assert store.stats().decisions == decisions
        assert store.stats().refused_requests == 0
        await alice.tool(1).emit("three")
        alice.tool(1).finish()
        assert [frame.step for frame in await post.frames()] == ["two", "three", "answer"]
        assert not standalone.done.is_set()
        assert (await alice.ping())["result"] == {}
        assert store.stats().sessions == 1


@pytest.mark.parametrize("other", OTHERS)
async def test_another_user_cannot_take_over_a_tail(other: str) -> None:
    async with authenticated(ResumableEventStore()) as host:
        alice = await open_session(host, "alice-1")
        post = await alice.call(1)
        await alice.tool(1).emit("one")
        primed = await post.frame()
        assert primed is not None
        tail = alice.get(primed.id)
        assert [getattr(await tail.frame(), "id", None)] == [primed.id]
        thief = alice.of(other).get(primed.id)
        assert (await answer_to(thief))[0] == 404
        await alice.tool(1).emit("two")
        alice.tool(1).finish()
        assert [frame.step for frame in await tail.frames()] == ["one", "two", "answer"]


async def test_a_refreshed_token_of_the_same_user_resumes_and_takes_over() -> None:
    async with authenticated(ResumableEventStore()) as host:
        alice = await open_session(host, "alice-1")
        post = await alice.call(1)
        await alice.tool(1).emit("one", "two")
        frames = [await post.frame(), await post.frame()]
        assert frames[1] is not None
        refreshed = alice.of("alice-2")
        tail = refreshed.get(frames[1].id)
        first = await tail.frame()
        assert first is not None
        assert first.id == frames[1].id
        with anyio.fail_after(PATIENCE_SECONDS):
            await post.done.wait()  # Taken over.
        await alice.tool(1).emit("three")
        alice.tool(1).finish()
        assert [frame.step for frame in await tail.frames()] == ["two", "three", "answer"]
        standalone = refreshed.get()
        primed = await standalone.frame()
        assert primed is not None
        deleted = refreshed.request("DELETE")
        await deleted.until_done()
        assert deleted.status == 200
        assert await standalone.frames() == []


@pytest.mark.parametrize("token", ["", "unheard of"])
async def test_without_a_valid_token_the_sdk_answers_401_as_it_does_without_a_store(token: str) -> None:
    answers: list[list[Answer]] = []
    for store in (ResumableEventStore(), None):
        async with authenticated(store) as host:
            alice = await open_session(host, "alice-1")
            post = await alice.call(1)
            await alice.tool(1).emit("one")
            frame = await post.frame()
            assert frame is not None
            nobody = alice.of(token)
            attempts = [
                nobody.get(),
                nobody.get("1-abcdefghijkl:1.MQ:0"),
                nobody.get(frame.id),
                nobody.request("POST", body=call_body(1)),
                nobody.request("DELETE"),
            ]
            answers.append([await answer_to(attempt) for attempt in attempts])
            await alice.tool(1).emit("two")
            alice.tool(1).finish()
            assert (await post.frames())[-1].step == "answer"
    with_store, without = answers
    assert with_store == without
    assert [status for status, _, _ in with_store] == [401] * 5
    assert all("www-authenticate" in headers for _, headers, _ in with_store)


async def test_the_owner_of_a_session_is_who_opened_it_and_no_token_of_another_session_matters() -> None:
    """Two users with a session each and the same request ids: each cursor is good in its own session only."""
    async with authenticated(ResumableEventStore()) as host:
        alice = await open_session(host, "alice-1")
        bob = await open_session(host, "another-subject")
        cursors: list[str] = []
        for client in (alice, bob):
            post = await client.call(1)
            await client.tool(1).emit(client.token)
            frame = await post.frame()
            assert frame is not None
            assert frame.id is not None
            cursors.append(frame.id)
        foreign = bob.get(cursors[0])
        assert await foreign.reason() == "unrecognized_generation"
        assert foreign.status == 400
        own = bob.get(cursors[1])
        primed, first = await own.frame(), await own.frame()
        assert primed is not None
        assert first is not None
        assert first.step == "another-subject"


def without_ids(answer: Answer) -> Answer:
    """Leave out what the SDK makes up anew for each answer."""
    status, headers, body = answer
    return status, headers, {**body, "id": None}
