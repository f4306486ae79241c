"""Prompts in a seeded order that can be saved and resumed; used for rollouts and for supervised rows alike."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from skirl.errors import CheckpointError, DataError
from skirl.records import Prompt

__all__ = ["ShuffledPrompts", "check_enough"]


def check_enough(prompts: Sequence[Prompt], at_once: int, setting: str) -> None:
    """A run whose steps want more prompts than there are is refused before it starts.

    Args: setting: of ``at_once`` in the recipe, for the message.

    Raises: DataError: see above.
    """
    if at_once > len(prompts):
        raise DataError(
            f"{setting} = {at_once} asks for more different rows in a step than data.train holds, which is "
            f"{len(prompts)}: set {setting} to {len(prompts)} or less, or add rows."
        )


class ShuffledPrompts:
    """Epoch after epoch of the same prompts, each epoch in its own order, keyed by (seed, epoch).

    Implements ``protocols.PromptSource``. The order is the ranking of raw Philox numbers, a stream that NumPy keeps
    the same in every release, so a run's order depends on nothing but its seed and its prompts.
    """

    def __init__(self, prompts: Sequence[Prompt], seed: int) -> None:
        """Starts at the first prompt of epoch 0.

        Args:
            prompts: at least one; their ids are unique.
            seed: >= 0, the run's.

        Raises:
            DataError: there are no prompts.
        """
        if not prompts:
            raise DataError("there are no prompts to train on. Name a source under data.train that holds rows.")
        self._prompts = tuple(prompts)
        self._seed = seed
        self._fingerprint = _fingerprint([prompt.id for prompt in self._prompts])
        self._epoch = 0
        self._position = 0
        self._postponed: tuple[int, ...] = ()
        self._order = self._order_of(0, ())

    def __len__(self) -> int:
        """Prompts in an epoch."""
        return len(self._prompts)

    @property
    def num_taken(self) -> int:
        """Prompts taken since the run began: whole epochs, and what was taken of this one."""
        return self._epoch * len(self._prompts) + self._position

    def take(self, num_prompts: int) -> list[Prompt]:
        """The next prompts, all different; over the end of an epoch it goes on with the next one, so none is left out.

        What was already taken in the same call then comes at the end of the new epoch.

        Raises:
            DataError: there are fewer prompts than are asked for at once.
        """
        assert num_prompts >= 0, num_prompts
        if num_prompts > len(self._prompts):
            raise DataError(
                f"{num_prompts} prompts are asked for in one step, but data.train holds {len(self._prompts)}. Lower "
                "the step's size, or add rows."
            )
        taken: list[int] = []
        while len(taken) < num_prompts:
            if self._position == len(self._order):
                self._epoch += 1
                self._position = 0
                self._postponed = tuple(taken)
                self._order = self._order_of(self._epoch, self._postponed)
            end = min(len(self._order), self._position + num_prompts - len(taken))
            taken += self._order[self._position : end].tolist()
            self._position = end
        return [self._prompts[index] for index in taken]

    def state(self) -> Mapping[str, Any]:
        """Epoch, position in it, what its start postponed, seed, and a fingerprint of all ids in their order."""
        return {
            "epoch": self._epoch,
            "position": self._position,
            "postponed": list(self._postponed),
            "seed": self._seed,
            "num_prompts": len(self._prompts),
            "fingerprint": self._fingerprint,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continues where ``state`` was taken.

        Raises:
            CheckpointError: the prompts or the seed are not those of the state.
        """
        if state["fingerprint"] != self._fingerprint:
            raise CheckpointError(
                f"the training data changed since the checkpoint: it had {state['num_prompts']} prompts "
                f"(fingerprint {state['fingerprint']}), now there are {len(self._prompts)} ({self._fingerprint}). "
                "Restore the manifests and the data settings of the run, or start a new run."
            )
        if state["seed"] != self._seed:
            raise CheckpointError(
                f"the checkpoint was made with run.seed {state['seed']}, the recipe says {self._seed}. "
                "Set the old seed, or start a new run."
            )
        self._epoch, self._position = int(state["epoch"]), int(state["position"])
        self._postponed = tuple(state["postponed"])
        self._order = self._order_of(self._epoch, self._postponed)

    def _order_of(self, epoch: int, postponed: Sequence[int]) -> npt.NDArray[np.int64]:
        keys = np.random.Philox(np.random.SeedSequence((self._seed, epoch))).random_raw(len(self._prompts))
        order = np.argsort(keys, kind="stable")
        late = np.isin(order, np.asarray(postponed, dtype=order.dtype))
        return np.concatenate([order[~late], order[late]])


def _fingerprint(ids: Sequence[str]) -> str:
    return hashlib.sha256(json.dumps(ids).encode()).hexdigest()[:16]
