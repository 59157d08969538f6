"""One exchange with the ASGI server: closable from elsewhere, never blocked for ever, and held back until decided."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Awaitable, Callable, Generator, Iterable, MutableMapping
from functools import partial
from typing import Any, cast

import anyio

from mcp_resumable.errors import ResumptionError, StorageUnavailableError
from mcp_resumable.session import Connection

__all__ = ["ASGIApp", "Gate", "Message", "Receive", "Scope", "Send", "Wire", "cursor_frame", "header"]

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
ASGIApp = Callable[[Scope, Receive, Send], Awaitable[None]]


class Wire:
    """One exchange with the ASGI server: closable from elsewhere, and never blocked for ever.

    Attributes:
        connection: What others may close.
        status: Of the response that was begun, None before.
        on_start: Called with status and headers before the response begins.
        on_stall: Called when the client is given up because it does not read.
        last_resort: The only frame of a stream that would else end without any.
    """

    def __init__(self, receive: Receive, send: Send, send_timeout: float, on_stall: Callable[[], None]) -> None:
        self.connection = Connection()
        self.on_stall = on_stall
        self.status: int | None = None
        self.on_start: Callable[[int, Iterable[tuple[bytes, bytes]]], Awaitable[None]] | None = None
        self.last_resort: Callable[[], bytes] | None = None
        self._receive = receive
        self._send = send
        self._send_timeout = send_timeout
        self._unread: deque[Message] = deque()
        self._is_event_stream = False
        self._has_begun = False
        self._has_frame = False
        self._is_complete = False
        self._is_stalled = False

    async def read_request_id(self, max_body_size: int) -> int | str | None:
        """Read the body ahead and return the id of the JSON-RPC request in it; None where there is none.

        `receive` then gives the body to the SDK as if it were unread.
        """
        body = bytearray()
        while len(body) <= max_body_size:
            message = await self._receive()
            self._unread.append(message)
            if message["type"] != "http.request":
                return None
            body += message.get("body", b"")
            if not message.get("more_body", False):
                return _request_id_of(body)
        return None

    async def receive(self) -> Message:
        """Receive from the client; a closed connection looks like a client that has gone."""
        if self._unread:
            return self._unread.popleft()
        with self.connection.receiving():
            return await self._receive()
        return {"type": "http.disconnect"}

    async def send(self, message: Message, *, even_if_closed: bool = False) -> None:
        """Send to the client; what comes after a close is dropped, and a client that does not read is given up."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            content_type = header(message["headers"], b"content-type") or ""
            self._is_event_stream = content_type.startswith("text/event-stream")
            if self.on_start is not None:
                await self.on_start(message["status"], message["headers"])
        elif self._is_complete or (self.connection.is_closed and not even_if_closed):
            return
        elif not message.get("more_body", False) and not message.get("body", b""):
            message = {**message, "body": self._last_frame()}
        if not await _finishes_within(self._send_timeout, self._send(message)):
            self._is_stalled = True
            self.connection.close()
            self.on_stall()
            return
        self._has_begun = True
        if message["type"] == "http.response.body":
            self._is_complete = not message.get("more_body", False)
            body = message.get("body", b"")
            if body and not body.startswith(b":"):  # not a keep-alive comment
                self._has_frame = True
                if self.connection.in_transit:
                    self.connection.on_event_written()

    async def finish(self) -> None:
        """End the body cleanly where the SDK did not, because the connection was closed or the server shuts down."""
        if not self._has_begun or self._is_complete or self._is_stalled:
            return
        self._is_complete = True
        end = {"type": "http.response.body", "body": self._last_frame(), "more_body": False}
        await _finishes_within(self._send_timeout, self._send(end))

    def _last_frame(self) -> bytes:
        if self.last_resort is None or self._has_frame or not self._is_event_stream:
            return b""
        return self.last_resort()


class Gate:
    """The response of a GET: held back until the store has decided. See `ResumeGate`.

    Attributes:
        wire: The exchange.
        error: Why the claim is refused, None where it is not.
        is_accepted: The response has begun.
    """

    def __init__(self, wire: Wire, *, is_claim: bool, primes: bool, retry_interval: int | None) -> None:
        self.is_claim = is_claim
        self.connection = wire.connection
        self.error: ResumptionError | None = None
        self.is_accepted = False
        self.wire = wire
        self._primes = primes
        self._retry_interval = retry_interval
        self._start: Message | None = None
        self._started = anyio.Event()

    async def accept(self, event_id: str | None) -> None:
        """Let the SDK's response begin, with the cursor as its first frame. See `ResumeGate`."""
        # The SDK begins its response and asks the store in two tasks, in no certain order.
        await self._started.wait()
        await self.wire.send(cast(Message, self._start))
        self.is_accepted = True
        if event_id is not None and self._primes:
            # Also where the connection was closed meanwhile: a client without a cursor could not come back.
            frame = cursor_frame(event_id, self._retry_interval)
            await self.wire.send({"type": "http.response.body", "body": frame, "more_body": True}, even_if_closed=True)

    def refuse(self, error: ResumptionError) -> None:
        """Keep the SDK's response back; the layer answers with the error. See `ResumeGate`."""
        self.error = error

    async def send(self, message: Message) -> None:
        """Take what the SDK sends: its own answers go on, a stream waits for the decision."""
        if message["type"] == "http.response.start" and message["status"] == 200:
            self._start = message
            self._started.set()
        elif self._start is None or self.is_accepted:
            await self.wire.send(message)
        elif self.error is None and not message.get("more_body", False):
            # The store ended without a decision, which it must not.
            self.error = StorageUnavailableError()
        # Otherwise a keep-alive comment before the decision, or the empty end of a refused stream.


async def _finishes_within(seconds: float, work: Awaitable[None]) -> bool:
    """Await `work`, and tell whether it finished in time.

    A timer costs as much as the append of two events, and a server takes nearly everything that is sent without
    waiting. So there is one only if `work` waits.
    """
    steps = work.__await__()
    try:
        awaited = next(steps)
    except StopIteration:
        return True
    with anyio.move_on_after(seconds) as scope:
        await _Begun(steps, awaited)
    return not scope.cancelled_caught


class _Begun:
    """The rest of a coroutine that has taken its first step, and waits for what that has yielded to the event loop."""

    def __init__(self, steps: Generator[Any, Any, None], awaited: object) -> None:
        self._steps = steps
        self._awaited = awaited

    def __await__(self) -> Generator[Any, Any, None]:
        """Do what `yield from` does, but for the first step (PEP 380)."""
        awaited = self._awaited
        while True:
            try:
                answer = yield awaited
            except GeneratorExit:
                self._steps.close()
                raise
            except BaseException as exc:
                step = partial(self._steps.throw, exc)
            else:
                step = partial(self._steps.send, answer)
            try:
                awaited = step()
            except StopIteration:
                return


def _request_id_of(body: bytes | bytearray) -> int | str | None:
    try:
        message: object = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(message, dict) or "method" not in message:
        return None
    request_id = cast("dict[str, object]", message).get("id")
    # True is an int to isinstance, and no request id to the SDK.
    return request_id if isinstance(request_id, int | str) and not isinstance(request_id, bool) else None


def cursor_frame(event_id: str, retry_interval: int | None) -> bytes:
    """Return an event with an id and no data: a cursor."""
    retry = f"retry: {retry_interval}\r\n" if retry_interval is not None else ""
    return f"id: {event_id}\r\n{retry}data: \r\n\r\n".encode("ascii")


def header(headers: Iterable[tuple[bytes, bytes]], name: bytes) -> str | None:
    """Return the first header of that name, as the SDK reads it."""
    for key, value in headers:
        if key.lower() == name:
            return value.decode("latin-1")
    return None
