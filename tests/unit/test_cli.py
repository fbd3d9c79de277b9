import subprocess
import sys
import types

import click
import pytest
from click.testing import CliRunner

import naiad
from naiad import cli
from naiad.cli import init, serve
from naiad.errors import InvalidArgument
from naiad.options import OPTIONS, ServerOptions


@pytest.fixture
def served(monkeypatch):
    """What `naiad.server.serve` was called with; it answers 0."""
    calls: list[ServerOptions] = []
    module = types.ModuleType("naiad.server")
    module.serve = lambda options: calls.append(options) or 0
    monkeypatch.setitem(sys.modules, "naiad.server", module)
    return calls


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        cli.main(list(arguments))
    return caught.value.code


@pytest.mark.parametrize("form", [["serve"], []])
def test_a_command_line_of_tritons_server_works_with_and_without_serve(served, form):
    code = run(
        *form,
        "--model-repository=/a",
        "--model-store",
        "/b",
        "--http-port",
        "1",
        "--http-port=2",
        "--strict-readiness=OFF",
    )
    assert code == 0
    assert served == [ServerOptions(model_repository=("/a", "/b"), http_port=2, strict_readiness=False)]


def test_flags_may_be_shortened_as_triton_takes_them(served, capsys):
    assert run("--model-repo=/a", "--http-po", "2", "--log-verbose=1", "--allow-vertex=false") == 0
    assert served == [ServerOptions(model_repository=("/a",), http_port=2, log_verbose=1)]
    assert run("--model-repository=/a", "--http-s=a") == 1
    assert "'--http-s' is ambiguous; possibilities: --http-server-cert, --http-server-key" in capsys.readouterr().err
    assert run("--model-repo=/a", "--allow-vertex=true") == 1
    assert "'--allow-vertex-ai' of Triton's server is not supported" in capsys.readouterr().err


def test_a_deprecated_flag_works_and_says_what_takes_its_place(served, capsys):
    assert run("--trace-file=/t", "--trace-rate=3", "--model-repository=/a") == 0
    assert [(options.trace_file, options.trace_rate) for options in served] == [("/t", 3)]
    assert capsys.readouterr().err.splitlines() == [
        "Warning: '--trace-file' has been deprecated: use --trace-config=triton,file=<path>.",
        "Warning: '--trace-rate' has been deprecated: use --trace-config=rate=<number>.",
    ]


def test_a_switch_takes_no_value(served):
    assert run("--disable-auto-complete-config", "--model-repository=/a") == 0
    assert not served[0].auto_complete_config
    assert run("--model-repository=/a", "--disable-auto-complete-config=true") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--no-such-flag"], "unrecognized option '--no-such-flag'"),
        (["serve", "--htp-port=1"], "Did you mean"),
        (["--model-repository=/a", "--host-policy=a"], "'--host-policy' of Triton's server is not supported"),
        (
            ["--model-repository=/a", "--allow-vertex-ai=true"],
            "'--allow-vertex-ai' of Triton's server is not supported",
        ),
        (["--model-repository=/a", "--allow-vertex-ai=no"], "invalid value for bool option: no"),
        (["--model-repository=/a", "stray"], "stray"),
        (["--model-repository"], "requires an argument"),
        (["--model-control-mode=sometimes"], "invalid argument for --model-control-mode"),
        (["--allow-http", "--model-repository"], "invalid value for bool option: --model-repository"),
        (["--http-port=8001"], "--model-repository must be specified"),
    ],
)
def test_a_wrong_command_line_says_why_on_stderr_and_exits_with_1(served, capsys, arguments, message):
    assert run(*arguments) == 1
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.out == ""
    assert served == []


def test_what_there_is_not_may_be_off(served):
    flags = ("--model-namespacing", "--enable-peer-access", "--allow-sagemaker", "--allow-vertex-ai")
    assert run("--model-repository=/a", *[f"{flag}=false" for flag in flags]) == 0
    assert served == [ServerOptions(model_repository=("/a",))]


def test_help_shows_every_option_under_its_heading(capsys):
    assert run("serve", "--help") == 0
    printed = capsys.readouterr().out
    for option in OPTIONS.values():
        assert option.flag in printed
        assert f"{option.group}:" in printed


def test_help_keeps_flags_whole_and_says_what_is_the_default(capsys):
    assert run("serve", "-h") == 0
    lines = capsys.readouterr().out.splitlines()
    assert "  --execution-timeout-secs <number>  [default: 600]" in lines
    place = lines.index("  --load-model <name>")
    assert "--model-control-mode=explicit" in lines[place + 1]
    assert lines[lines.index("  --http-thread-count <integer>") + 1].startswith("      No effect: ")


@pytest.mark.parametrize(
    ("word", "end"),
    [
        ("sevre", "init."),
        ("models", "naiad --model-repository=models"),
        ("my models", "naiad --model-repository='my models'"),
    ],
)
def test_a_word_that_is_no_command(tmp_path, monkeypatch, capsys, word, end):
    for name in ("models", "my models"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path)
    assert run(word) == 2
    error = capsys.readouterr().err.rstrip()
    assert f"no command '{word}'; there are serve, convert, init." in error
    assert error.endswith(end)


def test_help_exits_with_1_where_triton_does(capsys):
    assert run("--model-repository=/a", "-h") == 1
    assert run("--model-repository=/a", "--help") == 1
    assert "--model-repository" in capsys.readouterr().err
    assert run("--help") == 0


def test_version(capsys):
    assert run("--version") == 0
    assert capsys.readouterr().out == f"naiad {naiad.__version__}\n"


def test_nothing_is_imported_from_the_folder_of_the_launcher(tmp_path, monkeypatch):
    folder = str(tmp_path.resolve())
    others = [entry for entry in sys.path if entry != folder]
    monkeypatch.setattr(sys, "argv", [f"{folder}/naiad", "--version"])
    for path in [folder, *others], others:
        monkeypatch.setattr(sys, "path", list(path))
        with pytest.raises(SystemExit):
            cli.main()
        assert sys.path == others


def test_as_a_module():
    command = [sys.executable, "-m", "naiad", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.startswith(f"naiad {naiad.__version__}")


def test_an_error_of_the_start_is_shown_and_exits_with_1(monkeypatch, capsys):
    def fail(options):
        raise InvalidArgument("no such place")

    module = types.ModuleType("naiad.server")
    module.serve = fail
    monkeypatch.setitem(sys.modules, "naiad.server", module)
    assert run("--model-repository=/a") == 1
    assert capsys.readouterr().err == "error: creating server: no such place\n"


@pytest.mark.parametrize("form", [["serve"], []])
def test_ctrl_c_before_the_server_listens_to_signals(monkeypatch, capsys, form):
    class Imported(types.ModuleType):
        @property
        def serve(self):
            raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "naiad.server", Imported("naiad.server"))
    assert run(*form, "--model-repository=/a") == 130
    assert capsys.readouterr().err == ""


def test_parse_arguments_for_other_commands():
    assert serve.parse_arguments(["--model-repository=/a"]) == ServerOptions(model_repository=("/a",))
    with pytest.raises(click.ClickException):
        serve.parse_arguments(["--nonsense"])


def test_help_imports_nothing_heavy():
    heavy = ("numpy", "rich", "orjson", "uvloop", "google.protobuf", "naiad.server", "naiad.options")
    program = (
        "import sys; from naiad import cli\n"
        "try: cli.main(['--help'])\n"
        "except SystemExit: pass\n"
        f"sys.exit(str([m for m in {heavy!r} if m in sys.modules] or ''))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stderr.strip() == ""


def test_init_writes_a_python_model(tmp_path):
    result = CliRunner().invoke(init.command, [str(tmp_path / "models" / "mine"), "--backend=python"])
    assert result.exit_code == 0, result.output
    assert f"--model-repository={tmp_path / 'models'}" in result.output
    config = (tmp_path / "models/mine/config.pbtxt").read_text()
    assert 'name: "mine"' in config
    compile((tmp_path / "models/mine/1/model.py").read_text(), "model.py", "exec")


@pytest.mark.parametrize(("backend", "file"), [("onnxruntime", "model.onnx"), ("pytorch", "model.pt")])
def test_init_says_where_the_file_of_a_model_goes(tmp_path, backend, file):
    result = CliRunner().invoke(init.command, [str(tmp_path / "mine"), f"--backend={backend}"])
    assert f"now put the model at {tmp_path / 'mine' / '1' / file}" in result.output
    assert f'backend: "{backend}"' in (tmp_path / "mine/config.pbtxt").read_text()


def test_the_line_that_serves_it_can_be_copied_whatever_the_folder_is_called(tmp_path):
    result = CliRunner().invoke(init.command, [str(tmp_path / "my models" / "mine"), "--backend=python"])
    assert result.output.endswith(f"serve it with: naiad serve --model-repository='{tmp_path}/my models'\n")


def test_init_overwrites_nothing(tmp_path):
    result = CliRunner().invoke(init.command, [str(tmp_path), "--backend=python"])
    assert result.exit_code == 1
    assert "exists already" in result.output


@pytest.mark.parametrize(
    "arguments",
    [[], ["--example", "--backend=python"], ["--backend=python", "--with=torch"], ["--example", "--with=caffe"]],
)
def test_init_wants_one_of_its_options(tmp_path, arguments):
    result = CliRunner().invoke(init.command, [str(tmp_path / "x"), *arguments])
    assert result.exit_code == 2
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("argument", ["--example", "--backend=python"])
def test_init_says_where_it_cannot_write(tmp_path, argument):
    (tmp_path / "file").touch()
    result = CliRunner().invoke(init.command, [str(tmp_path / "file" / "m"), argument])
    assert result.exit_code == 1
    assert f"Error: cannot write {tmp_path}/file" in result.output
    assert "Not a directory" in result.output


def test_init_writes_the_example(tmp_path):
    result = CliRunner().invoke(init.command, [str(tmp_path / "models"), "--example"])
    assert result.exit_code == 0, result.output
    assert list((tmp_path / "models").rglob("config.pbtxt"))


def test_init_writes_the_example_for_frameworks(tmp_path, monkeypatch):
    written = []
    monkeypatch.setattr(init, "write_example", lambda directory, frameworks: written.append(frameworks))
    monkeypatch.setattr(init, "installed", lambda: ["openvino"])
    for value in ("torch, tensorflow,torch", "installed"):
        result = CliRunner().invoke(init.command, [str(tmp_path), "--example", f"--with={value}"])
        assert result.exit_code == 0, result.output
    assert written == [["torch", "tensorflow"], ["openvino"]]
