"""A build hook of hatchling, off unless asked for, that puts the compiled modules into the wheel beside their sources.

HATCH_BUILD_HOOK_ENABLE_CUSTOM=true python -m hatchling build -t wheel       # ./dev build"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class CompiledWheel(BuildHookInterface[Any]):
    """The hook: the wheel is for this interpreter and machine (``cp311-cp311-linux_x86_64``), not ``py3-none-any``."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":  # runs from src, where nothing compiled may lie
            return
        sys.path.insert(0, self.root)
        from tools.compiled_tree import compiled_files, make_tree

        tree = Path(self.root, "build", "compiled")
        services = Path(self.root, "services")
        make_tree(tree, services=services if services.is_dir() else None)  # a source distribution has none
        build_data["pure_python"] = False
        build_data["infer_tag"] = True
        files = [path for path in compiled_files(tree) if path.parts[0].startswith("pinyon")]
        build_data["force_include"] |= {str(tree / path): str(path) for path in files}
