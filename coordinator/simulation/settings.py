"""The waits of a simulated group, which are short, so that a seed is."""

from __future__ import annotations

from typing import Final

PROGRESS_DEADLINE_S: Final = 2.0
STARTUP_DEADLINE_S: Final = 20.0
PREFILL_DELAY_S: Final = 0.02
STORE_RESTORED_S: Final = 3.0  # by then the master has restored what the store had lost
