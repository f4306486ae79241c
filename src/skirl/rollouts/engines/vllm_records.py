"""Skirl's records as vLLM's, and vLLM's as arrays: Sampling -> SamplingParams, CompletionOutput -> [T]."""

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from skirl.records import Sampling

__all__ = ["logprobs_of", "sampling_params"]


def sampling_params(sampling: Sampling, seed: int) -> Any:
    """vLLM's form of one response's sampling. Of the seed's 64 bits vLLM takes the lower 63: it wants signed ones.

    A banned id gets a bias of -inf, ahead of temperature and filters: log-probs are normalised over the others.
    ``ignore_eos``: only our stop ids end a response, and none that a generation_config.json adds.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    known = SamplingParams.__struct_fields__
    faster = {"flat_logprobs": True, "skip_clone": True}  # arrays instead of an object a token; made for one request
    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        seed=seed % 2**63,
        max_tokens=sampling.max_new_tokens,
        stop_token_ids=list(sampling.stop_ids),
        ignore_eos=True,
        logit_bias=dict.fromkeys(sampling.banned_ids, -math.inf) or None,
        logprobs=0,  # the sampled token's alone
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        **{name: value for name, value in faster.items() if name in known},  # pyright: ignore[reportArgumentType]
    )


def logprobs_of(completion: Any) -> npt.NDArray[np.float32]:
    """[T] of the sampled tokens, as vLLM returns them."""
    found = completion.logprobs
    if hasattr(found, "logprobs"):  # flat
        return np.asarray(found.logprobs, dtype=np.float32)
    pairs = zip(found or (), completion.token_ids, strict=False)
    return np.asarray([entry[token].logprob for entry, token in pairs], dtype=np.float32)
