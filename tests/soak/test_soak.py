"""The soak as a test: SOAK_SECONDS and SOAK_SEED as in `soak.py`."""

from __future__ import annotations

import os
import random

import pytest

from tests.loops import ASYNCIO

from .soak import plan_connection, plan_session, soak

pytestmark = [pytest.mark.anyio, pytest.mark.filterwarnings("ignore:The logging capability is deprecated")]


@pytest.fixture
def anyio_backend() -> object:
    """Only asyncio: uvicorn knows no other loop."""
    return ASYNCIO


def test_a_seed_is_a_plan() -> None:
    assert [plan_session(7, number) for number in range(50)] == [plan_session(7, number) for number in range(50)]
    assert plan_session(7, 3) != plan_session(8, 3)
    assert plan_connection(7, "3/00a/1") == plan_connection(7, "3/00a/1")
    assert plan_connection(7, "3/00a/clear").is_faultless


@pytest.mark.no_cover
async def test_nothing_is_lost_duplicated_foreign_or_hung() -> None:
    seed = int(os.environ.get("SOAK_SEED") or random.randrange(1_000_000))
    report = await soak(seed, float(os.environ.get("SOAK_SECONDS") or 20))
    assert not report.tally.violations, str(report)
    # It did meet what it is about.
    assert report.tally.answers > 0
    assert report.tally.resumes > 0
    assert report.tally.faults["reset"] > 0
