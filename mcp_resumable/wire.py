"""One exchange with the ASGI server: closable from elsewhere, never blocked for ever, and held back until decided."""

from __future__ import annotations

import json
import math
import re
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any, cast

import anyio

from mcp_resumable.errors import ResumptionError, StorageUnavailableError
from mcp_resumable.outbox import Outbox
from mcp_resumable.session import Connection

__all__ = ["ASGIApp", "Gate", "Message", "Receive", "Scope", "Send", "Wire", "cursor_frame", "header"]

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
ASGIApp = Callable[[Scope, Receive, Send], Awaitable[None]]

# For what waits when the server shuts down: a storage that answers, and a client that reads, take less.
_FLUSH_SECONDS = 1.0

# How long a connection that is closed while the store decides may wait for the decision: a storage gives up sooner.
_DECISION_SECONDS = 10.0

# Keep-alives, which are no frames.
_COMMENTS = re.compile(rb"(:[^\r\n]*[\r\n]+)*")


class Wire:
    """One exchange with the ASGI server: closable from elsewhere, and never blocked for ever.

    Attributes:
        connection: What others may close.
        status: Of the response that was begun, None before.
        is_complete: The end of its body was sent.
        on_start: Called with status and headers before the response begins.
        on_stall: Called when the client is given up because it does not read.
        send_timeout: Seconds that the client may take to read.
        last_resort: The only frame of a stream that would else end without any.
        outbox: What the frames of a call go through; None where each is written at once.
    """

    def __init__(self, receive: Receive, send: Send, send_timeout: float, on_stall: Callable[[], None]) -> None:
        self.connection = Connection()
        self.on_stall = on_stall
        self.status: int | None = None
        self.on_start: Callable[[int, Iterable[tuple[bytes, bytes]]], Awaitable[None]] | None = None
        self.last_resort: Callable[[], bytes] | None = None
        self.outbox: Outbox | None = None
        self._receive = receive
        self._send = send
        self.send_timeout = send_timeout
        self._unread: deque[Message] = deque()
        self._is_event_stream = False
        self._has_begun = False
        self._has_frame = False
        self.is_complete = False
        self._is_stalled = False
        self._has_gone = False
        # The wait for the client, if there is one.
        self._watch: anyio.CancelScope | None = None
        # Sends that are under way (a keep-alive may cross an event), and since when there have been any.
        self._sends = 0
        self._sending_since: float | None = None

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
        while not self.connection.is_closed and not self._is_send_overdue():
            with self.connection.receiving() as watch:
                if self._sending_since is not None:
                    watch.deadline = anyio.current_time() + self.send_timeout + self._sending_since - time.monotonic()
                self._watch = watch
                try:
                    message = await self._receive()
                finally:
                    self._watch = None
                self._has_gone = message["type"] == "http.disconnect"
                return message
        return {"type": "http.disconnect"}

    async def send(self, message: Message, *, even_if_closed: bool = False) -> None:
        """Send to the client; what comes after a close is dropped, and a client that does not read is given up."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            content_type = header(message["headers"], b"content-type") or ""
            self._is_event_stream = content_type.startswith("text/event-stream")
            if self.on_start is not None:
                await self.on_start(message["status"], message["headers"])
            await self.write(message)
        elif self.is_complete or (self.connection.is_closed and not even_if_closed):
            return
        elif self.outbox is not None and self._is_event_stream and message.get("more_body", False):
            await self.outbox.put(message)
        else:
            if self.outbox is not None:
                await self.outbox.empty()
            if not message.get("more_body", False) and not message.get("body", b""):
                message = {**message, "body": self._last_frame()}
            await self.write(message)

    async def write(self, message: Message) -> None:
        """Write; a client that does not read is given up.

        While somebody waits for the client that takes a look at the clock, where a timer takes as long as an append:
        once the write is overdue, the one who waits gives the client up and is told that it has gone, and the SDK then
        cancels the write. The wait's deadline is set by the first write after the last look.
        """
        if self._watch is None:
            with anyio.move_on_after(self.send_timeout) as scope:
                await self._send(message)
            if scope.cancelled_caught:
                self._give_up()
                return
        else:
            if self._sending_since is None:
                self._sending_since = time.monotonic()
                if self._watch.deadline == math.inf:
                    self._watch.deadline = anyio.current_time() + self.send_timeout
            self._sends += 1
            try:
                await self._send(message)
            finally:
                self._sends -= 1
                if not self._sends:
                    self._sending_since = None
        self._has_begun = True
        if message["type"] == "http.response.body":
            self.is_complete = not message.get("more_body", False)
            if not _COMMENTS.fullmatch(message.get("body", b"")):
                self._has_frame = True
                if self.connection.in_transit:
                    self.connection.on_event_written()

    def _is_send_overdue(self) -> bool:
        since = self._sending_since
        if since is None or time.monotonic() < since + self.send_timeout:
            return False
        self._give_up()
        return True

    def _give_up(self) -> None:
        self._is_stalled = True
        self.connection.close()
        self.on_stall()

    async def flush(self) -> None:
        """Write what waits where the SDK did not end the body, because the server shuts down: so no longer than that.

        What is not written then is dropped: the client, which is cut off anyhow, resumes before it.
        """
        if self.outbox is not None and not (self.is_complete or self._has_gone or self.connection.is_closed):
            with anyio.move_on_after(_FLUSH_SECONDS):
                await self.outbox.empty()

    async def finish(self) -> None:
        """End the body cleanly where the SDK did not, because the connection was closed or the server shuts down."""
        if not self._has_begun or self.is_complete or self._is_stalled:
            return
        self.is_complete = True
        with anyio.move_on_after(self.send_timeout):
            await self._send({"type": "http.response.body", "body": self._last_frame(), "more_body": False})

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
        self._accepted = anyio.Event()

    async def receive(self) -> Message:
        """Receive from the client; a connection that is closed while the store decides seems open until it has."""
        message = await self.wire.receive()
        if self.connection.is_closed:
            # Told that the client has gone, the SDK would end without a response, and the server answer 500.
            with anyio.move_on_after(_DECISION_SECONDS):
                await self._accepted.wait()
            if not self.connection.is_closed:
                return await self.wire.receive()
        return message

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
        self._accepted.set()

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
