"""Data of NLTK that tests of IFBench have."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from actors.rewards.instructions.ifbench_words import _tagger


@pytest.fixture
def nltk_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory of NLTK's data, which holds none yet."""
    nltk = pytest.importorskip("nltk")
    monkeypatch.setattr(nltk.data, "path", [str(tmp_path)])
    _tagger.cache_clear()
    yield tmp_path
    _tagger.cache_clear()
