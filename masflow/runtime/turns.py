"""Model calls: what a role is told, how its reply becomes a turn and a value, and what a malformed one leads
to."""

from __future__ import annotations

from typing import Any

from masflow.compiler.graph import Node, RoleIR
from masflow.compiler.plan import Plan
from masflow.errors import EpisodeError, RunError
from masflow.models.engine import Reply, Request, SamplingParams
from masflow.runtime import react
from masflow.runtime.board import Conversation, Write
from masflow.runtime.effects import run_tool
from masflow.runtime.live import Item, Live, Play, Slot, Templates, Visit
from masflow.runtime.reminding import remind
from masflow.runtime.replies import Parsed, parse_reply
from masflow.spec.replies import Retry
from masflow.trace import Message, Step, Turn, changed, made, path_json


def run_role(
    live: Live, play: Play, visit: Visit, item: Item, templates: Templates | None, prompt: str | None = None
) -> None:
    """Go on until the role's value is there or a reply is waited for.

    Args:
        templates: given on the first call of an item; renders its prompt.
        prompt: instead of the node's (a role that stands in for a person).
    """
    role = play.info.roles[item.role]
    if templates is not None:
        _open(live, play, visit, item, role, templates, prompt)
    while not item.done:
        if item.waits_for is not None:
            if not _use_tool(live, play, visit, item, role):
                return
            continue
        slot = item.slot = item.slot or _slot(live, play, visit, item)
        reply = live.state.replies.get(slot.text)
        if reply is None:
            _ask(live, play, visit, item, role, slot)
            return
        turn, parsed, call = _turn(live, play, visit, item, role, slot, reply)
        item.slot = None
        _follow(live, play, visit, item, role, turn, parsed, call)


def _open(
    live: Live, play: Play, visit: Visit, item: Item, role: RoleIR, templates: Templates, prompt: str | None
) -> None:
    """Fix who speaks, render what is said, and remember which words a `choice` allows."""
    node = visit.node
    item.member = _member(node, role, item, templates)
    if role.members:
        templates.names["me"] = item.member  # type: ignore[index]
    templates.names["memory"] = []  # type: ignore[index]
    if node.with_:
        templates.names.update(templates.value("with", node.with_))  # type: ignore[attr-defined]
    tools: tuple[dict[str, Any], ...] = ()
    held = item.board.conversations.get(thread_name(node, role, item))
    user = prompt or node.prompt or role.prompt
    if held is not None:
        user = node.next_prompt or role.next_prompt or user
    reminder = remind(live, play, item, role, templates, user, is_new=held is None) if live.memory else ""
    if held is None:
        system = templates.render("system", role.system) if role.system else ""
        tools = react.schemas(react.offered(role, play.info.tools), play.info.tools)
        told = ""
        if tools and _dialect(live, play, item) == "text":
            told, tools = react.description(tools), ()
        parts = [part for part in (system, told, reminder) if part]
        messages = (Message("system", "\n\n".join(parts)),) if parts else ()
    else:
        messages, item.parent = held
    if user is not None:
        messages = (*messages, Message("user", templates.render("prompt", user)))
    if tools and messages:
        messages = (changed(messages[0], tools=react.tools_text(tools)), *messages[1:])
    item.messages = messages
    if role.reply.format == "choice" and isinstance(role.reply.choice, str):
        words = templates.value("reply.choice", role.reply.choice)
        if not isinstance(words, list) or not words:
            raise EpisodeError(
                "tool_error", f"{templates.where}.reply.choice: expected a list of words, got {words!r}"
            )
        item.choices = words


def _member(node: Node, role: RoleIR, item: Item, templates: Templates) -> str:
    if not role.members:
        return role.name
    if not role.is_family:
        return item.locals["me"]
    speaker = templates.evaluate("speaker", node.speaker) if node.speaker else None
    if speaker not in role.members:
        raise EpisodeError(
            "malformed", f"{templates.where}.speaker: {speaker!r} isn't one of {', '.join(role.members)}"
        )
    return speaker


def thread_name(node: Node, role: RoleIR, item: Item) -> str:
    """Which conversation the item speaks in: its role's or its node's, one a member and one an item."""
    if role.conversation == "none":
        return ""
    whose = f"role {role.name}" if role.conversation == "role" else f"node {node.name}"
    of_item = (
        item.thread
        if item.thread is not None
        else ""
        if item.key is None or (role.members and not role.is_family)
        else f" {type(item.key).__name__} {item.key}"
    )
    return f"{whose} {item.member}{of_item}"


def _slot(live: Live, play: Play, visit: Visit, item: Item) -> Slot:
    path = play.path(visit.node.name, visit.number, item)
    text = path_json(path)
    epoch = live.epoch(item.board.clock, text)
    return Slot(path, text, epoch, live.state.keys[epoch].turn_id(path))


def _ask(live: Live, play: Play, visit: Visit, item: Item, role: RoleIR, slot: Slot) -> None:
    board, limits = item.board, play.info.graph.limits
    if board.turns >= limits.turns:
        raise EpisodeError(
            "limit", f"node {play.qualified(visit.node.name)}: the {limits.turns} turns are used up"
        )
    if play.token_limit is not None and board.tokens >= play.token_limit:
        raise EpisodeError(
            "limit", f"node {play.qualified(visit.node.name)}: the {play.token_limit} tokens are used up"
        )
    if slot.turn_id in live.state.pending:
        return
    live.state.pending[slot.turn_id] = slot.text
    member = play.qualified(item.member)
    parameters = _parameters(play, role, item)
    live.new.append(
        made(
            Request,
            turn_id=slot.turn_id,
            policy=policy_of(live.plan, member),
            messages=item.messages or (),
            sampling=_sampling(live, play, role),
            seed=live.state.keys[slot.epoch].seed(slot.path),
            parent=item.parent,
            tools=react.schemas(parameters, play.info.tools) if parameters else (),
            node=play.qualified(visit.node.name),
            role=play.qualified(role.name),
            member=member,
            visit=visit.number,
            item=item.key,
            task=play.task,
        )
    )


def policy_of(plan: Plan, member: str) -> str:
    """Raises RunError when the mapping leaves the member out."""
    try:
        return plan.policy_of[member]
    except KeyError:
        raise RunError(f"no model plays '{member}'", "name it in the mapping") from None


def _dialect(live: Live, play: Play, item: Item) -> str:
    """How the item's speaker calls tools."""
    return live.plan.dialect_of(policy_of(live.plan, play.qualified(item.member)))


def sampling(plan: Plan, role: RoleIR, mode: str) -> SamplingParams:
    """A role's sampling, complete. Train: the algorithm's temperature unless the role has one; eval: greedy
    unless."""
    own = role.sampling.train if mode == "train" else role.sampling.eval
    usual = plan.algorithm.temperature if mode == "train" else 0.0
    return SamplingParams(
        temperature=usual if own.temperature is None else own.temperature,
        top_p=1.0 if own.top_p is None else own.top_p,
        top_k=own.top_k or 0,
        stop=own.stop or (),
        max_tokens=role.reply.max_tokens,
    )


def _sampling(live: Live, play: Play, role: RoleIR) -> SamplingParams:
    known = play.info.sampling
    if role.name not in known:
        known[role.name] = sampling(live.plan, role, live.mode)
    return known[role.name]


def _parameters(play: Play, role: RoleIR, item: Item) -> dict[str, Any]:
    """Tools offered at this call; none at the last permitted one."""
    if not role.tools and role.handoff is None:
        return {}
    return react.offered(role, play.info.tools) if item.call < role.max_calls else {}


def _turn(
    live: Live, play: Play, visit: Visit, item: Item, role: RoleIR, slot: Slot, reply: Reply
) -> tuple[Turn, Parsed, react.ToolCall | None]:
    """Make the turn of a reply and move the item's place in time behind it."""
    board, node = item.board, play.qualified(visit.node.name)
    live.paths[slot.text] = slot.turn_id
    live.depends[slot.turn_id] = board.clock.last + board.clock.hidden
    if reply.finish == "prompt_too_long":
        raise EpisodeError(
            "prompt_too_long", f"node {node}: {reply.detail or 'the prompt does not fit the window'}"
        )
    if reply.finish == "error":
        raise EpisodeError("engine_error", f"node {node}: {reply.detail or 'the engine failed'}")
    how = _sampling(live, play, role)
    parsed, call = _read(live, play, role, item, reply, how)
    outcome = "truncated" if reply.finish == "length" else "ok" if parsed.ok else "malformed"
    member = play.qualified(item.member)
    turn = made(
        Turn,
        id=slot.turn_id,
        path=slot.path,
        node=node,
        role=play.qualified(role.name),
        member=member,
        policy=policy_of(live.plan, member),
        superstep=board.clock.superstep + 1,
        messages=item.messages or (),
        text=reply.text,
        value=None if call is not None else parsed.value,
        ok=parsed.ok,
        outcome=outcome,
        last=call is None,
        detail=parsed.reason,
        parent=item.parent,
        temperature=how.temperature,
        prompt_tokens=reply.prompt_tokens,
        reply_tokens=reply.reply_tokens,
        logprob=reply.logprob,
        version=reply.version,
        demonstrated=live.demonstrated(slot.text),
    )
    live.turns[turn.id] = turn
    if item.recalled is not None:
        live.recalled[turn.id] = item.recalled
    live.predecessors[turn.id] = board.clock.last
    board.turns += 1
    board.tokens += reply.prompt_tokens + reply.reply_tokens
    board.made = (*board.made, turn.id)
    board.clock = board.clock.after(turn.id, live.epoch_behind(slot))
    item.path, item.raw = slot.path, reply.text
    return turn, parsed, call


def _read(
    live: Live, play: Play, role: RoleIR, item: Item, reply: Reply, how: SamplingParams
) -> tuple[Parsed, react.ToolCall | None]:
    """The reply's value, or its tool call (whose value is then an empty record)."""
    dialect = _dialect(live, play, item) if role.tools or role.handoff else ""
    if dialect and react.has_call(reply.text, dialect):
        parameters = _parameters(play, role, item)
        if not parameters:
            return Parsed(reason="a tool call where none is offered"), None
        call = react.parse_call(reply.text, parameters, how.stop, dialect)
        return (Parsed(reason=call.reason), None) if call.reason else (Parsed({}), call)
    return parse_reply(role.reply, reply.text, choices=item.choices, stop=how.stop), None


def _follow(
    live: Live,
    play: Play,
    visit: Visit,
    item: Item,
    role: RoleIR,
    turn: Turn,
    parsed: Parsed,
    call: react.ToolCall | None,
) -> None:
    """What comes after a turn: a tool's use, another attempt, or the end of the item."""
    if call is not None:
        item.messages = (*(item.messages or ()), Message("assistant", turn.text, turn.id))
        item.parent = turn.id
        if call.name == react.HANDOFF and call.name not in role.tools:
            live.turns[turn.id] = changed(turn, last=True)
            _push(live, play, item, role, str((call.arguments or {})["to"]))
            _close(visit, item, role, turn, None, True)
        else:
            item.waits_for = call
        return
    if parsed.ok:
        if role.handoff is not None and not react.hands_off_by_call(role):
            for name in react.pushes(role):
                _push(live, play, item, role, (parsed.value or {}).get(name))
        _close(visit, item, role, turn, parsed.value, True)
        return
    rule = role.reply.on_malformed
    if isinstance(rule, Retry) and item.attempt < rule.retry:
        live.turns[turn.id] = changed(turn, last=False)
        item.attempt += 1
        return
    ends = rule != "continue" and not (visit.is_list and rule != "end")
    if role.reply.default is not None or not ends:
        _close(visit, item, role, turn, role.reply.default, False)
        return
    _close(visit, item, role, turn, None, False)
    outcome = "truncated" if turn.outcome == "truncated" else "malformed"
    item.stop = (outcome, f"node {turn.node}: {turn.detail}")


def _close(visit: Visit, item: Item, role: RoleIR, turn: Turn, value: Any, ok: bool) -> None:
    item.value, item.ok, item.done = value, ok, True
    name = thread_name(visit.node, role, item)
    if name:
        messages = item.messages or ()
        if not messages or messages[-1].turn_id != turn.id:
            messages = (*messages, Message("assistant", turn.text, turn.id))
        item.board.conversations = {**item.board.conversations, name: Conversation(messages, turn.id)}


def _push(live: Live, play: Play, item: Item, role: RoleIR, name: Any) -> None:
    """Push the chosen name on the handoff's stack; null hands nothing over."""
    assert role.handoff is not None
    if name is None:
        return
    field = role.handoff.to.removeprefix("state.")
    stack = item.board.state.get(field) or []
    item.board.write(Write(field, False, [*stack, name]), play.info.fields, live.load)


def run_agent(live: Live, play: Play, item: Item, name: str, args: dict[str, Any]) -> tuple[bool, Any]:
    """A tool that is an agent: (True, its answer) once the episode that the call started is over."""
    from masflow.runtime.items import begin_sub, end_sub
    from masflow.runtime.walk import run_play

    if item.sub is None:
        spoken = item.path[-1]
        whose = f"~{spoken.node} {'' if spoken.item is None else f'{spoken.item} '}{spoken.visit}.{item.call}"
        path = (*play.prefix, Step(play.call, name, 1, whose))
        node = play.info.agents[name]
        fields = live.plan.workflows[str(node.workflow)].task
        hidden = {entry.name: play.task.get(entry.name) for entry in fields if entry.hidden}
        item.sub = begin_sub(live, play, item.board, node, path, {**args, **hidden})
    run_play(live, item.sub)
    if not item.sub.thread.done:
        return False, None
    value, item.sub = end_sub(live, item.board, item.sub), None
    only = list(value.values()) if isinstance(value, dict) and len(value) == 1 else []
    return True, only[0] if only and isinstance(only[0], str) else value


def _use_tool(live: Live, play: Play, visit: Visit, item: Item, role: RoleIR) -> bool:
    """Run the tool that was called and tell its result; False while a person's approval is waited for."""
    call, tools = item.waits_for, play.info.tools
    assert call is not None
    args = call.arguments or {}
    if call.name in play.info.agents:
        done, value = run_agent(live, play, item, call.name, args)
    else:
        done, value = run_tool(
            live, play, item.board, item.path, tools[call.name], args, approve=role.approve
        )
    if not done:
        return False
    told = react.result_text(value)
    if item.call + 1 >= role.max_calls:
        told = f"{told}\n{react.NO_CALLS_LEFT}"
    item.messages = (*(item.messages or ()), Message("tool", told))
    item.waits_for, item.call, item.attempt = None, item.call + 1, 0
    return True
