"""The critics of one model's process: asked once a step, trained beside its policies, saved with it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from masflow.algorithms import filled
from masflow.algorithms.critics import critic_of, gae_of
from masflow.compiler.plan import ModelIR, Plan
from masflow.errors import RunError
from masflow.models.bases import Base
from masflow.models.critic import Critic
from masflow.models.experience import Row
from masflow.models.saving import MENDS, read_whole
from masflow.rl.chains import Link

__all__ = ["Critics"]

FOLDER = "critics"
"""Below a model's part of a checkpoint."""
RECORD = "critics.json"
"""There: each critic's name, and whether it has an optimizer."""


class Critics:
    """All critics of one model; none where the algorithm has none."""

    def __init__(self, model: ModelIR, plan: Plan, run_dir: Path, base: Base | None = None):
        """
        Args:
            base: the model's own, loaded: critics on another one read the same tokens.
        Raises:
            RunError: as `Critic`; a critic's own base reads other tokens than the model, or fewer.
        """
        algorithm = filled(plan.algorithm)
        self._host, self._settings, self._gae = model, critic_of(algorithm), gae_of(algorithm)
        self._by_token, self._epochs = algorithm.advantage == "gae", algorithm.epochs or 1
        shares, seed = plan.shares_prefixes(model.name), plan.train.seed
        self.by_name = {
            spec.name: Critic(spec, model, run_dir, seed, shares)
            for spec in plan.critics
            if spec.model == model.name
        }
        if base is not None:
            for critic in self.by_name.values():
                _check_base(critic, base)
        self.token_advantages: dict[str, list[float]] = {}
        """Turn id → one a reply token, of the step's estimates."""

    def __bool__(self) -> bool:
        return bool(self.by_name)

    def start_from(self, weights: Mapping[str, Tensor]) -> None:
        """At the start of RL those on the model's own base begin from what it is then, adapters left out."""
        for critic in self.by_name.values():
            if critic.spec.base_hash == self._host.base_hash:
                critic.start_from(weights)

    def estimate(self, links: Mapping[str, Sequence[Link]], rows: Mapping[str, Row]) -> dict[str, float]:
        """Turn id → advantage, whitened a role; kept for `update`.

        Args:
            links: critic's name → what it is asked about.
        Returns:
            Of single tokens a turn's mean; where that is 0 and theirs aren't, the largest of them: a turn
            with an advantage of 0 teaches nothing.
        """
        self.token_advantages = {}
        found: dict[str, float] = {}
        for name, mine in links.items():
            estimate = self.by_name[name].estimate(mine, rows, self._by_token, self._gae)
            for link, advantages in zip(estimate.links, estimate.advantages, strict=True):
                found[link.turn_id] = float(advantages.mean() or advantages.max())
                if self._by_token:
                    self.token_advantages[link.turn_id] = advantages.tolist()
        return found

    def update(self, step: int, num_steps: int) -> dict[str, dict[str, float]]:
        """Critic's name → metrics, of those that were asked; as `Critic.update`."""
        assert self._settings is not None
        clip, asked = self._settings.value_clip, [c for c in self.by_name.values() if c.estimated]
        return {
            critic.spec.name: critic.update(critic.spec.optimizer, clip, self._epochs, step, num_steps)
            for critic in asked
        }

    def save(self, folder: Path) -> None:
        """Below a model's folder; nothing without critics."""
        if not self:
            return
        place = folder / FOLDER
        place.mkdir(parents=True, exist_ok=True)
        for critic in self.by_name.values():
            critic.save(place)
        record = {name: critic.learner.optimizer is not None for name, critic in self.by_name.items()}
        (place / RECORD).write_text(json.dumps(record), encoding="utf-8")

    def load(self, folder: Path) -> None:
        """The exact reverse of `save`.

        Raises:
            RunError: a critic isn't there, or is torn.
        """
        if not self:
            return
        record = read_whole(folder / FOLDER / RECORD, _read_record)
        if set(record) != set(self.by_name):
            known = ", ".join(sorted(record)) or "none"
            raise RunError(
                f"{folder / FOLDER} holds the critics {known}, not {', '.join(self.by_name)}", MENDS
            )
        for name, critic in self.by_name.items():
            critic.load(folder / FOLDER, record[name])

    def describe(self) -> dict[str, dict[str, Any]]:
        """Trained parameters, roles and context of each, by name."""
        return {
            name: {
                "parameters": critic.num_parameters,
                "roles": list(critic.spec.roles),
                "context": critic.context,
            }
            for name, critic in self.by_name.items()
        }


def _check_base(critic: Critic, base: Base) -> None:
    """Raises RunError where a critic that reads a model's tokens has a base that knows others."""
    if critic.spec.central:
        return
    name, why = f"critic '{critic.spec.name}'", ""
    if critic.tokenizer.get_vocab() != base.tokenizer.get_vocab():
        why = "has another tokenizer than the model whose replies it values"
    elif critic.context < base.context:
        why = f"reads at most {critic.context} tokens, and the model whose replies it values {base.context}"
    if why:
        message = f"{name}: its base '{critic.spec.base}' {why}"
        raise RunError(message, "leave algorithm.critic.base out, or name a model of the same family")


def _read_record(path: Path) -> dict[str, bool]:
    found = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(found, dict):
        raise ValueError("it is no record of critics")
    return {str(name): bool(has_optimizer) for name, has_optimizer in found.items()}
