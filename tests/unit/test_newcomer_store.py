"""To new ranks: entries that somebody else has written into the store of the launcher are refused."""

import json

import pytest
from torch.distributed import HashStore, PrefixStore

from torchmpi.errors import LaunchError
from torchmpi.launch.launcherless.newcomer_store import NewcomerStore, Offer, joined

KEY = b"key of the job" * 4


def test_only_entries_of_the_job_count(monkeypatch):
    monkeypatch.setenv("TORCHMPI_RESPAWNS", "2")
    shared = HashStore()
    store, stranger = NewcomerStore(shared, KEY), NewcomerStore(shared, KEY[::-1])
    assert store.first_offer(4, ()) is None and not store.has_joined(4)
    offer = Offer(5, ["place"], "nonce")
    store.write("newcomer 5", offer)
    store.write(joined(5), True)
    assert store.first_offer(4, ()) == offer and store.first_offer(4, {5}) is None
    assert store.has_joined(5) and not store.has_joined(4)
    stranger.write(joined(5), True)
    stranger.write("newcomer 5", offer)
    assert not store.has_joined(5)
    with pytest.raises(LaunchError, match=r"'newcomer 5' .* not signed with the key of this job"):
        store.first_offer(4, ())


@pytest.mark.parametrize("entry", ("", "{", "1", "[]", "[1, 2, 3]", json.dumps(["true", None])))
def test_an_entry_of_another_form_is_refused(entry):
    """Regression: the thread that looks for new ranks ended without a message."""
    shared = HashStore()
    store = NewcomerStore(shared, KEY)
    PrefixStore("torchmpi respawn", shared).set(joined(4), entry)
    with pytest.raises(LaunchError, match="not of this job"):
        store.read(joined(4))
    assert not store.has_joined(4)
