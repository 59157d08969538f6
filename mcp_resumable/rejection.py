"""How a refusal is spelled in JSON-RPC, and read: a response's body, an answer in a stream, a marker in a stream."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Annotated, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from mcp_resumable.errors import Outcome, ResumptionError

__all__ = ["REJECTION_CODE", "RejectionData", "answer_text", "body_text", "marker_text", "rejection_of"]

REJECTION_CODE = -32010
"""JSON-RPC error code of every refusal. From the range -32000 to -32019 that MCP leaves to implementations; the SDKs
use -32000 and -32001. Branch on `data.reason` instead."""

# What JSON's own integers look like: a client that spelled its request id so had a number, or cannot tell the two apart
# (the SDKs' clients take either spelling).
_INTEGER = re.compile(r"-?[1-9][0-9]{0,17}|0")

# Above it JavaScript does not tell integers apart (RFC 8259, section 6). No real seq comes near; a claimed one may.
_MAX_SAFE_INTEGER = 2**53 - 1

# What tells a marker from a server's own notifications.
_MARKER_LOGGER = "mcp_resumable"

_Count = Annotated[int, Field(ge=0, le=_MAX_SAFE_INTEGER)]


class RejectionData(BaseModel):
    """The `data` of a refusal: what a client can act on. Frozen; its texts are ASCII without control characters.

    Attributes:
        reason: Stable name of what is wrong.
        outcome: What to do: `reset` (discard, call again), `invalid`, `gone` (initialize again), `retry` (later).
        generation: The session's current generation, where there is one.
        seq: The claimed seq, where the claim is about a place in a stream.
        replay_floor: Lowest seq of that stream that resumes.
        high_water_mark: Highest seq of that stream.
        retry_after_seconds: When to try again.
    """

    model_config = ConfigDict(frozen=True, strict=True)

    reason: Annotated[str, Field(pattern="^[a-z_]{1,64}$")]
    outcome: Outcome
    generation: Annotated[str, Field(pattern="^[0-9]{1,200}-[0-9a-z]{12}$")] | None = None
    seq: _Count | None = None
    replay_floor: _Count | None = None
    high_water_mark: _Count | None = None
    retry_after_seconds: _Count | None = None

    @classmethod
    def of(cls, error: ResumptionError) -> RejectionData:
        """Return the data of `error`; nothing that the client presented is echoed."""
        fields = {name: getattr(error, name, None) for name in cls.model_fields}
        if (fields["seq"] or 0) > _MAX_SAFE_INTEGER:
            fields["seq"] = None
        return cls.model_validate(fields)


def rejection_of(error: object) -> RejectionData | None:
    """Return what a server with this package says in `error`, or None where it says nothing of the kind.

    For clients. Never raises, whatever a server has sent: data that is not ours is None.

    Args:
        error: What a call raised (`McpError` of mcp 1.x, `MCPError` of 2.x); or a parsed JSON-RPC message, such as
            the body of a refusing response; or the params of a logging notification, which tell that all that came in
            a stream before is void (`rejection="stream"`).
    """
    told = _field(error, "error")
    if told is None:
        told = _field(error, "params") or error
        is_ours = _field(told, "logger") == _MARKER_LOGGER
    else:
        is_ours = _field(told, "code") == REJECTION_CODE
    if not is_ours:
        return None
    try:
        return RejectionData.model_validate(_field(told, "data"))
    except ValidationError:
        return None


def _field(value: object, name: str) -> object:
    """Return a field of a JSON object, or an attribute of a model."""
    if isinstance(value, Mapping):
        return cast("Mapping[str, object]", value).get(name)
    return cast(object, getattr(value, name, None))


def body_text(error: ResumptionError, request_id: int | str | None = None) -> str:
    """Return the JSON-RPC error that answers an HTTP request, for `request_id` where one waits for it."""
    return _to_text(
        {
            "jsonrpc": "2.0",
            "id": request_id,
            "error": {"code": REJECTION_CODE, "message": str(error), "data": _data_of(error)},
        }
    )


def answer_text(request_id: str, error: ResumptionError) -> str:
    """Return the JSON-RPC error that ends the call which waits for `request_id`, to be sent in a stream."""
    return body_text(error, int(request_id) if _INTEGER.fullmatch(request_id) else request_id)


def marker_text(error: ResumptionError) -> str:
    """Return the notification that tells a client to discard what it has of this stream."""
    return _to_text(
        {
            "jsonrpc": "2.0",
            "method": "notifications/message",
            "params": {
                "level": "warning",
                "logger": _MARKER_LOGGER,
                "data": {**_data_of(error), "message": str(error)},
            },
        }
    )


def _data_of(error: ResumptionError) -> dict[str, object]:
    return RejectionData.of(error).model_dump(exclude_none=True)


def _to_text(message: dict[str, object]) -> str:
    return json.dumps(message, ensure_ascii=True, separators=(",", ":"))
