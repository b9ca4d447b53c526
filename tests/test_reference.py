"""The reference pages are what the code says now."""

from __future__ import annotations

import pytest
from reference import FOLDER, PAGES


@pytest.mark.parametrize("page", list(PAGES))
def test_page_is_current(page: str) -> None:
    assert (FOLDER / page).read_text() == PAGES[page](), "make report NAME=reference"
