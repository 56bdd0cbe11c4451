"""Credentials in a URL: refused where one is given, and hidden wherever one is shown or stored all the same.

A store's URL stands in its report, in the names of folders, in the state of a sweep, in commands to copy and in error
messages, so a secret in it would be in all of these. Environment and profiles are where the libraries look for secrets.
"""

from __future__ import annotations

import re
from urllib.parse import unquote

from fp4dse.dse.errors import ConfigError

HIDDEN = "***"

_PARAMETER = r"(?!credential_kind=)[^=&\s]*(?:key|secret|token|passw|pwd|credential|signature|sas)[^=&\s]*|sig|auth"
_SECRETS = [
    re.compile(r"(?<=\bs3://)[^\s/?#@:]+(?::[^\s?#@]*)?(?=@)"),  # S3's keys may hold a slash
    re.compile(r"(?<=://)[^\s/?#@:]*:(?!\d{1,5}/)[^\s?#@]*(?=@)"),
    re.compile(rf"(?<=[?&])({_PARAMETER})=[^&\s#'\"`)]+", re.IGNORECASE),
]
"""`user:password@`, and the parameters that hold keys, tokens or signatures."""

ADVICE = (
    "a URL without credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, in the environment "
    "(GOOGLE_APPLICATION_CREDENTIALS for gs://)"
)


def redacted(text: object) -> str:
    """The text with the credentials of all URLs in it replaced by HIDDEN."""
    shown = str(text)
    for secret in _SECRETS:
        shown = secret.sub(lambda found: f"{found[1]}={HIDDEN}" if found.re.groups else HIDDEN, shown)
    return shown


def refuse_credentials(url: str) -> None:
    """ConfigError, which does not repeat them, if the URL holds credentials, percent-encoded ones included."""
    for spelling in (url, unquote(url)):
        if redacted(spelling) != spelling:
            raise ConfigError("store", redacted(spelling), ADVICE)
