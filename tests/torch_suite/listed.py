"""Tests of PyTorch that fail over torchmpi, each with the reason. A listed test that passes is an error as well."""

from __future__ import annotations

LISTED: dict[str, str] = {}
