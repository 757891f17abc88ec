"""Counting of reads at a node (windows, hot blocks, bounds), and the choice of what to copy."""

from pinyon.store.hot_reads import COUNTED_MAX, HOT_MAX, HOT_READS, WINDOW_S, HotReads, to_copy


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def test_a_window_is_told_once_and_only_when_it_is_over() -> None:
    reads = HotReads(100.0)
    reads.add([key(1), key(2)], 100.0)
    assert reads.take(100.0 + WINDOW_S - 0.1) is None
    assert reads.take(100.0 + WINDOW_S) == (WINDOW_S, 2)
    assert reads.hot == []
    assert reads.take(100.0 + WINDOW_S) is None
    assert reads.take(100.0 + 2 * WINDOW_S) == (WINDOW_S, 0)


def test_few_reads_in_a_long_time_make_nothing_hot() -> None:
    reads = HotReads(0.0)
    reads.add([key(1)] * HOT_READS, 1.0)
    assert reads.take(2 * WINDOW_S) is None
    assert reads.take(3 * WINDOW_S) == (WINDOW_S, 0)


def test_hot_blocks_come_hottest_first_then_ancestors_first() -> None:
    reads = HotReads(0.0)
    for _ in range(HOT_READS):
        reads.add([key(1), key(2), key(3)], 1.0)
    reads.add([key(3)], 1.0)
    reads.add([key(4)] * (HOT_READS - 1), 1.0)
    assert reads.take(WINDOW_S) == (WINDOW_S, 4 * HOT_READS)
    assert reads.hot == [(key(3), HOT_READS + 1), (key(1), HOT_READS), (key(2), HOT_READS)]


def test_many_blocks_end_a_window_early() -> None:
    reads = HotReads(0.0)
    for _ in range(HOT_READS):
        reads.add([key(number) for number in range(COUNTED_MAX - 1)], 1.0)
    reads.add([key(COUNTED_MAX)], 2.0)
    assert reads.take(2.0) == (2.0, HOT_READS * (COUNTED_MAX - 1) + 1)
    assert len(reads.hot) == HOT_MAX
    reads.add([key(1)], 2.5)
    assert reads.take(2.0 + WINDOW_S) == (WINDOW_S, 1)


def test_the_hottest_are_copied_until_enough_reads_move() -> None:
    hot = [(key(number), 100) for number in range(4)]
    alone = [["a"]] * 4
    assert to_copy(hot, alone, "b", 100) == [key(0), key(1)], "half of the reads of each"
    assert to_copy(hot, alone, "b", 101) == [key(0), key(1), key(2)]
    assert to_copy(hot, alone, "b", 1000) == [key(number) for number in range(4)]
    assert to_copy(hot, [["a", "c"]] * 4, "b", 100) == [key(0), key(1), key(2)], "a third of the reads of each"


def test_an_order_continues_where_the_last_one_ended() -> None:
    hot = [(key(number), 100) for number in range(4)]
    assert to_copy(hot, [["a", "b"], ["a", "b"], ["a"], ["a"]], "b", 100) == [key(2), key(3)]
