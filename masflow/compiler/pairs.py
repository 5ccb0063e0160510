"""Rules of a whole plan: workflow, mapping and schedule that can't work together."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

from masflow.compiler.graph import Graph
from masflow.compiler.plan import ModelIR, Plan
from masflow.compiler.team import Place, graphs_below, speakers_of, team_of
from masflow.compiler.usage import below
from masflow.errors import Problem, Where
from masflow.project import Loaded
from masflow.spec.experiment import Experiment
from masflow.spec.mapping import ConfigBase

__all__ = ["plan_problems"]

ONLY_PLAY = "; or play without training: train: {steps: 0}"


def plan_problems(plan: Plan, experiment: Loaded[Experiment] | None) -> Iterator[Problem]:
    """Every problem of pairs; those of training only where there is something to train on."""
    trained = {member for policy in plan.policies if policy.train for member in policy.roles}
    trains = plan.train.steps > 0 and "train" in plan.data
    for place in graphs_below(plan.root, plan.workflows):
        yield from _judge_problems(place, trained)
        if trains:
            yield from _people_problems(place.graph)
    for model in plan.models:
        yield from _window_problems(plan, model)
        yield from _precision_problems(plan, model)
    if experiment is not None:
        yield from _engine_problems(plan, experiment.source.where("runtime"))
        yield from _twice_problems(plan, experiment)
    if trains:
        yield from _sampling_problems(plan, trained)
        yield from _unpaid_problems(plan, trained)
        yield from _random_base_problems(plan)
    if plan.policies and not trained and trains:
        where = experiment.source.where("mapping") if experiment else plan.graph.where
        message = "every model is frozen, so there is nothing to train"
        yield Problem.at(where, "warn-nothing-to-train", message, "train a model, or write train: {steps: 0}")


def _twice_problems(plan: Plan, experiment: Loaded[Experiment]) -> Iterator[Problem]:
    """What both the algorithm and the pass that draws for it say."""
    algorithm = experiment.spec.algorithm
    if plan.sampler.kind == "nodes" and algorithm.samples is not None:
        message = "node_sampling says how many actions are drawn, and so does algorithm.samples"
        where = experiment.source.where("algorithm", "samples")
        yield Problem.at(where, "samples-twice", message, "remove it; write node_sampling: {samples: N}")
    if "temperature" not in algorithm.model_fields_set:
        return
    for entry in plan.passes:
        if entry["name"] == "node_sampling" and entry["settings"]["temperature"] is not None:
            message = (
                "node_sampling says at which temperature turns are drawn, and so does algorithm.temperature"
            )
            where = experiment.source.where("algorithm", "temperature")
            yield Problem.at(where, "temperature-twice", message, "remove one of the two")


def _judge_problems(place: Place, trained: set[str]) -> Iterator[Problem]:
    roles = {role.name: role for role in place.graph.roles}
    for reward in place.graph.rewards:
        judge = roles.get(reward.judge or "")
        if judge and any(place.prefix + member in trained for member in judge.members or (judge.name,)):
            message = f"'{reward.judge}' judges for reward '{reward.name}', and it is trained itself"
            fix = "give it a model with 'train: frozen' in the mapping"
            yield Problem.at(below(reward.where, "use"), "judge-not-frozen", message, fix)


def _people_problems(graph: Graph) -> Iterator[Problem]:
    tools = {tool.name: tool for tool in graph.tools}
    for node in graph.nodes:
        if node.human is not None and node.human.in_training is None:
            message = f"'{node.name}' asks a person, and nobody is there in training"
            fix = f"add in_training: skip, {{value: …}}, {{call: file.py:fn}} or {{role: NAME}}{ONLY_PLAY}"
            yield Problem.at(below(node.where, "human"), "human-in-training", message, fix)
        if node.tool in tools and tools[node.tool].approve:
            message = f"tool '{node.tool}' asks a person for approval, and nobody is there in training"
            fix = f"remove 'approve' from the tool{ONLY_PLAY}"
            yield Problem.at(node.where, "human-in-training", message, fix)
    for role in graph.roles:
        asking = role.approve or any(name in tools and tools[name].approve for name in role.tools)
        if asking and role.tools:
            message = (
                f"role '{role.name}' asks a person to approve its calls, and nobody is there in training"
            )
            yield Problem.at(role.where, "human-in-training", message, f"remove 'approve'{ONLY_PLAY}")


def _engine_problems(plan: Plan, where: Where) -> Iterator[Problem]:
    """An engine that isn't installed; on a cluster it has to be on the workers, not here."""
    here = plan.runtime.backend == "local"
    own = [m for m in plan.models if m.endpoint is None and _engine(m, plan) == "vllm"]
    if not own:
        return
    for model in own:
        if model.quantize is not None and model.train != "frozen":
            message = f"model '{model.name}' trains over weights in 4 bits, and vllm speaks with whole ones"
            fix = "remove 'quantize', or choose 'engine: transformers'"
            yield Problem.at(model.where, "bad-quantize", message, fix)
    if find_spec("vllm") is None:
        code = "engine-not-installed" if here else "warn-engine-not-installed"
        message = "the engine vllm isn't installed" + ("" if here else " here; the workers need it")
        fix = "pip install 'masflow[vllm]', or choose 'engine: transformers'"
        yield Problem.at(where, code, message, fix)
    if plan.runtime.deterministic:
        message = "the engine vllm needn't repeat its replies bit for bit, and the runtime is deterministic"
        yield Problem.at(where, "engine-does-not-repeat", message, "write 'deterministic: false'")


def _engine(model: ModelIR, plan: Plan) -> str:
    own = model.place.rollout.engine if plan.runtime.backend == "ray" else None
    return (own or plan.runtime.engine).use


def _window(model: ModelIR) -> int | None:
    if model.context is not None:
        return model.context
    if isinstance(model.base, ConfigBase):
        size = model.base.config.get("max_position_embeddings")
        return size if isinstance(size, int) else None
    return None


def _window_problems(plan: Plan, model: ModelIR) -> Iterator[Problem]:
    """A reply as long as the window leaves no place for a prompt."""
    window = _window(model)
    if window is None:
        return
    for speaker in team_of(plan.root, plan.workflows):
        if speaker.role.reply.max_tokens >= window and set(speaker.members) & set(model.roles):
            message = (
                f"role '{speaker.name}' may reply with {speaker.role.reply.max_tokens} tokens, "
                f"and the window of model '{model.name}' has {window}"
            )
            fix = f"lower reply.max_tokens below {window}, or raise the model's context"
            yield Problem.at(below(speaker.role.where, "reply"), "reply-fills-window", message, fix)


def _precision_problems(plan: Plan, model: ModelIR) -> Iterator[Problem]:
    for message, fix in _quantize_faults(plan, model) if model.quantize is not None else ():
        yield Problem.at(
            below(model.where, "quantize"), "bad-quantize", f"model '{model.name}': {message}", fix
        )
    if model.dtype == "bfloat16" and model.train == "full":
        message = f"model '{model.name}' is trained in bfloat16: updates below 1/256 of a weight are lost"
        fix = "write 'dtype: auto' (float32), or 'train: lora' (float32 adapters on a bfloat16 base)"
        yield Problem.at(below(model.where, "dtype"), "warn-bfloat16-training", message, fix)


def _quantize_faults(plan: Plan, model: ModelIR) -> Iterator[tuple[str, str]]:
    """(what can't go with 4 bits, the fix)."""
    rollout, trainer = model.place.rollout, model.place.trainer
    if isinstance(model.base, ConfigBase):
        yield (
            "its base is made from a config, and 4 bits hold weights that are loaded",
            "remove 'quantize', or name a base's folder or id",
        )
    if (rollout.engine or plan.runtime.engine).use == "vllm":
        yield "the vllm engine would hold its base in another way", "write 'engine: {use: transformers}'"
    if plan.runtime.backend == "ray" and not (rollout.gpus or trainer.gpus):
        yield (
            "4 bits need a GPU, and its place in the runtime gives it none",
            f"write 'models: {{{model.name}: {{rollout: {{gpus: 1}}, trainer: {{gpus: 1}}}}}}' there",
        )
    if trainer.workers > 1 and trainer.strategy == "fsdp2":
        yield "weights in 4 bits can't be sharded", "write 'strategy: ddp'"


def _sampling_problems(plan: Plan, trained: set[str]) -> Iterator[Problem]:
    """The trainer knows the distribution that was sampled from only where nothing was cut off."""
    for speaker in team_of(plan.root, plan.workflows):
        if not set(speaker.members) & trained:
            continue
        own = speaker.role.sampling.train
        where = below(speaker.role.where, "sampling.train")
        if (own.top_p is not None and own.top_p < 1) or own.top_k:
            message = f"role '{speaker.name}' is trained, and top_p or top_k would cut its distribution"
            yield Problem.at(where, "cut-in-training", message, "remove them, or set them under 'eval'")
        if own.temperature == 0:
            message = f"role '{speaker.name}' is trained, and at temperature 0 all its samples are the same"
            yield Problem.at(where, "greedy-in-training", message, "write a temperature above 0")


def _unpaid_problems(plan: Plan, trained: set[str]) -> Iterator[Problem]:
    """A trained role that no reward reaches would stand still."""
    rewards = [r for r in plan.graph.rewards if r.weight != 0]
    if not rewards or any(r.allocator for r in rewards):
        return
    paid: set[str] = set()
    for reward in rewards:
        named = reward.to or reward.roles or tuple(role for role, _ in reward.pay)
        if not named and not reward.nodes:
            return  # everybody is paid
        paid |= set(named)
        paid |= {s for n in plan.graph.nodes if n.name in reward.nodes for s in speakers_of(n)}
    for speaker in team_of(plan.root, plan.workflows):
        if set(speaker.members) & trained and speaker.name not in paid and not _kept(plan):
            message = f"role '{speaker.name}' is trained, and no reward pays it"
            fix = "name it in a reward, or freeze its model"
            yield Problem.at(speaker.role.where, "warn-unpaid-role", message, fix)


def _kept(plan: Plan) -> bool:
    return any(n.keep_rewards for graph in plan.workflows.values() for n in graph.nodes)


def _random_base_problems(plan: Plan) -> Iterator[Problem]:
    """Adapters can't make sense of a backbone of random numbers."""
    warm = plan.init is not None or (plan.warm_start is not None and plan.warm_start.steps > 0)
    for model in plan.models:
        made = isinstance(model.base, ConfigBase)
        if made and model.train == "lora" and not warm and not all(p.init for p in model.policies):
            message = f"model '{model.name}' trains adapters on a base of random weights"
            fix = "add a warm_start, which trains the whole base first"
            yield Problem.at(model.where, "warn-random-base", message, fix)
