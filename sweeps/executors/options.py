"""What an executor is told with `--option`: names and values, each executor with its own."""

from __future__ import annotations

from collections.abc import Mapping

from fp4dse.dse import ConfigError


def check_options(executor: str, options: Mapping[str, str], known: Mapping[str, str]) -> dict[str, str]:
    """The options with their defaults. ConfigError on one that the executor does not have."""
    for key in options:
        if key not in known:
            raise ConfigError(f"--option of {executor}", key, ", ".join(known) or "none")
    return {**known, **options}
