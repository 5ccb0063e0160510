"""Which of a model's workers answers which request: where its history is, else where least is to be done.

Depends on requests and earlier choices alone, so that a run repeats. Knows no workers, only their numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from masflow.models.engine import Request

__all__ = ["Balance"]

_CHARS_A_TOKEN = 4


class Balance:
    """Deals requests out to `num_workers` workers."""

    def __init__(self, num_workers: int):
        self.num_workers = num_workers
        self._home: dict[str, int] = {}
        """Turn → the worker that spoke it, which still has its prefix."""

    def deal(
        self,
        requests: Sequence[Request],
        among: Sequence[int] | None = None,
        load: Mapping[int, int] | None = None,
    ) -> dict[int, list[int]]:
        """Numbers of the requests by worker, each list in order.

        A request that continues a turn goes to the worker that spoke it; requests of one prompt and policy
        stay together, so that it is read once; such a bundle goes to the worker with the least outstanding
        tokens of this deal, the larger bundles first.

        Args:
            among: workers that may be chosen; a history elsewhere is no reason then.
            load: tokens that workers still have to do from earlier deals.
        """
        workers = list(range(self.num_workers)) if among is None else list(among)
        load = {worker: (load or {}).get(worker, 0) for worker in workers}
        dealt: dict[int, list[int]] = {worker: [] for worker in workers}
        bundles: dict[object, list[int]] = {}
        for number, request in enumerate(requests):
            home = self._home.get(request.parent or "")
            if home in load:
                self._give(home, [number], requests, load, dealt)
            else:
                bundles.setdefault((request.policy, request.messages), []).append(number)
        most = -(-len(requests) // len(workers))
        pieces = [b[i : i + most] for b in bundles.values() for i in range(0, len(b), most)]
        for piece in sorted(pieces, key=lambda p: (-cost(p, requests), p[0])):
            least = min(workers, key=lambda worker: (load[worker], worker))
            self._give(least, piece, requests, load, dealt)
        return {worker: sorted(numbers) for worker, numbers in dealt.items() if numbers}

    def _give(
        self,
        worker: int,
        numbers: list[int],
        requests: Sequence[Request],
        load: dict[int, int],
        dealt: dict[int, list[int]],
    ) -> None:
        dealt[worker] += numbers
        load[worker] += cost(numbers, requests)
        for number in numbers:
            self._home[requests[number].turn_id] = worker

    def forget(self, worker: int | None = None) -> None:
        """Nobody's history is anywhere any more, or not with this worker."""
        self._home = {} if worker is None else {t: w for t, w in self._home.items() if w != worker}


def cost(numbers: Sequence[int], requests: Sequence[Request]) -> int:
    """Tokens of a bundle, roughly: its prompt once, its replies at their longest."""
    prompt = sum(len(m.content) for m in requests[numbers[0]].messages) // _CHARS_A_TOKEN
    return prompt + sum(requests[n].sampling.max_tokens for n in numbers)
