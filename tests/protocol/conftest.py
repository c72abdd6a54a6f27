"""Fixtures of the protocol tests."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from aiohttp import ClientSession


@pytest.fixture
async def session() -> AsyncIterator[ClientSession]:
    """A client that keeps its connections for one test."""
    async with ClientSession() as opened:
        yield opened
