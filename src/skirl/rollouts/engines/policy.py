"""Sampling by the policy's own forward pass: one prompt pass a group, then one token a step for the whole batch.

requests -> distinct prompts, left-padded -> cache -> rows of the cache for each response -> tokens, log-probs
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache

from skirl.algorithms.logprobs import sampling_logits
from skirl.models.policy import Policy
from skirl.records import Prompt, Request, Rollout, Sampling

__all__ = ["PolicySampler"]


@dataclass
class _Batch:
    """State of the rows that are still being written. ``rows``: index of each into the request list."""

    cache: DynamicCache
    mask: Tensor
    positions: Tensor
    logits: Tensor
    rows: list[int]


class PolicySampler:
    """Samples from the policy in this process. Equal requests on equal weights give equal tokens in equal batches.

    Each response draws from its own stream of uniform numbers (inverse of the cumulative distribution), seeded by the
    request, so neither order nor siblings change what is drawn.
    """

    def __init__(self, policy: Policy, tokenizer: Any) -> None:
        self._policy, self._tokenizer = policy, tokenizer
        self.policy_version = 0
        """Stamped on every token."""

    @torch.no_grad()
    def generate(self, requests: Sequence[Request]) -> list[Rollout]:
        """One rollout a request, in order. All requests share one sampling distribution."""
        if not requests:
            return []
        sampling = requests[0].sampling
        assert all(r.sampling == sampling for r in requests), "one batch, one sampling distribution"
        tokens: list[list[int]] = [[] for _ in requests]
        logprobs: list[list[float]] = [[] for _ in requests]
        uniforms = _uniforms(requests)
        banned = torch.tensor(sampling.banned_ids, dtype=torch.long, device=self._policy.device)
        batch = self._prefill(requests)
        for step in range(sampling.max_new_tokens):
            chosen, chosen_logprobs = _choose(batch.logits, sampling, banned, uniforms[batch.rows, step])
            going = []
            for i, (row, token) in enumerate(zip(batch.rows, chosen.tolist(), strict=True)):
                tokens[row].append(token)
                logprobs[row].append(chosen_logprobs[i])
                if token not in sampling.stop_ids:
                    going.append(i)
            if not going or step + 1 == sampling.max_new_tokens:
                break
            self._advance(batch, chosen, going)
        return [self._rollout(r, tokens[i], logprobs[i]) for i, r in enumerate(requests)]

    def _prefill(self, requests: Sequence[Request]) -> _Batch:
        prompts = list({r.prompt.id: r.prompt for r in requests}.values())
        place = {prompt.id: i for i, prompt in enumerate(prompts)}
        width = max(len(p.input_ids) for p in prompts)
        device = self._policy.device
        ids = torch.zeros(len(prompts), width, dtype=torch.long)
        mask = torch.zeros(len(prompts), width, dtype=torch.long)
        for i, prompt in enumerate(prompts):
            ids[i, width - len(prompt.input_ids) :] = torch.tensor(prompt.input_ids)
            mask[i, width - len(prompt.input_ids) :] = 1
        spots = self._placeholders(prompts, width)
        clips = [media for prompt in prompts for media in prompt.media]
        mask = mask.to(device)
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        embeddings = self._policy.embed(ids.to(device), clips, spots.to(device))
        config = self._policy.language_model.config
        logits, cache = self._policy.decode_step(
            embeddings, attention_mask=mask, position_ids=positions, past_key_values=DynamicCache(config=config)
        )
        rows = torch.tensor([place[r.prompt.id] for r in requests], device=device)
        cache.batch_select_indices(rows)
        return _Batch(cache, mask[rows], positions[rows, -1], logits[rows], list(range(len(requests))))

    def _placeholders(self, prompts: Sequence[Prompt], width: int) -> Tensor:
        """Positions, in the flattened padded batch, of the placeholders in the prompts."""
        family = self._policy.loaded.family
        if family.placeholder is None:
            return torch.empty(0, dtype=torch.long)
        token = self._tokenizer.convert_tokens_to_ids(family.placeholder)
        return torch.tensor(
            [
                i * width + width - len(prompt.input_ids) + j
                for i, prompt in enumerate(prompts)
                for j, t in enumerate(prompt.input_ids)
                if t == token
            ],
            dtype=torch.long,
        )

    def _advance(self, batch: _Batch, chosen: Tensor, going: list[int]) -> None:
        if len(going) < len(batch.rows):
            keep = torch.tensor(going, device=chosen.device)
            batch.cache.batch_select_indices(keep)
            batch.mask, batch.positions, chosen = batch.mask[keep], batch.positions[keep], chosen[keep]
            batch.rows = [batch.rows[i] for i in going]
        batch.mask = torch.cat([batch.mask, batch.mask.new_ones(len(batch.rows), 1)], dim=1)
        batch.positions = batch.positions + 1
        embeddings = self._policy.language_model.get_input_embeddings()(chosen[:, None])
        batch.logits, batch.cache = self._policy.decode_step(
            embeddings,
            attention_mask=batch.mask,
            position_ids=batch.positions[:, None],
            past_key_values=batch.cache,
        )

    def _rollout(self, request: Request, tokens: list[int], logprobs: list[float]) -> Rollout:
        stopped = tokens[-1] in request.sampling.stop_ids
        text = self._tokenizer.decode(tokens[:-1] if stopped else tokens, skip_special_tokens=False)
        return Rollout(
            prompt_id=request.prompt.id,
            sample_index=request.sample_index,
            prompt_ids=np.asarray(request.prompt.input_ids, dtype=np.int64),
            response_ids=np.asarray(tokens, dtype=np.int64),
            logprobs=np.asarray(logprobs, dtype=np.float32),
            versions=np.full(len(tokens), self.policy_version, dtype=np.int64),
            finish_reason="stop" if stopped else "length",
            text=text,
        )


def _uniforms(requests: Sequence[Request]) -> Tensor:
    """[B, T] uniform numbers, one stream a request."""
    length = requests[0].sampling.max_new_tokens
    streams = [np.random.Generator(np.random.Philox(key=r.seed)).random(length) for r in requests]
    return torch.from_numpy(np.stack(streams))


def _choose(logits: Tensor, sampling: Sampling, banned: Tensor, uniforms: Tensor) -> tuple[Tensor, list[float]]:
    """Next token of each row and its log-prob under the sampling distribution."""
    logits = sampling_logits(
        logits,
        temperature=sampling.temperature,
        banned_ids=banned,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
    )
    logprobs = logits.log_softmax(-1)
    if sampling.temperature == 0:
        chosen = logits.argmax(-1)
    else:
        cumulative = logprobs.double().exp().cumsum(-1)
        draw = uniforms.to(logits.device)[:, None] * cumulative[:, -1:]
        chosen = torch.searchsorted(cumulative, draw, right=True)[:, 0]
        # at the very top rounding may point past the last possible token: take the likeliest there
        possible = logprobs.gather(-1, chosen.clamp(max=logits.shape[-1] - 1)[:, None])[:, 0] > -torch.inf
        chosen = torch.where(possible & (chosen < logits.shape[-1]), chosen, logits.argmax(-1))
    return chosen, logprobs.gather(-1, chosen[:, None])[:, 0].tolist()
