"""The backend `tensorflow`: SavedModels and frozen GraphDefs, run by TensorFlow's own sessions. Runs in hosts.

`signature` (pure) is what a model takes and gives, and checks and completes configurations with it; `options` turns a
configuration into a session's; `graphs` reads files and opens sessions; `backend` is the class.
"""

from naiad.backends.tensorflow.backend import TensorflowBackend

__all__ = ["TensorflowBackend"]
