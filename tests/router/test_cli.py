"""The command line: what it prints, which status it ends with, and that it ends."""

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import jsonschema
import pytest
import yaml

from cartridge_proto.stores import LocalStore
from cartridge_router.cli import run
from cartridge_router.settings import ListedTenant, TenantSettings
from cartridge_router.tenants import key_hash, read_keys_file
from tests.router.stored_cartridges import digest_of, flip_a_bit, put_cartridge

Capture = pytest.CaptureFixture[str]


def test_list_shows_each_alias(store: LocalStore, capsys: Capture) -> None:
    """A line for people, and rows with everything for machines."""
    manifest = put_cartridge(store, num_tokens=7)
    assert run(["cartridge", "list", "--store", str(store.root)]) == 0
    line = capsys.readouterr().out
    for part in ("harbour-rules@1", "7 tokens", digest_of(manifest)):
        assert part in line
    assert run(["cartridge", "list", "--store", str(store.root), "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row == {
        "id": "harbour-rules@1",
        "digest": digest_of(manifest),
        "kind": "prefill",
        "num_tokens": 7,
        "size_bytes": manifest.payload_bytes,
        "title": manifest.card.title,
    }


def test_a_damaged_manifest_does_not_hide_the_rest(store: LocalStore, capsys: Capture) -> None:
    """The good ones are listed, the damaged one is named, and the status says so."""
    put_cartridge(store, name="good")
    damaged = put_cartridge(store, name="damaged")
    store.manifest_path(digest_of(damaged)).write_text("{}")
    assert run(["cartridge", "list", "--store", str(store.root)]) == 1
    said = capsys.readouterr()
    assert "good@1" in said.out
    assert "damaged@1" not in said.out
    assert said.err.startswith("error: damaged@1: manifest ")


def test_show_prints_manifests(store: LocalStore, capsys: Capture) -> None:
    """By alias or digest; tensors are counted for people and listed for machines."""
    manifest = put_cartridge(store)
    assert run(["cartridge", "show", "--store", str(store.root), "harbour-rules@1"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["digest"], shown["tensors"]) == (digest_of(manifest), "4 tensors")
    arguments = ["cartridge", "show", "--store", str(store.root), "--json", digest_of(manifest)]
    assert run(arguments) == 0
    assert sorted(json.loads(capsys.readouterr().out)["tensors"]) == sorted(manifest.tensors)


def test_verify_tells_good_from_corrupt(store: LocalStore, capsys: Capture) -> None:
    """One flipped bit is status 1 and named; the good one is still checked and ok."""
    put_cartridge(store)
    arguments = ["cartridge", "verify", "--store", str(store.root), "harbour-rules@1"]
    assert run(arguments) == 0
    assert capsys.readouterr().out == "harbour-rules@1: ok\n"
    flip_a_bit(store, put_cartridge(store, "broken", seed=1))
    assert run([*arguments, "broken@1", "absent@1", "--json"]) == 1
    good, broken, absent = json.loads(capsys.readouterr().out)
    assert (good["ok"], good["problem"]) == (True, None)
    assert (broken["id"], broken["ok"]) == ("broken@1", False)
    assert "hash to" in broken["problem"]
    assert absent["ok"] is False
    assert run([*arguments, "broken@1"]) == 1
    assert "broken@1: blob sha256:" in capsys.readouterr().out


def test_a_damaged_manifest_is_status_1(store: LocalStore, capsys: Capture) -> None:
    """Without a traceback."""
    path = store.manifest_path(digest_of(put_cartridge(store)))
    path.write_bytes(path.read_bytes() + b" ")
    for command in (["list"], ["show", "harbour-rules@1"], ["show", "absent@1"]):
        assert run(["cartridge", command[0], "--store", str(store.root), *command[1:]]) == 1
        assert capsys.readouterr().err.startswith("error: ")


def test_copy_brings_artifacts_to_another_store(
    store: LocalStore, tmp_path: Path, redis_tcp_url: str, capsys: Capture
) -> None:
    """From a folder to a Redis and on to a folder; progress on stderr, what happened on stdout."""
    manifest = put_cartridge(store)
    away, back = f"{redis_tcp_url}/library", str(tmp_path / "back")
    copy = ["cartridge", "copy", "--json", "harbour-rules@1"]
    assert run([*copy, "--from", str(store.root), "--to", away]) == 0
    said = capsys.readouterr()
    (row,) = json.loads(said.out)
    assert row == {
        "id": "harbour-rules@1",
        "digest": digest_of(manifest),
        "ok": True,
        "problem": None,
        "copied_bytes": manifest.payload_bytes,
        "present_bytes": 0,
    }
    assert "harbour-rules@1: 0.0 of 0.0 MiB" in said.err
    assert run(["cartridge", "verify", "--store", away, "harbour-rules@1"]) == 0
    assert run(["cartridge", "list", "--store", away]) == 0
    assert run(["cartridge", "show", "--store", away, "harbour-rules@1"]) == 0
    capsys.readouterr()
    assert run(["cartridge", "copy", "--from", away, "--to", back, digest_of(manifest)]) == 0
    assert capsys.readouterr().out == f"{digest_of(manifest)}: {digest_of(manifest)} copied\n"
    assert LocalStore(tmp_path / "back").verify(digest_of(manifest)) == manifest


def test_an_encoded_cartridge_is_shown_verified_and_copied(
    store: LocalStore, tmp_path: Path, capsys: Capture
) -> None:
    """Sizes are those of the stored bytes; a flipped bit is found as in any other."""
    manifest = put_cartridge(store, is_encoded=True)
    stored_bytes = manifest.payload_bytes
    assert stored_bytes < manifest.decoded_bytes
    target = str(tmp_path / "target")
    copy = ["cartridge", "copy", "--from", str(store.root), "--to", target, "--json"]
    assert run([*copy, "harbour-rules@1"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["copied_bytes"] == stored_bytes
    for place in (str(store.root), target):
        assert run(["cartridge", "verify", "--store", place, "harbour-rules@1"]) == 0
        assert run(["cartridge", "list", "--store", place, "--json"]) == 0
        said = capsys.readouterr().out.removeprefix("harbour-rules@1: ok\n")
        assert json.loads(said)[0]["size_bytes"] == stored_bytes
    assert run(["cartridge", "show", "--store", target, "harbour-rules@1"]) == 0
    (blob,) = json.loads(capsys.readouterr().out)["payload"]
    assert blob["encoding"]["codec"] == "shuffle-zstd"
    flip_a_bit(store, manifest)
    assert run(["cartridge", "verify", "--store", str(store.root), "harbour-rules@1"]) == 1
    assert "hash to" in capsys.readouterr().out


def test_verify_says_what_to_install(
    store: LocalStore, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the codec's package an encoded artifact is a problem with a way out."""
    put_cartridge(store, is_encoded=True)
    monkeypatch.setitem(sys.modules, "zstandard", None)
    assert run(["cartridge", "verify", "--store", str(store.root), "harbour-rules@1"]) == 1
    assert "pip install 'cartridge-router[codecs]'" in capsys.readouterr().out


def test_copy_goes_on_after_a_problem(store: LocalStore, tmp_path: Path, capsys: Capture) -> None:
    """What does not verify is not copied, the rest is; the status says so."""
    put_cartridge(store)
    flip_a_bit(store, put_cartridge(store, "broken", seed=1))
    command = ["cartridge", "copy", "--from", str(store.root), "--to", str(tmp_path / "target")]
    assert run([*command, "absent@1", "broken@1", "harbour-rules@1"]) == 1
    absent, broken, good = capsys.readouterr().out.splitlines()
    assert absent == "absent@1: not in the store: absent@1"
    assert "broken@1: blob sha256:" in broken
    assert good.endswith("copied")
    assert list(LocalStore(tmp_path / "target").aliases()) == ["harbour-rules@1"]


def test_an_unknown_kind_of_store_is_status_1(capsys: Capture) -> None:
    """With what is allowed."""
    assert run(["cartridge", "list", "--store", "ftp://host/store"]) == 1
    assert "allowed are a folder, file:///folder, s3://bucket/prefix" in capsys.readouterr().err


def test_config_check_lists_every_problem(tmp_path: Path, capsys: Capture) -> None:
    """A good file is status 0, a bad one 2 with a line for each problem."""
    file = tmp_path / "settings.yaml"
    file.write_text("port: 1234\n")
    assert run(["config", "check", str(file)]) == 0
    assert capsys.readouterr().out == f"{file}: ok\n"
    file.write_text("port: -1\nprot: 1\n")
    assert run(["config", "check", str(file)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert all(line.startswith("error: ") for line in lines)


def test_config_schema_is_a_json_schema(capsys: Capture) -> None:
    """What a chart validates its values with."""
    assert run(["config", "schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    jsonschema.Draft202012Validator.check_schema(schema)


def test_serve_with_bad_settings_does_not_start(capsys: Capture) -> None:
    """Status 2 and the reason."""
    assert run(["serve", "--replicas", "nonsense", "--port", "0"]) == 2
    assert "nonsense" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["cartridge"], ["serve", "--port", "x"], ["nothing"]])
def test_wrong_arguments_are_status_2(arguments: list[str], capsys: Capture) -> None:
    """The usage is printed, as for every command."""
    with pytest.raises(SystemExit) as info:
        run(arguments)
    assert info.value.code == 2
    assert "usage: cartridge-router" in capsys.readouterr().err


def test_commands_of_other_packages_are_found(capsys: Capture) -> None:
    """`cartridge build` comes through the entry-point group, and its help needs no torch."""
    with pytest.raises(SystemExit) as info:
        run(["cartridge", "build", "--help"])
    assert info.value.code == 0
    assert "--text" in capsys.readouterr().out


def test_a_command_whose_packages_are_absent_says_what_to_install(tmp_path: Path) -> None:
    """Without transformers `cartridge build` is status 3 and a pip line, not a traceback."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\nsys.modules.update({'torch': None, 'transformers': None})\n"
    )
    text = tmp_path / "text"
    text.write_text("A document.")
    command = [sys.executable, "-m", "cartridge_router", "cartridge", "build", "--model", "."]
    command += ["--text", str(text), "--name", "n", "--store", str(tmp_path)]
    done = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 3, done.stderr
    assert "pip install 'cartridge-router[" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_serve_runs_until_it_is_told_to_stop(store: LocalStore, number: signal.Signals) -> None:
    """The command says where it listens, answers, and ends with status 0."""
    store.root.mkdir()
    command = [sys.executable, "-m", "cartridge_router", "serve", "--port", "0"]
    command += ["--store", str(store.root)]
    quick = {**os.environ, "CARTRIDGE_ROUTER_DRAIN__SETTLE_S": "0"}
    with subprocess.Popen(command, env=quick, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            ready = next(line for line in process.stderr if "ready http" in line)
            match = re.search(r"http://127\.0\.0\.1:\d+", ready)
            assert match is not None
            with urllib.request.urlopen(f"{match.group()}/health", timeout=10) as answer:  # noqa: S310
                assert json.load(answer) == {"status": "ok"}
            process.send_signal(number)
            assert process.wait(timeout=20) == 0
            assert "Traceback" not in process.stderr.read()
        finally:
            process.kill()


# --- tenants -------------------------------------------------------------------------------------
def test_a_new_key_is_printed_once_with_its_entry(capsys: Capture) -> None:
    """On stdout for scripts; the entry holds the hash and not the key."""
    assert run(["tenants", "new-key", "acme", "--label", 'of "Ada"\nand Bob']) == 0
    key, entry = capsys.readouterr().out.splitlines()
    assert key not in entry
    assert yaml.safe_load(entry) == [
        {"sha256": key_hash(key), "tenant": "acme", "label": 'of "Ada"\nand Bob'}
    ]


def test_new_keys_are_put_into_a_file(tmp_path: Path, capsys: Capture) -> None:
    """It is made, readable by its owner only, and keeps what people wrote into it."""
    file, settings = tmp_path / "keys.yaml", TenantSettings()
    assert run(["tenants", "new-key", "acme", "--file", str(file)]) == 0
    first = capsys.readouterr().out.strip()
    assert file.stat().st_mode & 0o777 == 0o600
    file.write_text("# ours\n" + file.read_text().rstrip("\n"))
    file.chmod(0o640)
    assert run(["tenants", "new-key", "acme", "--file", str(file)]) == 0
    second = capsys.readouterr().out.strip()
    assert [key.sha256 for key in read_keys_file(file, settings).keys] == [
        key_hash(first),
        key_hash(second),
    ]
    assert file.read_text().startswith("# ours\n")
    assert file.stat().st_mode & 0o777 == 0o640
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("text", ["", "tenants: {acme: {}}", "# nothing yet\n"])
def test_a_file_without_keys_gets_its_first(tmp_path: Path, capsys: Capture, text: str) -> None:
    """Whether it lists the tenant or not, which is said."""
    file = tmp_path / "keys.yaml"
    file.write_text(text)
    assert run(["tenants", "new-key", "acme", "--file", str(file)]) == 0
    said = capsys.readouterr()
    assert ("not listed" in said.err) is ("acme" not in text)
    settings = TenantSettings(listed={} if "acme" in text else {"acme": ListedTenant()})
    assert len(read_keys_file(file, settings).keys) == 1


@pytest.mark.parametrize(
    "text", ["keys: []\n", "keys: []\ntenants:\n  acme: {}\n", "keys: [", "[1]", "other: 1"]
)
def test_a_file_that_cannot_be_appended_to_stays_as_it_is(
    tmp_path: Path, capsys: Capture, text: str
) -> None:
    """The command fails, and gives out no key that nobody would know."""
    file = tmp_path / "keys.yaml"
    file.write_text(text)
    assert run(["tenants", "new-key", "acme", "--file", str(file)]) == 2
    said = capsys.readouterr()
    assert (said.out, file.read_text()) == ("", text)
    assert said.err.startswith(f"error: {file}: ")
    assert list(tmp_path.iterdir()) == [file]


def test_a_key_is_for_a_name_that_a_tenant_can_have(capsys: Capture) -> None:
    """Others are an error, before a key is made."""
    assert run(["tenants", "new-key", "a b"]) == 2
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", "error: 'a b': not a name that a tenant can have\n")


def test_config_check_reads_the_keys_file(tmp_path: Path, capsys: Capture) -> None:
    """Its problems are problems of the settings."""
    keys, file = tmp_path / "keys.yaml", tmp_path / "settings.yaml"
    file.write_text(f"tenants: {{keys_file: {keys}}}\n")
    assert run(["config", "check", str(file)]) == 2
    assert capsys.readouterr().err == f"error: {keys}: No such file or directory\n"
    keys.write_text("tenants: {acme: {}}\n")
    assert run(["config", "check", str(file)]) == 0
