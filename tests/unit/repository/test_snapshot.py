import os
from pathlib import Path

import pytest
from tritonclient.grpc import model_config_pb2

from naiad.errors import InvalidArgument
from naiad.repository.snapshot import Snapshot, model_names, scan, versions_for


def write(path: Path, text: str = "x") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def model(repository: Path, name: str, *versions: str) -> Path:
    write(repository / name / "config.pbtxt", f'name: "{name}"')
    for version in versions:
        write(repository / name / version / "model.py")
    return repository / name


def test_models_and_their_versions(tmp_path):
    model(tmp_path, "b", "1", "10", "2")
    model(tmp_path, "a", "1")
    write(tmp_path / "README.md")
    write(tmp_path / ".git" / "config")
    snapshot = scan([tmp_path])
    assert list(snapshot.models) == ["a", "b"]
    found = snapshot.models["b"]
    assert found.directory == tmp_path / "b"
    assert found.repository == str(tmp_path)
    assert list(found.versions) == [1, 2, 10]
    assert found.versions[10].directory == tmp_path / "b" / "10"
    assert snapshot.failures == {}
    assert snapshot.duplicates == {}


@pytest.mark.parametrize(
    ("folder", "versions", "note"),
    [
        ("0", [0], None),
        ("7", [7], None),
        ("configs", [], None),
        ("warmup", [], None),
        ("initial_state", [], None),
        (".cache", [], None),
        ("__pycache__", [], None),
        ("01", [], "ignore version directory '01' of model 'm' which has leading zeros"),
        ("00", [], "ignore version directory '00' of model 'm' which has leading zeros"),
        ("1abc", [], "ignore version directory '1abc' of model 'm' which is not a number"),
        ("-1", [], "ignore version directory '-1' of model 'm' which is not a number"),
        ("lib", [], "ignore version directory 'lib' of model 'm' which is not a number"),
        ("9" * 20, [], f"ignore version directory '{'9' * 20}' of model 'm' which is too large a number"),
    ],
)
def test_which_folders_are_versions(tmp_path, folder, versions, note):
    model(tmp_path, "m", folder)
    found = scan([tmp_path]).models["m"]
    assert list(found.versions) == versions
    assert list(found.notes) == ([note] if note else [])


@pytest.mark.parametrize("name", ["Config.pbtxt", "config.pbtx", "config.pbtxt.txt", "config.txt", "config.prototxt"])
def test_a_configuration_with_another_name_is_noted(tmp_path, name):
    folder = model(tmp_path, "m", "1")
    write(folder / name)
    write(folder / "config.json")
    assert scan([tmp_path]).models["m"].notes == ()
    (folder / "config.pbtxt").unlink()
    [note] = scan([tmp_path]).models["m"].notes
    assert note == f"model 'm' has a '{name}', which nobody reads: it must be named config.pbtxt"


def test_a_file_with_a_number_as_its_name_is_no_version(tmp_path):
    write(tmp_path / "m" / "1")
    assert scan([tmp_path]).models["m"].versions == {}


def test_an_empty_version_folder_counts(tmp_path):
    (tmp_path / "ensemble" / "1").mkdir(parents=True)
    assert list(scan([tmp_path]).models["ensemble"].versions) == [1]


def test_a_name_in_two_repositories_is_not_served(tmp_path):
    places = (model(tmp_path / "x", "m", "1"), model(tmp_path / "y", "m", "1"))
    model(tmp_path / "y", "other", "1")
    snapshot = scan([tmp_path / "x", tmp_path / "y"])
    assert list(snapshot.models) == ["other"]
    assert snapshot.duplicates == {"m": places}


def test_a_repository_named_twice_is_one(tmp_path):
    model(tmp_path, "m", "1")
    assert list(scan([tmp_path, str(tmp_path)]).models) == ["m"]


def test_a_repository_that_is_not_there_does_not_hide_the_others(tmp_path):
    model(tmp_path / "x", "m", "1")
    missing = tmp_path / "missing"
    file = write(tmp_path / "file")
    snapshot = scan([missing, file, tmp_path / "x"])
    assert list(snapshot.models) == ["m"]
    assert snapshot.failures == {
        str(missing): f"there is no folder '{missing}'",
        str(file): f"cannot open folder '{file}': Not a directory",
    }


def test_where_a_relative_path_leads_is_said(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert scan(["models"]).failures == {"models": f"there is no folder '{tmp_path}/models'"}


def test_repositories_that_look_like_a_mistake(tmp_path):
    folder = model(tmp_path / "x", "m", "1")
    write(folder / "config.pbtxt")
    (tmp_path / "empty").mkdir()
    assert scan([tmp_path / "x"]).notes == ()
    assert scan([tmp_path / "empty"]).notes == (f"there are no models in model repository '{tmp_path}/empty'",)
    assert scan([tmp_path / "empty"], only=["m"]).notes == ()
    [note] = scan([folder]).notes
    assert note == f"'{folder}' is the folder of a model: --model-repository is the folder above it"


def test_a_folder_whose_name_is_not_utf_8_is_no_model(tmp_path):
    model(tmp_path, "m", "1")
    (tmp_path / os.fsdecode(b"m\xff") / "1").mkdir(parents=True)
    snapshot = scan([tmp_path])
    assert list(snapshot.models) == ["m"]
    assert snapshot.notes == (f"ignore folder 'm\\udcff' of model repository '{tmp_path}' whose name is not UTF-8",)
    assert model_names([tmp_path]) == ({"m": 1}, frozenset())


def test_folders_that_others_put_into_a_repository(tmp_path):
    for name in ("lost+found", "__pycache__", ".git", "m"):
        model(tmp_path, name, "1")
    assert list(scan([tmp_path]).models) == ["m"]


def test_only_some_models(tmp_path):
    for name in "abc":
        model(tmp_path, name, "1")
    assert list(scan([tmp_path], only=["a", "c", "nope"]).models) == ["a", "c"]
    assert scan([tmp_path / "missing"], only=["a"]).failures != {}


def test_names_and_in_how_many_repositories_they_are(tmp_path):
    model(tmp_path / "x", "m", "1")
    model(tmp_path / "y", "m", "1")
    model(tmp_path / "y", "other")
    missing = str(tmp_path / "missing")
    assert model_names([tmp_path / "x", tmp_path / "y", tmp_path / "y", missing]) == ({"m": 2, "other": 1}, {missing})


def changed(tmp_path: Path, change) -> set[str]:
    """In which fingerprints a change of model `m` shows: of its configurations, of its other files, of version 1."""
    before = scan([tmp_path]).models["m"]
    assert scan([tmp_path]).models["m"] == before
    change()
    after = scan([tmp_path]).models["m"]
    differs = {
        "config": after.config_fingerprint != before.config_fingerprint,
        "files": after.fingerprint != before.fingerprint,
        "version": after.versions[1].fingerprint != before.versions[1].fingerprint,
    }
    return {part for part, is_different in differs.items() if is_different}


def touch(path: Path) -> None:
    status = path.stat()
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1_000_000))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda m: None, set()),
        (lambda m: touch(m / "config.pbtxt"), {"config"}),
        (lambda m: write(m / "labels.txt"), {"files"}),
        (lambda m: write(m / "configs" / "h100.pbtxt"), {"config"}),
        (lambda m: write(m / "lib" / "deep" / "x.py"), {"files"}),
        (lambda m: write(m / "2" / "model.py"), set()),
        (lambda m: touch(m / "1" / "model.py"), {"version"}),
        (lambda m: write(m / "1" / "deep" / "weights"), {"version"}),
        (lambda m: (m / "1" / "model.py").unlink(), {"version"}),
        (lambda m: (m / "1" / "model.py").rename(m / "1" / "other.py"), {"version"}),
        (lambda m: write(m / "1" / "__pycache__" / "model.pyc"), set()),
    ],
)
def test_what_changes_which_fingerprint(tmp_path, change, expected):
    folder = model(tmp_path, "m", "1")
    assert changed(tmp_path, lambda: change(folder)) == expected


def test_a_file_that_keeps_its_time_but_not_its_size_is_changed(tmp_path):
    file = model(tmp_path, "m", "1") / "1" / "model.py"
    times = (file.stat().st_atime_ns, file.stat().st_mtime_ns)

    def append():
        file.write_text("longer")
        os.utime(file, ns=times)

    assert changed(tmp_path, append) == {"version"}


def test_links_are_followed(tmp_path):
    model(tmp_path / "store", "m", "1")
    (tmp_path / "repository").mkdir()
    (tmp_path / "repository" / "m").symlink_to(tmp_path / "store" / "m")
    before = scan([tmp_path / "repository"]).models["m"]
    touch(tmp_path / "store" / "m" / "1" / "model.py")
    assert scan([tmp_path / "repository"]).models["m"].versions[1] != before.versions[1]


def test_links_in_a_circle_end(tmp_path):
    folder = model(tmp_path, "m", "1")
    (folder / "1" / "up").symlink_to(folder)
    (folder / "1" / "self").symlink_to(folder / "1" / "self")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    assert list(scan([tmp_path]).models) == ["m"]


def test_names_that_are_not_utf8(tmp_path):
    folder = model(tmp_path, "m", "1")
    os.close(os.open(os.fsencode(folder / "1") + b"/\xff", os.O_CREAT))
    assert list(scan([tmp_path]).models["m"].versions) == [1]


def test_no_repositories():
    assert scan([]) == Snapshot()


def policy(text: str) -> model_config_pb2.ModelVersionPolicy | None:
    result = model_config_pb2.ModelVersionPolicy()
    if text == "none":
        return None
    if text == "all":
        result.all.SetInParent()
    elif text.startswith("latest"):
        result.latest.num_versions = int(text.split()[1])
    elif text.startswith("specific"):
        result.specific.versions.extend(map(int, text.split()[1:]))
    return result


@pytest.mark.parametrize(
    ("text", "present", "chosen"),
    [
        ("none", [1, 3, 2], (3,)),
        ("unset", [1, 10, 9], (1, 9, 10)),
        ("latest 1", [1, 2], (2,)),
        ("latest 2", [1, 2, 3], (2, 3)),
        ("latest 5", [1, 2], (1, 2)),
        ("all", [3, 1], (1, 3)),
        ("specific 1 3", [1, 2, 3], (1, 3)),
        ("specific 3 1 3", [1, 2, 3], (1, 3)),
        ("none", [0], (0,)),
    ],
)
def test_version_policies(text, present, chosen):
    choice = versions_for("m", policy(text), present)
    assert choice.versions == chosen
    assert choice.notes == ()


def test_a_specific_version_that_is_missing_is_noted():
    choice = versions_for("m", policy("specific 1 7"), [1, 2])
    assert choice.versions == (1,)
    assert choice.notes == ("version 7 is specified for model 'm', but the version directory is not present",)


@pytest.mark.parametrize(("text", "present"), [("none", []), ("all", []), ("specific 7", [1]), ("latest 0", [1])])
def test_a_policy_that_leaves_nothing_is_an_error(text, present):
    with pytest.raises(InvalidArgument) as caught:
        versions_for("m", policy(text), present)
    assert caught.value.message == "at least one version must be available under the version policy of model 'm'"
