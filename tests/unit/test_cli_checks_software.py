"""The doctor's verdicts on versions, settings, forking and the self test; its report."""

from __future__ import annotations

import configparser
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from cli_facts import LAUNCH, PROCESS, alone, job

from torchmpi.cli.doctor import software_checks as checks
from torchmpi.cli.doctor.diagnosis import as_json, as_text, diagnose, summary
from torchmpi.cli.facts import OLDEST_AND_TESTED, Finding, RankFacts, SelfTest

ROOT = Path(__file__).resolve().parents[2]
PASSED = SelfTest(2, 0.5, None, "refused")


def with_version(**versions: str | None) -> dict[str, object]:
    return {"versions": {**PROCESS.versions, **versions}}


@pytest.mark.parametrize(
    ("versions", "expected", "words"),
    [
        ({}, "ok", "torch 2.8.0+cu126"),
        ({"torch": "2.5.1"}, "problem", "torch>=2.6"),
        ({"torch": "2.10.0"}, "ok", "2.10.0"),  # a number, not a text: more than 2.6
        ({"torch": "2.99.0a0+git123"}, "warning", "Tested up to torch"),
        ({"mpi4py": "3.1.6"}, "problem", "mpi4py>=4.0"),
        ({"mpi4py": None}, "problem", "mpi4py missing"),
        ({"Python": "3.99.0"}, "warning", "Tested up to Python"),
    ],
)
def test_versions(versions, expected, words):
    found = checks.check_versions(alone(**with_version(**versions)))
    assert (found.verdict, words in found.found + found.remedy) == (expected, True), found


def test_versions_are_those_of_the_package():
    config = configparser.ConfigParser(interpolation=None)
    config.read(ROOT / "setup.cfg")
    required = dict(line.split(">=") for line in config["options"]["install_requires"].split())
    oldest = {name: oldest for name, (oldest, _) in OLDEST_AND_TESTED.items()}
    assert oldest == required | {"Python": config["options"]["python_requires"].removeprefix(">=")}
    pinned = dict(re.findall(r"^(\w+)==(\d+\.\d+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)[::-1])
    for name, (_, tested) in OLDEST_AND_TESTED.items():
        if name != "Python":
            assert tested == pinned[name], name


def test_ranks_that_differ():
    assert checks.check_agreement(job({}, {})).verdict == "ok"
    assert checks.check_agreement(job({})) is None
    found = checks.check_agreement(job({}, with_version(torch="2.7.1"), with_version(torch="2.7.1")))
    assert found.verdict == "problem"
    assert "differ in torch: 2.8.0+cu126 on rank 0; 2.7.1 on rank 1 and 1 more" in found.found
    facts = job({}, {})
    other = replace(facts.ranks[1], mpi=replace(facts.ranks[1].mpi, library="Open MPI 4.1.4"))
    assert "MPI library" in checks.check_agreement(replace(facts, ranks=[facts.ranks[0], other])).found


def test_settings():
    assert checks.check_settings(alone()).found == "the defaults"
    given = checks.check_settings(alone(settings_from_environment=["TORCHMPI_BIND"]))
    assert given.verdict == "ok" and "TORCHMPI_BIND" in given.found
    wrong = checks.check_settings(job({}, {"settings_error": "TORCHMPI_X is no setting."}))
    assert wrong.verdict == "problem" and wrong.found.startswith("rank 1: TORCHMPI_X")


def test_fork():
    assert "NotStartedError" in checks.check_fork(alone()).found
    let_in = replace(alone(), self_test=replace(PASSED, forked_child="was let into a barrier"))
    assert checks.check_fork(let_in).verdict == "problem"
    assert checks.check_fork(alone(has_infiniband=True)).verdict == "warning"
    assert checks.check_fork(alone(has_infiniband=True, environment={"RDMAV_FORK_SAFE": "1"})).verdict == "ok"
    assert checks.check_fork(alone(cuda_available=True)).verdict == "warning"
    assert checks.check_fork(alone(cuda_available=True, start_method="spawn")).verdict == "ok"


def test_self_test():
    assert checks.check_self_test(alone()).verdict == "ok"
    failed = checks.check_self_test(replace(alone(), self_test=replace(PASSED, error="rank 1: allreduce gave 2")))
    assert failed.verdict == "problem" and "rank 1" in failed.found
    unfinished = replace(alone(), self_test=None, launch=replace(LAUNCH, status=None, output="where it hung"))
    found = checks.check_self_test(unfinished)
    assert found.verdict == "problem" and "where it hung" in found.found
    assert "mpirun -n 2 python -m torchmpi doctor" in found.remedy
    crashed = checks.check_self_test(replace(alone(), launch=replace(LAUNCH, status=139)))
    assert crashed.verdict == "warning" and "139" in crashed.found
    assert checks.check_self_test(replace(alone(), ranks=[], self_test=None)) is None


# --- report


def test_report_ends_with_one_sentence():
    facts = alone(leftovers=["/dev/shm/x"], settings_error="bad")
    text = as_text(facts, diagnose(facts))
    assert text.splitlines()[-1] == "1 problem (settings) and 1 warning (leftovers) among 16 checks."
    assert max(map(len, text.splitlines())) <= 110 and "\x1b" not in text


def test_columns_are_aligned():
    facts = alone(is_root=True)
    lines = [line for line in as_text(facts, diagnose(facts)).splitlines()[2:-2]]
    starts = {len(line) - len(line[9:].lstrip()) for line in lines if line.startswith(("ok ", "problem", "warning"))}
    assert starts == {9}
    remedy = next(line for line in lines if "-> " in line)
    beginning = next(line for line in lines if "root" in line).index("running")
    assert remedy.index("->") == beginning


def test_summary():
    problem, warning = Finding("root", "problem", "x", "y"), Finding("cores", "warning", "x", "y")
    assert summary([problem, replace(problem, name="launcher")]) == "2 problems (root, launcher) among 2 checks."
    assert summary([warning, problem]) == "1 problem (root) and 1 warning (cores) among 2 checks."


def test_json_has_findings_and_facts():
    facts = job({}, {})
    report = json.loads(as_json(facts, diagnose(facts)))
    assert report["checks"][0] == {"name": "versions", "verdict": "ok", "found": diagnose(facts)[0].found, "remedy": ""}
    assert [RankFacts.from_json(rank) for rank in report["facts"]["ranks"]] == list(facts.ranks)
