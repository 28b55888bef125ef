"""What tests of recipes share."""

import pytest

from .tiny import TINY


@pytest.fixture
def tiny():
    return TINY
