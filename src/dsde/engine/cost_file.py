"""Keeps what a policy has learnt of seconds in a file, from one run to the next. Knows nothing of what it means."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from dsde.core.errors import InvalidInput
from dsde.policies import Policy


def load_cost_model(path: Path, policy: Policy) -> None:
    """Restore every cost model of the policy from the file, if it is there; say now if it could not be written."""
    if not policy.cost_models:
        raise InvalidInput(f"There is no cost model to keep in {path}: this policy does not look at seconds.")
    if not os.access(path if path.exists() else path.parent, os.W_OK) or path.is_dir():
        raise InvalidInput(f"The cost model cannot be written to {path}.")
    if not path.exists():
        return
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
        for model in policy.cost_models:
            model.restore(saved)
    except OSError as error:
        raise InvalidInput(f"The cost model cannot be read from {path}: {error.strerror}.") from None
    except (ValueError, InvalidInput) as error:
        raise InvalidInput(f"{path} holds no cost model ({error}): remove it, and it is measured anew.") from None


def save_cost_model(path: Path, policy: Policy) -> None:
    """Write the best informed of its models. Called when an engine has gone: it can only say that it failed."""
    model = policy.cost_model
    if model is None or not model.num_measured:
        return
    unfinished = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        unfinished.write_text(json.dumps(model.to_dict()) + "\n", encoding="utf-8")
        unfinished.replace(path)
    except OSError as error:
        print(f"dsde: the cost model could not be saved to {path}: {error.strerror}.", file=sys.stderr)
