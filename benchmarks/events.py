"""What is stored: messages as a server sends them."""

from __future__ import annotations

from mcp_types import JSONRPCNotification, JSONRPCResponse

__all__ = ["LARGE_BYTES", "SMALL_BYTES", "answer", "json_text", "notification"]

SMALL_BYTES = 200
LARGE_BYTES = 4_096


def notification(number: int, text_bytes: int = SMALL_BYTES) -> JSONRPCNotification:
    """Return a progress notification that carries a text of that size; its JSON text is some 110 bytes longer."""
    return JSONRPCNotification(
        jsonrpc="2.0",
        method="notifications/progress",
        params={"progressToken": "t", "progress": number, "message": "x" * text_bytes},
    )


def answer(request_id: int) -> JSONRPCResponse:
    """Return the answer to a request."""
    return JSONRPCResponse(jsonrpc="2.0", id=request_id, result={"content": [{"type": "text", "text": "done"}]})


def json_text(message: JSONRPCNotification | JSONRPCResponse) -> str:
    """Return the JSON text that the SDK sends."""
    return message.model_dump_json(by_alias=True, exclude_unset=True)
