"""An import-linter contract that says what the rooms may import, not what they must not.

import-linter's own ``forbidden`` contract cannot say "this package, except these two parts of it", and it needs every
unwanted package listed. ``PureContract`` names the rooms and what they are allowed; everything else is a violation.
Because a room may import only rooms under the same rule, no chain of imports can lead out of it."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from grimp import ImportGraph
from importlinter.application import output
from importlinter.domain import fields
from importlinter.domain.contract import Contract, ContractCheck


class PureContract(Contract):
    """Modules of ``rooms``, except those of ``edges``, import only each other and what is allowed here.

    - ``rooms``: packages or modules, with everything below them; one that does not exist yet is no error
    - ``edges``: parts of the rooms that are exempt, and that the rooms must not import. Below an edge a room may be
      named again: the longest name that fits a module decides
    - ``may_import``: further first-party packages, with everything below them
    - ``packages``: third-party packages, ``*`` for any
    - ``packages_of_one_room``: ``room: package package`` for what only that room may import
    - ``never``: modules of the standard library (or of anything else) that are not allowed"""

    type_name = "pure"

    rooms: Any = fields.ListField(subfield=fields.StringField())
    edges: Any = fields.ListField(subfield=fields.StringField(), default=[])
    may_import: Any = fields.ListField(subfield=fields.StringField(), default=[])
    packages: Any = fields.ListField(subfield=fields.StringField(), default=[])
    packages_of_one_room: Any = fields.ListField(subfield=fields.StringField(), default=[])
    never: Any = fields.ListField(subfield=fields.StringField(), default=[])

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:
        first_party = {root.split(".")[0] for root in self.session_options["root_packages"]}
        violations: set[tuple[str, str, int, str]] = set()
        for module in sorted(graph.modules):
            if module.split(".")[0] not in first_party or not self._pure(module):
                continue
            for imported in sorted(graph.find_modules_directly_imported_by(module)):
                if not self._allowed(module, imported, first_party):
                    details = graph.get_import_details(importer=module, imported=imported)
                    violations |= {(module, imported, d["line_number"], d["line_contents"]) for d in details}
        return ContractCheck(kept=not violations, metadata={"violations": sorted(violations)})

    def render_broken_contract(self, check: ContractCheck) -> None:
        for module, imported, line, text in check.metadata["violations"]:
            output.print_error(f"{module} must not import {imported}", bold=True)
            output.indent_cursor()
            output.print_error(f"line {line}: {text}", bold=False)
        output.new_line()

    def _pure(self, module: str) -> bool:
        return _nearest(module, self.rooms) > _nearest(module, self.edges)

    def _allowed(self, module: str, imported: str, first_party: set[str]) -> bool:
        top = imported.split(".")[0]
        if top in first_party:
            # a bare root package holds only its version
            return imported in first_party or self._pure(imported) or _within(imported, self.may_import)
        if _within(imported, self.never):
            return False
        if top in sys.stdlib_module_names or "*" in self.packages or top in self.packages:
            return True
        for rule in self.packages_of_one_room:
            room, _, names = rule.partition(":")
            if _within(module, [room.strip()]) and top in names.split():
                return True
        return False


def _nearest(module: str, packages: Iterable[str]) -> int:
    """Returns the length of the longest of ``packages`` that ``module`` is or lies in; 0 if none."""
    return max((len(package) for package in packages if _within(module, [package])), default=0)


def _within(module: str, packages: Iterable[str]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)
