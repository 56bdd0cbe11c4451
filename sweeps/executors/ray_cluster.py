"""The Ray cluster that a sweep runs on: a given one, or one of our own on this machine."""

from __future__ import annotations

import logging
import os
from typing import Any

from fp4dse.dse import ConfigError

log = logging.getLogger(__name__)

QUIET: dict[str, Any] = {"logging_level": "warning", "log_to_driver": False}
STARTS = 4
"""Ray gives its processes half a minute to start, which a busy machine may not do."""


def connect(address: str) -> bool:
    """Make Ray usable; True if that started a cluster, which then is ours to end.

    A cluster of our own listens on loopback alone: Ray does so by itself where it takes the machine for a personal one,
    which the variable says as long as Ray is not imported. Without it `127.0.0.1` is replaced by the address that
    others see.

    ConfigError if Ray is not installed or a given cluster does not answer; OSError if one of our own does not start.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    if not address:
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    try:
        import ray
    except ImportError:
        raise ConfigError("--executor", "ray", "an installed Ray: pip install 'fp4dse[ray]'") from None
    if ray.is_initialized():
        return False
    if not address:
        _start()
    else:
        try:
            ray.init(address, **QUIET)
        except Exception as error:  # Ray raises what it likes
            accepted = f"the address of a Ray cluster that answers ({_words(error)})"
            raise ConfigError("--option address", address, accepted) from None
    if not address and ray.util.get_node_ip_address() != "127.0.0.1":
        ray.shutdown()
        raise ConfigError("--executor", "ray", "a process that has not imported Ray before, or --option address=…")
    return not address


def _start() -> None:
    """Start a cluster here. OSError if it does not come up, however often it is tried."""
    import ray

    for number in range(1, STARTS + 1):
        try:
            ray.init(include_dashboard=False, _node_ip_address="127.0.0.1", **QUIET)
            return
        except Exception as error:
            ray.shutdown()
            is_late = type(error) is Exception or isinstance(error, TimeoutError | ConnectionError)  # as Ray says it
            if number == STARTS or not is_late:
                raise OSError(f"Ray did not start here (try {number} of {STARTS}): {_words(error)}") from None
            log.warning("Ray has not started yet (%s); trying again, %d of %d", _words(error), number + 1, STARTS)


def _words(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
