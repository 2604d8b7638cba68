"""Puts a software bill of materials (CycloneDX) into the wheel, as ``*.dist-info/sboms/hvdlab.cdx.json``. Needs no network.

It names the code of others that the wheel contains, which is in the scripts for the browser, and what it depends on, with the
versions that it is tested with.
"""

from __future__ import annotations

import json
import re
import tempfile
import tomllib
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

NAME = "hvdlab.cdx.json"
_REQUIREMENT = re.compile(r"([A-Za-z0-9._-]+)(\[[^]]*\])?(.*)")


class SbomHook(BuildHookInterface):  # type: ignore[type-arg]  # of any configuration
    """Makes the file before the wheel is built."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        self._directory = tempfile.TemporaryDirectory()
        path = Path(self._directory.name) / NAME
        path.write_text(json.dumps(bill(Path(self.root)), indent=1) + "\n")
        build_data["sbom_files"].append(str(path))

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        self._directory.cleanup()


def bill(root: Path) -> dict[str, Any]:
    """Return the bill of materials of this tree."""
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    tested = tested_versions((root / "constraints.txt").read_text())
    wanted = [(text, "required") for text in project["dependencies"]]
    extras = ("torch", "tensorflow", "mpi", "gpu", "tls", "yaml", "lab")
    wanted += [(text, "optional") for extra in extras for text in project["optional-dependencies"][extra]]
    components = [*contained(root), *(depends_on(text, scope, tested) for text, scope in wanted)]
    own = f"pkg:pypi/{project['name']}@{project['version']}"
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {
            "component": {
                "type": "library",
                "bom-ref": own,
                "name": project["name"],
                "version": project["version"],
                "purl": own,
                "licenses": [{"license": {"id": project["license"]}}],
            }
        },
        "components": components,
        "dependencies": [{"ref": own, "dependsOn": sorted({one["bom-ref"] for one in components})}],
    }


def tested_versions(constraints: str) -> dict[str, str]:
    """Versions in ``constraints.txt``; where it has several, for several Pythons, the last."""
    found = {}
    for line in constraints.splitlines():
        name, pinned, rest = line.partition("==")
        if pinned and not line.startswith("#"):
            found[canonical(name)] = rest.partition(";")[0].strip()
    return found


def canonical(name: str) -> str:
    """Return a distribution's name as PyPI compares it."""
    return re.sub(r"[-_.]+", "-", name.strip()).lower()


def contained(root: Path) -> list[dict[str, Any]]:
    """Code of others in the scripts that come with the wheel."""
    told = json.loads((root / "labextension/prebuilt/static/third-party-licenses.json").read_text())
    packages = {one["name"]: (one["versionInfo"], one["licenseId"]) for one in told["packages"]}
    uplot = json.loads((root / "ui/package-lock.json").read_text())["packages"]["node_modules/uplot"]
    packages["uplot"] = (uplot["version"], uplot["license"])
    # The panel's loader is the bundler's runtime, which it does not tell of.
    bundler = json.loads((root / "labextension/package-lock.json").read_text())["packages"][
        "node_modules/@rspack/core"
    ]
    packages["@rspack/core"] = (bundler["version"], bundler["license"])
    return [
        {
            "type": "library",
            "bom-ref": f"pkg:npm/{name.replace('@', '%40')}@{version}",
            "name": name,
            "version": version,
            "purl": f"pkg:npm/{name.replace('@', '%40')}@{version}",
            "scope": "required",
            "licenses": [{"license": {"id": licence}}],
            "properties": [{"name": "hvdlab:contained", "value": "in the wheel's scripts for the browser"}],
        }
        for name, (version, licence) in sorted(packages.items())
    ]


def depends_on(requirement: str, scope: str, tested: dict[str, str]) -> dict[str, Any]:
    """Return a dependency, with the version that is tested if one is."""
    match = _REQUIREMENT.match(requirement)
    assert match is not None, requirement
    name = canonical(match[1])
    version = tested.get(name, "")
    purl = f"pkg:pypi/{name}" + (f"@{version}" if version else "")
    return {
        "type": "library",
        "bom-ref": purl,
        "name": name,
        **({"version": version} if version else {}),
        "purl": purl,
        "scope": scope,
        "properties": [{"name": "hvdlab:requires", "value": match[3].strip() or "any version"}],
    }
