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
from skirl.models.clips import ClipStore
from skirl.models.loading import LoadedModel
from skirl.records import Media, Sampling, TensorSpec

__all__ = ["PackedRow", "Policy", "check_packing"]

HEAD_CHUNK = 1024
"""Action tokens whose logits are held at once."""


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


class Policy(nn.Module):
    """Roles of a loaded model, called on packed rows.

    A frozen encoder is not part of this module: it is a function of the clips, held whole on every rank, and no
    backend shards or saves it.

    Args:
        loaded: the model and its family; its attention must be ``PACKED_ATTENTION``.
        clips: encoder output by clip; None for text models.
    """

    def __init__(self, loaded: LoadedModel, clips: ClipStore | None) -> None:
        super().__init__()
        self._loaded = (loaded,)  # in a tuple: not a submodule
        self._clips = clips
        self._banned: dict[tuple[int, ...], Tensor] = {}
        self.compiled = False
        """Layers are compiled for packed rows (``compile.compile_policy``)."""
        roles, model = loaded.family.roles, loaded.model
        self.language_model = model.get_submodule(roles["language_model"])
        head = model.get_submodule(roles["head"])
        weight = head.weight
        if not isinstance(weight, nn.Parameter) or getattr(head, "bias", None) is not None:  # getattr: absent in some
            raise ModelError(f"{loaded.source}: the head {roles['head']} is no plain matrix, which is not supported")
        self.head = ScoringHead(weight)
        if "adapter" in roles:
            self.adapter: nn.Module | None = model.get_submodule(roles["adapter"])
            encoder = model.get_submodule(roles["encoder"])
            self.encoder: nn.Module | None = encoder if any(p.requires_grad for p in encoder.parameters()) else None
        else:
            self.adapter = self.encoder = None

    @property
    def loaded(self) -> LoadedModel:
        """The Hugging Face model and what belongs to it."""
        return self._loaded[0]

    @property
    def device(self) -> torch.device:
        """Where rows must lie."""
        return self.head.weight.device

    def named_model_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters of this module under the names of the Hugging Face model; tied ones once."""
        roles = self.loaded.family.roles
        for name, parameter in self.named_parameters():
            role, rest = name.split(".", 1)
            yield f"{roles[role]}.{rest}", parameter

    def named_model_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """All that a checkpoint holds, under the names of the Hugging Face model, tied ones once: the parameters above,
        those of a frozen encoder, persistent buffers.
        """
        yield from self.named_model_parameters()
        model, mine = self.loaded.model, {id(p) for p in self.parameters()}
        yield from ((name, p) for name, p in model.named_parameters() if id(p) not in mine)
        persistent = model.state_dict().keys()
        yield from ((name, buffer) for name, buffer in model.named_buffers() if name in persistent)

    def tensor_specs(self) -> tuple[TensorSpec, ...]:
        """Names, whole shapes and types of ``named_model_tensors``, in the same order on every rank."""
        shapes = self.loaded.shapes
        return tuple(
            TensorSpec(name, shapes[name], str(t.dtype).removeprefix("torch."), t.requires_grad)
            for name, t in self.named_model_tensors()
        )

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
        width = next(m for m in self.adapter.modules() if isinstance(m, nn.Linear)).in_features
        return torch.zeros(1, width, device=self.device, dtype=self.head.weight.dtype)

    def hidden(self, row: PackedRow) -> Tensor:
        """Last hidden states [N, D] of a packed row."""
        output = self.language_model(
            inputs_embeds=self.embed(row.input_ids[None], row.clips, row.placeholders),
            position_ids=row.position_ids[None],
            use_cache=False,
            cu_seq_lens_q=row.cu_seqlens,
            cu_seq_lens_k=row.cu_seqlens,
            max_length_q=row.longest,
            max_length_k=row.longest,
        )
        return output.last_hidden_state[0]

    def forward(self, row: PackedRow, sampling: Sampling) -> tuple[Tensor, Tensor, Tensor]:
        """(log-probs [A], entropies [A], auxiliary losses [S]), float32.

        Log-probs and entropies are those of the row's action tokens under the sampling distribution; auxiliary losses
        of each sequence are those of a mixture of experts, already times their factor, and empty for other models.
        """
        hidden = self.hidden(row)
        logprobs, entropies = self.head(hidden[row.predictors], row.targets, sampling, self._banned_ids(sampling))
        return logprobs, entropies, logprobs.new_zeros(0)

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
def check_packing(policy: Policy, tolerance: float) -> float:
    """Largest difference of hidden states between two sequences packed in one row and each alone, at load.

    Raises: ModelError: above the tolerance, so this architecture cannot be packed (state carried between sequences,
        an attention of its own): training would be silently wrong.
    """
    generator = torch.Generator().manual_seed(0)
    vocabulary = policy.head.weight.shape[0]
    parts = [torch.randint(0, vocabulary, (n,), generator=generator).to(policy.device) for n in (5, 7)]
    alone = torch.cat([policy.hidden(_text_row([part])) for part in parts]).float()
    packed = policy.hidden(_text_row(parts)).float()
    difference = float((alone - packed).abs().max() / alone.abs().max().clamp(min=1e-6))
    if not difference <= tolerance:
        raise ModelError(
            f"{policy.loaded.source}: model type {policy.loaded.family.model_type} cannot be trained on packed rows: "
            f"hidden states of packed sequences differ by {difference:.2g} (relative) from each alone, more than "
            f"{tolerance:.0e}; its attention or recurrence crosses sequence borders"
        )
    return difference


def _text_row(parts: Sequence[Tensor]) -> PackedRow:
    device = parts[0].device
    borders = torch.tensor([0, *(len(p) for p in parts)]).cumsum(0).to(device, torch.int32)
    nothing = torch.empty(0, dtype=torch.long, device=device)
    positions = torch.cat([torch.arange(len(p)) for p in parts]).to(device)
    longest = max(len(p) for p in parts)
    return PackedRow(torch.cat(list(parts)), positions, borders, longest, nothing, nothing, (), nothing)
