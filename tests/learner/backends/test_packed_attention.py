from learner.backends.shared.packed_attention import bucket_by_length


def test_padding_never_more_than_doubles_the_tokens():
    lengths = [1, 100, 3, 51, 49, 2, 7, 26, 25, 1]
    buckets, slots = bucket_by_length(lengths)
    assert sum(bucket.sequences for bucket in buckets) == len(lengths)
    assert sum(bucket.sequences * bucket.length for bucket in buckets) <= 2 * sum(lengths)
    assert len(set(slots.tolist())) == sum(lengths)


def test_each_sequence_is_a_run_of_slots_at_the_start_of_a_row():
    buckets, slots = bucket_by_length([2, 4, 1, 3])
    assert buckets == ((3, 4), (1, 1))
    assert slots.tolist() == [8, 9, 0, 1, 2, 3, 12, 4, 5, 6]
