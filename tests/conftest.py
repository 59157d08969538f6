"""Every asynchronous test runs on both event loops."""

from __future__ import annotations

import os
import warnings
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.loops import ASYNCIO

TESTS = Path(__file__).parent

# What is the same with every version of the SDK: `make matrix` runs it with one of them.
_FOR_ANY_SDK = [
    *(TESTS / f"test_{name}.py" for name in ("benchmark", "contract_suite", "cursor", "decision", "errors", "memory")),
    *(TESTS / f"test_{name}.py" for name in ("ring", "sqlite_storage")),
    *(TESTS / "checker" / f"test_{name}.py" for name in ("checks", "client", "nonsense")),
    *(
        TESTS / "redis" / f"test_{name}.py"
        for name in (
            "accounting",
            "cluster",
            "connections",
            "contract",
            "differential",
            "expiry",
            "history",
            "lost_keys",
        )
    ),
]


def pytest_configure(config: pytest.Config) -> None:
    if version("mcp").startswith("1.29."):
        # That SDK leaves the reading end of a resumed stream open; later ones close it.
        for message, category, name in (
            ("Unclosed <MemoryObjectReceiveStream", ResourceWarning, "ResourceWarning"),
            (
                "Exception ignored in. <function MemoryObjectReceiveStream.__del__",
                pytest.PytestUnraisableExceptionWarning,
                "pytest.PytestUnraisableExceptionWarning",
            ),
        ):
            config.addinivalue_line("filterwarnings", f"ignore:{message}:{name}")
            # What the collector finds after the last test meets the filters that were read before this.
            warnings.filterwarnings("ignore", message, category)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if os.environ.get("ONLY_WHAT_DEPENDS_ON_THE_SDK"):
        missing = [path for path in _FOR_ANY_SDK if not path.is_file()]
        assert not missing, missing
        config.hook.pytest_deselected(items=[item for item in items if item.path in _FOR_ANY_SDK])
        items[:] = [item for item in items if item.path not in _FOR_ANY_SDK]


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> object:
    return ASYNCIO if request.param == "asyncio" else request.param


@pytest.fixture
def writes_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have no frame wait for others: what is not there once all tasks are blocked is then held back for a reason."""
    monkeypatch.setattr("mcp_resumable.outbox._GAP_SECONDS", 0.0)
