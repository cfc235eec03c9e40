"""To whoever reads the output: the logger ``torchmpi`` writes to standard error, and its errors harm nobody."""

from __future__ import annotations

import io
import logging
import os
import subprocess
import sys
import threading

import pytest

from torchmpi import log
from torchmpi.config import Config
from torchmpi.errors import ConfigError


def test_a_message_is_one_line_with_the_prefix(capsys):
    log.logger.warning("rank 0 has waited 100 %s")
    log.logger.info("torchmpi 1.0: 2 ranks")
    log.logger.debug("not at the default level")
    assert capsys.readouterr().err == "torchmpi: rank 0 has waited 100 %s\ntorchmpi 1.0: 2 ranks\n"


@pytest.mark.parametrize("stream", [None, "closed"])
def test_a_stream_that_fails_is_ignored(monkeypatch, stream):
    if stream == "closed":
        stream = io.StringIO()
        stream.close()
    monkeypatch.setattr(sys, "stderr", stream)
    log.logger.error("lost")
    log.log_fatal("lost")
    assert sys.stderr is stream


def test_a_fatal_message_appears_although_the_program_has_disabled_the_logger(monkeypatch, capfd):
    monkeypatch.setattr(log.logger, "disabled", True)
    log.logger.error("hidden")
    log.log_fatal("rank 1 failed")
    assert capfd.readouterr().err == "torchmpi: rank 1 failed\n"


def test_a_forked_child_may_log_while_a_thread_of_its_parent_holds_the_lock_of_a_handler():
    handler = log.logger.handlers[0]
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with handler.lock:
            held.set()
            done.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    log.logger.info("by the parent, which does not wait either")
    child = os.fork()
    if child == 0:
        log.logger.info("by the child")
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    done.set()
    thread.join()


def test_other_handlers_get_rank_and_host():
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append
    log.logger.addHandler(handler)
    try:
        before = log._place.rank, log._place.host
        log.set_place(3, "node1")
        log.logger.info("started")
    finally:
        log.set_place(*before)
        log.logger.removeHandler(handler)
    assert [(each.rank, each.host, each.getMessage()) for each in records] == [(3, "node1", "started")]


def test_the_level_comes_from_the_environment():
    code = "from torchmpi import log; log.logger.info('info'); log.logger.warning('warning')"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | {log.VARIABLE: "warning"}
    )
    assert done.stderr == "torchmpi: warning\n"
    code = "from torchmpi import log; log.set_place(1, 'node2'); log.logger.info('torchmpi 1.0: 2 ranks')"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | {log.VARIABLE: "debug"}
    )
    assert done.stderr == "torchmpi: info, rank 1 on node2: torchmpi 1.0: 2 ranks\n"
    assert Config.from_environment({log.VARIABLE: "DEBUG"}) == Config()
    with pytest.raises(ConfigError, match="TORCHMPI_LOG='loud' is not one of debug, info"):
        Config.from_environment({log.VARIABLE: "loud"})
