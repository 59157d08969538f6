"""What is stored of a message is what the SDK sends of it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mcp_resumable.writer import _dump, _kind_of
from tests.test_store_stateful import real_message

PROGRESS = {"method": "notifications/progress", "params": {"progressToken": 1, "progress": 0.5, "message": "é\u2028\n"}}
MESSAGES: list[tuple[dict[str, Any], bool]] = [
    (PROGRESS, False),
    ({"method": "notifications/initialized"}, False),
    ({"id": 7, "method": "roots/list"}, True),
    ({"id": "7", "method": "ping", "params": {"_meta": {"a": None, "b": [1, None]}}}, True),
    ({"id": 7, "result": {"content": [{"type": "text", "text": "\x00"}], "isError": False, "extra": None}}, True),
    ({"id": 7, "error": {"code": -32600, "message": "no", "data": None}}, True),
]


@pytest.mark.parametrize(("message", "has_id"), MESSAGES)
def test_what_is_stored_is_what_the_sdk_sends(message: dict[str, Any], has_id: bool) -> None:
    of_the_sdk, text = real_message(json.dumps({"jsonrpc": "2.0", **message}))
    kind = _kind_of(of_the_sdk.__class__)
    assert kind.serializer is not None
    assert _dump(of_the_sdk, kind) == text.encode()
    content = of_the_sdk.root if kind.is_root_model else of_the_sdk
    assert _kind_of(content.__class__).has_id is has_id


def test_a_message_that_dumps_in_its_own_way_does() -> None:
    of_the_sdk, _ = real_message(json.dumps({"jsonrpc": "2.0", **PROGRESS}))
    base: Any = of_the_sdk.__class__

    class Own(base):  # type: ignore[misc]
        def model_dump_json(self, **options: Any) -> str:
            return f"own, {sorted(options)}"

    own = Own.model_validate(of_the_sdk.model_dump())
    assert _dump(own, _kind_of(Own)).startswith(b"own, ['by_alias', 'exclude_")
