"""Entries in a store of torch that others may write too: JSON with the signature of the job."""

from __future__ import annotations

import hmac
import json
from typing import Any

from ... import files


class NotSignedError(ValueError):
    """Somebody without the key of the job has written an entry, or it was written under another label."""

    def __init__(self) -> None:
        super().__init__("it is not signed with the key of this job")


def signed(key: bytes, label: str, value: Any) -> str:
    """Return the entry with a value; the label says what it is, and is signed too."""
    text = json.dumps(value)
    return json.dumps([text, _signature(key, label, text)])


def value_of(key: bytes, label: str, entry: Any) -> Any:
    """Return the value of an entry, which has been read as JSON.

    >>> entry = json.loads(signed(b"key", "place 1", ["host", 7]))
    >>> value_of(b"key", "place 1", entry)
    ['host', 7]
    >>> value_of(b"key", "place 2", entry)
    Traceback (most recent call last):
    torchmpi.launch.launcherless.signed_entries.NotSignedError: it is not signed with the key of this job

    Raises:
        NotSignedError: It does not have the signature of the job.
        TypeError, ValueError: It has another form.
    """
    text, signature = map(str, entry)
    if not hmac.compare_digest(signature.encode(), _signature(key, label, text).encode()):
        raise NotSignedError
    return files.parse_json(text)


def _signature(key: bytes, label: str, text: str) -> str:
    return hmac.digest(key, f"{label} {text}".encode(), "sha256").hex()
