"""The backend `pytorch`: TorchScript, torch.export archives, AOTInductor packages and plain modules."""

from naiad.backends.pytorch.backend import PyTorchBackend

__all__ = ["PyTorchBackend"]
