"""Both ends of a weight commit around small modules: a trainer's model, and engines that fuse its parts."""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from skirl.records import TensorSpec
from skirl.weights.endpoints import Place
from skirl.weights.manifest import Bucket, Manifest, TransportName
from skirl.weights.receiver import WeightReceiver
from skirl.weights.sender import WeightSender, merge_buckets

HERE = Place("node-1", None)


class TrainerModel(nn.Module):
    """Names as in a checkpoint; q and k apart; a frozen half and a buffer; two dtypes."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Parameter(torch.randn(37, 8))
        self.q = nn.Parameter(torch.randn(16, 8))
        self.k = nn.Parameter(torch.randn(4, 8).bfloat16())
        self.frozen = nn.Parameter(torch.randn(5, 6), requires_grad=False)
        self.register_buffer("mean", torch.randn(3))

    def step(self) -> None:
        """Another value for everything that is trained."""
        with torch.no_grad():
            for parameter in self.parameters():
                if parameter.requires_grad:
                    parameter.add_(torch.randn_like(parameter))


class EngineModel(nn.Module):
    """The same weights as an engine holds them: q and k in one parameter, other names."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Parameter(torch.zeros(37, 8))
        self.qk = nn.Parameter(torch.zeros(20, 8))
        self.tower = nn.Parameter(torch.zeros(5, 6))
        self.register_buffer("average", torch.zeros(3))

    def load(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        """Copies named tensors into their places."""
        places = {
            "embed": self.tokens.data,
            "q": self.qk.data[:16],
            "k": self.qk.data[16:],
            "frozen": self.tower.data,
            "mean": self.average,
        }
        for name, tensor in tensors:
            places[name].copy_(tensor)

    def holds(self, model: TrainerModel) -> bool:
        """Whether every value is the trainer's."""
        pairs = [(self.tokens, model.embed), (self.qk[:16], model.q), (self.qk[16:], model.k.float())]
        pairs += [(self.tower, model.frozen), (self.average, model.mean)]
        return all(torch.equal(mine.cpu(), theirs.cpu()) for mine, theirs in pairs)

    def snapshot(self) -> dict[str, Tensor]:
        """A copy of all values."""
        return {name: tensor.clone() for name, tensor in self.state_dict().items()}


class ModuleWeights:
    """``Weights`` of a module that is not sharded; ``edit`` changes what it lists, ``values`` what it gathers."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.edit: Callable[[list[TensorSpec]], list[TensorSpec]] = list
        self.values: Callable[[dict[str, Tensor]], dict[str, Tensor]] = dict

    def specs(self) -> tuple[TensorSpec, ...]:
        """Parameters, then buffers."""
        trained = {name: p.requires_grad for name, p in self.module.named_parameters()}
        named = [*self.module.named_parameters(), *self.module.named_buffers()]
        return tuple(
            self.edit([TensorSpec(n, tuple(t.shape), str(t.dtype)[6:], n in trained and trained[n]) for n, t in named])
        )

    @contextmanager
    def gathered(self, names: Sequence[str]) -> Iterator[Mapping[str, Tensor]]:
        """The tensors themselves."""
        yield self.values({n: t for n, t in self.module.state_dict().items() if n in names})


class LocalSender:
    """``Sender`` over ranks of this process."""

    def __init__(self, ranks: Sequence[WeightSender]) -> None:
        self.ranks = ranks
        self.log: list[str] = []

    async def open(self, transport: TransportName, setup: bytes, *, version: int, whole: bool) -> Manifest:
        """On every rank."""
        manifests = [rank.open(transport, setup, version=version, whole=whole) for rank in self.ranks]
        return manifests[0]

    async def pack(self, index: int) -> Bucket:
        """On every rank."""
        self.log.append(f"pack {index}")
        return merge_buckets([await asyncio.to_thread(rank.pack, index) for rank in self.ranks])

    async def transmit(self, index: int) -> None:
        """On every rank."""
        self.log.append(f"transmit {index}")
        for rank in self.ranks:
            await asyncio.to_thread(rank.transmit, index)

    async def abort(self) -> None:
        """On every rank."""
        self.log.append("abort")
        for rank in self.ranks:
            rank.abort()


class LocalReceiver:
    """``Receiver`` over one worker of this process; ``tamper`` sees each bucket first."""

    def __init__(
        self,
        name: str,
        expected: tuple[TensorSpec, ...],
        *,
        worker_rank: int = 0,
        device: torch.device | None = None,
        place: Place = HERE,
    ) -> None:
        self.name = name
        self.model = EngineModel().to(device or "cpu")
        self.tamper: Callable[[Bucket], Bucket] = lambda bucket: bucket
        self.log: list[str] = []
        self.worker = WeightReceiver(
            load=self.model.load,
            expected=expected,
            device=device or torch.device("cpu"),
            place=place,
            worker_rank=worker_rank,
            named_parameters=self.model.named_parameters,
        )

    @property
    def version(self) -> int | None:
        """Of the worker."""
        return self.worker.version

    async def begin(self, manifest: Manifest, transport: TransportName, setup: bytes) -> None:
        """In this thread."""
        self.worker.begin(manifest, transport, setup)

    async def receive(self, bucket: Bucket) -> None:
        """In a thread: a broadcast waits for its sender."""
        await asyncio.to_thread(self.worker.receive, self.tamper(bucket))
        self.log.append(f"received {bucket.index}")

    async def finish(self, version: int) -> None:
        """In this thread."""
        self.worker.finish(version)

    async def abort(self) -> None:
        """In this thread."""
        self.log.append("abort")
        self.worker.abort()


def make_sender(
    weights: Any, *, bucket_bytes: int = 256, sends: bool = True, checksum: bool = True, place: Place = HERE
) -> WeightSender:
    """One rank; small buckets, so that there are several."""
    return WeightSender(weights, sends=sends, place=place, bucket_bytes=bucket_bytes, checksum=checksum)
