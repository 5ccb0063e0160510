"""A model group as the hub sees it: one physical model's workers and its store, wherever they run.

Text, ids and scalars come in and go out; tokens and weights go between the group's own processes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from masflow.compiler.plan import ModelIR, Plan
from masflow.errors import RunError
from masflow.models.engine import Reply, Request
from masflow.models.trainer import TrainItem
from masflow.rl.chains import Link
from masflow.rl.losses import LossSpec
from masflow.runtime import checkpoints, placement
from masflow.runtime.backend import Actor, Backend, Died, Pending
from masflow.runtime.balance import Balance
from masflow.runtime.local import LocalBackend
from masflow.runtime.messages import Answer, Delivery, Part
from masflow.runtime.store import Store
from masflow.runtime.worker import Worker
from masflow.spec.mapping import Optimizer
from masflow.trace import Turn

__all__ = ["Call", "Delivery", "ModelGroup"]

REUSE_NATS = 0.02
"""Between engine and trainer on the probe: up to this, sampled log-probs are taken as the trainer's own. In
single precision a delivery is refused long before; in half precision half of them come to 0.002."""
_CLOSE_S = 10.0
_GRACE_S = 10.0
"""For the other processes of a model, once one has failed: it may be that one of them died."""
_MAX_DEATHS = 3
"""Of one worker without an answer in between."""


@dataclass
class Call:
    """Requests on their way to a worker. Made by `submit`; eaten by `gather`."""

    worker: int
    requests: list[Request]
    pending: Pending[Answer]

    def done(self) -> bool:
        """Whether `gather` would not wait."""
        return self.pending.done()


class ModelGroup:
    """All that happens to one physical model."""

    repeats = True

    def __init__(
        self,
        model: ModelIR,
        plan: Plan,
        run_dir: Path,
        backend: Backend | None = None,
        worker: type = Worker,
    ):
        """Spawn the store and the workers; `ready` waits for them.

        Args:
            worker: what a process of the model is.
        Raises:
            RunError: a policy's `init` isn't there; in one process whatever `Worker` raises.
        """
        self.model = _found(model, plan)
        self.layout = placement.layout_of(model, plan.runtime)
        self.num_restarts = self.num_cached = 0
        """Workers that died; prompt tokens whose keys and values were at hand."""
        self.incidents: list[str] = []
        """What happened to workers since the hub last took these."""
        self._plan, self._run_dir, self._worker = plan, run_dir, worker
        self._backend = backend or LocalBackend()
        self._asks = dict(placement.asks_of(model, plan.runtime))
        self._unproven: set[str] = set()
        self._gaps: dict[str, float] = {}
        """Of each policy's last delivery, nats."""
        self._counts = [0, 0, 0]
        self._deaths: dict[int, int] = {}
        self.store = self._backend.spawn(
            f"{model.name}/store", Store, model.name, run_dir, ask=self._asks[f"{model.name}/store"]
        )
        names = [name for name in self._asks if not name.endswith("/store")]
        learners = [n for n in names if self.layout.colocated or "/trainer" in n]
        learners = learners[: self.layout.num_trainers]
        self._parts = {n: self._part(n, learners) for n in names}
        with ExitStack() as stack:
            stack.callback(self.close)
            actors = {name: self._spawn(name) for name in names}
            stack.pop_all()
        self.speakers: list[Actor] = [a for n, a in actors.items() if self._parts[n].speaks]
        self.learners: list[Actor] = [actors[n] for n in learners] or self.speakers[:1]
        """By rank; where nothing is trained, the worker that saves."""
        self._balance = Balance(len(self.speakers))

    def _part(self, name: str, learners: Sequence[str]) -> Part:
        learns = name in learners
        return Part(
            name=name,
            speaks=self.layout.colocated or not learns,
            learns=learns,
            rank=learners.index(name) if learns else 0,
            world=max(1, len(learners)) if learns else 1,
            strategy=self.model.place.trainer.strategy,
            threads=self._asks[name].threads,
            timeout_s=self._plan.runtime.call_timeout_s,
        )

    def _spawn(self, name: str) -> Actor:
        arguments = (self.model, self._plan, self._run_dir, self.store, self._parts[name])
        return self._backend.spawn(name, self._worker, *arguments, ask=self._asks[name])

    @property
    def actors(self) -> list[Actor]:
        """The workers, each once."""
        return list({actor.name: actor for actor in (*self.learners, *self.speakers)}.values())

    def ready(self) -> None:
        """Wait until everything is loaded, and the processes that learn have found each other.

        Raises:
            RunError: one isn't there in `runtime.start_timeout_s`; what loading it raised.
        """
        timeout_s = self._plan.runtime.start_timeout_s
        pendings = [actor.call("ready") for actor in (self.store, *self.actors)]
        for pending in pendings:
            self._get(pending, timeout_s)
        if len(self.learners) > 1:
            address = self._get(self.learners[0].call("address"), timeout_s)
            self._all(self.learners, "join", address, timeout_s=timeout_s)

    # -- calls ------------------------------------------------------------------------------------

    def _get(self, pending: Pending[Any], timeout_s: float | None = None) -> Any:
        try:
            return pending.get(timeout_s or self._plan.runtime.call_timeout_s)
        except Died as death:
            fix = f"go on from the last checkpoint: --resume --out {self._run_dir}"
            raise RunError(f"{death}; the run can't go on without it", fix) from death

    def _all(
        self, actors: Sequence[Actor], method: str, *args: Any, timeout_s: float | None = None
    ) -> list[Any]:
        """Call all of them at once, then wait for each."""
        return self._by_rank([actor.call(method, *args) for actor in actors], timeout_s)

    def _by_rank(self, pendings: Sequence[Pending[Any]], timeout_s: float | None = None) -> list[Any]:
        """What each process answers, in order. A death is told at once, whoever else still waits for the dead
        one; of other errors the first, unless a death explains it within moments."""
        bound_s = timeout_s or self._plan.runtime.call_timeout_s
        found: dict[int, Any] = {}
        first: RunError | None = None
        left = list(range(len(pendings)))
        while left:
            ready = self._backend.wait([pendings[place] for place in left], bound_s)
            if not ready and first is not None:
                break
            for place in [left[number] for number in ready or [0]]:
                left.remove(place)
                try:
                    found[place] = pendings[place].get(bound_s)
                except Died as death:
                    self._get(_Dead(death))
                except RunError as error:
                    first, bound_s = first or error, _GRACE_S
        if first is not None:
            raise first
        return [found[place] for place in range(len(pendings))]

    # -- speaking ---------------------------------------------------------------------------------

    def generate(self, requests: Sequence[Request]) -> list[Reply]:
        """One reply a request, in order; their tokens are in the store, and in the token trace."""
        found = self.gather(self.submit(requests))
        return [found[request.turn_id] for request in requests]

    def submit(self, requests: Sequence[Request], among: Sequence[int] | None = None) -> list[Call]:
        """Hand requests out to the workers, policies that moved first; `gather` waits for the replies.

        Args:
            among: numbers of the workers that may be asked.
        """
        self.deliver()
        dealt = self._balance.deal(requests, among)
        return [self._ask(worker, [requests[n] for n in numbers]) for worker, numbers in dealt.items()]

    def _ask(self, worker: int, requests: list[Request]) -> Call:
        return Call(worker, requests, self.speakers[worker].call("generate", requests))

    def gather(self, calls: Sequence[Call]) -> dict[str, Reply]:
        """Replies by turn id. A worker that died is made again, and asked again: the ids are the same.

        Raises:
            RunError: it dies again and again, or it also learns; no reply in `runtime.call_timeout_s`.
        """
        found: dict[str, Reply] = {}
        for call in calls:
            answer = self._answer(call)
            self.count(call.worker, answer)
            found |= {reply.turn_id: reply for reply in answer.replies}
        return found

    def count(self, worker: int, answer: Answer) -> None:
        """A worker lives, and said so much."""
        self._deaths.pop(worker, None)
        self.num_cached += answer.num_cached
        for place, count in enumerate((answer.num_drawn, answer.num_batches, answer.num_forked)):
            self._counts[place] += count

    @property
    def joins(self) -> bool:
        """Requests may join those that a worker is answering (`Worker.advance`)."""
        return bool(getattr(self._worker, "joins", False))

    def deal(self, requests: Sequence[Request], load: Mapping[int, int]) -> dict[int, list[Request]]:
        """Requests by worker, policies that moved are published first; `load`: tokens that each has to do."""
        self.deliver()
        dealt = self._balance.deal(requests, load=load)
        return {worker: [requests[n] for n in numbers] for worker, numbers in dealt.items()}

    def _answer(self, call: Call) -> Answer:
        while True:
            try:
                return call.pending.get(self._plan.runtime.call_timeout_s)
            except Died as death:
                self.revive(call.worker, death)
                call.pending = self.speakers[call.worker].call("generate", call.requests)

    def revive(self, worker: int, death: Died) -> None:
        """A rollout worker in the place of a dead one, with the last published weights.

        Raises:
            RunError: what died learns too, or dies again and again, or the new one can't be made.
        """
        name = self.speakers[worker].name
        self._deaths[worker] = self._deaths.get(worker, 0) + 1
        if self._parts[name].learns or death.name != name or self._deaths[worker] > _MAX_DEATHS:
            self._get(_Dead(death))
        self.num_restarts += 1
        self.incidents.append(f"worker {death}; it is started again with the last published weights")
        self.speakers[worker] = self._spawn(name)
        self._balance.forget(worker)
        self._get(self.speakers[worker].call("ready"), self._plan.runtime.start_timeout_s)
        if not self.layout.colocated:
            for policy in self.model.policies:
                self._publish(policy.name, [self.speakers[worker]], whole=True)

    def add_rows(self, turns: Sequence[Turn]) -> None:
        """Tokenise demonstrated turns by the code path of `generate`; parents before their continuations.

        Raises:
            RunError: a demonstration doesn't fit the context.
        """
        self._get(self.learners[0].call("add_rows", turns))

    # -- learning ---------------------------------------------------------------------------------

    def supervise(
        self, policy: str, turn_ids: Sequence[str], optimizer: Optimizer, step: int, num_steps: int
    ) -> dict[str, float]:
        """One optimizer step on the mean over these turns' reply tokens; proven when the policy next speaks.

        Where adapters sit on a base made from a config, the model's own name means its backbone.

        Args:
            step: from 0, of `num_steps`, for the schedule.
        Returns:
            `loss` (nats a token), `likely_frac` (tokens of probability above 1/2), `grad_norm` (unclipped),
            `lr`, `tokens`.
        Raises:
            RunError: a frozen or unknown policy, unknown turns, a non-finite value, a failed delivery.
        """
        return self.finish_supervise(self.begin_supervise(policy, turn_ids, optimizer, step, num_steps))

    def begin_supervise(
        self, policy: str, turn_ids: Sequence[str], optimizer: Optimizer, step: int, num_steps: int
    ) -> list[Pending[dict[str, float]]]:
        """Set all ranks to work; `finish_supervise` waits for them, so that several models learn at once."""
        made = self.model.base is not None and not isinstance(self.model.base, str)
        if self.model.train == "lora" and made and policy == self.model.name:
            self._unproven.update(p.name for p in self.model.policies)
            return [
                actor.call("supervise_base", turn_ids, optimizer, step, num_steps) for actor in self.learners
            ]
        begun = [
            actor.call("supervise", policy, turn_ids, optimizer, step, num_steps) for actor in self.learners
        ]
        self._unproven.add(policy)
        return begun

    def finish_supervise(self, begun: Sequence[Pending[dict[str, float]]]) -> dict[str, float]:
        """Metrics of a supervised step."""
        return self._by_rank(begun)[0]

    def update(
        self, policy: str, rows: Sequence[TrainItem], loss: LossSpec, step: int, num_steps: int
    ) -> dict[str, float]:
        """`updates_per_step` optimizer steps of a policy, one a mini-batch, then its publication.

        Without rows nothing moves, bit for bit, and there are no metrics.

        Args:
            step: from 0, of `num_steps`, for the schedule.
        Raises:
            RunError: as `supervise`; a turn of another policy, or a demonstration.
        """
        return self.finish_update(policy, self.begin_update(policy, rows, loss, step, num_steps))

    def begin_update(
        self, policy: str, rows: Sequence[TrainItem], loss: LossSpec, step: int, num_steps: int
    ) -> list[Pending[dict[str, float]]]:
        """Set all ranks to work; `finish_update` waits for them, so that several models learn at once."""
        if not rows:
            return []
        if policy not in self._gaps and self.layout.colocated:  # as a resume, which proves all of them again
            self.prove_delivery(policy)
        gap = self._gaps.get(policy, 0.0)
        if rescore := gap > REUSE_NATS:
            self.incidents.append(
                f"what speaks for policy '{policy}' is {gap:.2g} nats off its trainer: log-probs of sampled"
                f" replies are computed again (above {REUSE_NATS:g} nats)"
            )
        return [actor.call("update", policy, rows, loss, step, num_steps, rescore) for actor in self.learners]

    def finish_update(self, policy: str, begun: Sequence[Pending[dict[str, float]]]) -> dict[str, float]:
        """Metrics of an update, after its publication."""
        if not begun:
            return {}
        metrics = dict(self._by_rank(begun)[0])
        staleness = metrics.pop("staleness")
        delivery = self.prove_delivery(policy)
        facts = {"version": delivery.version, "delivery_gap": delivery.logprob_gap, "staleness": staleness}
        return metrics | {name: float(value) for name, value in facts.items()}

    def begin_estimate(self, links: Mapping[str, Sequence[Link]]) -> Pending[dict[str, float]]:
        """Ask this model's critics about a step's turns; `finish` waits: turn id → advantage."""
        return self.learners[0].call("estimate", links)

    def begin_critics(self, step: int, num_steps: int) -> Pending[dict[str, dict[str, float]]]:
        """Set them to learn from what they estimated; `finish` waits: critic's name → metrics."""
        return self.learners[0].call("update_critics", step, num_steps)

    def finish(self, begun: Pending[Any]) -> Any:
        """What a call to the critics answers."""
        return self._get(begun)

    def start_critics(self) -> None:
        """At the start of RL: critics begin from the model's weights as they are now."""
        self._get(self.learners[0].call("start_critics"))

    # -- publishing -------------------------------------------------------------------------------

    def deliver(self) -> None:
        """Publish and prove every policy that moved since it last spoke."""
        for policy in [p.name for p in self.model.policies if p.name in self._unproven]:
            self.prove_delivery(policy)

    def prove_delivery(self, policy: str) -> Delivery:
        """Bring a policy to all workers that speak, and compare their log-probs of a probe prompt with the
        trainer's; colocated, weights are shared, and only the proof is left.

        Raises:
            RunError: they differ by more than 1e-3 nats (half precision: 0.15), or aren't finite.
        """
        if self.layout.colocated:
            deliveries = self._all(self.speakers, "prove", policy)
        else:
            deliveries = self._publish(policy, self.speakers)
        self._unproven.discard(policy)
        worst = max(deliveries, key=lambda delivery: delivery.logprob_gap)
        if worst.version or self.layout.colocated:
            self._gaps[policy] = worst.logprob_gap  # apart, only a resume sends what hasn't moved yet
        return worst

    def _publish(self, policy: str, to: Sequence[Actor], whole: bool = False) -> list[Delivery]:
        """One message from the trainer to all of them: it doesn't come through here."""
        by_rank = [actor.call("payload", policy, whole) for actor in self.learners]
        payload = by_rank[0]
        deliveries: list[Delivery] = []
        for actor, pending in [(actor, actor.call("receive", payload)) for actor in to]:
            try:
                deliveries.append(pending.get(self._plan.runtime.call_timeout_s))
            except Died as death:
                if self.layout.colocated or death.name != actor.name:
                    self._get(_Dead(death))
                self.revive(self.speakers.index(actor), death)
                deliveries.append(self._last_delivery(policy, actor.name))
        return deliveries

    def _last_delivery(self, policy: str, name: str) -> Delivery:
        """Of a worker that was just made again, and got everything."""
        actor = next(a for a in self.speakers if a.name == name)
        return self._get(actor.call("receive", self.learners[0].call("payload", policy, True)))

    # -- state ------------------------------------------------------------------------------------

    def versions(self) -> dict[str, int]:
        """Publications of each policy so far."""
        return self._get(self.learners[0].call("versions"))

    def traffic(self) -> tuple[int, int, int]:
        """Since the model was loaded: replies drawn, decoding batches, and rows that forked because the chat
        template rewrote their history."""
        return self._counts[0], self._counts[1], self._counts[2]

    def clear_rows(self) -> None:
        """Forget the rows; the token trace on disk keeps them."""
        self._balance.forget()
        self._each(self.actors, "clear_rows")
        self._get(self.store.call("clear"))

    def _each(self, actors: Sequence[Actor], method: str) -> None:
        """Call all of them; a dead worker that only speaks is made again when it is next asked."""
        for actor, pending in [(actor, actor.call(method)) for actor in actors]:
            try:
                pending.get(self._plan.runtime.call_timeout_s)
            except Died as death:
                if self._parts[actor.name].learns or actor in self.learners:
                    self._get(_Dead(death))

    def reset_optimizers(self) -> None:
        """Begin afresh: moments and step counts go, weights stay."""
        self._all(self.learners, "reset_optimizers")

    def snapshot_reference(self) -> None:
        """Keep today's weights as what a KL penalty compares with."""
        self._all(self.learners, "snapshot_reference")

    def save(self, folder: Path) -> None:
        """Write policies, optimizers, versions and random state; `load` gives back exactly them."""
        self._all(self.learners, "save", folder)

    def load(self, folder: Path) -> None:
        """Raises RunError where `folder` belongs to other policies or weights."""
        self._all(self.actors, "load", folder)
        self._unproven.update(p.name for p in self.model.policies)

    def describe(self) -> dict[str, Any]:
        """Parameters, bytes, device, context: for progress and `explain`."""
        return self._get(self.learners[0].call("describe"))

    def close(self) -> None:
        """Close the token trace; whoever made the backend ends the processes."""
        with suppress(RunError, Died):  # what ended the run is said already
            self.store.call("close").get(_CLOSE_S)


class _Dead:
    """A call whose actor is known to be dead."""

    def __init__(self, death: Died):
        self.death = death

    def done(self) -> bool:
        return True

    def get(self, timeout_s: float) -> Any:
        raise self.death


def _found(model: ModelIR, plan: Plan) -> ModelIR:
    """The model with the folders that its `init`s name: other processes may stand elsewhere.

    Raises:
        RunError: no such run or checkpoint.
    """
    roots = (Path.cwd(), Path(plan.root_dir))
    policies = tuple(
        p if p.init is None else replace(p, init=str(checkpoints.find(p.init, roots).absolute()))
        for p in model.policies
    )
    return replace(model, policies=policies)
