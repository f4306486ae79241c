"""What every settings class shares."""

from typing import Any

from pydantic import BaseModel, ConfigDict

__all__ = ["Frozen", "by_name"]


class Frozen(BaseModel):
    """Base of all settings: immutable, finite, unknown keys refused; field docstrings become help texts."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=True, allow_inf_nan=False
    )


def by_name(value: Any) -> Any:
    """A bare name stands for the variant of that kind with its defaults."""
    return {"kind": value} if isinstance(value, str) else value
