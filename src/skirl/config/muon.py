"""Where Muon can run: the check that config/check.py and the trainer share."""

from skirl.config.schema import DeepSpeedBackendConfig, OptimConfig, SingleBackendConfig
from skirl.errors import ConfigError

__all__ = ["check_muon"]


def check_muon(
    optim: OptimConfig, backend: SingleBackendConfig | DeepSpeedBackendConfig, path: str = "trainer.optim"
) -> None:
    """Muon needs whole matrices where the optimizer steps.

    DeepSpeed's own Muon for sharded state (0.19.8) limits gradients after they were made orthogonal, so that
    ``max_grad_norm`` would cut every step, and its number of Newton-Schulz steps is fixed.

    Args: path: of ``optim`` in the recipe, for the message.

    Raises: ConfigError: the backend shards the optimizer's state.
    """
    if optim.muon is None or isinstance(backend, SingleBackendConfig) or backend.zero_stage == 0:
        return
    raise ConfigError(
        f"{path}.muon needs whole matrices, but trainer.backend.zero_stage {backend.zero_stage} cuts them into shards: "
        f"set trainer.backend.zero_stage 0, or leave {path}.muon out"
    )
