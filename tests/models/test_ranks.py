"""Several trainer processes of one model: two real ones come to what one comes to."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from masflow.errors import RunError
from masflow.models.packs import trees_of
from masflow.models.ranks import Ranks, free_address, share_of

PARTY = Path(__file__).with_name("rank_party.py")
STRATEGIES = ("ddp", "fsdp2")
CASES = ("full", "frozen", "untied", "lora")


def _party() -> ModuleType:
    spec = importlib.util.spec_from_file_location("rank_party", PARTY)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["rank_party"] = module
    spec.loader.exec_module(module)
    return module


party = _party()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """`alone/`, `ddp/` and `fsdp2/`: what one process found, and what each of two real ones did."""
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("ranks")
    for case in CASES:
        torch.save(party.work(case, root / "alone" / case), root / "alone" / f"{case}.pt")
    torch.save(party.poisoned("full", root / "alone" / "poisoned"), root / "alone" / "poisoned.pt")
    addresses = ",".join(free_address() for _ in range(3))
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "error", str(PARTY)]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), addresses, str(root)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in (0, 1)
    ]
    try:
        said = [rank.communicate(timeout=150)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(said)
    yield root


def _found(folder: Path, who: str, case: str) -> dict[str, Any]:
    return torch.load(folder / who / f"{case}.pt")


def _both(folder: Path, strategy: str, case: str) -> list[dict[str, Any]]:
    return [_found(folder, f"{strategy}/rank{rank}", case) for rank in (0, 1)]


def _gap(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    """Largest difference of a tensor, relative to its norm."""
    assert found.keys() == wanted.keys() and wanted
    gaps = [float((found[n] - w).norm() / w.norm().clamp(min=1e-12)) for n, w in wanted.items()]
    return max(gaps)


# -- the same as one -----------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gradients_are_those_of_one_process(folder: Path, strategy: str, case: str) -> None:
    """Uneven shares, and one row alone, which leaves the other rank with none."""
    wanted = _found(folder, "alone", case)["gradients"]
    for found in _both(folder, strategy, case):
        for name, gradient in wanted.items():
            assert float(sum(g.abs().sum() for g in gradient.values())) > 0
            assert _gap(found["gradients"][name], gradient) < 1e-5, name


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_weights_and_metrics_after_several_steps_are_those_of_one_process(
    folder: Path, strategy: str, case: str
) -> None:
    """A warm start, then updates of every policy in mini-batches: plain, with KL and entropy, and with a KL
    that tokens pay, importance weights, ratios of whole turns and two passes."""
    wanted = _found(folder, "alone", case)
    first, second = _both(folder, strategy, case)
    assert first["metrics"] == second["metrics"]
    assert all(torch.equal(first["weights"][n], w) for n, w in second["weights"].items())
    assert max(float((first["weights"][n] - w).abs().max()) for n, w in wanted["weights"].items()) < 1e-5
    moved = max(float((wanted["start"][n] - w).abs().max()) for n, w in wanted["weights"].items())
    assert moved > 1e-3
    for found, metrics in zip(first["metrics"], wanted["metrics"], strict=True):
        assert found == pytest.approx(metrics, rel=1e-4, abs=1e-6)
    for found, logprobs in zip(first["logprobs"], wanted["logprobs"], strict=True):
        assert found == pytest.approx(logprobs, abs=1e-5)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_frozen_embeddings_stay_and_a_tied_head_moves_with_its_embedding(folder: Path, strategy: str) -> None:
    for found in _both(folder, strategy, "frozen"):
        name = next(n for n in found["start"] if "embed" in n)
        assert torch.equal(found["start"][name], found["weights"][name])
    for found in _both(folder, strategy, "full"):
        assert not any("lm_head" in n for n in found["weights"])
        name = next(n for n in found["start"] if "embed" in n)
        assert not torch.equal(found["start"][name], found["weights"][name])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_nan_on_one_rank_stops_all_with_one_message(folder: Path, strategy: str) -> None:
    alone, (first, second) = _found(folder, "alone", "poisoned"), _both(folder, strategy, "poisoned")
    names = [[message.split("; the batch")[0] for message in found["messages"]] for found in (first, second)]
    assert names[0] == names[1] and len(names[0]) == 4
    for turn, message in zip(("t0", "t4", "t9"), names[0], strict=False):
        assert f"step 7: non-finite loss; turns {turn}" in message
    assert first["unmoved"] and second["unmoved"] and first["metrics"] == second["metrics"]
    assert first["metrics"][0] == pytest.approx(alone["metrics"][0], rel=1e-4, abs=1e-6)
    dumps = [folder / strategy / f"rank{rank}" / "poisoned" / "dump" for rank in (0, 1)]
    assert "t9" in torch.load(dumps[0] / "nonfinite-m-step7.pt")["bad"] and not dumps[1].exists()


# -- on disk and on the way --------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_checkpoint_of_two_processes_goes_on_with_one(
    folder: Path, tmp_path: Path, strategy: str, case: str
) -> None:
    saved, alone = folder / strategy / "rank0" / "saved" / case, folder / "alone" / "saved" / case
    assert {f.name for f in saved.iterdir()} == {f.name for f in alone.iterdir()}
    assert not any((folder / strategy / "rank1" / "saved" / case).iterdir())
    one = party.go_on(case, _aside(folder, case, tmp_path), saved)
    two = _found(folder, f"{strategy}/rank0", case)
    assert all(torch.equal(one["loaded"][n], w) for n, w in two["weights"].items())
    wanted = party.go_on(case, _aside(folder, case, tmp_path), alone)
    assert max(float((one["weights"][n] - w).abs().max()) for n, w in wanted["weights"].items()) < 1e-5


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_checkpoint_of_one_process_goes_on_with_two(
    folder: Path, tmp_path: Path, strategy: str, case: str
) -> None:
    alone = folder / "alone" / "saved" / case
    wanted = party.go_on(case, _aside(folder, case, tmp_path), alone)
    for found in _both(folder, strategy, f"{case}-on"):
        assert all(torch.equal(found["loaded"][n], w) for n, w in wanted["loaded"].items())
        assert max(float((found["weights"][n] - w).abs().max()) for n, w in wanted["weights"].items()) < 1e-5


def _aside(folder: Path, case: str, tmp_path: Path) -> Path:
    """A folder of its own beside the bases that all share."""
    (tmp_path / "bases").mkdir(exist_ok=True)
    link = tmp_path / "bases" / case
    if not link.exists():
        link.symlink_to(folder / "bases" / case)
    return tmp_path / "on" / case


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_optimizer_states_are_the_same_files_whatever_the_number_of_processes(
    folder: Path, strategy: str, case: str
) -> None:
    saved, alone = folder / strategy / "rank0" / "saved" / case, folder / "alone" / "saved" / case
    files = sorted(alone.glob("*.optimizer.pt")) + sorted(alone.glob("*.reference.safetensors"))
    assert len(files) >= 2
    for file in files:
        wanted, found = _read(file), _read(saved / file.name)
        assert found.keys() == wanted.keys()
        for name, value in wanted.items():
            assert type(found[name]) is torch.Tensor and found[name].shape == value.shape
            assert torch.allclose(found[name], value, rtol=1e-4, atol=1e-6), name


def _read(file: Path) -> dict[str, torch.Tensor]:
    if file.suffix == ".safetensors":
        return load_file(file)
    states = torch.load(file, weights_only=True)
    return {f"{name}.{key}": value for name, state in states.items() for key, value in state.items()}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_mapping__one_adapter_a_sub_agent__each_has_weights_and_moments_of_its_own(
    folder: Path, strategy: str
) -> None:
    """Rows of FIELD_PROBLEMS, Mapping: the checkpoint keeps one adapter; adapters were never saved."""
    saved = folder / strategy / "rank0" / "saved" / "lora"
    parts = [
        (_read(saved / f"m.{n}.safetensors"), _read(saved / f"m.{n}.optimizer.pt"))
        for n in ("asker", "solver")
    ]
    for one, other in zip(*parts, strict=True):
        assert one.keys() == other.keys() and not any(
            torch.equal(one[n], other[n]) for n in one if "step" not in n
        )
    two = _found(folder, f"{strategy}/rank0", "lora")["weights"]
    for name, (weights, _) in zip(("asker", "solver"), parts, strict=True):
        mark = f".policy_{name}."
        mine = {path.replace(mark, "."): w for path, w in two.items() if mark in path}
        assert mine.keys() == weights.keys() and all(torch.equal(mine[n], w) for n, w in weights.items())


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_first_rank_publishes_whole_weights(folder: Path, strategy: str) -> None:
    for case in CASES:
        first, second = _both(folder, strategy, case)
        shapes = {n: t.shape for n, t in _found(folder, "alone", case)["payload"].items()}
        assert {n: t.shape for n, t in first["payload"].items()} == shapes and not second["payload"]


def test_fsdp2_keeps_shards_and_ddp_the_whole(folder: Path) -> None:
    for strategy, share in (("ddp", 1.0), ("fsdp2", 0.5)):
        parts = [found["local_numbers"] / found["numbers"] for found in _both(folder, strategy, "full")]
        assert parts == pytest.approx([share, share], abs=0.1)


# -- who takes what --------------------------------------------------------------------------------------


def test_trees_stay_together_and_shares_are_even() -> None:
    rows = [row for seed in range(6) for row in party.make_rows(12, seed)]
    for world in (2, 3, 4):
        shares = share_of(rows, world)
        assert sorted(i for share in shares for i in share) == list(range(len(rows)))
        where = {i: rank for rank, share in enumerate(shares) for i in share}
        trees = trees_of(rows)
        assert any(len(numbers) > 2 for numbers, _ in trees)
        assert all(len({where[i] for i in numbers}) == 1 for numbers, _ in trees)
        loads = [sum(size for numbers, size in trees if where[numbers[0]] == r) for r in range(world)]
        # The longest first to the least loaded: no rank is ahead by more than one tree.
        assert max(loads) - min(loads) <= max(size for _, size in trees)
        assert share_of(rows, world) == shares


def test_samples_of_one_prompt_stay_on_one_rank() -> None:
    rows = party.make_rows(24, 3)
    where = {i: rank for rank, share in enumerate(share_of(rows, 2)) for i in share}
    for i, row in enumerate(rows):
        for j, other in enumerate(rows[:i]):
            if row.prompt_ids == other.prompt_ids and len(row.reply_ids) <= len(row.prompt_ids):
                assert where[i] == where[j]


# -- who is gone ---------------------------------------------------------------------------------------


def test_a_rank_that_dies_ends_the_others_at_once_and_clearly(folder: Path) -> None:
    found = torch.load(folder / "dying.pt")
    assert "trainer rank 0 of 2 lost the others" in found["message"] and "--resume" in found["message"]
    assert found["seconds"] < 10


def test_a_rank_that_never_comes_is_waited_for_no_longer_than_said() -> None:
    began = time.monotonic()
    with pytest.raises(RunError, match="trainer rank 0 of 2 lost the others, meeting"):
        Ranks(0, 2, free_address(), "ddp", timeout_s=1.5)
    assert time.monotonic() - began < 20
