"""Removes secrets from texts: user info, queries, signatures, tokens and the values of options."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from urllib.parse import quote

#: Replaces a secret.
HIDDEN = "***"

# Environment variables whose values are secrets.
_VARIABLES = re.compile(
    r"(AWS|AZURE|GOOGLE|GCS|FSSPEC)_\w*(KEY|SECRET|TOKEN|PASSWORD|SAS)\w*(?<!FILE)"
)
# Shorter values are parts of other words, and are too short to be a secret.
_SHORTEST = 4

_PATTERNS = [
    # User info in a URL.
    (re.compile(r"(?<=://)[^/\s'\"<>?#]*@"), f"{HIDDEN}@"),
    # A query. S3's answers to a wrong signature repeat the query and the signed text.
    (re.compile(r"(://[^\s'\"<>?]*)\?[^\s'\"<>]*"), rf"\1?{HIDDEN}"),
    (
        re.compile(
            r"(?i)\b((?:x-amz-|x-goog-|aws|azure|google)?[\w-]*"
            r"(?:signature\w*|credential|security-token|session[-_]token|access[-_]?key(?:[-_]?id)?"
            r"|account[-_]?key|secret(?:[-_]?(?:access[-_]?)?key)?|password|passwd|api[-_]?key"
            r"|authorization|sas[-_]?(?:key|token)?|sig|bearer))"
            r"(['\"]?\s*[:=>]\s*['\"]?)((?:bearer |basic |aws4-hmac-sha256 )?[^\s'\",;&<>]+)"
        ),
        rf"\1\2{HIDDEN}",
    ),
    (re.compile(r"(?i)\b(bearer|basic)\s+[a-z0-9._~+/=-]{8,}"), rf"\1 {HIDDEN}"),
    # Access keys of AWS, and tokens in the form of a JSON Web Token.
    (re.compile(r"\b(?:AKIA|ASIA)[A-Z0-9]{12,}\b"), HIDDEN),
    (re.compile(r"\beyJ[\w-]+\.[\w-]+\.[\w-]*"), HIDDEN),
]


class Redactor:
    """Removes the secrets of one store from texts."""

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        values = {*secrets, *(v for k, v in os.environ.items() if _VARIABLES.fullmatch(k))}
        values |= {quote(value, safe="") for value in values}
        # The longest first: one secret may contain another.
        self._secrets = sorted((v for v in values if len(v) >= _SHORTEST), key=len, reverse=True)

    def __repr__(self) -> str:
        return f"Redactor({len(self._secrets)} secrets)"

    def __reduce__(self) -> str:
        raise TypeError("a Redactor holds secrets and cannot be pickled")

    def __call__(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, HIDDEN)
        for pattern, replacement in _PATTERNS:
            text = pattern.sub(replacement, text)
        return text
