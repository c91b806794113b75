"""Times several ways in rounds, so that what drifts on a machine meets all of them alike."""

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

#: Prepares something, and returns what is to be timed.
Way = Callable[[], Callable[[], object]]


@dataclass(frozen=True)
class Spread:
    """The median of some rounds, and their lowest and highest value."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Return the spread of some values.

        Examples:
            >>> Spread.of([3.0, 1.0, 2.0])
            Spread(median=2.0, low=1.0, high=3.0)
        """
        return cls(statistics.median(values), min(values), max(values))

    def text(self, factor: float = 1.0, digits: int = 0) -> str:
        """Return the spread for a table.

        Examples:
            >>> Spread(0.002, 0.001, 0.003).text(1e6)
            '2000 (1000 to 3000)'
        """
        median, low, high = (
            f"{value * factor:.{digits}f}" for value in (self.median, self.low, self.high)
        )
        return f"{median} ({low} to {high})"


def time_rounds(
    ways: Mapping[str, Way], rounds: int, meet: Callable[[], object] = lambda: None
) -> dict[str, list[float]]:
    """Time every way once a round, in an order of the round's own; a first round warms up.

    Args:
        ways: What is timed. With ranks, the same on all of them.
        rounds: How many are kept.
        meet: Called right before each timing: where ranks wait for each other.

    Returns:
        dict[str, list[float]]: The seconds of each way, by round.
    """
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        order = list(ways)
        random.Random(number).shuffle(order)
        for name in order:
            run = ways[name]()
            meet()
            started = time.perf_counter()
            run()
            ended = time.perf_counter()
            if number:
                seconds[name].append(ended - started)
    return seconds


def slowest(ranks: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, list[float]]:
    """Return the seconds of the slowest rank, by way and round: an epoch lasts until it is done.

    Examples:
        >>> slowest([{"plain": [1.0, 4.0]}, {"plain": [2.0, 3.0]}])
        {'plain': [2.0, 4.0]}
    """
    return {
        name: [max(times) for times in zip(*(rank[name] for rank in ranks), strict=True)]
        for name in ranks[0]
    }


def ratios(over: Sequence[float], under: Sequence[float]) -> list[float]:
    """Return the ratio of each round.

    Examples:
        >>> ratios([3.0, 4.0], [2.0, 2.0])
        [1.5, 2.0]
    """
    return [a / b for a, b in zip(over, under, strict=True)]
