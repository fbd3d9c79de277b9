import os
import stat

import pytest
from hypothesis import given
from hypothesis import strategies as st

from naiad.errors import Internal, InvalidArgument
from naiad.repository.overrides import (
    LoadOverride,
    check_model_name,
    check_override,
    is_inside,
    parse_override,
    remove_override,
    write_override,
)


def test_parameters_of_a_load_request():
    override = parse_override({"config": "{}", "file:1/model.py": b"x", "file:config.pbtxt": b""})
    assert override == LoadOverride("{}", {"1/model.py": b"x", "config.pbtxt": b""})
    assert parse_override({"config": "{}", "file:/1/model.py": b"x"}) == LoadOverride("{}", {"1/model.py": b"x"})
    assert parse_override({}) == LoadOverride()


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"colour": "red"}, "Unrecognized load parameter 'colour' with type 'string'"),
        ({"colour": b"red"}, "Unrecognized load parameter 'colour' with type 'bytes'"),
        ({"config": b"{}"}, "Unrecognized load parameter 'config' with type 'bytes'"),
    ],
)
def test_parameters_that_are_not_known(parameters, message):
    with pytest.raises(InvalidArgument) as caught:
        parse_override(parameters)
    assert caught.value.message == message


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", "Model name cannot be empty. Please enter a valid name to deploy."),
        (" \t", "Model name cannot be empty. Please enter a valid name to deploy."),
        ("../x", "invalid model name '../x', model name must not contain path traversal characters"),
        ("a/b", "invalid model name 'a/b', model name must not contain path traversal characters"),
        ("a..b", "invalid model name 'a..b', model name must not contain path traversal characters"),
        ("a\0b", "invalid model name 'a\0b', model name must not contain path traversal characters"),
    ],
)
def test_names_that_no_model_may_have(name, message):
    with pytest.raises(InvalidArgument) as caught:
        check_model_name(name)
    assert caught.value.message == message


def test_ordinary_names():
    for name in ("m", "my model", "m.onnx", "m-1"):
        check_model_name(name)


@pytest.mark.parametrize("config", [None, ""])
def test_files_need_a_configuration(config):
    with pytest.raises(InvalidArgument) as caught:
        check_override("m", LoadOverride(config, {"1/model.py": b""}))
    assert caught.value.message == "Load parameter 'config' must be specified for model file override"
    check_override("m", LoadOverride(config))


@pytest.mark.parametrize(
    ("path", "inside"),
    [
        ("1/model.py", True),
        ("config.pbtxt", True),
        ("1/deep/er/x", True),
        ("1/..x", True),
        ("", False),
        (".", False),
        ("..", False),
        ("../x", False),
        ("1/../../x", False),
        ("1/../x", False),
        ("/etc/passwd", False),
        ("//etc/passwd", False),
        ("1/\0", False),
    ],
)
def test_paths_inside_a_model(path, inside):
    assert is_inside(path) is inside
    override = LoadOverride("{}", {path: b""})
    if inside:
        check_override("m", override)
    else:
        with pytest.raises(InvalidArgument, match="escapes the model directory"):
            check_override("m", override)


@given(st.lists(st.sampled_from(["..", ".", "", "a", "1"]), max_size=6).map("/".join))
def test_a_path_inside_never_leads_out(path):
    if is_inside(path):
        resolved = os.path.normpath(os.path.join("/top/m", path))
        assert resolved.startswith("/top/m/")


def test_files_become_a_folder_with_the_name_of_the_model(tmp_path):
    override = LoadOverride("{}", {"1/model.py": b"code", "labels.txt": b"a\nb"})
    directory = write_override("m", override, tmp_path)
    assert directory.name == "m"
    assert (directory / "1" / "model.py").read_bytes() == b"code"
    assert (directory / "labels.txt").read_bytes() == b"a\nb"
    assert stat.S_IMODE(directory.parent.stat().st_mode) == 0o700
    assert write_override("m", override, tmp_path) != directory
    remove_override(directory)
    remove_override(directory)
    assert not directory.parent.exists()
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("files", [{"1": b"", "1/model.py": b""}, {"1/" + "x" * 300: b""}])
def test_nothing_is_left_when_writing_fails(tmp_path, files):
    with pytest.raises(Internal, match="failed to write override file for model 'm'"):
        write_override("m", LoadOverride("{}", files), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_written_for_a_path_outside(tmp_path):
    with pytest.raises(InvalidArgument):
        write_override("m", LoadOverride("{}", {"../x": b""}), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_somebody_else_is_not_removed(tmp_path):
    (tmp_path / "m").mkdir()
    with pytest.raises(AssertionError):
        remove_override(tmp_path / "m")
    assert (tmp_path / "m").exists()
