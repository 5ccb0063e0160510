"""CoMLRL's `MAGRPOTrainer` on a workload of several roles, each a model of its own.

    python -m tests.bench.speed.side_comlrl WORKLOAD FOLDER

With several turns it draws a tree: every joint reply of a group is gone on from by a group of its own, so
that one prompt gives G + G² + … replies a role, all trained on. `aligned` (the i-th replies of the roles
belong together) is the mode with the least work. A step is one prompt's tree with its update, one optimizer
step for each turn of it.
"""
# pyright: reportMissingImports=false

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

os.environ["WANDB_MODE"] = "disabled"

import torch
from comlrl.trainers.reinforce import MAGRPOConfig, MAGRPOTrainer
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.bench.speed.meter import Meter, pin
from tests.bench.speed.workloads import LR, Workload, next_prompt, prompt_text, prompts, reward


def nodes(work: Workload) -> int:
    """Groups in one prompt's tree."""
    return sum(work.group**turn for turn in range(work.turns))


class Counted(MAGRPOTrainer):
    """Tells the meter of each step; the first one, which warms up, has one turn."""

    meter: Meter
    work: Workload
    drawn: int = 0

    def _train_step_returns(self, batch_item: Any, **kwargs: Any) -> None:
        first = self.meter.done == 0
        self.args.num_turns = 1 if first else self.work.turns
        self.args.rollout_buffer_size = 1 if first else nodes(self.work)
        super()._train_step_returns(batch_item, **kwargs)
        assert not any(self.rollout_buffers)
        self.meter.step()

    def _generate_completions(self, *args: Any, **kwargs: Any) -> Any:
        found = super()._generate_completions(*args, **kwargs)
        assert set(found["response_lens"]) == {self.work.reply_tokens}
        self.drawn += len(found["response_lens"]) if self.meter.done else 0
        return found


def main() -> None:
    pin()
    torch.manual_seed(0)
    work, folder = Workload.read(sys.argv[1]), Path(sys.argv[2])
    samples = nodes(work) * work.group * work.roles
    meter = Meter(samples, work.steps)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    agents = [AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) for _ in range(work.roles)]
    texts = [prompt_text(text, tokenizer) for text in prompts(work, folder, work.steps + 1)]

    def paid(*said: list[str]) -> list[float]:
        return [sum(map(reward, texts)) / len(texts) for texts in zip(*said, strict=True)]

    def go_on(
        agent_completions: list[str], prompt_history_per_agent: list[list[str]], **more: Any
    ) -> list[str]:
        """Each role's prompt, its reply and what the other one said."""
        others = [*agent_completions[1:], agent_completions[0]]
        before = [history[-1] for history in prompt_history_per_agent]
        return [next_prompt(*one, tokenizer) for one in zip(before, agent_completions, others, strict=True)]

    trainer = Counted(
        agents=agents,
        num_agents=work.roles,
        tokenizer=tokenizer,
        reward_func=paid,
        external_transition=go_on,
        train_dataset=Dataset.from_dict({"prompt": texts}),
        args=MAGRPOConfig(
            num_train_epochs=1,
            agent_learning_rate=LR,
            num_agents=work.roles,
            num_generations=work.group,
            max_new_tokens=work.reply_tokens,
            temperature=1.0,
            top_p=1.0,
            top_k=0,
            num_turns=work.turns,
            early_termination_threshold=None,
            external_prompt_passthrough=True,
            eval_interval=0,
            train_batch_size=nodes(work),
        ),
    )
    trainer.meter, trainer.work = meter, work
    before = [agent.lm_head.weight.detach().clone() for agent in agents]
    meter.loaded()
    trainer.train()
    assert trainer.drawn == samples * work.steps, (trainer.drawn, samples)
    assert all(bool((a.lm_head.weight != old).any()) for a, old in zip(agents, before, strict=True))
    meter.tell(drawn=trainer.drawn)


if __name__ == "__main__":
    main()
