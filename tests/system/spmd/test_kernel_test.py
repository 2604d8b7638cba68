"""Jupyter's own test of kernels."""

from __future__ import annotations

from typing import Any, ClassVar

import jupyter_kernel_test  # type: ignore[import-untyped]  # has no types

from support.leaks import no_leak_check as leak_check  # noqa: F401  # ranks come and go in the kernel that all tests share


class TestHvdlabKernel(jupyter_kernel_test.KernelTests):  # type: ignore[misc]  # which has no types
    """Each attribute is one of the tests' inputs."""

    kernel_name = "hvdlab"
    language_name = "python"
    file_extension = ".py"
    code_hello_world = "print('hello, world')"
    code_stderr = "import sys; print('careful', file=sys.stderr)"
    completion_samples: ClassVar[list[dict[str, Any]]] = [
        {"text": "zi", "matches": {"zip"}},
        {"text": "os.getpi", "matches": {"getpid"}},
    ]
    complete_code_samples: ClassVar[list[str]] = [
        "1",
        "print('hello')",
        "def f(x):\n  return x\n\n",
        "%%time\nx = 1\n\n",
    ]
    incomplete_code_samples: ClassVar[list[str]] = ["def f(x):\n  x*2", "for i in range(3):"]
    invalid_code_samples: ClassVar[list[str]] = ["import = 7q"]
    code_page_something = "zip?"
    code_generate_error = "raise ValueError('bad')"
    code_execute_result: ClassVar[list[dict[str, str]]] = [
        {"code": "6*7", "result": "42"},
        {"code": "'a' + 'b'", "result": "'ab'"},
        {"code": "import os; int(os.environ['RANK'])", "result": "[0] 0\n[1] 1"},
    ]
    code_display_data: ClassVar[list[dict[str, str]]] = [
        {
            "code": "from IPython.display import HTML, display; display(HTML('<b>test</b>'))",
            "mime": "text/html",
        },
        {"code": "from IPython.display import Math, display; display(Math('x'))", "mime": "text/latex"},
    ]
    code_history_pattern = "6?7*"
    supported_history_operations = ("tail", "range", "search")
    code_inspect_sample = "zip"
    code_clear_output = "from IPython.display import clear_output; clear_output()"

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        # These tests wait a tenth of a second for some messages, which is not the time in which ranks start.
        cls.kc.execute_interactive("import os", output_hook=lambda message: None, timeout=60)
        cls.kc.execute_interactive("1/0", output_hook=lambda message: None, timeout=60)
        while not cls.kc.complete("os.getpi", reply=True, timeout=60)["content"]["matches"]:
            pass  # it imports jedi
