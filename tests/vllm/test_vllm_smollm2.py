"""A real model, SmolLM2-135M-Instruct, speaks in vLLM as it does in Hugging Face.

Skipped where it isn't installed (`make smollm2`).
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from masflow.compiler.plan import ModelIR, PolicyIR
from masflow.models.bases import load_base
from masflow.models.engine import Request, SamplingParams
from masflow.models.experience import Experience
from masflow.models.policies import Policies
from masflow.models.tokens import ChatTokens
from masflow.models.vllm_engine import VllmEngine
from masflow.spec.mapping import Lora, Optimizer
from masflow.trace import Message

FOLDER = Path(__file__).resolve().parents[2] / "models" / "SmolLM2-135M-Instruct"
TOLERANCE = 1e-4
QUESTIONS = ("Where is Paris?", "Name two colours.", "What is 2 + 3?", "Who wrote Hamlet?")


@pytest.fixture
def model():
    policies = tuple(PolicyIR(f"m/{n}", "m", n, (n,), True, Optimizer()) for n in ("left", "right"))
    return ModelIR(
        "m", str(FOLDER), "", "lora", policies, Lora(rank=8, alpha=16), context=512, dtype="float32"
    )


@pytest.mark.skipif(not FOLDER.is_dir(), reason="SmolLM2-135M-Instruct isn't there: make smollm2")
def test_a_real_model_and_two_adapters_have_hugging_faces_logprobs(model, tmp_path: Path):
    base = load_base(model, tmp_path, 0)
    tokens = ChatTokens.of(model, base.tokenizer, base.stop_ids)
    policies, experience = Policies(model, base, 0), Experience()
    how = {"context": 512, "dtype": torch.float32, "memory_frac": 0.2}
    engine = VllmEngine(model, str(FOLDER), tokens, experience, **how)
    try:
        with torch.no_grad():
            for parameter in policies.learners["m/left"].parameters.values():
                parameter.add_(0.02 * torch.randn_like(parameter))
        engine.receive(policies.payload("m/left"))
        sampling = SamplingParams(temperature=0.8, max_tokens=24)
        requests = [
            Request(f"t{n}", policy, (Message("user", question),), sampling, n)
            for n, question in enumerate(QUESTIONS)
            for policy in (("m/left", "m/right")[n % 2],)
        ]
        replies = engine.generate(requests)
        assert len(replies) == 4
        for one in requests:
            row = experience.get(one.turn_id)
            assert row is not None
            policies.switch(one.policy)
            ids_1T = torch.tensor([[*row.prompt_ids, *row.reply_ids]])
            with torch.no_grad():
                logits_TV = base.model(ids_1T).logits[0, len(row.prompt_ids) - 1 : -1] / 0.8
            expected = torch.log_softmax(logits_TV, -1).gather(-1, torch.tensor(row.reply_ids)[:, None])[:, 0]
            assert (expected - torch.tensor(row.logprobs)).abs().max() < TOLERANCE
    finally:
        engine.close()
