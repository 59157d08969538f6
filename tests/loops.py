"""The event loop of the tests that need asyncio: uvloop where that is installed, as uvicorn chooses too."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Final

__all__ = ["ASYNCIO"]

ASYNCIO: Final = ("asyncio", {"use_uvloop": find_spec("uvloop") is not None})
"""What an `anyio_backend` fixture returns."""
