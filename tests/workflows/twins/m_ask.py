"""M-ASK as a function, with the shipped prompts, tools and rewards: what `m_ask.yaml` says with a graph."""

import importlib.util
from pathlib import Path

from masflow import workflow

WORKFLOWS = Path(__file__).resolve().parents[3] / "workflows"
PROMPTS = WORKFLOWS / "m_ask"
_spec = importlib.util.spec_from_file_location("m_ask_steps", PROMPTS / "steps.py")
assert _spec is not None and _spec.loader is not None
_steps = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_steps)


@workflow(
    task={"question": str, "answers": {"type": [str], "hidden": True}},
    params={"rounds": 3, "top_k": 5, "corpus": str(WORKFLOWS / "passages.jsonl")},
    roles={
        "planner": {
            "prompt": str(PROMPTS / "planner.md"),
            "reply": {
                "json": {"steps": [{"question": str, "answer": str}], "answer": str},
                "max_tokens": 256,
            },
        },
        "searcher": {
            "prompt": str(PROMPTS / "searcher.md"),
            "reply": {"tags": {"action": ["search", "stop"], "query": "str?"}, "max_tokens": 48},
        },
        "summariser": {
            "prompt": str(PROMPTS / "summariser.md"),
            "reply": {"tag": "evidence", "max_tokens": 128},
        },
        "updater": {
            "prompt": str(PROMPTS / "updater.md"),
            "reply": {"json": {"step": "int?", "question": str, "answer": str}, "max_tokens": 96},
        },
        "answerer": {"prompt": str(PROMPTS / "answerer.md"), "reply": {"tag": "answer", "max_tokens": 32}},
    },
    tools={"wiki": {"use": "bm25", "corpus": "{{ params.corpus }}", "top_k": "{{ params.top_k }}"}},
    output={"answer": "{{ result.answer }}", "steps": "{{ result.steps }}"},
    rewards=[
        {
            "name": "f1",
            "use": str(WORKFLOWS.parent / "rewards" / "qa.py") + ":token_f1",
            "otherwise": 0,
            "measure": {
                "after": ["planner", "answerer"],
                "args": {"prediction": "{{ result.answer }}", "answers": "{{ answers }}"},
            },
            "pay": {
                "planner": "value",
                "answerer": "value",
                "searcher": "gain",
                "summariser": "gain",
                "updater": "gain",
            },
        },
        {"name": "form", "use": "well_formed", "level": "turn"},
    ],
)
async def m_ask(task, agents, ctx):
    """Plan, then search, condense and revise for some rounds, answering after each."""
    plan = await agents.planner()
    steps, guess = [dict(vars(step)) for step in plan.steps], plan.answer
    for _ in range(ctx.params.rounds):
        search = await agents.searcher(state={"steps": steps, "guess": guess})
        if search.action == "stop":
            break
        found = await ctx.tool("wiki", query=search.query or "")
        summary = await agents.summariser(search=search, retrieve=found)
        update = await agents.updater(state={"steps": steps}, summarise=summary)
        steps = _steps.edit(steps, vars(update))
        guess = (await agents.answerer(state={"steps": steps})).answer
    return {"answer": guess, "steps": steps}
