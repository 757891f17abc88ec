"""Classes named as ``module:Class``, from modules that the process's environment allows."""

from __future__ import annotations

import importlib
import os
from typing import Any

from pinyon.core.near import did_you_mean

MODULES = "PINYON_POLICY_MODULES"
"""The environment variable: names of modules or packages, with commas. It cannot be changed from outside."""


def named_class(name: str) -> type[Any]:
    """Returns ``module:Class``; imports only modules that the environment names. Raises ``ValueError`` with the
    reason."""
    module, _, wanted = name.partition(":")
    if not _allowed(module):
        raise ValueError(
            f"{module} may not be imported here: start the process with {MODULES}={module}, or add it there"
        )
    try:
        content = vars(importlib.import_module(module))
    except Exception as error:  # importing a module may raise any error
        raise ValueError(f"{module} cannot be imported: {type(error).__name__}: {error}") from error
    found = content.get(wanted)
    if not isinstance(found, type):
        classes = [each for each, value in content.items() if isinstance(value, type)]
        raise ValueError(f"{module} has no class {wanted!r}{did_you_mean(wanted, classes)}")
    if not _allowed(found.__module__):  # the module only imports the class
        raise ValueError(f"{wanted} is a class of {found.__module__}, which {MODULES} does not name")
    return found


def _allowed(module: str) -> bool:
    named = (each.strip() for each in os.environ.get(MODULES, "").split(","))
    return any(each and (module == each or module.startswith(f"{each}.")) for each in named)
