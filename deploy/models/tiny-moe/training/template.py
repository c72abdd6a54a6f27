"""The demo model's chat template. Its home is the checkpoint's `chat_template.jinja`; this reads it."""

from __future__ import annotations

from pathlib import Path

TEMPLATE_FILE = Path(__file__).parent.parent / "chat_template.jinja"


def chat_template() -> str:
    """The template's source."""
    return TEMPLATE_FILE.read_text(encoding="utf-8")
