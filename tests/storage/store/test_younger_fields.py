"""Segments that an older build wrote, whose records lack the youngest fields, stay readable."""

from dataclasses import replace

import numpy as np
import pytest

from bus.codec import encode
from bus.kept_sets import KeptSets
from bus.older_kv import RUN
from storage.store import segments
from storage.store.segments import RECORD_FIELDS, Segment
from tests.factories import make_trajectory


@pytest.mark.parametrize("first", ["kept_counts", "older_kv"])
def test_segment_from_before_a_field_is_read_and_merged_with_one_that_has_it(tmp_path, monkeypatch, first):
    old, new = make_trajectory(0), make_trajectory(1)
    kept = KeptSets.of([np.array([token], np.int32) for token in new.token_ids])
    new = replace(
        new,
        kept_counts=kept.counts.tobytes(),
        kept_tokens=kept.token_ids.tobytes(),
        older_kv=np.array([(4, 6, 3)], RUN).tobytes(),
    )
    fields = RECORD_FIELDS[: RECORD_FIELDS.index(first)]
    with monkeypatch.context() as older:
        older.setattr(segments, "RECORD_FIELDS", fields)
        segments.write_segment(tmp_path / "old", [old])
    segments.write_segment(tmp_path / "new", [new])
    summary = segments.merge_segments(tmp_path / "both", [tmp_path / "old", tmp_path / "new"])
    assert summary.record_fields == list(RECORD_FIELDS)
    both = Segment(tmp_path / "both")
    assert [encode(both.trajectory(row)) for row in range(2)] == [encode(old), encode(new)]
    both.close()
