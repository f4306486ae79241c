"""vLLM's schedulers, made to send a token's log-prob as a number (ADR 0015).

vLLM cuts three arrays of one element each for every token, and both ends of its socket handle them one by one, in
Python. The plain number travels in a field that vLLM passes through unread.
ModelRunnerOutput.logprobs [rows, 1] -> (engine's process) kv_transfer_params -> (caller's process) ``Flight.logprobs``
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

__all__ = ["NumberAsyncScheduler", "NumberScheduler", "SendsNumbers", "collect_numbers", "send_numbers"]

FIELD = "skirl_logprobs"


class _Numbers:
    """Stands for vLLM's ``LogprobsLists`` while its scheduler deals out rows; the sampled token's comes first."""

    def __init__(self, logprobs: Any) -> None:
        self._values: list[float] = logprobs.logprobs[:, 0].tolist()

    def slice_request(self, row: int, count: int) -> list[float]:
        return self._values[row : row + count]


class SendsNumbers:
    """Comes before a scheduler of vLLM in a class's bases."""

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> dict[int, Any]:
        """vLLM's outputs of a step, by client, each log-prob in ``kv_transfer_params``."""
        found = model_runner_output.logprobs
        if found is not None and found.cu_num_generated_tokens is None:  # else several tokens a row
            model_runner_output.logprobs = _Numbers(found)
        outputs: dict[int, Any] = super().update_from_output(  # pyright: ignore[reportAttributeAccessIssue]
            scheduler_output, model_runner_output
        )
        for client in outputs.values():
            for output in client.outputs:
                if isinstance(output.new_logprobs, list):
                    output.kv_transfer_params = {FIELD: output.new_logprobs}
                    output.new_logprobs = None
        return outputs


class NumberScheduler(SendsNumbers, Scheduler):
    """vLLM's own."""


class NumberAsyncScheduler(SendsNumbers, AsyncScheduler):
    """vLLM's own that plans a step while the last one computes."""


def send_numbers(config: Any) -> None:
    """Sets the scheduler in a ``VllmConfig``, unless it has one of its own or sends keys and values elsewhere."""
    if config.scheduler_config.scheduler_cls is None and config.kv_transfer_config is None:
        found = config.scheduler_config.get_scheduler_cls()
        chosen = {Scheduler: NumberScheduler, AsyncScheduler: NumberAsyncScheduler}.get(found)
        config.scheduler_config.scheduler_cls = chosen


class Flight(Protocol):
    """A response that is being sampled."""

    logprobs: list[float]


def collect_numbers(processor: Any, flights: Mapping[str, Flight]) -> None:
    """Adds each number to its response's log-probs, where vLLM's ``OutputProcessor`` counts its token: the two agree
    at any time.

    Args:
        flights: by the id that the response's request was added with; those of others are dropped.
    """
    process, states = processor.process_outputs, processor.request_states

    def collect_and_process(outputs: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        for output in outputs:
            sent = output.kv_transfer_params
            if sent is None or FIELD not in sent:
                continue
            output.kv_transfer_params = None
            state = states.get(output.request_id)
            flight = None if state is None else flights.get(state.external_req_id)
            if flight is not None:
                flight.logprobs.extend(sent[FIELD])
        return process(outputs, *args, **kwargs)

    processor.process_outputs = collect_and_process
