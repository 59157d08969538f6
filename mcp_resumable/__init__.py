"""Safe resumption for MCP servers: an event store that never splices, leaks, skips or repeats.

Two lines make a server resumable:

    from mcp_resumable import ResumableEventStore

    FastMCP("name", event_store=ResumableEventStore())                          # mcp 1.x
    MCPServer("name").run("streamable-http", event_store=ResumableEventStore())  # mcp 2.x
"""

from mcp_resumable import attach
from mcp_resumable.cursor import EventCursor, Generation
from mcp_resumable.errors import (
    DuplicateRequestIdError,
    EventEvictedError,
    FutureEventIdError,
    GenerationMismatchError,
    InvalidEventIdError,
    MalformedEventIdError,
    ReplayGapError,
    ResetRequiredError,
    ResumptionError,
    SessionNotFoundError,
    StorageUnavailableError,
    StreamCompletedError,
    StreamSupersededError,
    UnrecognizedGenerationError,
)
from mcp_resumable.http import ResumptionLayer
from mcp_resumable.memory import MemoryStorage
from mcp_resumable.rejection import RejectionData, rejection_of
from mcp_resumable.storage import Retention, Storage
from mcp_resumable.store import ResumableEventStore

# From here on, a session manager that is given a store of ours gets the layer.
attach.install()

__all__ = [
    "DuplicateRequestIdError",
    "EventCursor",
    "EventEvictedError",
    "FutureEventIdError",
    "Generation",
    "GenerationMismatchError",
    "InvalidEventIdError",
    "MalformedEventIdError",
    "MemoryStorage",
    "RejectionData",
    "ReplayGapError",
    "ResetRequiredError",
    "ResumableEventStore",
    "ResumptionError",
    "ResumptionLayer",
    "Retention",
    "SessionNotFoundError",
    "Storage",
    "StorageUnavailableError",
    "StreamCompletedError",
    "StreamSupersededError",
    "UnrecognizedGenerationError",
    "rejection_of",
]
