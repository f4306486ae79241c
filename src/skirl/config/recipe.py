"""A recipe as messages speak of it: which command runs it, and where each value was written."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from skirl.config.describe import plain
from skirl.config.schema import Config, PlacementGroupConfig

__all__ = ["Command", "Recipe"]

Command = Literal["sft", "rm", "dpo", "kd", "prm", "train", "eval", "sample"]


@dataclass(frozen=True, slots=True)
class Recipe:
    """A config and where its values were written, for messages that name both."""

    config: Config
    provenance: Mapping[str, str]

    def at(self, path: str) -> str:
        """A setting as messages name it: "rollout.group_size = 1 (recipes/x.yaml:7)"."""
        value: Any = self.config
        for name in path.split("."):
            value = dict(value)[name]
        where = self.provenance.get(path, "")
        return f"{path} = {plain(value)}" + (f" ({where})" if where else "")

    def group(self, index: int | None, group: PlacementGroupConfig) -> str:
        """A group as messages name it: "runtime.placement[1] {roles: [rollout], gpus: 2} (recipes/x.yaml:7)"."""
        if index is None:
            return f"{self.at('trainer.ranks')}, one group for {' and '.join(group.roles)},"
        nodes = "" if group.nodes is None else f", nodes: {group.nodes}"
        where = self.provenance.get("runtime.placement", "")
        text = f"runtime.placement[{index}] {{roles: [{', '.join(group.roles)}], gpus: {group.gpus}{nodes}}}"
        return text + (f" ({where})" if where else "")
