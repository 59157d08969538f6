"""Every asynchronous test runs on both event loops."""

from __future__ import annotations

from importlib.metadata import version

import pytest


def pytest_configure(config: pytest.Config) -> None:
    if version("mcp").startswith("1.29."):
        # That SDK leaves the reading end of a resumed stream open; later ones close it.
        for ignored in (
            "ignore:Unclosed <MemoryObjectReceiveStream:ResourceWarning",
            "ignore:Exception ignored in. <function MemoryObjectReceiveStream.__del__"
            ":pytest.PytestUnraisableExceptionWarning",
        ):
            config.addinivalue_line("filterwarnings", ignored)


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)
