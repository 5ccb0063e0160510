"""Several trainer processes of one model: who takes which rows, and how their gradients become one sum.

Through accelerate: DDP keeps the whole model in each process, FSDP2 a shard of it. Gradients are summed, not
averaged, because the weights of rows are global. A tree of rows, as `packs` makes it, stays on one rank.
Knows no losses and no policies beyond their names.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any, Literal, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from masflow.errors import RunError
from masflow.models.experience import Row
from masflow.models.packs import MicroBatch, trees_of
from masflow.models.scorer import Scorer
from masflow.models.weights import checksum

__all__ = ["Alone", "Ranks", "Strategy", "Together", "free_address", "share_of"]

T = TypeVar("T")
Strategy = Literal["ddp", "fsdp2"]
FIX = "look at that model's other trainer processes, then go on with --resume"
_MARKS = ("gloo", "nccl", "connection", "timed out", "timeout", "tcpstore", "distributed", "peer")
"""Words of which a failed exchange between processes has at least one, in whatever library it failed."""


class Together(Protocol):
    """What a trainer asks of the other trainer processes of its model."""

    @property
    def is_first(self) -> bool: ...
    def share(self, rows: Sequence[Row]) -> list[int]: ...
    def even(self, batches: Sequence[MicroBatch], trains: bool) -> list[MicroBatch | None]: ...
    def gather(self, value: T) -> list[T]: ...
    def calling(
        self, scorer: Scorer, name: str, is_last: bool
    ) -> AbstractContextManager[Callable[..., Any]]: ...
    def together(self, what: str) -> AbstractContextManager[None]: ...
    def needs_wrapper(self, name: str) -> bool: ...


class Alone:
    """One trainer process: every row is its own, and nothing is exchanged."""

    is_first = True

    def share(self, rows: Sequence[Row]) -> list[int]:
        return list(range(len(rows)))

    def even(self, batches: Sequence[MicroBatch], trains: bool) -> list[MicroBatch | None]:
        return list(batches)

    def gather(self, value: T) -> list[T]:
        return [value]

    def calling(self, scorer: Scorer, name: str, is_last: bool) -> AbstractContextManager[Callable[..., Any]]:
        return nullcontext(scorer)

    def together(self, what: str) -> AbstractContextManager[None]:
        return nullcontext()

    def needs_wrapper(self, name: str) -> bool:
        return False


class Ranks:
    """One of `world` trainer processes of a model; all of them make the same calls in the same order."""

    def __init__(
        self,
        rank: int,
        world: int,
        address: str,
        strategy: Strategy = "ddp",
        *,
        device: str = "cpu",
        timeout_s: float = 600.0,
    ):
        """Meet the others; returns when all are there.

        Args:
            address: HOST:PORT of rank 0, which listens there; `free_address` finds one.
            device: `cpu` (gloo) or `cuda` (nccl); each process sees one device, its own.
            timeout_s: how long this and every later exchange may wait for another process.
        Raises:
            RunError: the others didn't come in time.
        """
        self.rank, self.world, self.strategy, self.device = rank, world, strategy, device
        self._wrapped: dict[str, nn.Module] = {}
        self._sharded: list[Any] = []
        host, _, port = address.rpartition(":")
        with self.together("meeting the other trainer processes"):
            dist.init_process_group(
                "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl",
                init_method=f"tcp://{address}",
                rank=rank,
                world_size=world,
                timeout=timedelta(seconds=timeout_s),
            )
        told = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
        told |= {"MASTER_ADDR": host, "MASTER_PORT": port, "OMP_NUM_THREADS": torch.get_num_threads()}
        with _environment({name: str(value) for name, value in told.items()}):
            self._accelerator = _accelerator(device)

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def close(self) -> None:
        """Leave; the others may go on only if they leave too."""
        from accelerate.state import AcceleratorState

        self._wrapped.clear()
        AcceleratorState._reset_state(True)
        if dist.is_initialized():
            dist.destroy_process_group()

    # -- rows -------------------------------------------------------------------------------------

    def share(self, rows: Sequence[Row]) -> list[int]:
        """Numbers of the rows that this rank takes, ascending; every rank gets all rows and tells alike."""
        return share_of(rows, self.world)[self.rank]

    def even(self, batches: Sequence[MicroBatch], trains: bool) -> list[MicroBatch | None]:
        """This rank's micro-batches, and None for each pass that it only makes because the others do.

        FSDP2 gathers shards in every pass, so all ranks make equally many; DDP meets in the last one alone.
        """
        wanted = len(batches)
        if self.strategy == "fsdp2":
            wanted = max(self.gather(len(batches)))
        elif trains:
            wanted = max(1, len(batches))
        return [*batches, *([None] * (wanted - len(batches)))]

    def gather(self, value: T) -> list[T]:
        """Every rank's value, in their order."""
        found: list[Any] = [None] * self.world
        with self.together("exchanging measurements"):
            dist.all_gather_object(found, value)
        return found

    # -- the model --------------------------------------------------------------------------------

    def take(self, scorer: Scorer, weights: Mapping[str, Tensor]) -> None:
        """Make a model that of all ranks; with FSDP2 its parameters are new objects afterwards.

        Args:
            weights: what must be equal on all ranks before they begin.
        Raises:
            RunError: they aren't.
        """
        sums = self.gather(checksum(weights))
        if len(set(sums)) > 1:
            told = ", ".join(f"rank {rank}: {found}" for rank, found in enumerate(sums))
            raise RunError(f"trainer processes of one model start from different weights ({told})", FIX)
        self._wrapped = {}
        if self.strategy == "fsdp2":
            self._sharded = _shard(self._accelerator, scorer)

    def needs_wrapper(self, name: str) -> bool:
        """Whether DDP has yet to learn which weights of a learner take gradients."""
        return self.strategy == "ddp" and name not in self._wrapped

    def wrap(self, scorer: Scorer, name: str, has_unused: bool) -> None:
        """Reduce the gradients of whatever takes gradients now, for the learner of this name.

        One wrapper a learner: DDP's hooks are fixed to the weights that it was made for.

        Args:
            has_unused: some of them may take no part in a pass (e.g. experts).
        """
        handler = self._accelerator.ddp_handler
        assert handler is not None
        handler.find_unused_parameters = has_unused
        wrapped: Any = self._accelerator.prepare_model(scorer, device_placement=False)
        wrapped.register_comm_hook(None, _sum_bucket)
        self._wrapped[name] = wrapped

    @contextmanager
    def calling(self, scorer: Scorer, name: str, is_last: bool) -> Iterator[Callable[..., Any]]:
        """What to call for a pass, forward and backward, of a learner: gradients meet in the last one."""
        if self.strategy == "fsdp2":
            yield scorer
            return
        wrapped = self._wrapped[name]
        with nullcontext() if is_last else self._accelerator.no_sync(wrapped):
            yield wrapped

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        """Work that needs the other ranks; afterwards weights are shards again.

        Raises:
            RunError: another rank is gone, or didn't come in time.
        """
        try:
            yield
        except (RuntimeError, OSError) as error:
            text = str(error)
            if not any(mark in text.lower() for mark in _MARKS):
                raise
            first = next(iter(text.strip().splitlines()), type(error).__name__).partition(". This is ")[0]
            raise RunError(
                f"trainer rank {self.rank} of {self.world} lost the others, {what}: {first}", FIX
            ) from error
        for module in self._sharded:
            module.reshard()


def share_of(rows: Sequence[Row], world: int) -> list[list[int]]:
    """Each rank's rows: whole trees, the largest first, each to the rank with the fewest tokens so far."""
    sizes = [(num_tokens, numbers) for numbers, num_tokens in trees_of(rows)]
    shares: list[list[int]] = [[] for _ in range(world)]
    loads = [0] * world
    for num_tokens, numbers in sorted(sizes, key=lambda tree: (-tree[0], tree[1])):
        rank = loads.index(min(loads))
        loads[rank] += num_tokens
        shares[rank].extend(numbers)
    return [sorted(share) for share in shares]


def free_address() -> str:
    """HOST:PORT of this machine, as others reach it, where nothing listens at the moment: for rank 0."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as route:
        try:
            route.connect(("192.0.2.1", 9))  # an address of nobody's: nothing is sent, only a route chosen
            host = route.getsockname()[0]
        except OSError:
            host = "127.0.0.1"
    with socket.socket() as probe:
        probe.bind((host, 0))
        return f"{host}:{probe.getsockname()[1]}"


def _sum_bucket(state, bucket):  # torch compares annotations, and ours are strings
    """DDP's default divides by the number of ranks; our losses carry their weights already."""
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    assert work is not None
    return work.get_future().then(lambda done: done.value()[0])


@contextmanager
def _environment(told: Mapping[str, str]) -> Iterator[None]:
    """Accelerate reads these from the environment, where a launcher would have put them."""
    before = {name: os.environ.get(name) for name in told}
    os.environ.update(told)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _accelerator(device: str) -> Any:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=device == "cpu")
    accelerator.ddp_handler = _ddp_settings()
    return accelerator


def _ddp_settings() -> Any:
    from dataclasses import dataclass

    from accelerate.utils import DistributedDataParallelKwargs

    @dataclass
    class Settings(DistributedDataParallelKwargs):
        """Weights are equal already, and buffers don't change: nothing is sent but gradients."""

        init_sync: bool = True
        forward_sync_buffers: bool = True

    return Settings(init_sync=False, forward_sync_buffers=False)


def _shard(accelerator: Any, scorer: Scorer) -> list[Any]:
    """Shard layer by layer; the modules that hold shards."""
    from accelerate.utils import FullyShardedDataParallelPlugin, fsdp2_prepare_model
    from torch.distributed.fsdp import FSDPModule

    # Set here, not given to the Accelerator: that knows FSDP2 on GPUs only, though torch shards on CPUs too.
    accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        reshard_after_forward=True,
        cpu_ram_efficient_loading=False,
        auto_wrap_policy="transformer_based_wrap",
    )
    sharded = fsdp2_prepare_model(accelerator, scorer)
    found = [module for module in sharded.modules() if isinstance(module, FSDPModule)]
    for module in found:
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
        module.set_reduce_scatter_unused_params(True)
    return found
