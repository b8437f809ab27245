"""What the commands' tests have in common."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the colours that some CI services ask for."""
    monkeypatch.setattr("typer.rich_utils.FORCE_TERMINAL", False)
    monkeypatch.delenv("FORCE_COLOR", raising=False)
