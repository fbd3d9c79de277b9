"""`pb_utils.ModelConfig`: what `auto_complete_config` of a model may change in its configuration."""

import json
from collections.abc import Mapping
from typing import Any

from naiad.backends.api import ConfigDict


class ModelConfig:
    """A model configuration. It can be completed; what the file says stays."""

    def __init__(self, model_config: str) -> None:
        """`model_config` is JSON in Triton's form."""
        config: ConfigDict = json.loads(model_config)
        config.setdefault("name", "")
        config.setdefault("max_batch_size", 0)
        config.setdefault("input", [])
        config.setdefault("output", [])
        self._model_config = config

    def as_dict(self) -> ConfigDict:
        return self._model_config

    @property
    def _where(self) -> str:
        return f"in auto-complete-config function for model '{self._model_config['name']}'"

    def set_max_batch_size(self, max_batch_size: int) -> None:
        """Raises ValueError when the file says a larger one."""
        configured = self._model_config["max_batch_size"]
        if configured > max_batch_size:
            raise ValueError(
                f"configuration specified max_batch_size {configured}, but {self._where} specified max_batch_size "
                f"{max_batch_size}"
            )
        self._model_config["max_batch_size"] = max_batch_size

    def set_dynamic_batching(self) -> None:
        """Chooses the dynamic batcher, with its defaults if it is not configured. Raises ValueError for other choices."""
        for scheduler in ("sequence_batching", "ensemble_scheduling"):
            if scheduler in self._model_config:
                raise ValueError(
                    f"Configuration specified scheduling_choice as '{scheduler}', but auto-complete-config function "
                    f"for model '{self._model_config['name']}' tries to set scheduling_choice as 'dynamic_batching'"
                )
        self._model_config.setdefault("dynamic_batching", {})

    def add_input(self, input: dict[str, Any]) -> None:
        """Adds an input with "name", "data_type", "dims" and perhaps "optional". Raises ValueError where the file differs."""
        optional = "'name', 'data_type', 'dims' and 'optional'"
        self._add("input", input, ("name", "data_type", "dims", "optional"), optional)

    def add_output(self, output: dict[str, Any]) -> None:
        """Adds an output with "name", "data_type" and "dims". Raises ValueError where the file differs."""
        self._add("output", output, ("name", "data_type", "dims"), "'name', 'data_type' and 'dims'")

    def _add(self, kind: str, tensor: dict[str, Any], known: tuple[str, ...], spelled: str) -> None:
        subject = f"{kind} '{tensor['name']}'" if "name" in tensor else kind
        if not known_only(tensor, known):
            raise ValueError(f"{subject} {self._where} contains property other than {spelled}.")
        for key in ("name", "data_type", "dims"):
            if key not in tensor:
                raise ValueError(f"{subject} {self._where} is missing '{key}' property.")
        model = self._model_config["name"]
        for configured in self._model_config[kind]:
            if configured["name"] != tensor["name"]:
                continue
            data_type = configured.get("data_type", "TYPE_INVALID")
            if data_type not in ("TYPE_INVALID", tensor["data_type"]):
                raise ValueError(
                    f"unable to load model '{model}', configuration expects datatype {data_type} for "
                    f"{kind} '{tensor['name']}', model provides {tensor['data_type']}"
                )
            for key in ("dims", "optional"):
                # Dims that are not configured are an empty list.
                if configured.get(key, []) == [] or key not in tensor or configured[key] == tensor[key]:
                    continue
                raise ValueError(
                    f"model '{model}', tensor '{tensor['name']}': the model expects {key} {tensor[key]} but the "
                    f"model configuration specifies {key} {configured[key]}"
                )
            configured.update(tensor)
            return
        self._model_config[kind].append(tensor)

    def set_model_transaction_policy(self, transaction_policy_dict: dict[str, Any]) -> None:
        """Sets `{"decoupled": bool}`. Raises ValueError where the file says otherwise."""
        name = self._model_config["name"]
        if not known_only(transaction_policy_dict, ("decoupled",)):
            raise ValueError(
                f"model transaction property in auto-complete-config function for model '{name}' contains property "
                "other than 'decoupled'."
            )
        policy = self._model_config.setdefault("model_transaction_policy", {})
        if "decoupled" in transaction_policy_dict:
            decoupled = transaction_policy_dict["decoupled"]
            if policy.get("decoupled", decoupled) != decoupled:
                raise ValueError(
                    f"trying to change decoupled property in auto-complete-config for model '{name}', which is "
                    f"already set to '{policy['decoupled']}'."
                )
            policy["decoupled"] = decoupled


def known_only(properties: Mapping[str, Any], known: tuple[str, ...]) -> bool:
    return all(key in known for key in properties)
