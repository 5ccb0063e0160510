"""What the tests of tools share."""

import os

import pytest

from masflow.errors import RunError
from masflow.tools.sandbox import ready


@pytest.fixture
def bubblewrap(monkeypatch):
    """Skips, with the reason, where there is no sandbox; fails where continuous integration has none."""
    monkeypatch.setenv("MASFLOW_SANDBOX", "bubblewrap")
    try:
        ready("bubblewrap")
    except RunError as error:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(str(error))
