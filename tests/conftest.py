"""Fixtures that several kinds of test share: running commands, and the demo model's corpus."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import settings

from tests.commands import DEMO_MODEL, Commands

# pytest limits each test's time; how long one example takes says how busy the machine is.
settings.register_profile("lockstep", deadline=None)
settings.load_profile("lockstep")


@pytest.fixture
def commands(tmp_path: Path) -> Iterator[Commands]:
    """Commands of one test, which may kill them. What still runs at its end is stopped; nothing may be left."""
    with Commands(tmp_path) as running:
        yield running


@pytest.fixture(scope="session")
def corpus() -> ModuleType:
    """The demo model's training/corpus.py, whose folder is no package: it draws questions and judges answers."""
    path = DEMO_MODEL / "training" / "corpus.py"
    spec = importlib.util.spec_from_file_location("demo_corpus", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
