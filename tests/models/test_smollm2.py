"""A real instruction-tuned model, where it has been added: it speaks, and adapters on it learn."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from masflow.compiler.plan import ModelIR, PolicyIR
from masflow.models.backbone import Backbone
from masflow.models.bases import load_base
from masflow.models.decoding import Job, decode
from masflow.models.engine import SamplingParams
from masflow.models.experience import Row
from masflow.models.policies import Policies
from masflow.models.tokens import ChatTokens
from masflow.models.trainer import Trainer
from masflow.spec.mapping import Lora, Optimizer
from masflow.trace import Message

FOLDER = Path(__file__).parents[2] / "models" / "SmolLM2-135M-Instruct"
needs_model = pytest.mark.skipif(
    not FOLDER.is_dir(), reason="models/SmolLM2-135M-Instruct isn't there: `make smollm2` puts it there"
)
pytestmark = needs_model
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
OPTIMIZER = Optimizer(lr=1e-3)


@pytest.fixture(scope="module")
def model():
    policies = tuple(PolicyIR(f"m/{n}", "m", n, (n,), True, OPTIMIZER, None) for n in ("planner", "answerer"))
    return ModelIR("m", str(FOLDER), "hash", "lora", policies, Lora(targets=["q_proj", "v_proj"]))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def base(model, tmp_path_factory):
    return load_base(model, tmp_path_factory.mktemp("run"), 0, torch.device("cpu"))


@pytest.fixture(scope="module")
def tokens(base):
    return ChatTokens(base.tokenizer, base.stop_ids)


@pytest.fixture(scope="module")
def policies(model, base):
    return Policies(model, base, 0)


@pytest.fixture(scope="module")
def backbone(base, policies):
    return Backbone(base.model)


def prompt(tokens):
    return tokens.prompt([Message("user", "What is the capital of France?")])


def said(row_id, asked, drawn, tokens):
    ids, logprobs = tuple(drawn.ids), tuple(drawn.logprobs)
    return Row(row_id, "m/planner", asked.ids, ids, logprobs, 0, asked.text, tokens.decode(ids))


def test_the_template_is_its_own_and_a_greedy_reply_makes_sense(base, tokens, backbone):
    assert (base.context, base.model.dtype, base.stop_ids) == (8192, torch.float32, (2,))
    asked = prompt(tokens)
    assert asked.text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert asked.text.endswith("<|im_end|>\n<|im_start|>assistant\n")
    (drawn,) = decode(backbone, [Job(asked.ids, GREEDY, 0)], tokens.stop_ids)
    assert tokens.decode(drawn.ids) == "The capital of France is Paris."
    assert drawn.finish == "stop" and drawn.ids[-1] == 2


def test_a_conversation_continues_with_the_ids_of_its_turns(tokens, backbone):
    asked = prompt(tokens)
    (drawn,) = decode(backbone, [Job(asked.ids, GREEDY, 0)], tokens.stop_ids)
    row = said("t1", asked, drawn, tokens)
    more = [
        Message("user", "What is the capital of France?"),
        Message("assistant", row.text, "t1"),
        Message("user", "And of Italy?"),
    ]
    again = tokens.prompt(more, row)
    assert not again.forked and again.prefix == len(row.prompt_ids) + len(row.reply_ids)
    assert again.ids == tokens.prompt(more).ids  # and nothing is lost at the seam


def test_engine_and_trainer_agree_on_every_token(tokens, backbone, tmp_path):
    asked = prompt(tokens)
    jobs = [Job(asked.ids, replace(GREEDY, temperature=1.0), seed) for seed in range(3)]
    rows = [said(f"t{i}", asked, d, tokens) for i, d in enumerate(decode(backbone, jobs, tokens.stop_ids))]
    scored = Trainer(backbone, tmp_path).logprobs(rows, [1.0] * 3)
    for row, logprobs in zip(rows, scored, strict=True):
        assert logprobs == pytest.approx(row.logprobs, abs=1e-3)


def test_a_step_moves_one_role_s_adapter_and_nothing_else(tokens, backbone, policies, tmp_path):
    asked = prompt(tokens)
    reply = tokens.reply("Lyon")
    row = Row("d", "m/planner", asked.ids, reply, (0.0,) * len(reply), 0, asked.text, "Lyon")
    trainer = Trainer(backbone, tmp_path)
    policies.switch("m/planner")
    before = {n: p.detach().clone() for n, p in policies.base.model.named_parameters()}
    losses = [
        trainer.supervise(policies.learners["m/planner"], [row], OPTIMIZER, step, 3)["loss"]
        for step in range(3)
    ]
    assert losses[2] < losses[1] < losses[0]
    moved = {n for n, p in policies.base.model.named_parameters() if not torch.equal(p, before[n])}
    assert moved and all(".policy_planner." in name for name in moved)
    policies.switch("m/answerer")
    (drawn,) = decode(backbone, [Job(asked.ids, GREEDY, 0)], tokens.stop_ids)
    assert tokens.decode(drawn.ids) == "The capital of France is Paris."
