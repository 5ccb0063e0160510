"""The manifests beside runtime/cluster.yaml: what Kubernetes and `ray up` read, and what they start."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import jsonschema
import ray
from ruamel.yaml import YAML

from masflow.errors import Where
from masflow.library import find_in_library
from masflow.project import find_documents

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "runtime" / "cluster"


def _documents(name: str) -> list[dict[str, Any]]:
    return list(YAML(typ="safe").load_all((FOLDER / name).read_text()))


def test_the_job_trains_on_the_cluster_beside_it_with_token_authentication() -> None:
    cluster, job = _documents("kuberay.yaml")
    assert (cluster["kind"], job["kind"]) == ("RayCluster", "RayJob")
    assert cluster["spec"]["authOptions"] == {"mode": "token"}
    assert job["spec"]["clusterSelector"]["ray.io/cluster"] == cluster["metadata"]["name"]
    words = shlex.split(job["spec"]["entrypoint"])
    assert words[:2] == ["masflow", "train"]
    for kind in ("mapping", "runtime"):
        reference = words[words.index(f"--{kind}") + 1].removeprefix("lib:")
        assert find_in_library(reference, Where(), kind).is_file()
    versions = {
        cluster["spec"]["rayVersion"],
        _documents("ray_up.yaml")[0]["setup_commands"][0].split("'")[1],
    }
    assert versions == {"2.60.0", "ray==2.60.0"}


def test_ray_up_takes_its_file() -> None:
    [found] = _documents("ray_up.yaml")
    schema = json.loads((Path(ray.__file__).parent / "autoscaler" / "ray-schema.json").read_text())
    jsonschema.validate(found, schema)
    starts = [*found["head_start_ray_commands"], *found["worker_start_ray_commands"]]
    assert all("RAY_AUTH_MODE=token" in c for c in starts if "ray start" in c)


def test_manifests_are_no_documents_of_masflow() -> None:
    found = {p.name for p in find_documents(ROOT / "runtime")}
    assert {"local.yaml", "ray.yaml", "cluster.yaml"} <= found
    assert not found & {p.name for p in FOLDER.glob("*.yaml")}
