"""The report of pairs: the page is what was measured."""

from __future__ import annotations

import pairs
import pytest

pytestmark = pytest.mark.slow  # a report is no part of the product


def test_the_page_is_what_was_measured():
    assert pairs.PAGE.read_text() == pairs.page(pairs.read())
