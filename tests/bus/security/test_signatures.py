"""A record is acted on only if a role that may write it has signed it, for this run and name."""

import random
import time
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from bus.errors import ConfigError, UnknownKeyError, UnsignedError
from bus.security import signatures
from bus.security.credentials import load_credentials
from bus.security.record_rules import RULES
from bus.security.role_keys import new_seed, public_key
from bus.security.signatures import MOST_AHEAD_NS, Signatures, sign_keys
from bus.server.secure_directory import SecureDirectory
from tests.bus.security.forgeries import By, forgeries

FORGED = 10_000


@pytest.fixture
def directory(tmp_path: Path) -> SecureDirectory:
    secure = SecureDirectory(tmp_path / "keys")
    secure.make(["mine", "other"], "nats://127.0.0.1:4222")
    return secure


@pytest.fixture
def by(directory: SecureDirectory) -> By:
    def signing(role: str, run: str = "mine", seen: Path | None = None) -> Signatures:
        path = directory.files(run).creds(role)
        return Signatures(load_credentials(path), path, seen)

    return signing


def test_record_is_read_as_its_writer_signed_it(by: By):
    sealed = by("storage").sealed("run", b"settings")
    for role in ("learner", "actor", "watcher", "judge", "storage"):
        assert by(role).opened("run", sealed) == b"settings"


@pytest.mark.parametrize("record", sorted(RULES))
def test_no_other_role_writes_a_record_than_those_of_its_rule(record: str, by: By):
    name, reading = record.replace("*", "x"), by("actor")
    for role in ("storage", "learner", "actor", "judge", "watcher", "operator"):
        sealed = by(role).sealed(name, b"content")
        if role in (*RULES[record].writers, "operator"):
            assert reading.opened(name, sealed) == b"content"
        else:
            with pytest.raises(UnsignedError, match=f"signed by {role}, which may not write it"):
                reading.opened(name, sealed)


def test_record_of_another_run_or_another_name_is_none(by: By):
    reading = by("actor")
    with pytest.raises(UnknownKeyError):
        reading.opened("run", by("storage", "other").sealed("run", b"settings"))
    with pytest.raises(UnsignedError, match="not of this record of run 'mine'"):
        reading.opened("heldout", by("storage").sealed("run", b"settings"))


def test_record_that_is_put_back_is_not_acted_on(by: By):
    writing, reading = by("learner"), by("actor")
    old, new = (writing.sealed("policy", content) for content in (b"version 1", b"version 2"))
    assert [reading.opened("policy", data) for data in (old, new, new)] == [
        b"version 1", b"version 2", b"version 2",
    ]  # fmt: skip
    with pytest.raises(UnsignedError, match="older than one that was seen before"):
        reading.opened("policy", old)


def test_request_is_acted_on_once(by: By):
    asked, serving = by("learner").sealed("rpc.resumed", b"from step 3"), by("storage")
    serving.opened("rpc.resumed", asked)
    with pytest.raises(UnsignedError, match="older"):
        serving.opened("rpc.resumed", asked)


def test_what_is_put_back_is_not_acted_on_after_a_restart_either(by: By, tmp_path: Path):
    learner, seen = by("learner"), tmp_path / "seen.json"
    old, new = (learner.sealed("policy", content) for content in (b"version 1", b"version 2"))
    asked, other = learner.sealed("rpc.resumed", b"from step 3"), learner.sealed("rpc.batch", b"step 4")
    first, beside = by("storage", seen=seen), by("storage", seen=seen)
    for name, data in (("policy", old), ("policy", new), ("rpc.resumed", asked)):
        first.opened(name, data)
    for name, data in (("policy", old), ("rpc.batch", other)):
        beside.opened(name, data)
    first.seen.save()
    beside.seen.save()  # which has seen less of one record, and more of another
    again = by("storage", seen=seen)
    for name, data in (("policy", old), ("rpc.resumed", asked), ("rpc.batch", other)):
        with pytest.raises(
            UnsignedError, match=r"seen before \(.*seen.json .* by [\d.e-]+ s of their signers"
        ):
            again.opened(name, data)
    assert again.opened("policy", new) == b"version 2"
    assert again.opened("policy", learner.sealed("policy", b"version 3")) == b"version 3"
    assert again.opened("rpc.resumed", learner.sealed("rpc.resumed", b"from step 3")) == b"from step 3"


def test_a_file_of_what_was_seen_that_is_garbled_or_has_no_directory_ends_nothing(by: By, tmp_path: Path):
    seen, sealed = tmp_path / "run" / "seen.json", by("learner").sealed("policy", b"version 1")
    reading = by("actor", seen=seen)
    assert reading.opened("policy", sealed) == b"version 1"
    reading.seen.save()
    assert not seen.parent.exists()  # it would look like a run that has been started here
    seen.parent.mkdir()
    said = ('"words"', "Infinity", "[" * 10**5)
    words = [f'{{"policy": {{"sequence": {one}, "digest": "", "key": ""}}}}' for one in said]
    for garbled in ("", "[]", '{"policy": 1}', '{"policy": {"sequence": 1}}', *words):
        seen.write_text(garbled)
        assert by("actor", seen=seen).opened("policy", sealed) == b"version 1"
    reading.seen.save()
    assert by("actor", seen=seen).seen.newest == reading.seen.newest


def test_a_disk_that_refuses_what_was_seen_is_named_once_until_it_takes_it(by: By, tmp_path: Path):
    seen = tmp_path / "seen.json"
    reading, learner = by("actor", seen=seen), by("learner")
    seen.mkdir()
    with capture_logs() as said:
        for content in (b"version 1", b"version 2"):
            reading.opened("policy", learner.sealed("policy", content))
            reading.seen.save()
    refused = ["seen_records_not_read", "seen_records_not_saved"]
    assert [line["event"] for line in said] == refused
    assert [path.name for path in tmp_path.glob(".seen*")] == []
    seen.rmdir()
    reading.seen.save()
    assert by("actor", seen=seen).seen.newest == reading.seen.newest
    unusable = by("actor", seen=tmp_path / ("x" * 300) / "seen.json")  # as a mount that has gone away
    unusable.opened("policy", learner.sealed("policy", b"version 3"))
    unusable.seen.save()


def test_what_a_revoked_key_signed_is_forgotten_by_the_file_too(
    by: By, directory: SecureDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    seen, thief = tmp_path / "seen.json", by("learner")
    reading, now = by("actor", seen=seen), time.time_ns()
    with monkeypatch.context() as ahead:
        ahead.setattr(signatures.time, "time_ns", lambda: now + MOST_AHEAD_NS // 2)
        reading.opened("policy", thief.sealed("policy", b"of the thief"))
    reading.seen.save()
    directory.files("mine").revoke("learner")
    assert by("actor", seen=seen).seen.newest == {}
    reading.adopt(by("operator").signed_keys)
    learner = by("learner")
    old, new = (learner.sealed("policy", content) for content in (b"version 1", b"version 2"))
    for one in (old, new):
        reading.opened("policy", one)
    reading.seen.save()
    with pytest.raises(UnsignedError, match="older"):
        by("actor", seen=seen).opened("policy", old)


def test_clocks_of_all_hosts_that_were_set_back_by_days_block_nobody_who_starts_again(
    by: By, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    now, learners, actors = time.time_ns(), tmp_path / "learner.json", tmp_path / "actors.json"
    with monkeypatch.context() as ahead:
        ahead.setattr(signatures.time, "time_ns", lambda: now + 3 * MOST_AHEAD_NS)
        learner, actor = by("learner", seen=learners), by("actor", seen=actors)
        sealed = learner.sealed("policy", b"version 1")
        for one in (learner, actor):
            one.opened("policy", sealed)
            one.seen.save()
    again = by("learner", seen=learners).sealed("policy", b"version 2")
    assert by("actor", seen=actors).opened("policy", again) == b"version 2"


def test_a_signer_that_read_nothing_of_its_own_signs_later_requests_with_its_clock_set_back(
    by: By, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    now, storage, seen = time.time_ns(), by("storage"), tmp_path / "seen.json"
    first = by("learner", seen=seen)
    storage.opened("rpc.batch", first.sealed("rpc.batch", b"step 1"))
    first.seen.save()
    monkeypatch.setattr(signatures.time, "time_ns", lambda: now - 3600 * 10**9)
    again = by("learner", seen=seen).sealed("rpc.batch", b"step 1")
    assert storage.opened("rpc.batch", again) == b"step 1"


def test_a_signer_that_starts_again_with_its_clock_set_back_writes_newer_records(
    by: By, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    now, reading, seen = time.time_ns(), by("actor"), tmp_path / "seen.json"
    first = by("learner", seen=seen)
    sealed = first.sealed("policy", b"version 1")
    for one in (first, reading):
        one.opened("policy", sealed)
    first.seen.save()
    monkeypatch.setattr(signatures.time, "time_ns", lambda: now - 3600 * 10**9)
    again = by("learner", seen=seen).sealed("policy", b"version 2")
    assert reading.opened("policy", again) == b"version 2"


def test_successor_on_a_host_whose_clock_is_behind_writes_newer_records(
    by: By, monkeypatch: pytest.MonkeyPatch
):
    first, reading, now = by("learner"), by("actor"), time.time_ns()
    late = first.sealed("policy", b"of the first")
    reading.opened("policy", late)
    monkeypatch.setattr(signatures.time, "time_ns", lambda: now - 3600 * 10**9)
    successor = by("learner")
    successor.opened("policy", late)  # it reads what the one before wrote
    assert reading.opened("policy", successor.sealed("policy", b"of the successor")) == b"of the successor"
    monkeypatch.setattr(signatures.time, "time_ns", lambda: now + 10**9)
    unread = first.sealed("policy", b"the last of the first")  # the successor never sees it
    monkeypatch.setattr(signatures.time, "time_ns", lambda: now - 3590 * 10**9)
    first_or_later = [
        reading.opened("policy", each) for each in (unread, successor.sealed("policy", b"later"))
    ]
    assert first_or_later[-1] == b"later"


def test_record_that_is_signed_for_another_day_is_set_aside(by: By, monkeypatch: pytest.MonkeyPatch):
    """Its signer would otherwise keep all that the role signs later from being taken."""
    now = time.time_ns()
    monkeypatch.setattr(signatures.time, "time_ns", lambda: now + 2 * MOST_AHEAD_NS)
    ahead = by("learner").sealed("policy", b"of the day after tomorrow")
    monkeypatch.setattr(signatures.time, "time_ns", lambda: now)
    with pytest.raises(UnsignedError, match=r"signed for 2\.0 days ahead: set the clocks"):
        by("actor").opened("policy", ahead)


@pytest.mark.slow
def test_ten_thousand_forged_records_are_set_aside(by: By):
    writing, reading = by("learner"), by("actor")
    old = writing.sealed("policy", b"version 1")
    newest = writing.sealed("policy", b"version 2")
    reading.opened("policy", newest)
    draw = random.Random(7)
    forge = forgeries(newest, old, by)
    taken = []
    for n in range(FORGED):
        data = forge[n % len(forge)](draw)
        try:
            content = reading.opened("policy", data)
        except UnsignedError:
            continue
        if data != newest and content != b"version 2":
            taken.append(data)
    assert taken == []
    assert reading.opened("policy", writing.sealed("policy", b"version 3")) == b"version 3"


# --- keys of roles ---


def test_role_has_both_keys_until_the_older_one_is_revoked(by: By, directory: SecureDirectory):
    files, old = directory.files("mine"), by("learner")
    reading = by("actor")
    before = files.keys.of("learner")
    files.rotate("learner")
    new = by("learner")
    assert len(files.keys.of("learner")) == 2
    assert reading.adopt(by("storage").signed_keys)
    for signing in (old, new):
        assert reading.opened("policy", signing.sealed("policy", b"x")) == b"x"
    files.revoke("learner")
    assert files.keys.of("learner") == (new._key,)
    assert reading.adopt(by("storage").signed_keys)
    with pytest.raises(UnknownKeyError):
        reading.opened("policy", old.sealed("policy", b"y"))
    assert before == (old._key,)


def test_role_with_one_key_gets_another_when_it_is_revoked(directory: SecureDirectory):
    files = directory.files("mine")
    seed = load_credentials(files.creds("judge")).seed
    files.revoke("judge")
    assert load_credentials(files.creds("judge")).seed != seed
    assert files.keys.of("judge") == (public_key(load_credentials(files.creds("judge")).seed),)


def test_what_a_revoked_key_signed_ahead_of_time_does_not_hold_up_its_role(
    by: By, directory: SecureDirectory, monkeypatch: pytest.MonkeyPatch
):
    stolen, reading, now = by("learner"), by("actor"), time.time_ns()
    with monkeypatch.context() as later:
        later.setattr(signatures.time, "time_ns", lambda: now + MOST_AHEAD_NS // 2)
        reading.opened("policy", stolen.sealed("policy", b"forged"))
    directory.files("mine").revoke("learner")
    assert reading.adopt(by("storage").signed_keys)
    assert reading.opened("policy", by("learner").sealed("policy", b"genuine")) == b"genuine"


def test_older_or_foreign_lists_of_keys_are_not_taken_over(by: By, directory: SecureDirectory):
    reading, files = by("actor"), directory.files("mine")
    older = reading.signed_keys
    files.revoke("learner")
    newest = by("storage").signed_keys
    assert reading.adopt(newest)
    assert not reading.adopt(older)
    keys = files.keys.replaced("storage", [public_key(new_seed())])
    assert not reading.adopt(sign_keys(new_seed(), "mine", keys))
    assert not reading.adopt(
        sign_keys((files.creds("storage").parent / "run.key").read_text(), "other", keys)
    )
    assert not reading.adopt(newest[:-1])
    assert not reading.adopt(b"")
    assert reading.signed_keys == newest


def test_credentials_that_were_revoked_do_not_come_back_with_their_file(directory: SecureDirectory):
    path = directory.files("mine").creds("judge")
    old = path.read_bytes()
    directory.files("mine").revoke("judge")
    path.write_bytes(old)
    with pytest.raises(ConfigError, match=r"the key in .*judge\.creds was revoked: remove the file"):
        directory.make([], "nats://127.0.0.1:4222")
    path.unlink()
    directory.make([], "nats://127.0.0.1:4222")
    assert load_credentials(path).seed not in old.decode()


def test_newer_file_is_read_while_the_process_goes_on(by: By, directory: SecureDirectory):
    files, signing = directory.files("mine"), by("learner")
    before = signing.renewed_seed()
    files.rotate("learner")
    after = signing.renewed_seed()
    assert before != after == load_credentials(files.creds("learner")).seed
    files.creds("learner").write_bytes(files.creds("judge").read_bytes())  # somebody copied the wrong file
    assert signing.renewed_seed() == after
