"""What is emitted moves what the papers say; the page says so too."""

from __future__ import annotations

import pytest
import volumes
from volumes import WAYS, Way


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
def test_emitted_volumes_are_the_published_ones(way: Way) -> None:
    volume = volumes.emitted(way)
    assert (volume.forward, volume.backward) == way.published(way.n)
    assert volume.norms < volume.forward / 100


def test_the_page_is_what_make_volumes_writes() -> None:
    assert volumes.PAGE.read_text() == volumes.page()
