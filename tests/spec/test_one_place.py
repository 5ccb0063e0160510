"""One fact stands in one place: no key of mapping, runtime or experiment says what another one says too."""

from collections import defaultdict
from collections.abc import Iterator

from masflow.spec.base import Spec
from masflow.spec.experiment import Experiment
from masflow.spec.mapping import Mapping
from masflow.spec.runtime import Runtime

DEFAULTS = {"optimizer", "base", "init", "engine", "lora"}
"""A model's own one stands instead of the experiment's, an adapter's instead of its model's, whole; nothing
merges the two."""
OTHER_THINGS = {
    "roles": "that a model plays; that one of its adapters plays",
    "init": "how a made base's weights are drawn, beside the run to start from",
    "optimizer": "the warm start has its own",
    "train": "how a model learns; the rows to learn from; the schedule",
    "eval": "the rows to score; how they are scored",
    "data": "demonstrations of the warm start; tasks",
    "steps": "of the warm start; of the run",
    "samples": "episodes a task in training; in evaluation",
    "use": "which engine, workflow or preset",
    "workers": "that speak; that train",
    "cpus": "of a rollout worker; of a trainer worker",
    "gpus": "of a rollout worker; of a trainer worker",
    "models": "what plays which roles; what it gets of a cluster",
    "options": "of a chat template; of a request to an endpoint",
    "name": "of a source in metrics; of a run at Weights & Biases",
    "weight": "of a source, of the KL, of an episode",
    "group": "which turns share a baseline; of a run at Weights & Biases",
    "per": "whose model is whose; whose critic is whose",
    "warmup_steps": "until a learning rate is whole; in which critics alone learn",
}


def specs(spec: type[Spec] = Spec) -> Iterator[type[Spec]]:
    for child in spec.__subclasses__():
        yield child
        yield from specs(child)


def test_mapping__config_fields_that_say_the_same_thing_twice__each_fact_has_one_key():
    """Row of FIELD_PROBLEMS, Mapping: config fields that say the same thing twice, ambiguously."""
    modules = {document.__module__ for document in (Experiment, Mapping, Runtime)}
    owners = defaultdict(set)
    for spec in specs():
        for name in spec.__annotations__ if spec.__module__ in modules else ():
            if name in spec.model_fields:
                owners[name].add(spec.__name__)
    shared = {name for name, found in owners.items() if len(found) > 1}
    assert len(owners) > 40
    assert shared == DEFAULTS | set(OTHER_THINGS)
