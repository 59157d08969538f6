"""A resumable MCP server in one file, right in all that the checker asks for, until it is told to be wrong in one way.

It is raw ASGI, so that nothing stands between a fault and the wire.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal
from uuid import uuid4

from tests import in_loop

__all__ = ["ALL_CHECKS_PASS", "WRONGS", "Request", "WrongServer", "serving"]

ALL_CHECKS_PASS = ""

WRONGS: dict[str, dict[str, str]] = {
    "no id on the answer": {"event-ids": "failed"},
    "control characters in ids": {"event-ids": "failed"},
    "ids that are not ASCII": {"event-ids": "failed"},
    "ids of 5,000 characters": {"event-ids": "failed"},
    "ids of a stream only": {"unique-ids": "failed"},
    "no priming event": {"priming-event": "warning"},
    "a priming id that is not known": {"priming-event": "failed"},
    "a resume skips one": {"exact-resume": "failed", "reused-request-id": "failed", "completed-stream": "failed"},
    "a resume repeats one": {"exact-resume": "failed"},
    "a resume begins at the beginning": {"exact-resume": "failed"},
    "a resume in another order": {"exact-resume": "failed"},
    "a resume is empty": {"exact-resume": "failed", "no-loss-under-load": "failed", "another-stream": "not_applicable"},
    "a resume is refused": {"exact-resume": "failed"},
    "a resume is never answered": {"exact-resume": "failed"},
    "a resume loses what is sent meanwhile": {"no-loss-under-load": "failed"},
    "a resume repeats what is sent meanwhile": {"no-loss-under-load": "failed"},
    "any session's ids": {"another-session": "failed"},
    "another session's ids: 404": {"another-session": "failed"},
    "streams of all sessions by request id": {"another-session": "failed"},
    "a resume brings all streams": {"another-stream": "failed"},
    "an unknown id: empty": {"unknown-id": "failed"},
    "an unknown id: open": {"unknown-id": "failed"},
    "an unknown id: 404": {"unknown-id": "failed"},
    "an unknown id: 500": {"unknown-id": "failed"},
    "an unknown id: everything": {"unknown-id": "failed"},
    "an unknown id ends the session": {"unknown-id": "failed"},
    "a malformed id: 500": {"malformed-id": "failed"},
    "a malformed id: empty": {"malformed-id": "failed"},
    "a future id: open": {"future-id": "failed"},
    "a future id: empty": {"future-id": "failed"},
    "a reused request id goes on": {"reused-request-id": "failed"},
    "a completed stream stays open": {"completed-stream": "failed"},
    "a completed stream without its answer": {"completed-stream": "failed"},
    "an answer again": {"completed-stream": "failed"},
    "a completed stream is held": {"completed-stream": "failed"},
    "409 while a stream is open": {"take-over": "failed"},
    "both connections": {"take-over": "failed"},
    "the first connection stays": {"take-over": "warning"},
    "a take-over is closed at once": {"take-over": "warning"},
    "409 for a second GET": {"two-gets": "failed"},
    "both GETs": {"two-gets": "failed"},
    "no cursor of the standalone stream": {"standalone-cursor": "warning"},
    "the standalone cursor is refused": {"standalone-cursor": "failed", "two-gets": "passed"},
    "the standalone stream forgets": {"standalone-cursor": "failed"},
    "the standalone stream closes": {"standalone-cursor": "warning"},
    "a frozen reader blocks": {"frozen-reader": "failed"},
    "a frozen reader loses": {"frozen-reader": "failed"},
    "polling loses": {"polling": "failed"},
    "no retry": {"polling": "warning"},
    "a retry that is no number": {"polling": "failed"},
    "an ended session: 400": {"delete": "failed"},
    "an ended session goes on": {"delete": "failed"},
    "DELETE: 500": {"delete": "failed"},
    "an ended session's stream stays open": {"delete": "warning"},
    "an unknown session: 200": {"unknown-session": "failed"},
    "an unknown session: 500": {"unknown-session": "failed"},
    "an unknown session: 400": {"unknown-session": "warning"},
    "an unknown session: empty": {"unknown-session": "failed"},
    "the cursor of an answer: 500": {"completed-stream": "failed"},
    "a GET: 500": {"two-gets": "failed", "standalone-cursor": "failed"},
    "the standalone cursor brings a call": {"standalone-cursor": "failed"},
    # Other ways to be right, or to offer less.
    "no standalone stream": {"two-gets": "not_applicable", "standalone-cursor": "not_applicable"},
    "no DELETE": {"delete": "not_applicable"},
    "a reused request id is refused": {"reused-request-id": "passed"},
    "refusals in the stream": {
        "unknown-id": "passed",
        "malformed-id": "passed",
        "future-id": "passed",
        "another-session": "passed",
    },
    "a completed stream is refused": {"completed-stream": "passed", "reused-request-id": "passed"},
    "ids that end in digits by chance": {"future-id": "not_applicable"},
    "a large call cannot be resumed": {"no-loss-under-load": "passed", "frozen-reader": "passed"},
    "no ids": {
        "event-ids": "failed",
        "unique-ids": "not_applicable",
        "priming-event": "warning",
        "exact-resume": "failed",
        "no-loss-under-load": "failed",
        "another-session": "not_applicable",
        "another-stream": "not_applicable",
        "unknown-id": "passed",
        "future-id": "not_applicable",
        "reused-request-id": "not_applicable",
        "completed-stream": "not_applicable",
        "take-over": "not_applicable",
        "standalone-cursor": "warning",
        "frozen-reader": "failed",
        "polling": "failed",
        "delete": "passed",
        "unknown-session": "passed",
    },
}
"""By what is wrong: what checks have to find."""

_STANDALONE = "standalone"
# Bytes of one message above which a call is a large one.
_LARGE = 5_000
_ENDED = object()


@dataclass
class Stream:
    """One stream.

    Attributes:
        name: Within its session.
        events: JSON-RPC messages, in order.
        is_done: The answer is the last of them.
        owner: The connection that carries it.
        opened: Connections that carried it so far.
        close: Asks the connection that carries it to close.
    """

    name: str
    events: list[str] = field(default_factory=list)
    is_done: bool = False
    owner: object = None
    opened: int = 0
    close: bool = False
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def append(self, message: dict[str, Any]) -> None:
        self.events.append(json.dumps({"jsonrpc": "2.0", **message}))
        self.is_done = "method" not in message
        self.wake()

    def wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    @property
    def next_change(self) -> asyncio.Event:
        """Set at the next change."""
        return self._changed


@dataclass
class Session:
    """One session."""

    id: str
    streams: dict[str, Stream] = field(default_factory=dict)
    requests: dict[str, Stream] = field(default_factory=dict)
    is_ended: bool = False
    writing: asyncio.Lock = field(default_factory=asyncio.Lock)


class Request:
    """One request, and its response."""

    def __init__(self, scope: Any, receive: Any, send: Any) -> None:
        self.method: str = scope["method"]
        self.headers = {name.decode(): value.decode("latin-1") for name, value in scope["headers"]}
        self._receive = receive
        self._send = send
        self.gone = asyncio.Event()

    async def json(self) -> dict[str, Any]:
        body = b""
        while True:
            message = await self._receive()
            body += message.get("body", b"")
            if not message.get("more_body", False):
                break
        parsed: dict[str, Any] = json.loads(body)
        return parsed

    async def watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.gone.set()

    async def start(self, status: int, media_type: str, **headers: str) -> None:
        pairs = [("content-type", media_type), *((name.replace("_", "-"), value) for name, value in headers.items())]
        encoded = [(name.encode(), value.encode()) for name, value in pairs]
        await self._send({"type": "http.response.start", "status": status, "headers": encoded})

    async def write(self, text: str) -> None:
        await self._send({"type": "http.response.body", "body": text.encode(), "more_body": True})

    async def end(self) -> None:
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def reply(self, status: int, body: Any = None, **headers: str) -> None:
        await self.start(status, "application/json", **headers)
        await self.write(json.dumps(body) if body is not None else "")
        await self.end()

    async def refuse(self, status: int) -> None:
        await self.reply(status, {"jsonrpc": "2.0", "id": None, "error": {"code": -32000, "message": "refused"}})


class WrongServer:
    """The server.

    Attributes:
        wrong: What is wrong with it; a key of `WRONGS`, or `ALL_CHECKS_PASS`.
        name: What it says that it is.
        held: Set once a request is held that is never answered.
        sessions: By session id; those that were ended stay.
        port: Where it listens.
    """

    def __init__(self, wrong: str = ALL_CHECKS_PASS, *, name: str = "wrong") -> None:
        assert wrong in WRONGS or wrong == ALL_CHECKS_PASS
        self.wrong = wrong
        self.name = name
        self.held = asyncio.Event()
        self.sessions: dict[str, Session] = {}
        self.port = 0
        self._shared: dict[str, Stream] = {}
        self._tools: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/mcp"

    @property
    def open_sessions(self) -> list[str]:
        return [session.id for session in self.sessions.values() if not session.is_ended]

    def stop(self) -> None:
        for task in self._tools:
            task.cancel()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve one request."""
        request = Request(scope, receive, send)
        if request.method == "POST":
            await self._post(request)
        elif (session := await self._session_of(request)) is not None:
            await (self._delete(request, session) if request.method == "DELETE" else self._get(request, session))

    async def _session_of(self, request: Request) -> Session | None:
        """Return the session of a request; None where it was refused."""
        session = self.sessions.get(request.headers.get("mcp-session-id", ""))
        if session is None and self.wrong == "an unknown session: empty" and request.method == "GET":
            await self._empty(request)
            return None
        if session is None:
            statuses = {f"an unknown session: {status}": status for status in (200, 400, 500)}
            await request.refuse(statuses.get(self.wrong, 404))
            return None
        if session.is_ended and self.wrong != "an ended session goes on":
            await request.refuse(400 if self.wrong == "an ended session: 400" else 404)
            return None
        return session

    async def _post(self, request: Request) -> None:
        message = await request.json()
        if message["method"] == "initialize":
            session = Session(uuid4().hex)
            self.sessions[session.id] = session
            info = {"name": self.name, "version": "1"}
            result = {"protocolVersion": "2025-11-25", "capabilities": {}, "serverInfo": info}
            await request.reply(
                200, {"jsonrpc": "2.0", "id": message["id"], "result": result}, mcp_session_id=session.id
            )
            return
        found = await self._session_of(request)
        if found is None:
            return
        if "id" not in message:
            await request.reply(202)
        elif message["method"] == "ping":
            async with found.writing:
                await request.reply(200, {"jsonrpc": "2.0", "id": message["id"], "result": {}})
        else:
            await self._call(request, found, message)

    async def _call(self, request: Request, session: Session, message: dict[str, Any]) -> None:
        key = str(message["id"])
        streams = self._shared if self.wrong == "streams of all sessions by request id" else session.requests
        goes_on = self.wrong in ("streams of all sessions by request id", "a reused request id goes on")
        if message["params"]["arguments"].get("plain"):
            await request.reply(200, {"jsonrpc": "2.0", "id": message["id"], "result": {}})
            return
        if self.wrong == "a reused request id is refused" and key in streams:
            error = {"code": -32600, "message": "used before"}
            await request.reply(200, {"jsonrpc": "2.0", "id": message["id"], "error": error})
            return
        stream = streams.get(key) if goes_on else None
        if stream is None:
            stream = Stream(str(len(session.streams) + 1))
        streams[key] = session.streams[stream.name] = stream
        seq = len(stream.events)
        stream.is_done = False
        task = asyncio.create_task(self._tool(session, stream, message))
        self._tools.add(task)
        task.add_done_callback(self._tools.discard)
        await self._serve(request, session, stream, seq, is_resume=False)

    async def _tool(self, session: Session, stream: Stream, message: dict[str, Any]) -> None:
        arguments = {"events": 6, "interval": 0.02, "padding": 0, "close_after": 0, **message["params"]["arguments"]}
        if arguments.get("fails"):
            stream.append({"id": message["id"], "error": {"code": -32602, "message": "\x1b[31mno such tool"}})
            return
        mark = message["params"]["_meta"]["progressToken"]
        for number in range(1, arguments["events"] + 1):
            await asyncio.sleep(arguments["interval"])
            params = {"progressToken": mark, "progress": number, "message": "x" * arguments["padding"]}
            if arguments.get("differs"):
                params["message"] = uuid4().hex
            stream.append({"method": "notifications/progress", "params": params})
            if number == arguments["close_after"]:
                stream.close = True
                stream.wake()
        self._standalone_of(session).append({"method": "notifications/tools/list_changed"})
        stream.append({"id": message["id"], "result": {"content": [{"type": "text", "text": "counted"}]}})

    def _standalone_of(self, session: Session) -> Stream:
        return session.streams.setdefault(_STANDALONE, Stream(_STANDALONE))

    async def _delete(self, request: Request, session: Session) -> None:
        if self.wrong in ("DELETE: 500", "no DELETE"):
            await request.refuse(500 if self.wrong == "DELETE: 500" else 405)
            return
        session.is_ended = True
        if self.wrong != "an ended session's stream stays open":
            for stream in session.streams.values():
                stream.owner = _ENDED
                stream.wake()
        await request.reply(200)

    async def _get(self, request: Request, session: Session) -> None:
        claim = request.headers.get("last-event-id")
        if claim is None and self.wrong in ("no standalone stream", "a GET: 500"):
            await request.refuse(405 if self.wrong == "no standalone stream" else 500)
        elif claim is None:
            standalone = self._standalone_of(session)
            if standalone.owner is not None and self.wrong == "409 for a second GET":
                await request.refuse(409)
            else:
                await self._serve(request, session, standalone, len(standalone.events), is_resume=False)
        else:
            await self._resume(request, session, claim)

    async def _resume(self, request: Request, session: Session, claim: str) -> None:
        found = re.fullmatch("([0-9a-f]{32}):([0-9a-z]+):([0-9]+)", claim)
        owner = self.sessions.get(found[1]) if found else None
        stream = owner.streams.get(found[2]) if found and owner is not None else None
        kind = ""
        if found is None and not re.fullmatch("[!-~]{20,80}", claim):
            kind = "a malformed id"
        elif found is None or owner is None or stream is None:
            kind = "an unknown id"
        elif owner is not session:
            kind = "another session's ids"
            if self.wrong == "any session's ids":
                kind = ""
        elif int(found[3]) > len(stream.events):
            kind = "a future id"
        if kind:
            await self._refuse_claim(request, session, kind)
            return
        assert stream is not None
        assert found is not None
        seq = int(found[3])
        is_empty = self.wrong == "a resume is empty" or (self.wrong == "polling loses" and stream.close)
        is_refused = {
            "a resume is refused": True,
            "a completed stream is refused": stream.is_done,
            "a large call cannot be resumed": any(len(data) > _LARGE for data in stream.events),
            "409 while a stream is open": stream.owner is not None,
        }
        is_answered = stream.is_done and seq == len(stream.events)
        is_held = self.wrong == "a resume is never answered" or (
            self.wrong == "a completed stream is held" and is_answered
        )
        if stream.name == _STANDALONE:
            if self.wrong == "the standalone cursor is refused":
                await request.refuse(400)
                return
            if self.wrong == "the standalone cursor brings a call":
                stream = session.streams["1"]
            if self.wrong == "the standalone stream forgets":
                seq = len(stream.events)
        elif is_empty:
            await self._empty(request)
            return
        elif is_answered and self.wrong == "the cursor of an answer: 500":
            await request.refuse(500)
            return
        elif is_held:
            await self._hold(request)
            return
        elif is_refused.get(self.wrong, False):
            await request.refuse(409)
            return
        await self._serve(request, session, stream, self._wrong_seq(session, stream, seq), is_resume=True)

    def _wrong_seq(self, session: Session, stream: Stream, seq: int) -> int:
        """Return the seq after which a request's stream is served."""
        if self.wrong == "a resume skips one" or (self.wrong == "a frozen reader loses" and seq == 1):
            return seq + 1
        if self.wrong == "a resume repeats one":
            return seq - 1
        if self.wrong == "a resume begins at the beginning":
            return 0
        if self.wrong == "an answer again" and seq == len(stream.events):
            return seq - 1
        if self.wrong == "a resume brings all streams":
            for other in session.streams.values():
                if other is not stream and other.name != _STANDALONE:
                    stream.events[seq:seq] = other.events
        return seq

    async def _refuse_claim(self, request: Request, session: Session, kind: str) -> None:
        if self.wrong == f"{kind}: empty":
            await self._empty(request)
        elif self.wrong == f"{kind}: open":
            await self._hold(request)
        elif self.wrong == f"{kind}: everything":
            await self._serve(request, session, session.streams["1"], 0, is_resume=True)
        elif self.wrong == "refusals in the stream":
            await request.start(200, "text/event-stream")
            await request.write('data: {"jsonrpc": "2.0", "id": null, "error": {"code": -32010, "message": "no"}}\n\n')
            await request.end()
        else:
            statuses = {f"{kind}: {status}": status for status in (404, 500)}
            await request.refuse(statuses.get(self.wrong, 400))
            if self.wrong == "an unknown id ends the session":
                session.is_ended = True

    async def _empty(self, request: Request) -> None:
        await request.start(200, "text/event-stream")
        await request.end()

    async def _hold(self, request: Request) -> None:
        await request.start(200, "text/event-stream")
        self.held.set()
        await request.watch()

    async def _serve(self, request: Request, session: Session, stream: Stream, seq: int, *, is_resume: bool) -> None:
        """Serve a stream from after `seq`, to its answer, or until another connection takes it over."""
        had_owner = stream.owner is not None
        stream.owner = request
        stream.opened += 1
        stream.wake()
        await request.start(200, "text/event-stream")
        watcher = asyncio.create_task(request.watch())
        try:
            await self._prime(request, session, stream, seq, is_resume=is_resume)
            if self.wrong == "a take-over is closed at once" and had_owner and is_resume:
                await self._write_all(request, session, stream, seq)
            else:
                await self._follow(request, session, stream, seq, is_resume=is_resume)
            await request.end()
        finally:
            watcher.cancel()
            if stream.owner is request:
                stream.owner = None

    async def _prime(self, request: Request, session: Session, stream: Stream, seq: int, *, is_resume: bool) -> None:
        retry = {"no retry": "", "a retry that is no number": "retry: soon\n"}.get(self.wrong, "retry: 10\n")
        cursor = self._id_of(session, stream, seq)
        if not is_resume and stream.name != _STANDALONE and self.wrong == "a priming id that is not known":
            cursor = uuid4().hex
        left_out = {"no priming event": stream.name != _STANDALONE and not is_resume, "no ids": True}
        left_out["no cursor of the standalone stream"] = stream.name == _STANDALONE
        if not left_out.get(self.wrong, False):
            await request.write(f"id: {cursor}\n{retry}data: \n\n")

    async def _follow(self, request: Request, session: Session, stream: Stream, seq: int, *, is_resume: bool) -> None:
        is_mixed = is_resume and not stream.is_done
        if self.wrong == "a resume in another order" and is_resume:
            while not stream.is_done:
                await stream.next_change.wait()
            stream.events[seq : seq + 2] = reversed(stream.events[seq : seq + 2])
        while True:
            change = stream.next_change  # Before what is there is written, so that nothing comes in between.
            seq = await self._write_all(request, session, stream, seq)
            if stream.is_done or (stream.close and not is_resume):
                break
            if is_resume and stream.name == _STANDALONE and self.wrong == "the standalone stream closes":
                return
            if await self._is_over(request, stream, change, is_resume=is_resume):
                return
            if is_mixed and len(stream.events) > seq:
                is_mixed = False
                if self.wrong == "a resume loses what is sent meanwhile":
                    seq += 1
                elif self.wrong == "a resume repeats what is sent meanwhile":
                    seq -= 1
        if is_resume and self.wrong == "a completed stream stays open":
            await request.gone.wait()

    async def _is_over(self, request: Request, stream: Stream, change: asyncio.Event, *, is_resume: bool) -> bool:
        """Wait for a change; return whether the connection is to be closed."""
        waits = [asyncio.create_task(event.wait()) for event in (change, request.gone)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        if request.gone.is_set():
            return True
        if stream.owner is request:
            return False
        keeps = {"both connections": stream.name != _STANDALONE, "both GETs": stream.name == _STANDALONE}
        if stream.owner is not _ENDED and self.wrong == "the first connection stays" and not is_resume:
            await request.gone.wait()
        return stream.owner is _ENDED or not keeps.get(self.wrong, False)

    async def _write_all(self, request: Request, session: Session, stream: Stream, seq: int) -> int:
        while seq < len(stream.events) and not request.gone.is_set():
            data = stream.events[seq]
            seq += 1
            if self.wrong == "a completed stream without its answer" and stream.opened > 1 and '"result"' in data:
                break
            event_id = self._id_of(session, stream, seq)
            is_bare = self.wrong == "no ids" or (self.wrong == "no id on the answer" and '"result"' in data)
            frame = f"data: {data}\n\n" if is_bare else f"id: {event_id}\ndata: {data}\n\n"
            if self.wrong == "a frozen reader blocks":
                async with session.writing:
                    await request.write(frame)
            else:
                await request.write(frame)
        return seq

    def _id_of(self, session: Session, stream: Stream, seq: int) -> str:
        is_answer = stream.is_done and seq == len(stream.events)
        ways: dict[str, Callable[[], str]] = {
            "control characters in ids": lambda: f"\x1b[31m{seq}",
            "ids that are not ASCII": lambda: f"é{seq}",
            "ids of 5,000 characters": lambda: f"{'x' * 5000}:{seq}",
            "ids of a stream only": lambda: str(seq),
            "ids that end in digits by chance": lambda: f"{uuid4().hex}-{'0' if is_answer else 'f'}",
        }
        return ways.get(self.wrong, lambda: f"{session.id}:{stream.name}:{seq}")()


@asynccontextmanager
async def serving(
    app: Any, *, send_buffer: int | None = None, lifespan: Literal["on", "off"] = "off"
) -> AsyncIterator[int]:
    """Serve an ASGI app in this event loop; give its port, which a `WrongServer` is told, too."""
    # It may never answer, and it may fail.
    async with in_loop.serving(
        app, lifespan=lifespan, send_buffer=send_buffer, patience=0.0, log_level="critical"
    ) as port:
        if isinstance(app, WrongServer):
            app.port = port
        try:
            yield port
        finally:
            if isinstance(app, WrongServer):
                app.stop()
