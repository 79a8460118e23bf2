"""Which sequence is read by which rank at which step."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zeroexp.data.permutation import Permutation
from zeroexp.data.sampler import PADDING, EvalSampler, TrainSampler


@st.composite
def cuts(draw: st.DrawFn) -> tuple[int, int, int, int]:
    """(num_sequences, batch_size, data_ranks, accumulate) that come out."""
    ranks, accumulate, micro = (draw(st.integers(1, n)) for n in (6, 4, 3))
    batch = ranks * accumulate * micro
    return draw(st.integers(batch, 5 * batch)), batch, ranks, accumulate


def epoch_by_step(
    num_sequences: int, batch: int, ranks: int, accumulate: int, seed: int, epoch: int = 0
) -> list[list[int]]:
    """The sequences of every optimizer step of an epoch, joined over ranks and micro-batches."""
    steps: list[list[int]] = []
    for rank in range(ranks):
        sampler = TrainSampler(
            num_sequences,
            batch,
            data_rank=rank,
            data_ranks=ranks,
            accumulate=accumulate,
            seed=seed,
        )
        sampler.set_epoch(epoch)
        for i, micro in enumerate(sampler):
            if i // accumulate == len(steps):
                steps.append([])
            steps[i // accumulate] += micro
    return steps


@given(cut=cuts(), seed=st.integers(0, 2**63), epoch=st.integers(0, 1000))
def test_ranks_are_disjoint_and_cover_the_epoch(
    cut: tuple[int, int, int, int], seed: int, epoch: int
) -> None:
    num_sequences, batch, ranks, accumulate = cut
    steps = epoch_by_step(num_sequences, batch, ranks, accumulate, seed, epoch)
    seen = list(itertools.chain(*steps))
    assert all(len(step) == batch for step in steps)
    assert len(steps) == num_sequences // batch
    assert len(set(seen)) == len(seen), "a sequence was read twice"
    assert set(seen) <= set(range(num_sequences))
    # What one epoch leaves out is less than a batch.
    assert num_sequences - len(seen) == num_sequences % batch


@given(
    ranks=st.sampled_from([1, 2, 3, 4, 6, 12]),
    accumulate=st.sampled_from([1, 2]),
    extra=st.integers(0, 100),
    seed=st.integers(0, 2**32),
    epoch=st.integers(0, 3),
)
def test_step_k_reads_the_same_sequences_whatever_the_cut(
    ranks: int, accumulate: int, extra: int, seed: int, epoch: int
) -> None:
    batch = 24
    alone = epoch_by_step(batch + extra, batch, 1, 1, seed, epoch)
    cut = epoch_by_step(batch + extra, batch, ranks, accumulate, seed, epoch)
    assert [sorted(step) for step in cut] == [sorted(step) for step in alone]


def test_eight_samples_two_ranks_two_epochs() -> None:
    """DA-04: built-in loaders gave every epoch the same order."""

    def run() -> list[list[list[int]]]:
        samplers = [TrainSampler(8, 4, data_rank=r, data_ranks=2, seed=0) for r in range(2)]
        epochs = []
        for _ in range(2):
            read = []
            for sampler in samplers:
                mine = []
                for micro in sampler:
                    sampler.advance()
                    mine += micro
                read.append(mine)
            epochs.append(read)
        return epochs

    first, second = run()
    for epoch in (first, second):
        assert set(epoch[0]).isdisjoint(epoch[1])
        assert set(epoch[0]) | set(epoch[1]) == set(range(8))
    assert first != second
    assert run() == [first, second]


def test_seeds_give_different_orders() -> None:
    orders = {tuple(itertools.chain(*TrainSampler(64, 8, seed=seed))) for seed in range(50)}
    assert len(orders) == 50


@given(cut=cuts(), seed=st.integers(0, 2**32), data=st.data())
@settings(deadline=None)
def test_resuming_continues_as_if_never_stopped(
    cut: tuple[int, int, int, int], seed: int, data: st.DataObject
) -> None:
    num_sequences, batch, ranks, accumulate = cut
    rank = data.draw(st.integers(0, ranks - 1))

    def make() -> TrainSampler:
        return TrainSampler(
            num_sequences,
            batch,
            data_rank=rank,
            data_ranks=ranks,
            accumulate=accumulate,
            seed=seed,
        )

    straight = make()
    expected = []
    for _ in range(3):
        for micro in straight:
            straight.advance()
            expected.append(micro)
    stop = data.draw(st.integers(0, 3 * len(straight) - 1))
    stopped = make()
    taken = 0
    while taken < stop:
        for micro in stopped:
            stopped.advance()
            assert micro == expected[taken]
            taken += 1
            if taken == stop:
                break

    # The state moves to a new sampler, as after a restart; a step that was begun is begun again.
    begin = stop - stop % accumulate
    resumed = make()
    resumed.load_state_dict(stopped.state_dict())
    rest = list(resumed)
    assert rest == expected[begin : begin + len(rest)]
    assert (begin + len(rest)) % len(straight) == 0, "the epoch is finished, not begun again"

    # So it goes with the number of optimizer steps alone.
    by_step = make()
    by_step.set_position(stop // accumulate)
    assert next(iter(by_step)) == expected[begin]


@given(
    saved=st.sampled_from([(1, 1), (2, 1), (4, 1), (2, 2), (1, 4)]),
    resumed=st.sampled_from([(1, 1), (2, 1), (4, 1), (2, 2), (1, 4)]),
    step=st.integers(0, 11),
)
def test_resuming_on_other_ranks_reads_the_steps_that_are_left(
    saved: tuple[int, int], resumed: tuple[int, int], step: int
) -> None:
    num_sequences, batch = 33, 8  # 4 steps per epoch
    first = TrainSampler(num_sequences, batch, data_ranks=saved[0], accumulate=saved[1])
    for _ in range(step * saved[1]):
        first.advance()
    state = first.state_dict()
    left: list[list[int]] = [[] for _ in range(4 - step % 4)]
    for rank in range(resumed[0]):
        sampler = TrainSampler(
            num_sequences, batch, data_rank=rank, data_ranks=resumed[0], accumulate=resumed[1]
        )
        sampler.load_state_dict(state)
        for i, micro in enumerate(sampler):
            left[i // resumed[1]] += micro
    alone = epoch_by_step(num_sequences, batch, 1, 1, 0, step // 4)
    assert [sorted(s) for s in left] == [sorted(s) for s in alone[step % 4 :]]


def test_reading_ahead_does_not_move_the_position() -> None:
    sampler = TrainSampler(16, 4)
    iterator = iter(sampler)
    ahead = [next(iterator), next(iterator)]
    assert sampler.state_dict() == {"epoch": 0, "sequences": 0}
    assert list(sampler)[:2] == ahead


def test_epoch_goes_forward_only() -> None:
    sampler = TrainSampler(16, 4)
    sampler.set_position(9)  # epoch 2, second batch
    at = sampler.state_dict()
    sampler.set_epoch(2)
    sampler.set_epoch(0)
    assert sampler.state_dict() == at
    sampler.set_epoch(5)
    assert sampler.state_dict() == {"epoch": 5, "sequences": 0}


@pytest.mark.parametrize(
    ("sequences", "batch", "ranks", "accumulate"), [(16, 6, 4, 1), (16, 4, 2, 4), (3, 4, 1, 1)]
)
def test_impossible_cuts_are_refused(
    sequences: int, batch: int, ranks: int, accumulate: int
) -> None:
    with pytest.raises(ValueError, match=r"multiple|fill"):
        TrainSampler(sequences, batch, data_ranks=ranks, accumulate=accumulate)


@given(num_sequences=st.integers(0, 60), micro=st.integers(1, 5), ranks=st.integers(1, 6))
def test_evaluation_reads_everything_once_in_equally_many_batches(
    num_sequences: int, micro: int, ranks: int
) -> None:
    per_rank = [
        list(EvalSampler(num_sequences, micro, data_rank=r, data_ranks=ranks)) for r in range(ranks)
    ]
    assert {len(batches) for batches in per_rank} == {-(-num_sequences // (micro * ranks))}
    flat = list(itertools.chain.from_iterable(itertools.chain.from_iterable(per_rank)))
    assert sorted(i for i in flat if i != PADDING) == list(range(num_sequences))
    assert all(len(batch) == micro for batches in per_rank for batch in batches)
    assert len(flat) - num_sequences < micro * ranks, "padding beyond the last round of batches"


@given(size=st.integers(1, 3000), seed=st.integers(-(2**63), 2**64), epoch=st.integers(0, 2**40))
@settings(deadline=None)
def test_permutation_is_a_bijection(size: int, seed: int, epoch: int) -> None:
    order = Permutation(size, seed, epoch)
    assert sorted(order[i] for i in range(size)) == list(range(size))


def test_permutation_is_uniform() -> None:
    """Chi-square of where an element lands, over 4000 epochs, for a size far from a power of
    two."""
    size, draws = 10, 4000
    for index in (0, 3, 9):
        counts = [0] * size
        for epoch in range(draws):
            counts[Permutation(size, 7, epoch)[index]] += 1
        expected = draws / size
        chi_square = sum((c - expected) ** 2 / expected for c in counts)
        assert chi_square < 27.9  # 99.9th percentile with 9 degrees of freedom


def test_neighbours_are_independent() -> None:
    """Ordered pairs of neighbours are as frequent as in a uniform shuffle (n(n-1) of them)."""
    size, draws = 5, 4000
    counts: dict[tuple[int, int], int] = {}
    for epoch in range(draws):
        order = Permutation(size, 1, epoch)
        pair = (order[1], order[2])
        counts[pair] = counts.get(pair, 0) + 1
    expected = draws / (size * (size - 1))
    assert len(counts) == size * (size - 1)
    chi_square = sum((c - expected) ** 2 / expected for c in counts.values())
    assert chi_square < 43.8  # 99.9th percentile with 19 degrees of freedom


def test_permutation_costs_no_memory() -> None:
    order = Permutation(10**15, 0, 0)
    picked = {order[i] for i in range(0, 10**15, 10**12)}
    assert len(picked) == 1000 and max(picked) < 10**15
