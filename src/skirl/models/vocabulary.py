"""Whether a model that reads the policy's token ids takes them for the same tokens."""

from pathlib import Path

from skirl.errors import ModelError
from skirl.models.loading import ModelFiles, load_tokenizer_and_family

__all__ = ["check_critic"]


def check_critic(path: Path, policy: ModelFiles, policy_path: Path) -> None:
    """A critic is given the policy's rows as they are: ids, and clips at their placeholders.

    Its vocabulary may hold more tokens, and its embeddings may be padded; what the policy writes must mean the same.

    Args: path: ``critic.path``. policy, policy_path: ``model.path`` and its files.

    Raises: ModelError: the critic would read something else, or hears nothing of a clip.
    """
    critic = load_tokenizer_and_family(path, scalar_heads=True)
    instead = "use a critic of the policy's family, or leave critic.path out (a new head on model.path)"
    if policy.family.placeholder is not None and critic.family.model_type != policy.family.model_type:
        raise ModelError(
            f"critic.path: {path} is a {critic.family.name} and the policy ({policy_path}) {policy.family.name}, whose "
            f"clips it does not hear: {instead}"
        )
    written, read = policy.tokenizer.get_vocab(), critic.tokenizer.get_vocab()
    odd = sorted(token for token, number in written.items() if read.get(token) != number)
    if odd:
        raise ModelError(
            f"critic.path: {path} does not read the policy's tokens ({policy_path}): {len(odd)} of {len(written)} have "
            f"another id there or none, such as {odd[0]!r}, so its values would mean nothing: {instead}"
        )
    size = critic.config.get_text_config().vocab_size
    if size <= max(written.values()):
        raise ModelError(
            f"critic.path: {path} has embeddings of {size} tokens, and the policy ({policy_path}) writes ids up to "
            f"{max(written.values())}: {instead}"
        )
