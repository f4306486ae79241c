"""The policy as the trainer and the sampler see it: packed rows in, log-probs of action tokens out.

input_ids [N] -> embeddings [N, D] <- adapter <- encoder rows of the clips
              -> language model over packed sequences -> hidden [N, D] -> head -> log-probs, entropy [A]
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from skirl.algorithms.logprobs import ScoreChunk, score_chunk, token_logprobs
from skirl.errors import ModelError
from skirl.models.adapters import NamedWeight, adapter_weights, committed_weights, exported_weights
from skirl.models.clips import ClipStore
from skirl.models.loading import LoadedModel
from skirl.models.moe import Routers, balance_losses
from skirl.models.roles import base_name, is_adapter_name
from skirl.records import Media, Sampling, TensorSpec

__all__ = ["PACKING_TOLERANCE", "PackedModel", "PackedRow", "Policy", "check_packing", "text_row"]

HEAD_CHUNK = 1024
"""Action tokens whose logits are held at once."""

PACKING_TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2}
"""Largest relative difference of hidden states, packed and alone, by the type of the weights."""


@dataclass(frozen=True)
class PackedRow:
    """One micro-batch on its device: sequences one after another, never padded.

    Attributes:
        input_ids, position_ids: [N]; positions restart with each sequence.
        cu_seqlens: [S+1] int32 borders. longest: tokens of the longest sequence.
        predictors: [A] row positions whose hidden state predicts an action token. targets: [A] those tokens.
        clips: audio, in the order of the placeholder runs. placeholders: [M] row positions of the runs.
    """

    input_ids: Tensor
    position_ids: Tensor
    cu_seqlens: Tensor
    longest: int
    predictors: Tensor
    targets: Tensor
    clips: tuple[Media, ...]
    placeholders: Tensor


class ScoringHead(nn.Module):
    """The language-model head without its logits: log-probs and entropies of given targets.

    Holds the model's own head parameter, so that backends which gather parameters by module (ZeRO-3) see it used here.
    """

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight
        self.score_chunk: ScoreChunk = score_chunk
        """Log-probs and entropies of a chunk; compiled or not."""

    def forward(
        self, hidden: Tensor, targets: Tensor | None, sampling: Sampling, banned_ids: Tensor
    ) -> tuple[Tensor, Tensor]:
        """(log-probs, entropies) [A]; without targets (logits [A, V], nothing), for the sampler."""
        if targets is None:
            return hidden @ self.weight.T, hidden.new_empty(0)
        return token_logprobs(
            hidden,
            self.weight,
            targets,
            temperature=sampling.temperature,
            banned_ids=banned_ids,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            chunk=HEAD_CHUNK,
            score_chunk=self.score_chunk,
        )


class PackedModel(nn.Module):
    """Roles of a loaded model, called on packed rows: everything but what the head makes of the hidden states.

    A frozen encoder is not part of this module: it is a function of the clips, held whole on every rank, and no
    backend shards or saves it.

    Args:
        loaded: the model and its family; its attention must be ``PACKED_ATTENTION``.
        clips: encoder output by clip; None for text models.
        head: called by the subclass; holds the parameters at the family's role "head".
    """

    def __init__(self, loaded: LoadedModel, clips: ClipStore | None, head: nn.Module) -> None:
        super().__init__()
        self._loaded = (loaded,)  # in a tuple: not a submodule
        self._clips = clips
        self.compiled = False
        """Layers are compiled for packed rows (``compile.compile_policy``)."""
        roles, model = loaded.family.roles, loaded.model
        self.language_model = model.get_submodule(roles["language_model"])
        self.head = head
        if "adapter" in roles:
            self.adapter: nn.Module | None = model.get_submodule(roles["adapter"])
            encoder = model.get_submodule(roles["encoder"])
            self.encoder: nn.Module | None = encoder if any(p.requires_grad for p in encoder.parameters()) else None
        else:
            self.adapter = self.encoder = None
        self._routers = Routers(self.language_model, loaded.source)
        self.set_router_aux(None)

    @property
    def is_mixture(self) -> bool:
        """It has layers with experts."""
        return self._routers.count > 0

    @property
    def loaded(self) -> LoadedModel:
        """The Hugging Face model and what belongs to it."""
        return self._loaded[0]

    @property
    def device(self) -> torch.device:
        """Where rows must lie."""
        return next(self.head.parameters()).device

    def named_model_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters of this module under the names of the Hugging Face model, tied ones once; without adapters."""
        for own, parameter in self._named_own():
            if not is_adapter_name(own):
                yield base_name(own), parameter

    def _named_own(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters of this module, adapters too, under the names of the model as it is in memory."""
        roles = self.loaded.family.roles
        for name, parameter in self.named_parameters():
            role, rest = name.split(".", 1)
            yield f"{roles[role]}.{rest}", parameter

    def named_model_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """All that the model holds, under the names that it has in memory, tied ones once: parameters and adapters of
        this module, those of a frozen encoder, persistent buffers.
        """
        yield from self._named_own()
        model, mine = self.loaded.model, {id(p) for p in self.parameters()}
        yield from ((name, p) for name, p in model.named_parameters() if id(p) not in mine)
        persistent = model.state_dict().keys()
        yield from ((name, buffer) for name, buffer in model.named_buffers() if name in persistent)

    def committed_weights(self) -> dict[str, NamedWeight]:
        """What engines hold, by name, in the same order on every rank; see ``adapters.committed_weights``."""
        return committed_weights(self.loaded, self.named_model_tensors())

    def exported_weights(self) -> dict[str, NamedWeight]:
        """This module's parameters as a checkpoint has them, adapters added in."""
        return exported_weights(self.loaded, self._named_own())

    def adapter_weights(self) -> dict[str, NamedWeight]:
        """The adapters alone; empty where there are none."""
        return adapter_weights(self.loaded, self._named_own())

    def tensor_specs(self) -> tuple[TensorSpec, ...]:
        """Names, whole shapes and types of ``committed_weights``."""
        return tuple(weight.spec for weight in self.committed_weights().values())

    def embed(self, input_ids: Tensor, clips: Sequence[Media], placeholders: Tensor) -> Tensor:
        """Input embeddings [..., D] with the adapter's rows at the placeholders (positions in the flattened ids).

        Where there are no clips, a silence that reaches nothing goes through adapter and trained encoder: every rank
        must call every trained module equally often.
        """
        embeddings = self.language_model.get_input_embeddings()(input_ids)
        if self.adapter is None:
            return embeddings
        flat = embeddings.flatten(0, -2)
        if clips:
            assert self._clips is not None
            rows = torch.cat(self._clips.encode(clips))
            audio = self.adapter(rows).to(flat.dtype)
            assert audio.shape[0] == placeholders.shape[0], (audio.shape, placeholders.shape)
            flat = flat.index_copy(0, placeholders, audio)
        else:
            flat = flat + 0.0 * self.adapter(self._silence()).sum().to(flat.dtype)
        return flat.view_as(embeddings)

    def _silence(self) -> Tensor:
        assert self.adapter is not None
        if self.encoder is not None:
            assert self._clips is not None
            return self._clips.silence()
        first = next(m for m in self.adapter.modules() if isinstance(m, nn.Linear))
        return torch.zeros(1, first.in_features, device=self.device, dtype=first.weight.dtype)

    def hidden(self, row: PackedRow) -> Tensor:
        """Last hidden states [N, D] of a packed row."""
        return self.hidden_with_auxiliary(row)[0]

    def hidden_with_auxiliary(self, row: PackedRow) -> tuple[Tensor, Tensor]:
        """(last hidden states [N, D], auxiliary losses [S] float32) of a packed row.

        Auxiliary losses are those of a mixture of experts, already times their factor: the mean over its layers of
        ``moe.balance_losses``. Empty for other models, and without gradient.
        """
        with self._routers.listening() as routed:
            output = self.language_model(
                inputs_embeds=self.embed(row.input_ids[None], row.clips, row.placeholders),
                position_ids=row.position_ids[None],
                use_cache=False,
                cu_seq_lens_q=row.cu_seqlens,
                cu_seq_lens_k=row.cu_seqlens,
                max_length_q=row.longest,
                max_length_k=row.longest,
            )
        hidden = output.last_hidden_state[0]
        if not (routed and self.router_aux_coef and torch.is_grad_enabled()):
            return hidden, hidden.new_zeros(0, dtype=torch.float32)
        losses = torch.stack([balance_losses(logits, chosen, row.cu_seqlens) for logits, chosen in routed])
        return hidden, self.router_aux_coef * losses.mean(0)

    def set_router_aux(self, coef: float | None) -> None:
        """Factor of the load-balancing loss, see ``moe.balance_losses``; None is the checkpoint's own.

        Without routers there is no such loss, whatever the factor.

        Raises: ModelError: the routers of this architecture have none.
        """
        config = self.loaded.config.get_text_config()
        own = getattr(config, "router_aux_loss_coef", 0.0)  # getattr: only of mixtures of experts
        self.router_aux_coef = (own if coef is None else coef) if self._routers.count else 0.0
        if self.router_aux_coef:
            self._routers.check()


class Policy(PackedModel):
    """A language model on packed rows: log-probs of action tokens. Arguments as in ``PackedModel``."""

    head: ScoringHead

    def __init__(self, loaded: LoadedModel, clips: ClipStore | None) -> None:
        path = loaded.family.roles["head"]
        head = loaded.model.get_submodule(path)
        weight = head.weight
        if not isinstance(weight, nn.Parameter) or getattr(head, "bias", None) is not None:  # getattr: absent in some
            raise ModelError(f"{loaded.source}: the head {path} is no plain matrix, which is not supported")
        super().__init__(loaded, clips, ScoringHead(weight))
        self._banned: dict[tuple[int, ...], Tensor] = {}

    def forward(self, row: PackedRow, sampling: Sampling) -> tuple[Tensor, Tensor, Tensor]:
        """(log-probs [A], entropies [A], auxiliary losses [S]), float32.

        Log-probs and entropies are those of the row's action tokens under the sampling distribution; auxiliary losses
        see ``hidden_with_auxiliary``.
        """
        hidden, auxiliary = self.hidden_with_auxiliary(row)
        logprobs, entropies = self.head(hidden[row.predictors], row.targets, sampling, self._banned_ids(sampling))
        return logprobs, entropies, auxiliary

    def _banned_ids(self, sampling: Sampling) -> Tensor:
        """[B] on the device; sent there once, since each transfer waits for what the device is doing."""
        found = self._banned.get(sampling.banned_ids)
        if found is None:
            found = torch.tensor(sampling.banned_ids, dtype=torch.long, device=self.device)
            self._banned[sampling.banned_ids] = found
        return found

    def decode_step(self, embeddings: Tensor, **state: Any) -> tuple[Tensor, Any]:
        """Logits [B, V] of the last position of a padded batch, and the cache; used by the sampler."""
        with self._decoding():
            output = self.language_model(inputs_embeds=embeddings, use_cache=True, **state)
        logits, _ = self.head(output.last_hidden_state[:, -1], None, Sampling(), embeddings.new_empty(0))
        return logits, output.past_key_values

    @contextmanager
    def _decoding(self) -> Iterator[None]:
        """Layers keep a cache: not recomputed (transformers would drop it), not compiled (anew for each layer)."""
        recomputed = self.language_model.training
        if recomputed:
            self.language_model.eval()
        try:
            with torch.compiler.set_stance("force_eager") if self.compiled else nullcontext():
                yield
        finally:
            if recomputed:
                self.language_model.train()


@torch.no_grad()
def check_packing(policy: PackedModel, tolerance: float) -> float:
    """Largest difference of hidden states between two sequences packed in one row and each alone, at load.

    Raises: ModelError: above the tolerance, so this architecture cannot be packed (state carried between sequences,
        an attention of its own): training would be silently wrong.
    """
    generator = torch.Generator().manual_seed(0)
    vocabulary = policy.loaded.config.get_text_config().vocab_size
    parts = [torch.randint(0, vocabulary, (n,), generator=generator).to(policy.device) for n in (5, 7)]
    alone = torch.cat([policy.hidden(text_row([part])) for part in parts]).float()
    packed = policy.hidden(text_row(parts)).float()
    difference = float((alone - packed).abs().max() / alone.abs().max().clamp(min=1e-6))
    if not difference <= tolerance:
        raise ModelError(
            f"{policy.loaded.source}: model type {policy.loaded.family.model_type} cannot be trained on packed rows: "
            f"hidden states of packed sequences differ by {difference:.2g} (relative) from each alone, more than "
            f"{tolerance:.0e}; its attention or recurrence crosses sequence borders"
        )
    return difference


def text_row(parts: Sequence[Tensor]) -> PackedRow:
    """Token ids of whole sequences as a packed row without action tokens."""
    device = parts[0].device
    borders = torch.tensor([0, *(len(p) for p in parts)]).cumsum(0).to(device, torch.int32)
    nothing = torch.empty(0, dtype=torch.long, device=device)
    positions = torch.cat([torch.arange(len(p)) for p in parts]).to(device)
    longest = max(len(p) for p in parts)
    return PackedRow(torch.cat(list(parts)), positions, borders, longest, nothing, nothing, (), nothing)
