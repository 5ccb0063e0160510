"""Deep research: a lead calls two tools that are agents, each call an episode of its own on another policy.

The lead plans topics, a browser looks into each of them side by side, and then the lead writes its answer,
calling the browser and a calculating clerk as often as it needs. How many inner episodes there are is the
lead's to choose; all of them are paid what the lead's answer is worth.
"""

from dataclasses import dataclass
from typing import Annotated

from masflow import Agents, Context, gather, workflow


@dataclass
class Question:
    """One data row."""

    question: str
    answers: Annotated[list[str], "hidden"]


@dataclass
class Plan:
    """What the lead replies with first."""

    topics: list[str]


@workflow(
    task={"topic": str},
    params={"corpus": "passages.jsonl", "top_k": 2},
    roles={
        "reader": {
            "prompt": "deep_research/reader.md",
            "tools": ["wiki"],
            "max_calls": 3,
            "reply": {"tag": "report", "max_tokens": 192},
        },
    },
    tools={"wiki": {"use": "bm25", "corpus": "{{ params.corpus }}", "top_k": "{{ params.top_k }}"}},
    output={"report": "{{ result }}"},
)
async def browse(task, agents: Agents, ctx: Context):
    """Look a topic up in the corpus and report what is found."""
    return (await agents.reader()).report


@workflow(
    task={"problem": str},
    roles={
        "clerk": {
            "prompt": "deep_research/clerk.md",
            "tools": ["calculator"],
            "max_calls": 3,
            "reply": {"tag": "report", "max_tokens": 96},
        },
    },
    tools={"calculator": {"use": "calculator"}},
    output={"report": "{{ result }}"},
)
async def compute(task, agents: Agents, ctx: Context):
    """Work a problem out with exact arithmetic and report the result."""
    return (await agents.clerk()).report


@workflow(
    task=Question,
    params={"topics": 3},
    roles={
        "planner": {"prompt": "deep_research/planner.md", "reply": {"json": Plan, "max_tokens": 96}},
        "lead": {
            "prompt": "deep_research/lead.md",
            "tools": ["browse", "compute"],
            "max_calls": 4,
            "reply": {"tag": "answer", "max_tokens": 128},
        },
    },
    workflows={"browse": browse, "compute": compute},
    output={"answer": "{{ result }}"},
    rewards=[
        {
            "name": "f1",
            "use": "rewards/qa.py:token_f1",
            "otherwise": 0,
            "args": {"prediction": "{{ output.answer }}", "answers": "{{ answers }}"},
        },
        {"name": "form", "use": "well_formed", "level": "turn", "weight": 0.5},
    ],
    limits={"turns": 32},
)
async def deep_research(task, agents: Agents, ctx: Context):
    """A lead plans, browsers look each topic up at once, the lead asks further and answers."""
    plan = await agents.planner()
    topics = plan.topics[: ctx.params.topics]
    found = await gather(*[ctx.run(browse, topic=topic, key=i) for i, topic in enumerate(topics)])
    notes = [{"topic": t, "report": f.report} for t, f in zip(topics, found, strict=True) if f is not None]
    return (await agents.lead(notes=notes)).answer
