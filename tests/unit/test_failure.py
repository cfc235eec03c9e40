"""The decisions of the failure handling about an error."""

from __future__ import annotations

import io
import sys

from torchmpi.errors import MismatchError
from torchmpi.session import failure


def raised(error: BaseException, cause: BaseException | None) -> BaseException:
    try:
        raise error from cause
    except BaseException as caught:
        return caught


def test_errors_that_only_report_an_abort():
    mismatch, raise_aborted = MismatchError("calls differ"), MismatchError("rank 0 has aborted it")
    raise_aborted.reason_is_elsewhere = True
    assert not failure._reason_is_elsewhere(None)
    assert not failure._reason_is_elsewhere(raised(ValueError(), mismatch))
    assert failure._reason_is_elsewhere(raise_aborted)
    assert failure._reason_is_elsewhere(raised(ValueError(), raised(KeyError(), raise_aborted)))


def test_an_error_may_be_its_own_cause():
    """Regression: the search for the cause did not end, nor did the job."""
    error, other = ValueError(), KeyError()
    assert not failure._reason_is_elsewhere(raised(error, error))
    other.__cause__, error.__cause__ = error, other
    assert not failure._reason_is_elsewhere(other)


def test_buffered_output_is_shown_once(monkeypatch):
    kept, shown = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stderr", kept)
    monkeypatch.setattr(sys, "__stderr__", shown)
    for text in ("first\n", "second\n"):
        print(text, end="", file=sys.stderr)
        failure._flush()
    assert shown.getvalue() == "first\nsecond\n"


def test_a_job_ends_with_closed_streams(monkeypatch):
    closed = io.StringIO()
    closed.close()
    for name in ("stdout", "stderr", "__stderr__"):
        monkeypatch.setattr(sys, name, closed)
    failure._flush()
    for name in ("stdout", "stderr", "__stderr__"):
        monkeypatch.setattr(sys, name, None)
    failure._flush()
