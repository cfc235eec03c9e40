"""To a user of checkpoints: replaced as a whole, read without torchmpi, refused if damaged, saved in the background."""

from __future__ import annotations

import enum
import io
import os
import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from torchmpi.engine import SGDEngine, checkpoint, training_run
from torchmpi.engine.checkpoint import Content, Saver, digest, read
from torchmpi.engine.coordination import SingleProcess
from torchmpi.errors import ArgumentError, CheckpointError

WEIGHTS = {"weight": torch.arange(5000.0)}
alone = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
CONTENT = Content(common={"epoch": 3}, own={"kept": {"a": {"x": 1}}}, trees={"network": WEIGHTS})


def write(path: Path, content: Content = CONTENT) -> None:
    Saver(SingleProcess()).save(path, content)


def epoch_of(path: Path) -> int:
    return read(path, SingleProcess()).common["epoch"]


@pytest.fixture
def path(tmp_path) -> Path:
    write(tmp_path / "a.ckpt")
    return tmp_path / "a.ckpt"


def test_round_trip(path):
    saved = read(path, SingleProcess())
    assert (saved.common, saved.ranks) == (CONTENT.common, [CONTENT.own])
    assert torch.equal(saved.trees["network"]["weight"], WEIGHTS["weight"])


def test_state_of_any_structure(tmp_path):
    """For example that of LBFGS: tensors in lists, whole numbers as keys, no tensors."""
    state = {0: {"d": torch.ones(2), "old": [torch.zeros(1), torch.ones(0, 3)], "n": 3}, 1: {}, "t": torch.tensor(7)}
    trees = {"network": {}, "optimizer": {"state": state, "param_groups": [{"lr": 0.1}]}}
    write(tmp_path / "b", Content({}, {}, trees))
    assert digest(read(tmp_path / "b", SingleProcess()).trees) == digest(trees)
    with pytest.raises(CheckpointError, match=r"two tensors have the name 'network.a.b'"):
        write(tmp_path / "b", Content({}, {}, {"network": {"a.b": torch.ones(1), "a": {"b": torch.ones(1)}}}))


@alone
def test_weights_load_with_plain_torch(tmp_path):
    engine, network = SGDEngine(progress=False), nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    engine.checkpoint(tmp_path / "a")
    batches = [(torch.randn(4, 2), torch.randn(4, 3))]
    engine.train(network=network, criterion=nn.MSELoss(), iterator=batches, lr=0.1)
    other = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    dcp.load({"network": other.state_dict()}, checkpoint_id=tmp_path / "a")
    assert digest(other.state_dict()) == digest(network.state_dict())


def fail(*arguments):
    raise OSError("disk full")


def test_a_failed_save_leaves_the_previous_checkpoint(path, monkeypatch):
    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(CheckpointError, match="disk full"):
        write(path, Content({"epoch": 4}, {}, {}))
    assert epoch_of(path) == 3
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize(("function", "call"), [("fsync", 1), ("rename", 2), ("rename", 3)])
def test_a_process_killed_while_saving_leaves_the_previous_checkpoint(path, monkeypatch, function, call):
    """Killed in the first file, or before a renaming: of a file (DCP), of the old or of the new checkpoint."""
    child = os.fork()
    if child == 0:
        left = iter(range(call - 1))
        owner = os if function == "fsync" else Path
        original = getattr(owner, function)

        def killed(*arguments):
            return original(*arguments) if next(left, None) is not None else os._exit(9)

        monkeypatch.setattr(owner, function, killed)
        try:
            write(path, Content({"epoch": 4}, {}, {}))
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert epoch_of(path) == 3 and checkpoint.exists(path)
    write(path, Content({"epoch": 5}, {}, {}))
    assert epoch_of(path) == 5
    assert list(path.parent.iterdir()) == [path]


def test_only_checkpoints_are_replaced(path):
    (path / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match=r"has other files, such as notes\.txt, and is not replaced"):
        write(path)
    (path / "notes.txt").unlink()
    link = path.with_name("link")
    link.symlink_to(path)
    write(link, Content({"epoch": 4}, {}, {}))
    assert link.is_symlink() and epoch_of(path) == 4


def test_mode_follows_the_umask(path):
    mask = os.umask(0o027)
    try:
        write(path)
    finally:
        os.umask(mask)
    assert path.stat().st_mode & 0o777 == 0o750
    assert {file.stat().st_mode & 0o777 for file in path.iterdir()} == {0o640}


def test_missing(tmp_path):
    with pytest.raises(CheckpointError, match=r"No such file.*b\.ckpt"):
        read(tmp_path / "b.ckpt", SingleProcess())
    with pytest.raises(CheckpointError, match="No such file"):
        write(tmp_path / "no" / "b.ckpt")


def change(path: Path, offset: int) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)


def test_damaged_files(path):
    data, metadata = path / "__0_0.distcp", path / ".metadata"
    for file in (data, metadata):
        whole = file.read_bytes()
        for length in (0, 10, 1000, len(whole) - 1):
            file.write_bytes(whole[:length])
            with pytest.raises(CheckpointError, match=r"a\.ckpt.* is not a checkpoint or is truncated"):
                read(path, SingleProcess())
        file.unlink()
        with pytest.raises(CheckpointError, match="is not a checkpoint or is truncated"):
            read(path, SingleProcess())
        file.write_bytes(whole)
    place = data.read_bytes().find(WEIGHTS["weight"].numpy().tobytes()) + 4003
    assert place > 4003
    change(data, place)
    with pytest.raises(CheckpointError, match=r"'network\.weight' in .* is damaged: the checksum"):
        read(path, SingleProcess())
    change(data, place)
    change(data, data.read_bytes().find(b"torchmpi_checkpoint") + 3)
    with pytest.raises(CheckpointError, match="damaged"):
        read(path, SingleProcess())


class Malicious:
    """An object whose pickle calls a function."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.path),)


def test_reading_runs_no_code_of_the_file(path, tmp_path):
    """Regression: the reader of torch.distributed.checkpoint unpickles the metadata."""
    made = tmp_path / "made by the file"
    for file in sorted(path.iterdir()):
        whole = file.read_bytes()
        file.write_bytes(pickle.dumps(Malicious(made)) + whole)
        with pytest.raises(CheckpointError, match=r"names posix\.mkdir|is not a checkpoint"):
            read(path, SingleProcess())
        file.write_bytes(whole)
    assert not made.exists()
    read(path, SingleProcess())


class GetattrPickler(pickle.Pickler):
    """Pickles enumerations as some releases of Python 3.11 do."""

    def reducer_override(self, value):
        return (getattr, (type(value), value.name)) if isinstance(value, enum.Enum) else NotImplemented


class Attribute:
    """Pickled as ``getattr(torch.Size, "mro")``."""

    def __reduce__(self):
        return getattr, (torch.Size, "mro")


def test_metadata_written_by_python_3_11(path):
    """Regression: checkpoints of Python 3.11.2 were refused, since their metadata names ``getattr``."""
    file, buffer = path / ".metadata", io.BytesIO()
    GetattrPickler(buffer).dump(pickle.loads(file.read_bytes()))
    assert b"getattr" in buffer.getvalue()
    file.write_bytes(buffer.getvalue())
    assert epoch_of(path) == 3
    file.write_bytes(pickle.dumps(Attribute()))
    with pytest.raises(CheckpointError, match=r"reads the attribute 'mro' of .*Size"):
        read(path, SingleProcess())


@alone
def test_other_files_of_torch(tmp_path):
    path = tmp_path / "old.ckpt"
    torch.save({"torchmpi_checkpoint": 1, "network": WEIGHTS}, path)  # the format of earlier versions
    for action in (read, lambda *_: write(path)):
        with pytest.raises(CheckpointError, match=r"is a file, but a checkpoint is a folder.*torch\.load\(.*old.ckpt"):
            action(path, SingleProcess())
    dcp.save({"network": WEIGHTS}, checkpoint_id=tmp_path / "dcp")
    with pytest.raises(CheckpointError, match="not of an engine"):
        read(tmp_path / "dcp", SingleProcess())


# --- asynchronous saving -----------------------------------------------------------------------------------


def test_the_state_is_copied(tmp_path):
    saver, weight = Saver(SingleProcess()), torch.zeros(100_000)
    for epoch in range(3):
        saver.save(tmp_path / "a", Content({"epoch": epoch}, {}, {"network": {"w": weight}}), asynchronous=True)
        weight += 1  # the next save waits for this one
    saver.wait()
    saved = read(tmp_path / "a", SingleProcess())
    assert saved.common["epoch"] == 2 and torch.equal(saved.trees["network"]["w"], torch.full((100_000,), 2.0))


@pytest.mark.parametrize("every", [1, 3])
def test_a_failure_in_the_thread_is_raised_by_train(tmp_path, monkeypatch, every):
    """The failure is raised after an update or by the next save, and at the end."""
    monkeypatch.setattr(os, "fsync", fail)
    engine = SGDEngine(progress=False)
    engine.checkpoint(tmp_path / "a", every=every, asynchronous=True)
    batches = [(torch.zeros(1, 1),) * 2] * 3
    with pytest.raises(CheckpointError, match="disk full"):
        engine.train(network=nn.Linear(1, 1), criterion=nn.MSELoss(), iterator=batches, lr=0.1)


# --- another number of ranks -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("done", "lengths", "size", "length", "expected"),
    [
        ((4, 4), (10, 10), 4, 5, 2),  # rows divided over the ranks
        ((4, 4), (10, 10), 1, 20, 8),
        ((3, 3), (8, 8), 5, 8, 3),  # every batch divided over the ranks
        ((2, 5), (2, 6), 1, 8, 7),  # uneven
        ((1, 1, 1), (3, 3, 3), 2, 4, 1),  # rounded down: no unprocessed batch is skipped
        ((4, 2), (None, None), 3, None, 2),
        ((0,), (0,), 2, 3, 0),
    ],
)
def test_position_on_another_number_of_ranks(done, lengths, size, length, expected):
    ranks = [{"batch": batch, "num_batches": num} for batch, num in zip(done, lengths, strict=True)]
    assert training_run.redivided_batch(ranks, size, length) == expected


def test_unreadable_state_is_refused_when_saving(tmp_path):
    own = {"kept": {"fine": {"x": [1, 2.0, "three", None, torch.zeros(1)]}, "mine": {"f": Path("x")}}}
    with pytest.raises(CheckpointError, match=r"state_dict\(\) of 'mine'"):
        write(tmp_path / "a.ckpt", Content({}, own, {}))
    with pytest.raises(CheckpointError, match=r"state_dict\(\) of 'network'"):
        write(tmp_path / "a.ckpt", Content({}, {}, {"network": {"_extra_state": Path("x")}}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.complex64])
def test_digest_depends_on_bits_shapes_and_types(dtype):
    zeros = torch.zeros(2, 3, dtype=dtype)
    changed = zeros.clone()
    changed[1, 2] = 1
    different = [zeros, changed, zeros.reshape(6), zeros[:, :0], [zeros], {"a": zeros}, None, 0, 0.0, "0"]
    assert len({digest(value) for value in different}) == len(different)
    assert digest(changed.t().contiguous().t()) == digest(changed)


@pytest.mark.parametrize("hook", ["on_sample", "on_forward", "on_backward"])
def test_not_in_the_middle_of_an_update(hook, tmp_path):
    engine = SGDEngine(progress=False)
    engine.on(hook)(lambda state: engine.save_checkpoint(tmp_path / "a.ckpt"))
    with pytest.raises(ArgumentError, match="in the middle of an update"):
        engine.train(network=nn.Linear(1, 1), criterion=nn.MSELoss(), iterator=[(torch.zeros(1, 1),) * 2], lr=0.1)
    with pytest.raises(ArgumentError, match="outside of train"):
        engine.save_checkpoint(tmp_path / "a.ckpt")
    with pytest.raises(ArgumentError, match="every=0"):
        engine.checkpoint(tmp_path / "a.ckpt", every=0)


def test_tensors_that_torch_does_not_view_as_bytes(tmp_path):
    """Regression: a single element with a stride, or a conjugate, could not be saved."""
    tensors = {"single": torch.arange(4.0)[::2][:1], "conjugate": torch.tensor([1 + 2j]).conj()}
    write(tmp_path / "a", Content({}, {}, {"network": tensors}))
    found = read(tmp_path / "a", SingleProcess()).trees["network"]
    assert {name: value.tolist() for name, value in found.items()} == {"single": [0.0], "conjugate": [1 - 2j]}
    assert digest(tensors["conjugate"]) == digest(tensors["conjugate"].resolve_conj())


def test_values_in_other_lists_have_other_digests():
    values = ([1, [2]], [[1, 2]], [[1], 2], [1, 2], [[[1]], 2], [[1, [2]]])
    assert len({digest(value) for value in values}) == len(values)


def test_a_checkpoint_that_cannot_be_put_into_place_leaves_the_one_before(path, monkeypatch):
    """Between the two renames no checkpoint has the name."""
    rename = Path.rename

    def fail(self: Path, target: Path) -> Path:
        if self.name.endswith(".new"):
            raise OSError("no")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(OSError, match="no"):
        checkpoint._replace(path, WEIGHTS, {}, [])
    assert epoch_of(path) == 3
    assert [file.name for file in path.parent.iterdir()] == [path.name]
