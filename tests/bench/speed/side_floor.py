"""The floor: the fewest tokens that a workload needs, in the same batch shapes, through raw modules.

    python -m tests.bench.speed.side_floor WORKLOAD FOLDER

Distinct prompts are prefilled once and their cache repeated; a conversation goes on from its cache; training
puts a group's prompt through forward and backward once. Nothing is rendered, scored, logged or checked.

Shapes: U distinct prompts, B rows, T tokens, V vocabulary.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from tests.bench.speed.meter import Meter, pin
from tests.bench.speed.workloads import LR, Workload, prompt_text, prompts


@dataclass
class Learner:
    """One model with its optimizer."""

    model: Any
    optimizer: torch.optim.Optimizer

    @classmethod
    def load(cls, folder: Path) -> Learner:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        return cls(
            model,
            torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.99), weight_decay=0.0, fused=True),
        )

    def fed(self, ids_BT: Tensor, cache: DynamicCache) -> Tensor:
        """Logits (B, V) behind the last token; the cache grows."""
        hidden_BTD = self.model.model(ids_BT, cache=cache).last_hidden_state
        return self.model.lm_head(hidden_BTD[:, -1])

    def reply(self, logits_BV: Tensor, cache: DynamicCache, tokens: int) -> tuple[Tensor, Tensor]:
        """So many tokens a row and their log-probs, both (B, T); the last one isn't fed."""
        drawn, logprobs = [], []
        for place in range(tokens):
            logprob_BV = logits_BV.log_softmax(-1)
            token_B1 = logprob_BV.exp().multinomial(1)
            drawn.append(token_B1)
            logprobs.append(logprob_BV.gather(1, token_B1))
            if place + 1 < tokens:
                logits_BV = self.fed(token_B1, cache)
        return torch.cat(drawn, 1), torch.cat(logprobs, 1)


@dataclass
class Rows:
    """What one role said in a step: a prompt of each task, and behind it what each episode added."""

    prompt_UT: Tensor
    tail_BT: Tensor
    """Behind the prompt: replies and, between them, what came in."""
    spoken_T: Tensor
    """bool: which of the tail's tokens are replies."""
    old_BR: Tensor
    """Log-probs of the spoken tokens when drawn."""


class Voice:
    """One role while a step is drawn: its cache, and what it has said."""

    def __init__(self, learner: Learner, prompt_UT: Tensor, group: int, tokens: int):
        self.learner, self.prompt_UT, self.tokens, self.group = learner, prompt_UT, tokens, group
        self.cache = DynamicCache(config=learner.model.config)
        self.tail: list[Tensor] = []
        self.spoken: list[bool] = []
        self.old: list[Tensor] = []

    def speak(self, said_BT: Tensor | None) -> Tensor:
        """The next reply (B, T), after a message or, at first, after the prompt."""
        if said_BT is None:
            logits_BV = self.learner.fed(self.prompt_UT, self.cache).repeat_interleave(self.group, 0)
            self.cache.batch_repeat_interleave(self.group)
        else:
            self.tail.append(said_BT)
            self.spoken += [False] * said_BT.shape[1]
            logits_BV = self.learner.fed(torch.cat([self.tail[-2][:, -1:], said_BT], 1), self.cache)
        reply_BT, old_BT = self.learner.reply(logits_BV, self.cache, self.tokens)
        self.tail.append(reply_BT)
        self.spoken += [True] * reply_BT.shape[1]
        self.old.append(old_BT)
        return reply_BT

    def rows(self) -> Rows:
        return Rows(
            self.prompt_UT, torch.cat(self.tail, 1), torch.tensor(self.spoken), torch.cat(self.old, 1)
        )


def hidden_by_cache(model: Any, rows: Rows, group: int) -> Tensor:
    """Hidden states (B, R, D) before each spoken token: the prompts' cache, with gradients, is repeated."""
    cache = DynamicCache(config=model.config)
    last_UD = model.model(rows.prompt_UT, cache=cache).last_hidden_state[:, -1]
    cache.batch_repeat_interleave(group)
    tail_BTD = model.model(rows.tail_BT[:, :-1], cache=cache).last_hidden_state
    before_BTD = torch.cat([last_UD.repeat_interleave(group, 0)[:, None], tail_BTD], 1)
    return before_BTD[:, rows.spoken_T]


def hidden_by_mask(model: Any, rows: Rows, group: int) -> Tensor:
    """The same, where each task is one row, prompt and all tails, under a mask of its tree."""
    prompt, tail = rows.prompt_UT.shape[1], rows.tail_BT.shape[1] - 1
    tails_UT = rows.tail_BT[:, :-1].unflatten(0, (-1, group)).flatten(1)
    ids_UT = torch.cat([rows.prompt_UT, tails_UT], 1)
    branch_T = torch.cat([torch.full((prompt,), -1), torch.arange(group).repeat_interleave(tail)])
    position_T = torch.cat([torch.arange(prompt), (prompt + torch.arange(tail)).repeat(group)])
    causal_TT = position_T[:, None] >= position_T
    mask_TT = causal_TT & ((branch_T == -1) | (branch_T == branch_T[:, None]))
    added_TT = torch.zeros(mask_TT.shape).masked_fill(~mask_TT, torch.finfo(torch.float32).min)
    mask = added_TT[None, None].expand(ids_UT.shape[0], 1, -1, -1)
    position_UT = position_T[None].expand(ids_UT.shape[0], -1)
    hidden_UTD = model.model(
        ids_UT, attention_mask=mask, position_ids=position_UT, use_cache=False
    ).last_hidden_state
    last_UD, tails_UTD = hidden_UTD[:, prompt - 1], hidden_UTD[:, prompt:]
    tail_BTD = tails_UTD.unflatten(1, (group, tail)).flatten(0, 1)
    before_BTD = torch.cat([last_UD.repeat_interleave(group, 0)[:, None], tail_BTD], 1)
    return before_BTD[:, rows.spoken_T]


HIDDEN = {"cache": hidden_by_cache, "mask": hidden_by_mask}


def update(learner: Learner, rows: Rows, group: int, way: str) -> None:
    """One optimizer step on the clipped ratio with advantages of random rewards."""
    reward_UG = torch.rand(rows.prompt_UT.shape[0], group)
    advantage_B1 = ((reward_UG - reward_UG.mean(1, True)) / reward_UG.std(1, keepdim=True)).reshape(-1, 1)
    spoken_BR = rows.tail_BT[:, rows.spoken_T]
    logits_BRV = learner.model.lm_head(HIDDEN[way](learner.model, rows, group))
    new_BR = logits_BRV.log_softmax(-1).gather(-1, spoken_BR[:, :, None])[:, :, 0]
    ratio_BR = (new_BR - rows.old_BR).exp()
    loss = -torch.min(ratio_BR * advantage_B1, ratio_BR.clamp(0.8, 1.2) * advantage_B1).mean()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(learner.model.parameters(), 1.0)
    learner.optimizer.step()
    learner.optimizer.zero_grad()


def step(learners: list[Learner], work: Workload, prompt_UT: Tensor, ends: tuple[int, int], way: str) -> None:
    with torch.no_grad():
        voices = [Voice(one, prompt_UT, work.group, work.reply_tokens) for one in learners]
        said: Tensor | None = None
        for turn in range(work.turns):
            for voice in voices:
                said = voice.speak(framed(said, ends) if turn and said is not None else None)
    for voice in voices:
        update(voice.learner, voice.rows(), work.group, way)


def node_step(learner: Learner, work: Workload, ids_UT: Tensor) -> None:
    """Actions at every node of every task, trained, and the suffix turns behind them, not trained.

    At node t a task has one context with G actions, and t (G - 1) suffix turns behind earlier actions, each
    with a prompt of its own, all in one batch.
    """
    spoken = []
    others = (work.group - 1) if work.credit == "rollout" else 0
    with torch.no_grad():
        for node in range(work.nodes):
            prompt_UT = shuffled(ids_UT, work.tasks * (1 + node * others))
            copies_U = torch.tensor([work.group] * work.tasks + [1] * (work.tasks * node * others))
            cache = DynamicCache(config=learner.model.config)
            logits_BV = learner.fed(prompt_UT, cache).repeat_interleave(copies_U, 0)
            cache.batch_select_indices(torch.arange(len(copies_U)).repeat_interleave(copies_U))
            reply_BT, old_BT = learner.reply(logits_BV, cache, work.reply_tokens)
            actions = work.tasks * work.group
            all_T = torch.ones(work.reply_tokens, dtype=torch.bool)
            spoken.append(Rows(prompt_UT[: work.tasks], reply_BT[:actions], all_T, old_BT[:actions]))
    prompts, tails, olds = zip(*((r.prompt_UT, r.tail_BT, r.old_BR) for r in spoken), strict=True)
    rows = Rows(torch.cat(prompts), torch.cat(tails), spoken[0].spoken_T, torch.cat(olds))
    update(learner, rows, work.group, "cache")


def shuffled(ids_UT: Tensor, count: int) -> Tensor:
    """So many prompts of the same length and different content."""
    place = torch.randint(ids_UT.shape[0], (count, ids_UT.shape[1]))
    return ids_UT.gather(0, place)


def framed(said_BT: Tensor, ends: tuple[int, int]) -> Tensor:
    """A message as it stands in a conversation: behind the end of the own reply, before a line break."""
    end_B1, line_B1 = (torch.full((said_BT.shape[0], 1), token) for token in ends)
    return torch.cat([end_B1, said_BT, line_B1], 1)


def run(work: Workload, folder: Path, meter: Meter, way: str = "cache") -> None:
    """As many steps as the workload says, and one before them."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    learners = [Learner.load(folder) for _ in range(work.roles)]
    texts = [prompt_text(text, tokenizer) for text in prompts(work, folder, work.tasks * (work.steps + 1))]
    ids = torch.tensor(tokenizer(texts)["input_ids"])
    assert ids.shape[1] == work.prompt_tokens
    ends = tokenizer.eos_token_id, int(ids[0, -1])
    meter.loaded()
    for number in range(work.steps + 1):
        here = ids[number * work.tasks : (number + 1) * work.tasks]
        node_step(learners[0], work, here) if work.credit else step(learners, work, here, ends, way)
        meter.step()


def main() -> None:
    pin()
    torch.manual_seed(0)
    work, folder = Workload.read(sys.argv[1]), Path(sys.argv[2])
    way = os.environ.get("FLOOR_WAY", "cache")
    meter = Meter(work.samples, work.steps)
    run(work, folder, meter, way)
    meter.tell(way=way)


if __name__ == "__main__":
    main()
