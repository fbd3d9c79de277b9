"""What a model's `execute` may return and raise, and how its life begins and ends."""

import builtins
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from python_backend_fakes import FakeRequest, FakeServices, context, load, write

from naiad.backends.api import BackendResponse, InstanceContext
from naiad.backends.python import PythonBackend
from naiad.errors import Internal, NaiadError, ResourceExhausted, Unsupported

ECHO = """
class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", r.inputs()[0].as_numpy())]) for r in requests]
"""
FAILED = "Failed to process the request(s) for model 'm_0_0', message: "


def load_error(path: Path, **config: object) -> NaiadError:
    with pytest.raises(NaiadError) as error:
        load(path, **config)
    return error.value


def test_initialize_gets_strings(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        """
        class TritonPythonModel:
            def initialize(self, args):
                global seen
                seen = args
                seen["dir"] = pb_utils.get_model_dir()
        """,
        version=3,
    )
    model = context(path, max_batch_size=8, default_model_filename="modèle.py")
    PythonBackend(model, InstanceContext("m_0_1", "KIND_GPU", 2))
    seen = sys.modules["3.model"].seen
    assert seen == {
        "model_config": '{"name":"m","max_batch_size":8,"input":[],"output":[],"default_model_filename":"modèle.py"}',
        "model_instance_kind": "GPU",
        "model_instance_name": "m_0_1",
        "model_instance_device_id": "2",
        "model_repository": str(tmp_path / "m"),
        "model_version": "3",
        "model_name": "m",
        "dir": str(tmp_path / "m" / "3"),
    }


def test_each_request_gets_its_response(tmp_path: Path) -> None:
    requests = [FakeRequest(("Y",), X=[n]) for n in range(3)]
    load(write(tmp_path, ECHO)).execute(requests)
    assert [request.values for request in requests] == [{"Y": [0]}, {"Y": [1]}, {"Y": [2]}]


def test_a_model_may_use_up_its_list_of_requests(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        """
        class TritonPythonModel:
            def execute(self, requests):
                responses = []
                while requests:
                    array = requests.pop(0).inputs()[0].as_numpy()
                    responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("Y", array)]))
                return responses
        """,
    )
    requests = [FakeRequest(("Y",), X=[n]) for n in range(2)]
    load(path).execute(requests)
    assert [request.values for request in requests] == [{"Y": [0]}, {"Y": [1]}]


def test_inputs_are_not_copied(tmp_path: Path) -> None:
    request = FakeRequest(("Y",), X=np.arange(4))
    load(write(tmp_path, ECHO)).execute([request])
    assert isinstance(request.answer, BackendResponse)
    assert request.answer.outputs["Y"] is request.inputs["X"]


def test_what_a_model_learns_about_a_request(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        """
        class TritonPythonModel:
            def execute(self, requests):
                global seen
                (r,) = requests
                seen = [r.request_id(), r.correlation_id(), r.flags(), r.timeout(), r.parameters(),
                        r.requested_output_names(), r.is_cancelled(), r.trace().get_context(),
                        pb_utils.get_input_tensor_by_name(r, "nope")]
                r.set_flags(2)
                seen.append(r.flags())
                return [pb_utils.InferenceResponse(parameters={"a": 1, "b": "x", "c": True})]
        """,
    )
    request = FakeRequest(("Y",), id="abc")
    request.correlation_id, request.flags, request.timeout_us, request.parameters = "s", 1, 50, {"p": 0.5, "ö": True}
    request.cancelled = True
    load(path).execute([request])
    assert sys.modules["1.model"].seen == ["abc", "s", 1, 50, '{"p":0.5,"ö":true}', {"Y"}, True, None, None, 2]
    assert isinstance(request.answer, BackendResponse)
    assert request.answer.parameters == {"a": 1, "b": "x", "c": True}


@pytest.mark.parametrize(
    ("result", "text"),
    [
        ("()", "Expected a list in the execute return, found type '<class 'tuple'>'."),
        (
            "[pb_utils.InferenceResponse(parameters={'a': 1.5})]",
            "TritonModelException: Expect parameters values to have type bool/int/str, found type <class 'float'>"
            "\n\nAt:\n  {path}(5): execute\n",
        ),
        (
            "[pb_utils.InferenceResponse(parameters={1: 1})]",
            "TritonModelException: Expect parameters keys to have type str, found type <class 'int'>"
            "\n\nAt:\n  {path}(5): execute\n",
        ),
        (
            "[pb_utils.InferenceResponse([None])]",
            "TritonModelException: Output tensor for inference response should not be empty."
            "\n\nAt:\n  {path}(5): execute\n",
        ),
        ("exit(3)", "SystemExit: 3\n\nAt:\n  <frozen _sitebuiltins>(26): __call__\n  {path}(5): execute\n"),
        (
            "(_ for _ in ()).throw(GeneratorExit('left'))",
            "GeneratorExit: left\n\nAt:\n  {path}(5): <genexpr>\n",
        ),
        (
            "(_ for _ in ()).throw(__import__('asyncio').CancelledError)",
            "CancelledError: <EMPTY MESSAGE>\n\nAt:\n  {path}(5): <genexpr>\n",
        ),
    ],
)
def test_bad_results(tmp_path: Path, result: str, text: str) -> None:
    path = write(tmp_path, f"class TritonPythonModel:\n    def execute(self, requests):\n        return {result}\n")
    request = FakeRequest()
    services = FakeServices()
    load(path, services).execute([request])
    assert request.error == FAILED + text.format(path=path)
    assert services.logged[0][:2] == ("ERROR", request.error)


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("raise ValueError", "ValueError: <EMPTY MESSAGE>\n\nAt:\n  {path}(14): execute\n"),
        ("assert not requests", "AssertionError: <EMPTY MESSAGE>\n\nAt:\n  {path}(14): execute\n"),
        (
            "raise Odd('x')",
            "Odd: <MESSAGE UNAVAILABLE DUE TO ANOTHER EXCEPTION>\n\nAt:\n  {path}(14): execute\n"
            "\nMESSAGE UNAVAILABLE DUE TO EXCEPTION: KeyError: 'x'\n\nAt:\n  {path}(7): __str__\n",
        ),
        (
            "raise Odd(Odd)",
            "Odd: <MESSAGE UNAVAILABLE DUE TO ANOTHER EXCEPTION>\n\nAt:\n  {path}(14): execute\n\nMESSAGE UNAVAILABLE DUE "
            "TO EXCEPTION: Odd: <MESSAGE UNAVAILABLE DUE TO ANOTHER EXCEPTION>\n\nAt:\n  {path}(9): __str__\n",
        ),
        (
            "raise Odd(5)",
            "Odd: <MESSAGE UNAVAILABLE DUE TO ANOTHER EXCEPTION>\n\nAt:\n  {path}(14): execute\n"
            "\nMESSAGE UNAVAILABLE DUE TO EXCEPTION: TypeError: __str__ returned non-string (type int)",
        ),
    ],
)
def test_errors_without_a_text(tmp_path: Path, body: str, text: str) -> None:
    path = write(
        tmp_path,
        f"""
        class Odd(Exception):
            def __str__(self):
                if self.args[0] == "x":
                    raise KeyError("x")
                if self.args[0] is Odd:
                    raise Odd(Odd)
                return self.args[0]

        class TritonPythonModel:
            def execute(self, requests):
                {body}
        """,
    )
    request = FakeRequest()
    load(path).execute([request])
    assert request.error == FAILED + text.format(path=path)


def test_the_stack_of_an_error_has_the_model_only_innermost_first(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        """
        def inner():
            pb_utils.Tensor("", np.zeros(1))

        class TritonPythonModel:
            def execute(self, requests):
                inner()
        """,
    )
    request = FakeRequest()
    load(path).execute([request])
    assert request.error == (
        f"{FAILED}TritonModelException: Tensor name cannot be an empty string.\n\nAt:\n"
        f"  {path}(5): inner\n  {path}(9): execute\n"
    )


def test_a_failure_answers_the_whole_batch_and_the_model_goes_on(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        """
        class TritonPythonModel:
            def execute(self, requests):
                if len(requests) > 1:
                    raise KeyError("x")
                return [pb_utils.InferenceResponse()]
        """,
    )
    requests = [FakeRequest(), FakeRequest(), FakeRequest()]
    backend = load(path)
    backend.execute(requests[:2])
    backend.execute(requests[2:])
    assert requests[0].error == requests[1].error == f"{FAILED}KeyError: 'x'\n\nAt:\n  {path}(7): execute\n"
    assert requests[2].values == {}


def test_a_result_that_cannot_be_sent_becomes_the_reason(tmp_path: Path) -> None:
    request, unanswered = FakeRequest(("Y",), X=[1]), FakeRequest(("Y",), X=[1])
    request.refusal = ResourceExhausted("too much")
    load(write(tmp_path, ECHO.replace("for r in requests]", "for r in requests[:1]] + [None]"))).execute(
        [request, unanswered]
    )
    assert isinstance(request.answer, ResourceExhausted)
    assert "returned no response" in unanswered.error


@pytest.mark.parametrize("error", ["ValueError", "SystemExit", "GeneratorExit", "asyncio.CancelledError"])
def test_initialize_that_fails(tmp_path: Path, error: str) -> None:
    path = write(
        tmp_path,
        f"""
        import asyncio

        class TritonPythonModel:
            def initialize(self, args):
                raise {error}("no")
        """,
    )
    name = error.removeprefix("asyncio.")
    assert load_error(path).message == f"{name}: no\n\nAt:\n  {path}(8): initialize\n"


def test_a_model_without_execute_loads_and_says_so_when_asked(tmp_path: Path) -> None:
    path = write(tmp_path, "class TritonPythonModel:\n    pass\n")
    request = FakeRequest()
    load(path).execute([request])
    assert request.error == f"{FAILED}Python model {path} does not implement `execute` method."


def test_coroutines(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        """
        import asyncio

        class TritonPythonModel:
            async def execute(self, requests):
                await asyncio.sleep(0)
                if requests[0].request_id() == "bad":
                    raise ValueError("async trouble")
                return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", np.array([4]))])]
        """,
    )
    good, bad = FakeRequest(("Y",)), FakeRequest(id="bad")
    backend = load(path)
    backend.execute([good])
    backend.execute([bad])
    backend.close()
    assert good.values == {"Y": [4]}
    assert bad.error == f"{FAILED}ValueError: async trouble\n\nAt:\n  {path}(10): execute\n"


def test_a_rescheduled_request_goes_through_execute_again(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        """
        class TritonPythonModel:
            def initialize(self, args):
                self.rounds = {}

            def execute(self, requests):
                responses = []
                for request in requests:
                    n = self.rounds[request.request_id()] = self.rounds.get(request.request_id(), 0) + 1
                    if n < int(request.inputs()[0].as_numpy()[0]):
                        request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
                        responses.append(None)
                    else:
                        out = pb_utils.Tensor("Y", np.array([n, len(requests)]))
                        responses.append(pb_utils.InferenceResponse([out]))
                return responses
        """,
    )
    requests = [FakeRequest(("Y",), id="a", X=[1]), FakeRequest(("Y",), id="b", X=[3])]
    load(path).execute(requests)
    assert [request.values for request in requests] == [{"Y": [1, 2]}, {"Y": [3, 1]}]


def test_a_rescheduled_request_whose_client_left_ends(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        """
        class TritonPythonModel:
            def execute(self, requests):
                requests[0].set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
                return [None]
        """,
    )
    request = FakeRequest()
    request.cancelled = True
    load(path).execute([request])
    assert isinstance(request.answer, NaiadError)
    assert request.answer.triton_code == "CANCELLED"


def test_a_rescheduled_request_must_not_have_a_response(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        """
        class TritonPythonModel:
            def execute(self, requests):
                requests[0].set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
                return [pb_utils.InferenceResponse()]
        """,
    )
    request = FakeRequest()
    load(path).execute([request])
    assert "Expected a None object in the execute function return list for reschduled request" in request.error


@pytest.mark.parametrize("error", ["RuntimeError", "GeneratorExit"])
def test_finalize_is_called_and_its_failure_is_only_logged(tmp_path: Path, error: str) -> None:
    path = write(
        tmp_path,
        f"""
        class TritonPythonModel:
            def finalize(self):
                raise {error}("at the end")
        """,
    )
    services = FakeServices()
    load(path, services).close()
    ((level, message, _, _),) = services.logged
    assert level == "ERROR"
    assert message == (
        f"Failed to finalize model instance 'm_0_0': {error}: at the end\n\nAt:\n  {path}(6): finalize\n"
    )


@pytest.mark.parametrize("value", ["yes", "no"])
def test_where_inputs_should_be(tmp_path: Path, value: str) -> None:
    load(write(tmp_path, ECHO), parameters={"FORCE_CPU_ONLY_INPUT_TENSORS": {"string_value": value}})


def test_where_inputs_cannot_be(tmp_path: Path) -> None:
    error = load_error(write(tmp_path, ECHO), parameters={"FORCE_CPU_ONLY_INPUT_TENSORS": {"string_value": "maybe"}})
    assert isinstance(error, Unsupported)
    assert error.message == "Incorrect value for FORCE_CPU_ONLY_INPUT_TENSORS: maybe'"


def test_files_that_are_no_model(tmp_path: Path) -> None:
    missing = tmp_path / "m" / "1" / "model.py"
    assert load_error(missing).message == f"Python model file not found in '{missing}'"
    text = write(tmp_path, "").rename(tmp_path / "m" / "1" / "model.txt")
    assert load_error(text).message == "Model name must end with '.py'. Model name is \"model.txt\"."
    empty = write(tmp_path, "")
    assert load_error(empty).message == "AttributeError: module '1.model' has no attribute 'TritonPythonModel'"


def test_a_missing_import_is_named_with_its_place(tmp_path: Path) -> None:
    path = write(tmp_path, "import not_there_at_all\n")
    error = load_error(path)
    assert isinstance(error, Internal)
    assert error.message.startswith(
        f"ModuleNotFoundError: No module named 'not_there_at_all'\n\nAt:\n  {path}(3): <module>\n  <frozen importlib."
    )


def test_modules_beside_the_model_and_above_it(tmp_path: Path) -> None:
    """Relative imports, plain ones from the version folder and from the model folder; of one model, not another."""
    source = """
        from . import beside_{n}
        from .beside_{n} import value
        import plain_{n}
        import above_{n}

        class TritonPythonModel:
            def execute(self, requests):
                from . import late
                values = [value, plain_{n}.value, above_{n}.value, late.value]
                return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", np.array(values))])]
        """
    for n in (1, 2):
        path = write(tmp_path, source.format(n=n), name=f"model_{n}")
        (path.parent / f"beside_{n}.py").write_text(f"value = {n}\n")
        (path.parent / "late.py").write_text(f"value = {n * 10}\n")
        (path.parent / f"plain_{n}.py").write_text(f"value = {n + 2}\n")
        (path.parent.parent / f"above_{n}.py").write_text(f"value = {n + 4}\n")
        request = FakeRequest(("Y",))
        load(path).execute([request])
        assert request.values == {"Y": [n, n + 2, n + 4, n * 10]}


def test_models_in_one_process_have_their_own_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However they import them, and though they are loaded beside each other."""
    monkeypatch.setattr(builtins, "__import__", builtins.__import__)
    monkeypatch.setattr(sys, "path", [*sys.path])
    source = """
        import sys
        sys.path.append(__file__.replace("model.py", "lib"))
        import plain, above, deep, package.inside as inside
        from package import inside as same
        from spaces import inside as third

        class TritonPythonModel:
            def execute(self, requests):
                from . import late
                import absolute, json
                values = [own, plain.value, above.value, inside.value, deep.value, late.value, absolute.value, third.value]
                assert same is inside and json.dumps and pb_utils.Tensor
                return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", np.array(values))])]
        """
    paths = []
    for n in range(6):
        # Two versions of each model.
        path = write(tmp_path, source.replace("class", f"own = {n}\n        class"), f"shared.{n // 2}", n % 2 + 1)
        (path.parent.parent / "above.py").write_text(f"value = {n // 2}\n")
        for file in ("plain", "late", "absolute", "package/inside", "package/__init__", "spaces/inside", "lib/deep"):
            (path.parent / file).parent.mkdir(exist_ok=True)
            (path.parent / f"{file}.py").write_text(f"value = {n}\n")
        (path.parent / "json.py").write_text("")
        (path.parent / "triton_python_backend_utils.py").write_text("")
        paths.append(path)
    with ThreadPoolExecutor(len(paths)) as threads:
        models = list(threads.map(partial(load, is_alone=False), paths))
    for n, model in enumerate(models):
        request = FakeRequest(("Y",))
        model.execute([request])
        assert request.values == {"Y": [n, n, n // 2, n, n, n, n, n]}


def test_a_version_folder_may_be_a_package(tmp_path: Path) -> None:
    path = write(tmp_path, "from . import value\nclass TritonPythonModel:\n    seen = value\n")
    (path.parent / "__init__.py").write_text("value = 5\n")
    load(path)
    assert sys.modules["1.model"].TritonPythonModel.seen == 5


def test_each_instance_loads_the_module_anew(tmp_path: Path) -> None:
    path = write(tmp_path, ECHO)
    load(path)
    first = sys.modules["1.model"]
    load(path)
    assert sys.modules["1.model"] is not first


def test_models_import_from_the_folder_of_the_server_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for place in tmp_path / "here", tmp_path / "later":
        place.mkdir()
        (place / "beside_the_server.py").write_text(f"name = {place.name!r}")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "later"), *(entry for entry in sys.path if entry)])
    monkeypatch.chdir(tmp_path / "here")
    load(write(tmp_path, "import beside_the_server\n" + ECHO))
    assert sys.modules.pop("beside_the_server").name == "here"


def test_spawned_processes_find_the_utilities(tmp_path: Path) -> None:
    import subprocess

    load(write(tmp_path, ECHO))
    program = f"import sys; sys.path = {sys.path!r}; import triton_python_backend_utils as u; print(u.Tensor.__name__)"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ran.stdout == "Tensor\n"


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("return 5", "auto_complete_config function in model 'm' must return a valid pb.ModelConfig object."),
        ("raise ValueError('no')", "ValueError: no\n\nAt:\n  {path}(6): auto_complete_config\n"),
        ("raise GeneratorExit", "GeneratorExit: <EMPTY MESSAGE>\n\nAt:\n  {path}(6): auto_complete_config\n"),
        ("config.as_dict()['input'] = {1}; return config", "TypeError: Object of type set is not JSON serializable*"),
        ("config.as_dict()['max_batch_size'] = np.int64(2); return config", "TypeError: Object of type int64 is not *"),
        ("config.as_dict()['parameters'] = config.as_dict(); return config", "ValueError: Circular reference *"),
        ("config.as_dict()[1, 2] = 3; return config", "TypeError: keys must be str, int, float, bool or None, *"),
    ],
)
def test_auto_completion_that_fails(tmp_path: Path, body: str, text: str) -> None:
    path = write(
        tmp_path,
        f"class TritonPythonModel:\n    @staticmethod\n    def auto_complete_config(config):\n        {body}\n",
    )
    with pytest.raises(Internal) as error:
        PythonBackend.autocomplete(context(path))
    assert fnmatchcase(error.value.message, text.format(path=path))


def test_the_log_has_the_place_in_the_model(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        """
        class TritonPythonModel:
            def initialize(self, args):
                logger = pb_utils.Logger
                logger.log("a")
                logger.log("b", logger.VERBOSE)
                logger.log_info("c")
                logger.log_warn("d")
                logger.log_error("e")
                logger.log_verbose("f")
        """,
    )
    services = FakeServices()
    load(path, services)
    levels = ["INFO", "VERBOSE", "INFO", "WARNING", "ERROR", "VERBOSE"]
    assert services.logged == [
        (level, message, str(path), line) for level, message, line in zip(levels, "abcdef", range(7, 13), strict=True)
    ]


def test_utilities_outside_of_a_model_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    from naiad.backends.python import current, pb_utils

    monkeypatch.setattr(current, "_instance", None)
    with pytest.raises(pb_utils.TritonModelException, match="works only inside of a model"):
        pb_utils.get_model_dir()


def test_a_python_based_backend_finds_the_files_of_its_model(tmp_path: Path) -> None:
    path = tmp_path / "backends" / "shared" / "model.py"
    path.parent.mkdir(parents=True)
    path.write_text(
        "import triton_python_backend_utils as pb_utils\n"
        "class TritonPythonModel:\n"
        "    def initialize(self, args):\n"
        "        global seen\n"
        "        seen = pb_utils.get_model_dir()\n"
    )
    PythonBackend(replace(context(write(tmp_path, "", version=2)), path=path), InstanceContext("m_0_0", "KIND_CPU"))
    assert sys.modules["model"].seen == str(tmp_path / "m" / "2")


def test_no_thread_is_started_for_a_plain_model(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    backend = load(write(tmp_path, ECHO))
    backend.execute([FakeRequest(("Y",), X=[1])])
    assert set(threading.enumerate()) <= before
    backend.close()
