"""The server that the official conformance suite asks for, over either SDK line: `server.py PORT [ours|none]`.

Names and contents are the suite's (`@modelcontextprotocol/conformance`, the descriptions of its server scenarios for
revision 2025-11-25). What it serves is written as the JSON that goes over the wire, so that both lines serve the same.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import logging
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import uvicorn
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from mcp.server.transport_security import TransportSecuritySettings
from starlette.applications import Starlette
from starlette.routing import Mount

from mcp_resumable import ResumableEventStore

IS_V1 = importlib.util.find_spec("mcp.server.mcpserver") is None

_low: Any = importlib.import_module("mcp.server.lowlevel")
_types: Any = importlib.import_module("mcp.types" if IS_V1 else "mcp_types")

Json = dict[str, Any]
# The request's context, as the SDK makes it, and the request's `params`.
Handler = Callable[[Any, Json], Awaitable[Json]]
Tool = Callable[[Any, Json], Awaitable[list[Json]]]

# One red pixel, and a WAV file without a sample.
PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mP8z8DwHwAFBQIAX8jx0gAAAABJRU5ErkJggg=="
WAV = "UklGRiQAAABXQVZFZm10IBAAAAABAAEAQB8AAIA+AAACABAAZGF0YQAAAAA="

# The pause that the scenarios ask for between notifications.
PAUSE_SECONDS = 0.05

NOTHING: Json = {"type": "object", "properties": {}}


def text(value: str) -> Json:
    return {"type": "text", "text": value}


def image() -> Json:
    return {"type": "image", "data": PNG, "mimeType": "image/png"}


def embedded(uri: str, mime_type: str, value: str) -> Json:
    return {"type": "resource", "resource": {"uri": uri, "mimeType": mime_type, "text": value}}


async def simple_text(_context: Any, _params: Json) -> list[Json]:
    """Tests simple text content response."""
    return [text("This is a simple text response for testing.")]


async def image_content(_context: Any, _params: Json) -> list[Json]:
    """Tests image content response."""
    return [image()]


async def audio_content(_context: Any, _params: Json) -> list[Json]:
    """Tests audio content response."""
    return [{"type": "audio", "data": WAV, "mimeType": "audio/wav"}]


async def embedded_resource(_context: Any, _params: Json) -> list[Json]:
    """Tests embedded resource content response."""
    return [embedded("test://embedded-resource", "text/plain", "This is an embedded resource content.")]


async def multiple_content_types(_context: Any, _params: Json) -> list[Json]:
    """Tests response with multiple content types."""
    data = json.dumps({"test": "data", "value": 123})
    return [
        text("Multiple content types test:"),
        image(),
        embedded("test://mixed-content-resource", "application/json", data),
    ]


async def tool_with_logging(context: Any, _params: Json) -> list[Json]:
    """Tests tool that emits log messages during execution."""
    for number, message in enumerate(("started", "processing data", "completed")):
        if number:
            await anyio.sleep(PAUSE_SECONDS)
        data = f"Tool {message}" if "data" in message else f"Tool execution {message}"
        await context.session.send_log_message("info", data, related_request_id=context.request_id)
    return [text("Tool with logging executed successfully")]


async def tool_with_progress(context: Any, params: Json) -> list[Json]:
    """Tests tool that reports progress notifications."""
    token = (params.get("_meta") or {}).get("progressToken")
    for number in (0, 50, 100):
        if number:
            await anyio.sleep(PAUSE_SECONDS)
        if token is None:
            continue
        if IS_V1:
            await context.session.send_progress_notification(
                token, number, 100, related_request_id=str(context.request_id)
            )
        else:
            await context.session.report_progress(number, 100)
    return [text("Tool with progress executed successfully")]


async def error_handling(_context: Any, _params: Json) -> list[Json]:
    """Tests error response handling."""
    raise ToolError("This tool intentionally returns an error for testing")


async def reconnection(context: Any, _params: Json) -> list[Json]:
    """Tests SSE stream disconnection and client reconnection (SEP-1699)."""
    await context.close_sse_stream()
    await anyio.sleep(2 * PAUSE_SECONDS)
    return [text("Reconnection test completed successfully")]


async def sampling(context: Any, params: Json) -> list[Json]:
    """Tests server-initiated sampling."""
    content = _types.TextContent(type="text", text=params["arguments"]["prompt"])
    result = await context.session.create_message(
        [_types.SamplingMessage(role="user", content=content)],
        max_tokens=100,
        related_request_id=context.request_id,
    )
    return [text(f"LLM response: {result.content.text}")]


async def elicitation(context: Any, params: Json) -> list[Json]:
    """Tests server-initiated elicitation."""
    schema = {
        "type": "object",
        "properties": {
            "username": {"type": "string", "description": "User's response"},
            "email": {"type": "string", "description": "User's email address"},
        },
        "required": ["username", "email"],
    }
    return [text(f"User response: {await elicit(context, params['arguments']['message'], schema)}")]


async def elicitation_sep1034_defaults(context: Any, _params: Json) -> list[Json]:
    """Tests elicitation with default values (SEP-1034)."""
    statuses = ["active", "inactive", "pending"]
    schema = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "default": "John Doe"},
            "age": {"type": "integer", "default": 30},
            "score": {"type": "number", "default": 95.5},
            "status": {"type": "string", "enum": statuses, "default": "active"},
            "verified": {"type": "boolean", "default": True},
        },
    }
    return [text(f"Elicitation completed: {await elicit(context, 'Review the defaults', schema)}")]


async def elicitation_sep1330_enums(context: Any, _params: Json) -> list[Json]:
    """Tests elicitation with all kinds of enums (SEP-1330)."""
    names = ["First", "Second", "Third"]
    options = ["option1", "option2", "option3"]
    schema = {
        "type": "object",
        "properties": {
            "untitledSingle": {"type": "string", "enum": options},
            "titledSingle": {
                "type": "string",
                "oneOf": [{"const": f"value{i}", "title": f"{name} Option"} for i, name in enumerate(names, 1)],
            },
            "legacyEnum": {
                "type": "string",
                "enum": ["opt1", "opt2", "opt3"],
                "enumNames": ["Option One", "Option Two", "Option Three"],
            },
            "untitledMulti": {"type": "array", "items": {"type": "string", "enum": options}},
            "titledMulti": {
                "type": "array",
                "items": {
                    "anyOf": [{"const": f"value{i}", "title": f"{name} Choice"} for i, name in enumerate(names, 1)]
                },
            },
        },
    }
    return [text(f"Elicitation completed: {await elicit(context, 'Choose', schema)}")]


async def json_schema_2020_12_tool(_context: Any, _params: Json) -> list[Json]:
    """Tool with JSON Schema 2020-12 features"""  # noqa: D415  # the suite's spelling
    return [text("called")]


async def elicit(context: Any, message: str, schema: Json) -> str:
    result = await context.session.elicit_form(message, schema, related_request_id=context.request_id)
    return f"action={result.action}, content={json.dumps(result.content)}"


class ToolError(Exception):
    """Raised when a tool fails; its text is the tool's result."""


JSON_SCHEMA_2020_12: Json = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "$defs": {
        "address": {
            "$anchor": "addressDef",
            "type": "object",
            "properties": {"street": {"type": "string"}, "city": {"type": "string"}},
        }
    },
    "properties": {
        "name": {"type": "string"},
        "address": {"$ref": "#/$defs/address"},
        "contactMethod": {"type": "string", "enum": ["phone", "email"]},
        "phone": {"type": "string"},
        "email": {"type": "string"},
    },
    "allOf": [{"anyOf": [{"required": ["phone"]}, {"required": ["email"]}]}],
    "if": {"properties": {"contactMethod": {"const": "phone"}}, "required": ["contactMethod"]},
    "then": {"required": ["phone"]},
    "else": {"required": ["email"]},
    "additionalProperties": False,
}


def argument(name: str) -> Json:
    return {"type": "object", "properties": {name: {"type": "string"}}, "required": [name]}


SCHEMAS: dict[Tool, Json] = {
    simple_text: NOTHING,
    image_content: NOTHING,
    audio_content: NOTHING,
    embedded_resource: NOTHING,
    multiple_content_types: NOTHING,
    tool_with_logging: NOTHING,
    tool_with_progress: NOTHING,
    error_handling: NOTHING,
    reconnection: NOTHING,
    sampling: argument("prompt"),
    elicitation: argument("message"),
    elicitation_sep1034_defaults: NOTHING,
    elicitation_sep1330_enums: NOTHING,
    json_schema_2020_12_tool: JSON_SCHEMA_2020_12,
}

# The suite calls all but one of them `test_...`.
TOOLS: dict[str, Tool] = {
    tool.__name__ if tool is json_schema_2020_12_tool else f"test_{tool.__name__}": tool for tool in SCHEMAS
}


async def list_tools(_context: Any, _params: Json) -> Json:
    return {
        "tools": [
            {"name": name, "description": tool.__doc__, "inputSchema": SCHEMAS[tool]} for name, tool in TOOLS.items()
        ]
    }


async def call_tool(context: Any, params: Json) -> Json:
    tool = TOOLS.get(params["name"])
    if tool is None:
        return {"content": [text(f"Unknown tool: {params['name']}")], "isError": True}
    try:
        return {"content": await tool(context, params)}
    except ToolError as error:
        return {"content": [text(str(error))], "isError": True}


async def list_resources(_context: Any, _params: Json) -> Json:
    kinds = {
        "static-text": ("A static text resource", "text/plain"),
        "static-binary": ("A static binary resource", "image/png"),
        "watched-resource": ("A resource to subscribe to", "text/plain"),
    }
    return {
        "resources": [
            {"uri": f"test://{name}", "name": name, "description": description, "mimeType": mime_type}
            for name, (description, mime_type) in kinds.items()
        ]
    }


async def list_resource_templates(_context: Any, _params: Json) -> Json:
    return {
        "resourceTemplates": [
            {
                "uriTemplate": "test://template/{id}/data",
                "name": "template",
                "description": "A resource template with a parameter",
                "mimeType": "application/json",
            }
        ]
    }


async def read_resource(_context: Any, params: Json) -> Json:
    uri = params["uri"]
    if uri == "test://static-binary":
        return {"contents": [{"uri": uri, "mimeType": "image/png", "blob": PNG}]}
    if uri.startswith("test://template/") and uri.endswith("/data"):
        number = uri.removeprefix("test://template/").removesuffix("/data")
        data = json.dumps({"id": number, "templateTest": True, "data": f"Data for ID: {number}"})
        return {"contents": [{"uri": uri, "mimeType": "application/json", "text": data}]}
    value = "This is the content of the static text resource."
    return {"contents": [{"uri": uri, "mimeType": "text/plain", "text": value}]}


async def list_prompts(_context: Any, _params: Json) -> Json:
    def prompt(name: str, *arguments: str) -> Json:
        described = [{"name": name, "description": f"{name}, for testing", "required": True} for name in arguments]
        return {"name": name, "description": f"{name}, for testing", "arguments": described}

    return {
        "prompts": [
            prompt("test_simple_prompt"),
            prompt("test_prompt_with_arguments", "arg1", "arg2"),
            prompt("test_prompt_with_embedded_resource", "resourceUri"),
            prompt("test_prompt_with_image"),
        ]
    }


async def get_prompt(_context: Any, params: Json) -> Json:
    arguments = params.get("arguments") or {}
    contents: list[Json]
    match params["name"]:
        case "test_prompt_with_arguments":
            contents = [text("Prompt with arguments: arg1='{arg1}', arg2='{arg2}'".format(**arguments))]
        case "test_prompt_with_embedded_resource":
            resource = embedded(arguments["resourceUri"], "text/plain", "Embedded resource content for testing.")
            contents = [resource, text("Please process the embedded resource above.")]
        case "test_prompt_with_image":
            contents = [image(), text("Please analyze the image above.")]
        case _:
            contents = [text("This is a simple prompt for testing.")]
    return {"messages": [{"role": "user", "content": content} for content in contents]}


async def complete(_context: Any, params: Json) -> Json:
    values = [value for value in ("paris", "park", "party") if value.startswith(params["argument"]["value"])]
    return {"completion": {"values": values, "total": len(values), "hasMore": False}}


async def accept(_context: Any, _params: Json) -> Json:
    """Answer a request that only has to be taken."""
    return {}


# The 1.x line's request, the 2.x line's argument, the result of both, and what makes it.
HANDLERS: tuple[tuple[str, str, str, Handler], ...] = (
    ("ListToolsRequest", "on_list_tools", "ListToolsResult", list_tools),
    ("CallToolRequest", "on_call_tool", "CallToolResult", call_tool),
    ("ListResourcesRequest", "on_list_resources", "ListResourcesResult", list_resources),
    (
        "ListResourceTemplatesRequest",
        "on_list_resource_templates",
        "ListResourceTemplatesResult",
        list_resource_templates,
    ),
    ("ReadResourceRequest", "on_read_resource", "ReadResourceResult", read_resource),
    ("SubscribeRequest", "on_subscribe_resource", "EmptyResult", accept),
    ("UnsubscribeRequest", "on_unsubscribe_resource", "EmptyResult", accept),
    ("ListPromptsRequest", "on_list_prompts", "ListPromptsResult", list_prompts),
    ("GetPromptRequest", "on_get_prompt", "GetPromptResult", get_prompt),
    ("CompleteRequest", "on_completion", "CompleteResult", complete),
    ("SetLevelRequest", "on_set_logging_level", "EmptyResult", accept),
)


def build_server() -> Any:
    if not IS_V1:
        return _low.Server(
            "conformance",
            version="1",
            **{name: _typed(result, handler) for _, name, result, handler in HANDLERS},
        )
    server = _low.Server("conformance", version="1")
    for request, _, result, handler in HANDLERS:
        server.request_handlers[getattr(_types, request)] = _of_request(server, _typed(result, handler))
    return server


def _typed(result: str, handler: Handler) -> Callable[[Any, Any], Awaitable[Any]]:
    async def handle(context: Any, params: Any) -> Any:
        dumped = {} if params is None else params.model_dump(mode="json", by_alias=True, exclude_none=True)
        return getattr(_types, result).model_validate(await handler(context, dumped))

    return handle


def _of_request(server: Any, handler: Callable[[Any, Any], Awaitable[Any]]) -> Callable[[Any], Awaitable[Any]]:
    async def handle(request: Any) -> Any:
        return _types.ServerResult(await handler(server.request_context, request.params))

    return handle


def build_app(store: ResumableEventStore | None) -> Starlette:
    local = ["127.0.0.1:*", "localhost:*", "[::1]:*"]
    manager = StreamableHTTPSessionManager(
        build_server(),
        event_store=store,
        retry_interval=100,
        security_settings=TransportSecuritySettings(
            enable_dns_rebinding_protection=True,
            allowed_hosts=local,
            allowed_origins=[f"http://{host}" for host in local],
        ),
    )
    return Starlette(routes=[Mount("/mcp", app=manager.handle_request)], lifespan=lambda _app: manager.run())


def main() -> None:
    """Serve on a port of the loopback address until told to stop."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s %(message)s")
    store = None if "none" in sys.argv[2:] else ResumableEventStore()
    uvicorn.run(build_app(store), host="127.0.0.1", port=int(sys.argv[1]), log_config=None)


if __name__ == "__main__":
    main()
