"""What a mapping says of a model's chat: its template's text is in the plan; what it can't do is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from masflow.compiler import compile_experiment
from masflow.compiler.explain import text
from masflow.compiler.plan import Plan
from masflow.errors import SpecError

Write = Callable[[dict[str, str]], Path]
QWEN = "{{ tools }} {{ messages }} <tool_call> {{ enable_thinking is defined }}"
PLAIN = "{% for m in messages %}{{ m.content }}{{ mood | default('') }}{% endfor %}"


@pytest.fixture
def plan_of(project: Write, tiny: dict[str, str]) -> Callable[..., Plan]:
    """`plan_of(chat, template, base)`: the small experiment, its base a folder with this template."""

    def make(
        chat: str = "{}", template: str | None = QWEN, base: str = "base", own: str | None = None
    ) -> Plan:
        mapping = f"{{models: {{policy: {{roles: rest, chat: {chat}}}}}}}"
        files = {**tiny, "base/config.json": "{}"}
        files["tiny.yaml"] = tiny["tiny.yaml"].replace("{models: {policy: {roles: rest}}}", mapping)
        files["tiny.yaml"] = files["tiny.yaml"].replace("some/base", base)
        if template is not None:
            files["base/tokenizer_config.json"] = json.dumps({"chat_template": template})
        if own is not None:
            files["own.jinja"] = own
        return compile_experiment(project(files))

    return make


def test_the_form_of_tool_calls_is_read_from_a_folders_template(plan_of: Callable[..., Plan]) -> None:
    assert plan_of().models[0].dialect == "hermes"
    assert plan_of("{tools: text}").models[0].dialect == "text"
    assert plan_of(template=PLAIN).models[0].dialect == "text"
    assert plan_of(template=None).models[0].dialect == "text"
    named = json.dumps([{"name": "default", "template": PLAIN}, {"name": "tool_use", "template": QWEN}])
    assert plan_of(template=json.loads(named)).models[0].dialect == "hermes"
    assert "tools by the chat template (hermes)" in text(plan_of())


def test_what_a_hub_ids_template_knows_is_left_to_the_loading(plan_of: Callable[..., Plan]) -> None:
    plan = plan_of("{thinking: true, options: {mood: glad}}", base="some/base")
    assert plan.models[0].dialect == "text" and "thinking on" in text(plan)
    with pytest.raises(SpecError, match="isn't known before it is loaded") as caught:
        plan_of("{tools: template}", base="some/base")
    assert caught.value.problems[0].code == "no-tool-template"


def test_the_template_is_part_of_the_plan_wherever_it_stands(plan_of: Callable[..., Plan]) -> None:
    plan = plan_of("{template: own.jinja}", own=PLAIN)
    assert plan.models[0].chat.template == PLAIN
    other = plan_of("{template: own.jinja}", own=PLAIN + " ")
    assert plan.digest not in (other.digest, plan_of().digest)
    assert plan_of("{template: ./own.jinja}", own=PLAIN).digest == plan.digest


@pytest.mark.parametrize(
    ("chat", "template", "own", "message"),
    [
        ("{thinking: true}", PLAIN, None, "doesn't know 'enable_thinking'"),
        ("{thinking: false}", None, None, "has no chat template, which doesn't know 'enable_thinking'"),
        ("{options: {modo: glad}}", PLAIN, None, r"doesn't know 'modo'; known: mood"),
        ("{tools: template}", PLAIN, None, "knows no tools"),
        ("{tools: template}", None, None, "has no chat template"),
        ("{tools: template}", "{{ tools }} <function=f>", None, "can't read the tool calls"),
        ("{template: own.jinja}", QWEN, "a\n{% for %}", r"own.jinja:2"),
        ("{template: onw.jinja}", QWEN, PLAIN, "write 'own.jinja'"),
        ("{template: own.jinja, thinking: true}", QWEN, PLAIN, "doesn't know 'enable_thinking'"),
    ],
)
def test_what_the_template_cannot_do_is_refused(
    chat: str, template: str | None, own: str | None, message: str, plan_of: Callable[..., Plan]
) -> None:
    # FIELD_PROBLEMS, Silent failures: a backend silently ignores an option.
    with pytest.raises(SpecError, match=message) as caught:
        plan_of(chat, template, own=own)
    assert len(caught.value.problems) == 1 and caught.value.problems[0].line > 0


def test_models_of_one_document_are_told_of_once(project: Write, tiny: dict[str, str]) -> None:
    mapping = "{models: {policy: {roles: rest, per: role, chat: {thinking: true}}}}"
    files = {**tiny, "base/config.json": "{}", "base/chat_template.jinja": PLAIN}
    files["tiny.yaml"] = tiny["tiny.yaml"].replace("{models: {policy: {roles: rest}}}", mapping)
    with pytest.raises(SpecError) as caught:
        compile_experiment(project({**files, "tiny.yaml": files["tiny.yaml"].replace("some/base", "base")}))
    [problem] = caught.value.problems
    assert problem.path == "models.policy.chat.thinking" or problem.path.endswith("policy.chat.thinking")
