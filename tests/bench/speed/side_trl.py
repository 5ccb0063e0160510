"""TRL's `GRPOTrainer` on a workload of one role, with the settings in which it does the work fastest.

python -m tests.bench.speed.side_trl WORKLOAD FOLDER
"""
# pyright: reportMissingImports=false

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from tests.bench.speed.meter import Meter, pin
from tests.bench.speed.workloads import LR, Workload, prompt_text, prompts, reward


class Steps(TrainerCallback):
    def __init__(self, meter: Meter):
        self.meter = meter

    def on_step_end(self, *args: Any, **more: Any) -> None:
        self.meter.step()


def config(work: Workload, place: str) -> GRPOConfig:
    """One optimizer step of all samples; no recomputation, half precision or reference model."""
    batch = min(work.micro or work.episodes, work.episodes)
    return GRPOConfig(
        output_dir=place,
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=work.episodes // batch,
        num_generations=work.group,
        max_completion_length=work.reply_tokens,
        max_steps=work.steps + 1,
        learning_rate=LR,
        lr_scheduler_type="constant",
        adam_beta2=0.99,
        max_grad_norm=1.0,
        temperature=1.0,
        beta=0.0,
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        dataloader_pin_memory=False,
        logging_steps=1,
        disable_tqdm=True,
        report_to="none",
        save_strategy="no",
        seed=0,
    )


def main() -> None:
    pin()
    work, folder = Workload.read(sys.argv[1]), Path(sys.argv[2])
    meter = Meter(work.samples, work.steps)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    texts = [prompt_text(text, tokenizer) for text in prompts(work, folder, work.tasks * (work.steps + 1))]
    assert {len(ids) for ids in tokenizer(texts)["input_ids"]} == {work.prompt_tokens}
    lengths: set[int] = set()

    def paid(completions: list[str], completion_ids: list[list[int]], **more: Any) -> list[float]:
        lengths.update(map(len, completion_ids))
        return [reward(text) for text in completions]

    with tempfile.TemporaryDirectory(prefix="masflow-") as place:
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=paid,
            args=config(work, place),
            train_dataset=Dataset.from_dict({"prompt": texts}),
            processing_class=tokenizer,
            callbacks=[Steps(meter)],
        )
        meter.loaded()
        trainer.train()
    assert lengths == {work.reply_tokens}, lengths
    norms = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
    assert norms and all(norm > 0 for norm in norms), norms
    meter.tell(grad_norm=norms[-1])


if __name__ == "__main__":
    main()
