"""To whoever sets a variable or an argument of start(): it is used, or refused with a hint; caches are for any user."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import os
import pwd
import shutil
import threading
from pathlib import Path

import pytest

from torchmpi import errors, files
from torchmpi.backends import saved_tables
from torchmpi.config import Config
from torchmpi.session import runtime
from torchmpi.shared_memory import kernels
from torchmpi.shared_memory.compiler import native_code


@pytest.mark.parametrize("field", dataclasses.fields(Config), ids=lambda field: field.name)
def test_every_setting_is_read_from_the_environment(field):
    given = {bool: ("0", False), int: ("7", 7), float: ("7.5", 7.5), str: ("none", "none")}[type(field.default)]
    names = {
        "check": "strict",
        "hierarchical": "off",
        "on_lost_rank": "raise",
        "backend": "p2p",
        "replica_check": "warn",
    }
    given = (names[field.name],) * 2 if field.name in names else given
    config = Config.from_environment({f"TORCHMPI_{field.name.upper()}": given[0], "HOME": "/root"})
    assert getattr(config, field.name) == given[1]
    assert dataclasses.replace(config, **{field.name: field.default}) == Config()


@pytest.mark.parametrize(
    ("variable", "text", "hint"),
    [
        ("TORCHMPI_BUKET_BYTES", "1", "TORCHMPI_BUCKET_BYTES"),
        ("TORCHMPI_VERBOSE", "maybe", "1 or 0"),
        ("TORCHMPI_THREADS", "two", "int"),
        ("TORCHMPI_THREADS", "-1", "negative"),
        ("TORCHMPI_BIND", "tight", "auto, none"),
        ("TORCHMPI_BACKEND", "tcp", "backend='tcp' is not one of auto, mpi, shm, p2p"),
        ("TORCHMPI_GPU_BACKENDS", "nccl,gloo", "list of nccl, ipc"),
        ("TORCHMPI_BUCKET_BYTES", "0", "greater than zero"),
        ("TORCHMPI_THREADS", str(1 << 70), "threads=.* less than 2147483648"),  # regression: an OverflowError of torch
        ("TORCHMPI_WATCHDOG_PERIOD_SECONDS", "1e300", "less than"),  # regressions: OverflowErrors of the waits
        ("TORCHMPI_METRICS_SECONDS", "1e300", "less than"),
        ("TORCHMPI_SLOT_BYTES", str(1 << 63), "slot_bytes=.* less than 9223372036854775808"),
        # Regressions: the watchdog ended the job with an OverflowError; no call was ever late.
        ("TORCHMPI_WATCHDOG_PERIOD_SECONDS", "inf", "greater than zero"),
        ("TORCHMPI_STALL_ABORT_SECONDS", "nan", "not negative"),
    ],
)
def test_wrong_settings_are_refused_with_a_hint(variable, text, hint):
    with pytest.raises(errors.ConfigError, match=hint):
        Config.from_environment({variable: text})


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"slot_bytes": "big"}, "slot_bytes='big' is a str; expected a whole number"),
        ({"threads": 1.5}, "threads=1.5 is a float; expected a whole number"),
        ({"stall_abort_seconds": "long"}, "expected a number"),
        ({"verbose": "no"}, "verbose='no' is a str; expected True or False"),
        ({"bucket_bytes": True}, "expected a whole number"),
        ({"timeline": 3}, "timeline=3 is an int; expected a string"),
    ],
)
def test_settings_of_wrong_types_are_refused(settings, expected):
    """Regression: a TypeError of a comparison, or nothing."""
    with pytest.raises(errors.ConfigError, match=expected):
        Config(**settings)
    assert Config(timeline=Path("folder"), stall_abort_seconds=3, verbose=0).stall_abort_seconds == 3


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"config": {"verbose": False}}, r"a dict is no Config. Pass mpi.Config\(\*\*config\)"),
        ({"config": "quiet"}, "a str is no Config"),
        ({"verbose": False, "threads": 2}, r"config=mpi.Config\(threads=2, verbose=False\)"),
        ({"with_gpu": True}, "with_cuda="),
    ],
)
def test_wrong_arguments_of_start_are_refused_before_mpi_is_loaded(arguments, expected):
    """Regression: an AttributeError of a dict, and a TypeError that names no setting."""
    with pytest.raises(errors.ArgumentError, match=expected):
        runtime.start(**arguments)


def test_variables_of_the_compiled_kernels_are_no_settings():
    """Regression: TORCHMPI_KERNEL_DELAYS was refused."""
    given = {"TORCHMPI_KERNEL_CHECKS": "1", "TORCHMPI_KERNEL_DELAYS": "1"}
    assert Config.from_environment(given) == Config()


def test_a_user_without_a_home(monkeypatch, tmp_path):
    """Regression: start() failed for a user id that is not in /etc/passwd, or wrote to ``./~/.cache``."""

    def unknown(uid):
        raise KeyError(uid)

    monkeypatch.chdir(tmp_path)
    for name in ("HOME", "XDG_CACHE_HOME", "NUMBA_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.setattr(native_code, "__file__", "/proc/none/native_code.py")  # an installation that others own
    assert native_code.writable_folders() == [] and saved_tables.path_for("") is None
    assert not list(tmp_path.iterdir())
    monkeypatch.setenv("HOME", "/dev/null")  # regression: a warning that a table of measurements cannot be read
    assert saved_tables.path_for("") is None


def test_compiled_code_is_read_from_a_folder_of_another_user(monkeypatch, tmp_path):
    """Regression: a user who cannot write to the package compiled what root had compiled when the image was built."""
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(native_code, "__file__", str(tmp_path / "package" / "native_code.py"))
    owner = native_code.Compiler()
    owner._write("part", "recipe", b"image")
    assert len(list((tmp_path / "home").rglob("*.native"))) == 1  # for other environments of this user
    shutil.rmtree(tmp_path / "home")
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: "package" not in str(path) and access(path, mode))
    user = native_code.Compiler()
    assert user.folder == tmp_path / "home" / "torchmpi" and user._read("part", "recipe") == b"image"
    user._write("other", "recipe", b"image")
    assert user._read("other", "recipe") == b"image" and len(list((tmp_path / "package").rglob("*.native"))) == 1


def test_a_rank_waits_for_a_lock_that_nfs_grants(monkeypatch, tmp_path):
    """Regression: all ranks compiled at the same time: NFS grants a shared lock only if the file can be read."""
    flock, needed = fcntl.flock, {fcntl.LOCK_SH: os.O_RDONLY, fcntl.LOCK_EX: os.O_WRONLY}

    def flock_of_nfs(file, operation):
        if fcntl.fcntl(file, fcntl.F_GETFL) & os.O_ACCMODE not in (needed[operation & ~fcntl.LOCK_NB], os.O_RDWR):
            raise OSError(errno.EBADF, "Bad file descriptor")
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", flock_of_nfs)
    ended, path = threading.Event(), tmp_path / "lock"
    with files.open_lock(path) as holder, files.open_lock(path) as other:
        assert kernels._may_compile(holder, path, waits=False)
        assert not kernels._may_compile(other, path, waits=False)
        threading.Timer(0.3, lambda: (ended.set(), holder.close())).start()
        assert kernels._may_compile(other, path, waits=True) and ended.is_set()
