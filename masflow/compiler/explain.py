"""A plan in words: text for people, Mermaid for pictures, JSON for machines. Changes nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from typing import Any, Literal

from masflow.compiler.algorithm_words import algorithm_words
from masflow.compiler.chat import notes_of
from masflow.compiler.critics import critic_facts
from masflow.compiler.graph import START, Arrow, Graph, Node, ProgramIR, RewardIR
from masflow.compiler.plan import CriticIR, ModelIR, Plan
from masflow.compiler.presets import grouped
from masflow.compiler.regions import Regions
from masflow.compiler.sizes import Size, estimate
from masflow.compiler.team import graphs_below
from masflow.spec.runtime import Engine

__all__ = ["explain", "mermaid", "plan_summary", "text"]


def explain(plan: Plan, format: Literal["text", "json", "mermaid"] = "text", *, passes: bool = False) -> str:
    """The plan in one of three forms.

    Args:
        passes: of the text form: also what each pass changed.
    """
    if format == "json":
        return json.dumps(plan_summary(plan), indent=1, ensure_ascii=False)
    return mermaid(plan) if format == "mermaid" else text(plan, passes=passes)


def plan_summary(plan: Plan) -> dict[str, Any]:
    """What machines may rely on: digest, graph, models, sampler, groups, rewards, stages."""
    return {
        "digest": plan.digest,
        "workflow": plan.root,
        "graph": _graph_data(plan),
        "models": [_model_data(model) for model in plan.models],
        "policies": plan.policy_of,
        "algorithm": plan.algorithm.model_dump(mode="json"),
        "sampler": {"kind": plan.sampler.kind, "samples": plan.sampler.samples, **plan.sampler.options},
        "groups": [
            {"key": list(g.key), "expected_size": g.expected_size}
            for g in grouped(plan.groups, plan.algorithm)
        ],
        "rewards": [_reward_data(reward) for reward in plan.graph.rewards],
        **({"critics": [_critic_data(plan, critic) for critic in plan.critics]} if plan.critics else {}),
        "stages": [{"name": stage.name, "op": stage.op} for stage in plan.stages],
        "passes": list(plan.passes),
        "prefix_sharing": [asdict(entry) for entry in plan.sharing],
        "data": {
            split: [{"path": s.path, "weight": s.weight} for s in sources]
            for split, sources in plan.data.items()
        },
        "train": plan.train.model_dump(mode="json"),
    }


def _graph_data(plan: Plan) -> dict[str, Any]:
    nodes, edges = [], []
    functions: dict[str, str] = {}
    for place in graphs_below(plan.root, plan.workflows):
        for node in place.graph.nodes:
            nodes.append({"name": place.prefix + node.name, "kind": node.kind, "what": _what(node)})
        if place.graph.program is not None:
            functions[place.prefix.rstrip("/")] = _program_name(place.graph.program)
        for source, switch, arrow in _arrows(place.graph):
            for target in arrow.targets:
                edge = {"from": place.prefix + source, "to": place.prefix + target}
                label = _label(arrow, switch)
                edges.append({**edge, "when": label} if label else edge)
    return {"nodes": nodes, "edges": edges} | ({"functions": functions} if functions else {})


def _model_data(model: ModelIR) -> dict[str, Any]:
    size = estimate(model)
    return {
        "name": model.name,
        "base": model.base if isinstance(model.base, str) else _base_name(model),
        "endpoint": model.endpoint.url if model.endpoint else None,
        "base_hash": model.base_hash,
        "roles": list(model.roles),
        "adapters": [p.adapter for p in model.policies if p.adapter is not None],
        "train": model.train,
        "policies": [{"name": p.name, "roles": list(p.roles), "train": p.train} for p in model.policies],
        "num_parameters": size.num_parameters if size else None,
        "num_trained": size.num_trained if size else None,
        "memory_bytes": size.memory_bytes if size else None,
    }


def _critic_data(plan: Plan, critic: CriticIR) -> dict[str, Any]:
    found = critic_facts(plan, critic)
    size = found.pop("size")
    return found | {"num_parameters": size.num_parameters if size else None}


def _reward_data(reward: RewardIR) -> dict[str, Any]:
    return {
        "name": reward.name,
        "use": _function_name(reward),
        "level": reward.level,
        "weight": reward.weight,
        "paid": _paid(reward),
        "otherwise": reward.otherwise,
    }


def _program_name(program: ProgramIR) -> str:
    return "/".join(program.function.ref.split("/")[-2:])


def _function_name(reward: RewardIR) -> str:
    if reward.function:
        return "/".join(reward.function.ref.split("/")[-2:])
    return f"role:{reward.judge}" if reward.judge else "well_formed"


def _paid(reward: RewardIR) -> str:
    """Whose turns get it, in words."""
    if reward.allocator:
        return "the turns that it names"
    if reward.pay:
        after = ", ".join(reward.measure_after)
        return ", ".join(f"{role} the {how}" for role, how in reward.pay) + f"; measured after {after}"
    who = ", ".join(reward.to or reward.roles) or "every role"
    if reward.level == "turn":
        return f"each turn of {who}" + (f" at {', '.join(reward.nodes)}" if reward.nodes else "")
    return f"all turns of {who}"


def _what(node: Node) -> str:
    if node.call:
        return "/".join(node.call.split("/")[-2:])
    if node.human:
        return "a person"
    return node.role or node.tool or node.workflow or ", ".join((*node.set_, *node.write))


def _arrows(graph: Graph) -> Iterator[tuple[str, str | None, Arrow]]:
    """(source, its switch, arrow) in order."""
    yield from ((START, None, arrow) for arrow in graph.start)
    for node in graph.nodes:
        yield from ((node.name, node.switch, arrow) for arrow in node.arrows)


def _label(arrow: Arrow, switch: str | None) -> str:
    if arrow.case is not None:
        return f"{switch} = {arrow.case}"
    return arrow.when or ""


def text(plan: Plan, *, passes: bool = False) -> str:
    """The plan for people."""
    parts = [
        [f"{plan.root}: {plan.graph.summary}".rstrip(": "), f"digest {plan.digest}"],
        ["graph", *_indented(_graph_lines(plan))],
        ["models", *_indented(_model_lines(plan))],
        ["training step", *_indented(_stage_lines(plan))],
        ["groups (turns compared with each other)", *_indented(_group_lines(plan))],
        ["rewards", *_indented(_reward_lines(plan))],
        ["data", *_indented(_data_lines(plan))],
        ["runtime", *_indented(_runtime_lines(plan))],
    ]
    if plan.passes or passes:
        parts.append(["passes", *_indented(_pass_lines(plan))])
    return "\n\n".join("\n".join(part) for part in parts)


def _indented(lines: Iterator[str]) -> list[str]:
    return [f"  {line}" for line in lines] or ["  (none)"]


def _graph_lines(plan: Plan) -> Iterator[str]:
    for place in graphs_below(plan.root, plan.workflows):
        regions = Regions.of(place.graph)
        for node in place.graph.nodes:
            marks = [
                f"each of {node.foreach}" if node.foreach else "",
                f"when {node.when}" if node.when else "",
                f"join {node.join}" if node.join != "all" else "",
                f"at most {node.max_visits} visits" if regions.cycle_of(node.name) else "",
            ]
            detail = "; ".join(mark for mark in marks if mark)
            shown = f"  ({detail})" if detail else ""
            yield f"{place.prefix + node.name:<20} {node.kind:<8} {_what(node)}{shown}"
        if place.graph.program is not None:
            yield from _program_lines(place.prefix, place.graph, place.graph.program)
        for source, switch, arrow in _arrows(place.graph):
            label = _label(arrow, switch)
            targets = " & ".join(place.prefix + target for target in arrow.targets)
            meets = f"  (meet at {place.prefix + arrow.join})" if arrow.join else ""
            yield f"{place.prefix + source} -> {targets}" + (f" when {label}" if label else "") + meets
        limits = place.graph.limits
        tokens = f", {limits.tokens} tokens" if limits.tokens else ""
        of = f" of {place.prefix.rstrip('/')}" if place.prefix else ""
        yield f"limits{of}: {limits.turns} turns, {limits.items} items{tokens}"


def _program_lines(prefix: str, graph: Graph, program: ProgramIR) -> Iterator[str]:
    """What is known of a workflow that is a function before it is played."""
    of = f"{prefix.rstrip('/')} is " if prefix else ""
    name = _program_name(program)
    yield f"{of}played by {name}; how often it calls what, and in which order, is known only then"
    for role in graph.roles:
        if role.tools:
            most = f"at most {role.max_calls} calls each time it is asked"
            yield f"{prefix + role.name} may itself call {', '.join(role.tools)} ({most})"


def _model_lines(plan: Plan) -> Iterator[str]:
    for model in plan.models:
        size = "played by a server" if model.endpoint else _size_words(estimate(model))
        yield f"{model.name}: {_base_name(model)}, {model.train}; {size}"
        yield from (f"  {note}" for note in notes_of(model))
        for policy in model.policies:
            learns = f"learns, lr {policy.optimizer.lr:g}" if policy.train else "frozen"
            shape = f", rank {policy.lora.rank}" if policy.lora else ""
            start = f", from {policy.init}" if policy.init else ""
            yield f"  {policy.name} ({learns}{shape}{start}): {', '.join(policy.roles)}"
    for critic in map(partial(critic_facts, plan), plan.critics):
        sees = "what the team was asked" if critic["central"] else "what each of them was asked"
        size = _size_words(critic["size"])
        yield f"critic {critic['name']}, beside {critic['model']}: {size}, lr {critic['lr']:g}; sees {sees}"
        yield f"  values of {', '.join(critic['roles'])}"


def _base_name(model: ModelIR) -> str:
    if model.endpoint is not None:
        return f"{model.served} at {model.endpoint.url}"
    if isinstance(model.base, str) or model.base is None:
        return str(model.base)
    config = model.base.config
    return f"{config.get('model_type')} made from a config (hidden size {config.get('hidden_size', '?')})"


def _size_words(size: Size | None) -> str:
    if size is None:
        return "size unknown until its config is downloaded"
    return (
        f"about {_number(size.num_parameters)} parameters, {_number(size.num_trained)} trained, "
        f"{_number(size.memory_bytes)}B of memory"
    )


def _number(value: float) -> str:
    for unit, scale in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= scale:
            return f"{value / scale:.3g}{unit}"
    return f"{value:g}"


def _stage_lines(plan: Plan) -> Iterator[str]:
    algorithm, train = plan.algorithm, plan.train
    yield (
        f"sampler {plan.sampler.kind}: {train.tasks_per_step} tasks x {plan.sampler.samples} samples, "
        f"temperature {algorithm.temperature:g}"
    )
    if plan.sampler.kind == "nodes":
        yield f"  {_node_words(plan)}"
    yield " -> ".join(f"{stage.name}: {stage.op}" for stage in plan.stages)
    for stage in plan.stages:
        if stage.op in _STAGE_WORDS:
            yield f"  {_STAGE_WORDS[stage.op](stage.options)}"
    yield algorithm_words(algorithm)
    if plan.init:
        yield f"starts from {plan.init}"
    elif plan.warm_start:
        yield f"warm start: {plan.warm_start.steps} supervised steps of {plan.warm_start.batch} turns a role"
    yield f"{train.steps} steps, seed {train.seed}"
    for entry in plan.sharing:
        about = f", about {entry.computed_tokens} of {entry.rows_tokens} tokens a task beside what is put in"
        saves = about if entry.computed_tokens < entry.rows_tokens else ""
        yield f"prefix sharing of {entry.model} {'on' if entry.shares else 'off'}: {entry.why}{saves}"


def _node_words(plan: Plan) -> str:
    """How actions are drawn at the turns of base episodes, and what a chain of N turns costs."""
    samples, options = plan.sampler.samples, plan.sampler.options
    most = options.get("max_nodes")
    where = f"{most} turns (drawn uniformly)" if most else "every trained turn"
    drawn = f"{samples} actions from one context at {where} of a base episode"
    if options["credit"] == "local":
        on = ", and goes on with the best" if options.get("advance") == "best" else ""
        return f"{drawn}{on}; credit local: the turn's own rewards, nothing is played behind it (biased)"
    if options["credit"] != "rollout":
        how = {
            "splice": "is the base episode's where its prompt is the same, else played",
            "fixed_suffix": "is the base episode's, whatever was said (biased)",
        }[options["credit"]]
        return f"{drawn}; credit {options['credit']}: what follows {how}"
    ways = samples * options["continuations"]
    played = f"{drawn}; credit rollout: the rest is played {options['continuations']} x behind each"
    if most:
        return played
    return (
        f"{played}; a chain of N turns costs {samples}·N actions and {ways}·N·(N-1)/2 turns behind them "
        "a task, of which N·(N-1)/2 are the base episode's"
    )


def _top_k_words(options: dict[str, Any]) -> str:
    """Which groups are trained on."""
    k, scope = options["k"], "each task" if options["scope"] == "task" else "the step"
    number = (
        f"{k:.0%} of the groups" if isinstance(k, float) else f"the {k} groups" if k != 1 else "the group"
    )
    number, most = ("all groups", "at all") if k == "all" else (number, "most")
    less = ", less what the luck of later turns adds" if options["corrected"] else " (luck included)"
    scaled = ", over the square of the role's range" if options["normalize"] == "role_range" else ""
    return f"top_k: trains {number} of {scope} whose actions' values vary {most}{less}{scaled}; biased"


def _memory_words(options: dict[str, Any]) -> str:
    """Who remembers, and what decides."""
    stores = (f"{name}: {', '.join(r)}" if r != [name] else name for name, r in options["stores"].items())
    taught = "; it begins with the demonstrations, half of which are taught with it in their prompts"
    return (
        f"memory of {'; '.join(stores)}: {options['recall']} records recalled before a turn, of"
        f" {options['rules']['capacity']} at most, which {', '.join(options['rewards'])} decide of"
        f"{taught if options['demonstrations'] else ''}"
    )


_STAGE_WORDS = {"top_k": _top_k_words, "memory": _memory_words}
_WIDE = {
    "each turn": "all turns of {} episodes",
    "each episode": "{} episodes at most, one number each",
    "each call": "all calls of {} episodes, one number each",
    "equal prompts": "turns of {} episodes that are asked the same",
}


def _group_lines(plan: Plan) -> Iterator[str]:
    if plan.critics:
        yield "none: each turn is compared with what its role's critic expected"
        return
    for group in grouped(plan.groups, plan.algorithm):
        what = f"{group.expected_size} turns at most" if group.node else _WIDE[group.key[2]]
        yield f"({', '.join(group.key)}): {what.format(group.expected_size)}"
    if any(group.key[2].endswith("]") and "[visit,key" in group.key[2] for group in plan.groups):
        yield "of those with [visit,key] there is a group for each call of a function, seen only when played"


def _reward_lines(plan: Plan) -> Iterator[str]:
    for reward in plan.graph.rewards:
        weight = f"weight {reward.weight:g}" if reward.weight else "reported only"
        otherwise = "" if reward.otherwise is None else f", else {reward.otherwise:g}"
        when = f", when {reward.when}" if reward.when else ""
        yield f"{reward.name} = {_function_name(reward)} ({weight}{otherwise}{when}): {_paid(reward)}"
    if plan.graph.rewards:
        discount = f", discounted by {plan.graph.discount:g}" if plan.graph.credit == "return_to_go" else ""
        yield f"credit: {plan.graph.credit}{discount}"


def _runtime_lines(plan: Plan) -> Iterator[str]:
    runtime = plan.runtime
    threads = runtime.threads or (1 if runtime.deterministic else "as many as torch chooses")
    repeats = "repeats bit for bit" if runtime.deterministic else "needn't repeat bit for bit"
    served = [model.name for model in plan.models if model.endpoint]
    if served:
        repeats = f"needn't repeat, for servers that play {', '.join(served)} needn't"
    where = "everything in this process"
    if runtime.backend == "ray":
        threads = threads if isinstance(threads, int) else "as many as its CPUs"
        where = f"a star of processes, {'of' if runtime.address else 'with'} "
        where += (
            f"the cluster at {runtime.address}" if runtime.address else "a Ray of its own on this machine"
        )
    yield f"{runtime.backend}: {where}; threads {threads}; a run {repeats}"
    for model in plan.models if runtime.backend == "ray" else ():
        if model.endpoint is None:
            yield f"{model.name}: {_place_text(model)}"
            if model.place.rollout.engine:
                yield f"engine of {model.name} {_engine_text(model.place.rollout.engine)}"
    yield f"engine {_engine_text(runtime.engine)}"
    who = "one process plays, then trains" if runtime.backend == "local" else "all play, then all train"
    why = who if runtime.pipeline == "auto" else "as asked for"
    yield f"pipeline sync: {why}; staleness 0"


def _engine_text(engine: Engine) -> str:
    if engine.use == "vllm":
        taken = f"takes {engine.memory_frac:.0%} of a device's memory"
        return f"vllm: {taken}, batches as requests come and go"
    kept = f"{_number(engine.prefix_cache_bytes)}B" if engine.prefix_cache_bytes else "nothing"
    plain = "" if engine.decoder == "auto" else f", decoder {engine.decoder}"
    return (
        f"transformers: at most {engine.max_batch_tokens} tokens decoded together, {kept} of what rows leave "
        f"kept for prompts that go on from them{plain}"
    )


def _place_text(model: ModelIR) -> str:
    """How many processes of a cluster speak for a model and train it, and what each takes."""
    rollout, trainer = model.place.rollout, model.place.trainer
    speak = f"rollout workers {rollout.workers}{_share(rollout.cpus, rollout.gpus)}"
    speak += f" with {rollout.engine.use}" if rollout.engine else ""
    if model.train == "frozen":
        return speak
    learn = f"trainer workers {trainer.workers}{_share(trainer.cpus, trainer.gpus)}"
    learn += f" ({trainer.strategy})" if trainer.workers > 1 else ""
    return f"placement {model.place.placement}, {speak}, {learn}"


def _share(cpus: float | None, gpus: float) -> str:
    asked = [f"{n:g} {what}" for n, what in ((cpus, "CPUs"), (gpus, "GPUs")) if n]
    return f" (each {' and '.join(asked)})" if asked else ""


def _data_lines(plan: Plan) -> Iterator[str]:
    for split, sources in plan.data.items():
        whole = sum(s.weight or 0.0 for s in sources)
        yield f"{split}: " + ", ".join(
            s.path.removeprefix(plan.root_dir + "/")
            + (f" ({100 * s.weight / whole:.3g} %)" if s.weight is not None else "")
            for s in sources
        )


def _pass_lines(plan: Plan) -> Iterator[str]:
    for entry in plan.passes:
        settings = ", ".join(f"{k}: {v}" for k, v in entry["settings"].items())
        yield f"{entry['name']} ({settings})"
        yield from (f"  {change}" for change in entry["changes"])


_SHAPES = {
    "role": ("([", "])"),
    "tool": ("[/", "/]"),
    "call": ("[", "]"),
    "workflow": ("[[", "]]"),
    "human": ("{{", "}}"),
    "set": ("(", ")"),
}


def mermaid(plan: Plan) -> str:
    """A Mermaid flowchart of the graph; sub-workflows are boxes of their own."""
    lines = ["flowchart TD"]
    for place in graphs_below(plan.root, plan.workflows):
        inner = place.prefix.rstrip("/")
        pad = "    " if inner else "  "
        if inner:
            lines.append(f'  subgraph {_id(inner)}_box["{inner}"]')
        lines += [f"{pad}{line}" for line in _mermaid_lines(place.graph, place.prefix)]
        if inner:
            lines.append("  end")
            lines.append(f"  {_id(inner)} -.-> {_id(place.prefix + START)}")
    return "\n".join(lines)


def _mermaid_lines(graph: Graph, prefix: str) -> Iterator[str]:
    if graph.program is None:
        yield f"{_id(prefix + 'start')}((start))"
        yield f"{_id(prefix + 'end')}((end))"
    else:  # any number of calls, in whatever order
        yield f'{_id(prefix + START)}{{{{"{_escaped(_program_name(graph.program))}"}}}}'
        for node in graph.nodes:
            yield f"{_id(prefix + START)} -.-> {_id(prefix + node.name)}"
        for role in graph.roles:
            for tool in role.tools:
                yield f"{_id(prefix + role.name)} -.-> {_id(prefix + tool)}"
    for node in graph.nodes:
        left, right = _SHAPES[node.kind]
        label = node.name if _what(node) in ("", node.name) else f"{node.name}<br/>{_what(node)}"
        yield f'{_id(prefix + node.name)}{left}"{_escaped(label)}"{right}'
    for source, switch, arrow in _arrows(graph):
        label = _label(arrow, switch)
        for target in arrow.targets:
            shown = f'-- "{_escaped(label)}" -->' if label else "-->"
            yield f"{_id(prefix + source)} {shown} {_id(prefix + target)}"


def _id(name: str) -> str:
    return "n_" + name.replace("/", "__")


def _escaped(label: str) -> str:
    """The label inside quotes; only our own line break is markup."""
    parts = [
        part.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")
        for part in label.split("<br/>")
    ]
    return "<br/>".join(parts)
