"""To who measures slow links: each setting keeps the others; one that the kernel lacks is refused with the remedy."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
from helpers.host_jobs import NETWORK, PREFIX, ROOT

HOSTS_SH = ROOT / "scripts" / "hosts.sh"
ROUND_TRIP = f"""
import socket, time
begin = time.perf_counter()
with socket.socket() as connection:
    connection.connect_ex(("{NETWORK}.2", 1))  # refused by h1, after a round trip
print(time.perf_counter() - begin)
"""


def hosts_sh(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([HOSTS_SH, *arguments], capture_output=True, text=True, timeout=60)


def settings() -> str:
    command = ["tc", "qdisc", "show", "dev", f"{PREFIX}-h1"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.fixture
def rate() -> Iterator[None]:
    assert hosts_sh("rate", "1gbit").returncode == 0
    yield
    for command in (("delay", "0"), ("loss", "0"), ("rate", "none")):
        assert hosts_sh(*command).returncode == 0
    assert "tbf" not in settings() and "netem" not in settings()


def test_delay_and_loss(rate):
    delayed, lossy = hosts_sh("delay", "20000"), hosts_sh("loss", "0.5")
    assert "rate 1Gbit" in settings()
    if delayed.returncode == 0:
        assert lossy.returncode == 0, lossy.stderr
        assert "delay 20ms" in settings() and "loss 0.5%" in settings()
        seconds = hosts_sh("run", "h0", sys.executable, "-c", ROUND_TRIP)
        assert float(seconds.stdout) >= 0.04, seconds
    else:
        assert lossy.returncode == 1
        for result in (delayed, lossy):
            assert "no delay and no loss" in result.stderr and "sch_netem" in result.stderr, result


@pytest.mark.parametrize("command", [("delay", "fast"), ("loss", "1%"), ("rate", ";"), ("delay",)])
def test_invalid_settings_are_refused(rate, command):
    before = settings()
    result = hosts_sh(*command)
    assert result.returncode == 1 and f"hosts.sh: {command[0]}: " in result.stderr, result
    assert settings() == before
