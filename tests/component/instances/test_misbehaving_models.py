"""model.py files that do what they should not, in real host processes: who else notices, and what is left."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
from instance_lab import config, request, run, until

from naiad.backends.api import InstanceContext
from naiad.errors import NaiadError
from naiad.instances.hosts import ModelSpec

STRINGS = config("BYTES", [1])
DECOUPLED = {**STRINGS, "model_transaction_policy": {"decoupled": True}}
HEAD = """
import asyncio, os, sys, threading
import numpy as np
import triton_python_backend_utils as pb_utils

def answer(*elements, **more):
    return pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", np.array(elements, object))], **more)
"""
#: What it does with a request is the code in its input.
OBEDIENT = """
class Odd(Exception):
    def __str__(self):
        raise self

class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            order = pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy()[0].decode()
            scope = {**globals(), "response": answer(b"done"), "request": request}
            exec(order, scope)
            answers.append(scope["response"])
        return answers

    def finalize(self):
        with open(__file__ + ".finalized", "a") as file:
            file.write(f"{os.getpid()} ")
"""


def said(text):
    return request(np.array([text.encode()], object))


@pytest.fixture
def load(lab, tmp_path):
    """Loads a model of the source."""

    async def load(source, configuration=STRINGS):
        path = tmp_path / "m" / "1" / "model.py"
        path.parent.mkdir(parents=True)
        path.write_text(HEAD + source)
        folder = path.parent.parent
        spec = ModelSpec("m", 1, "python", directory=folder, version_directory=path.parent, path=path)
        model = await lab.hosts.open(spec)
        await model.load(configuration, [InstanceContext("m_0_0", "KIND_CPU")])
        return model

    return load


async def ask(model, *texts):
    """The results of a batch, in words."""
    results = await run(model.instances[0], *map(said, texts), rows=[1] * len(texts))
    return [str(last if isinstance(last, NaiadError) else last.outputs["OUTPUT0"].item()) for [last] in results]


@pytest.mark.parametrize(
    ("order", "text"),
    [
        ("raise Odd()", "message: Odd: <MESSAGE UNAVAILABLE DUE TO ANOTHER EXCEPTION>"),
        ("raise ValueError('\\udc80')", r"message: ValueError: \udc80"),
        ("response = pb_utils.InferenceResponse(error=pb_utils.TritonError('\\udc80'))", r"\udc80"),
        ("response = answer('\\udc80')", "model 'm': a response cannot be sent: 'utf-8' codec can't encode"),
        ("response = answer(Odd())", "model 'm': a response cannot be sent: <MESSAGE UNAVAILABLE DUE TO ANOTHER"),
        ("response = answer(b'x', parameters={'\\udc80': 1})", "a response cannot be sent: 'utf-8' codec can't encode"),
        ("response = answer(b'x', parameters={'a': '\\udc80'})", "a response cannot be sent: 'utf-8' codec can't"),
        ("response = answer(b'x', parameters={'a': 2**70})", "a response cannot be sent: can't serialize ints"),
    ],
)
async def test_what_cannot_be_sent_is_an_error_of_its_request(load, order, text):
    model = await load(OBEDIENT)
    [error] = await ask(model, order)
    assert text in error
    assert await ask(model, "") == [str(b"done")]
    if order.startswith("response"):
        (pid,) = model.pids
        [error, other] = await ask(model, order, "")
        assert text in error
        assert other == str(b"done")
        assert model.pids == [pid]
    assert model.restarts == 0


@pytest.mark.parametrize("order", ["sys.stdout.close()", "sys.stdout = None", "os.close(1)"])
async def test_a_model_without_output_is_unloaded_as_any_other(load, order, capfd):
    model = await load(OBEDIENT)
    assert await ask(model, order) == [str(b"done")]
    await model.close()
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize(
    "end",
    [
        "sys.exit(3)",
        "raise ValueError('in the child')",
        "response = answer(b'child')",
        "[r] = [pb_utils.InferenceRequest(model_name='n', requested_output_names=['o'], inputs=[]).exec()]; response = r",
    ],
)
async def test_a_process_that_a_model_forks_answers_nothing_in_its_place(load, lab, end):
    model = await load(OBEDIENT)
    (pid,) = model.pids
    assert await ask(model, f"if os.fork() == 0:\n  {end}") == [str(b"done")]
    [child] = children_of(pid)
    # The model does not wait for it.
    await until(lambda: is_zombie(child))
    assert await ask(model, "") == [str(b"done")]
    await model.close()
    assert finalized_in(model) == f"{pid} "


@pytest.mark.parametrize(
    ("end", "status", "told"),
    [
        ("sys.exit()", 0, ""),
        ("sys.exit(3)", 3, ""),
        ("sys.exit('no such file')", 1, "no such file\n"),
        ("raise ValueError('in the child')", 1, "ValueError: in the child\n"),
    ],
)
async def test_a_process_that_a_model_forks_ends_as_python_does(load, lab, capfd, end, status, told):
    model = await load(OBEDIENT)
    order = f"child = os.fork()\nif child == 0:\n  {end}\nresponse = answer(str(os.waitpid(child, 0)[1] >> 8).encode())"
    assert await ask(model, order) == [str(str(status).encode())]
    assert not [line for line in lab.logs if "ERROR" in line]
    assert capfd.readouterr().err.endswith(told)


async def test_a_process_that_a_coroutine_forks_ends(load, lab):
    model = await load(
        """
class TritonPythonModel:
    async def execute(self, requests):
        await asyncio.sleep(0)
        child = os.fork()
        if child == 0:
            sys.exit(3)
        return [answer(str(os.waitpid(child, 0)[1] >> 8).encode())]
"""
    )
    assert await ask(model, "") == [str(b"3")]
    assert not [line for line in lab.logs if "ERROR" in line]


def children_of(pid):
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def is_zombie(pid):
    return Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z"


def finalized_in(model):
    return Path(f"{model.spec.path}.finalized").read_text()


async def test_a_child_of_initialize_does_not_say_how_loading_went(load):
    model = await load(
        """
class TritonPythonModel:
    def initialize(self, args):
        child = os.fork()
        if child == 0:
            sys.exit(3)
        os.waitpid(child, 0)

    def execute(self, requests):
        return [answer(b"done") for _ in requests]
"""
    )
    assert await ask(model, "") == [str(b"done")]


@pytest.mark.parametrize("order", ["sys.exit(1)", "raise KeyboardInterrupt"])
async def test_a_coroutine_that_exits_fails_its_requests_only(load, order):
    model = await load(
        f"""
class TritonPythonModel:
    async def execute(self, requests):
        await asyncio.sleep(0)
        {order}
"""
    )
    for _ in range(2):
        [error] = await ask(model, "")
        assert "SystemExit: 1" in error or "KeyboardInterrupt" in error
    assert model.restarts == 0


async def test_a_response_of_another_thread_that_cannot_be_sent_ends_its_request(load):
    model = await load(
        """
class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            threading.Thread(target=self.respond, args=(request.get_response_sender(),)).start()

    def respond(self, sender):
        try:
            sender.send(answer("\\udc80"), flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        except pb_utils.TritonModelException:
            pass
""",
        DECOUPLED,
    )
    [error] = await ask(model, "")
    assert "model 'm': a response cannot be sent" in error
    assert model.restarts == 0


async def test_what_never_finalizes_ends_when_all_hosts_are_killed(load, lab):
    model = await load(OBEDIENT + "        threading.Event().wait()\n")
    [pid] = model.pids
    closing = asyncio.ensure_future(model.close())
    await until(Path(f"{model.spec.path}.finalized").exists)
    lab.hosts.kill()
    await closing
    await until(lambda: not Path(f"/proc/{pid}").exists())
