"""The directive ``launchers``: each launcher's options and capabilities, as its class declares them."""

from __future__ import annotations

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from hvdlab.launch import registry
from hvdlab.launch.starter import Capability


class LauncherTable(SphinxDirective):
    """Write a section's worth of rows for each launcher of hvdlab's own."""

    def run(self) -> list[nodes.Node]:
        lines: list[str] = []
        for name in registry.OURS:
            launcher = registry.find(name)
            assert launcher is not None
            lines += [f"**{name}**", ""]
            options = list(launcher.options())
            if options:
                lines += ["| `--launcher-option` | meaning |", "|---|---|"]
                lines += [f"| `{option.name}` | {option.help} |" for option in options]
            else:
                lines.append("It takes no options.")
            lines += ["", "| can | |", "|---|---|"]
            for capability in Capability:
                has = capability in launcher.capabilities
                reason = launcher.capabilities.lacks.get(capability, "")
                lines.append(f"| {capability.value} | {'yes' if has else f'no: {reason}'} |")
            lines.append("")
        container = nodes.container()
        self.state.nested_parse(StringList(lines, source="launchers"), self.content_offset, container)
        return container.children


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("launchers", LauncherTable)
    return {"parallel_read_safe": True}
