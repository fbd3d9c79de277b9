"""What the HTTP front end needs of an engine."""

from typing import Protocol

from naiad.frontends.http.inference import InferenceEngine
from naiad.frontends.http.management import ManagementEngine


class Engine(InferenceEngine, ManagementEngine, Protocol):
    pass
