"""HTTP over TLS, from the outside: clients that trust the server, clients it trusts, and files that are no good."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tritonclient.http
import trustme
from served import NAIAD, PATIENCE_S, Repository, Server, until


class Certificates:
    """PEM files of an authority, a server and a client."""

    def __init__(self, folder: Path) -> None:
        authority = trustme.CA()
        server = authority.issue_cert("localhost", "127.0.0.1")
        client = authority.issue_cert("client@example.org")
        self.root = folder / "root.pem"
        authority.cert_pem.write_to_path(self.root)
        self.server_cert, self.server_key = folder / "server.pem", folder / "server.key"
        self.client_cert, self.client_key = folder / "client.pem", folder / "client.key"
        for issued, cert, key in (
            (server, self.server_cert, self.server_key),
            (client, self.client_cert, self.client_key),
        ):
            cert.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
            issued.private_key_pem.write_to_path(key)

    @property
    def server_flags(self) -> tuple[str, ...]:
        return (f"--http-server-cert={self.server_cert}", f"--http-server-key={self.server_key}")

    @property
    def as_client(self) -> tuple[str, ...]:
        return ("--cert", str(self.client_cert), "--key", str(self.client_key))


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


def curl(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            "curl",
            "--silent",
            "--show-error",
            "--max-time",
            "30",
            "--output",
            "-",
            "--write-out",
            "%{http_code}",
            *arguments,
        ],
        capture_output=True,
        text=True,
        check=False,
    )


def serving(tmp_path: Path, certificates: Certificates, *flags: str) -> Iterator[Server]:
    repository = Repository(tmp_path / "models")
    repository.echo("echo")
    with Server(repository, flags=(*certificates.server_flags, *flags)) as server:
        until(lambda: "Started Metrics Service" in server.log, "the server listens", PATIENCE_S)
        url = f"https://localhost:{server.ports[0]}/v2/health/ready"
        trusted = ("--cacert", str(certificates.root), *certificates.as_client)
        until(lambda: curl(*trusted, url).stdout == "200", "the server is ready")
        yield server


@pytest.fixture
def one_sided(tmp_path: Path, certificates: Certificates) -> Iterator[Server]:
    yield from serving(tmp_path, certificates, "--http-use-ssl=true")


@pytest.fixture
def mutual(tmp_path: Path, certificates: Certificates) -> Iterator[Server]:
    yield from serving(tmp_path, certificates, "--http-use-ssl-mutual=true", f"--http-root-cert={certificates.root}")


def infer(server: Server, size: int, **ssl_options: str) -> np.ndarray:
    client = tritonclient.http.InferenceServerClient(
        f"localhost:{server.ports[0]}", ssl=True, ssl_options=ssl_options, network_timeout=60.0
    )
    values = np.arange(size, dtype=np.float32)
    tensor = tritonclient.http.InferInput("IN", [size], "FP32")
    tensor.set_data_from_numpy(values)
    try:
        return np.asarray(client.infer("echo", [tensor]).as_numpy("OUT"))
    finally:
        client.close()


def test_clients_that_trust_the_server_are_served(one_sided: Server, certificates: Certificates) -> None:
    for size in (1, 3_000_000):
        answer = infer(one_sided, size, ca_certs=str(certificates.root))
        np.testing.assert_array_equal(answer, np.arange(size, dtype=np.float32))
    url = f"https://localhost:{one_sided.ports[0]}/v2/health/ready"
    assert curl(url).returncode == 60, "curl does not know who signed the certificate"
    assert curl("--cacert", str(certificates.root), "--tls-max", "1.1", url).returncode != 0
    plain = curl(url.replace("https", "http"))
    assert plain.stdout == "000", "without TLS there is no answer"


def test_mutual_tls_asks_for_a_certificate(
    mutual: Server, certificates: Certificates, tmp_path_factory: pytest.TempPathFactory
) -> None:
    answer = infer(
        mutual,
        10,
        ca_certs=str(certificates.root),
        certfile=str(certificates.client_cert),
        keyfile=str(certificates.client_key),
    )
    np.testing.assert_array_equal(answer, np.arange(10, dtype=np.float32))
    url = f"https://localhost:{mutual.ports[0]}/v2/health/ready"
    trusted = ("--cacert", str(certificates.root))
    stranger = Certificates(tmp_path_factory.mktemp("stranger"))
    assert curl(*trusted, url).stdout == "000", "no certificate"
    assert curl(*trusted, *stranger.as_client, url).stdout == "000", "one of another authority"
    assert curl(*trusted, *certificates.as_client, url).stdout == "200"
    assert "ERROR" not in mutual.log
    assert "Traceback" not in mutual.log


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        ("cert missing", "--http-server-cert={folder}/missing.pem cannot be read: No such file or directory"),
        ("key missing", "--http-server-key={folder}/missing.pem cannot be read: No such file or directory"),
        ("root missing", "--http-root-cert={folder}/missing.pem cannot be read: No such file or directory"),
        ("cert no pem", "--http-server-cert={folder}/text.pem and"),
        ("key of another", "are no certificate and its key in PEM form"),
        ("root no pem", "--http-root-cert={folder}/text.pem is no certificate in PEM form"),
    ],
)
def test_files_that_are_no_good_are_named(
    broken: str, says: str, tmp_path: Path, certificates: Certificates, tmp_path_factory: pytest.TempPathFactory
) -> None:
    (tmp_path / "text.pem").write_text("no PEM")
    given = {
        "server-cert": certificates.server_cert,
        "server-key": certificates.server_key,
        "root-cert": certificates.root,
    }
    if broken == "key of another":
        given["server-key"] = certificates.client_key
    else:
        which, _, how = broken.partition(" ")
        name = "root-cert" if which == "root" else f"server-{which}"
        given[name] = tmp_path / ("missing.pem" if how == "missing" else "text.pem")
    (tmp_path / "models").mkdir()
    command = [str(NAIAD), "serve", f"--model-repository={tmp_path / 'models'}", "--http-use-ssl-mutual=true"]
    command += ["--allow-grpc=false", "--allow-metrics=false", "--http-port=0", "--http-address=127.0.0.1"]
    command += [f"--http-{name}={path}" for name, path in given.items()]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert ended.returncode == 1, ended.stdout
    assert says.format(folder=tmp_path) in ended.stdout + ended.stderr
    assert "Traceback" not in ended.stdout + ended.stderr
