"""``%hvd_c10d``: whether ``torch.distributed`` in the ranks runs on hvdlab where Gloo was asked for."""

from __future__ import annotations

import os

from IPython.core.error import UsageError
from IPython.core.magic import Magics, line_magic, magics_class

from hvdlab.magics.session import Session, as_usage_error

_NAME = "HVDLAB_C10D"


@magics_class
class C10dMagics(Magics):
    """The magic about ``torch.distributed``."""

    def __init__(self, session: Session) -> None:
        super().__init__(session.shell)
        self._session = session

    @line_magic
    def hvd_c10d(self, line: str) -> None:
        """Let groups of torch.distributed for CPU tensors be hvdlab's in all ranks: %hvd_c10d on | off."""
        choice = line.strip().lower()
        if choice not in ("", "on", "off"):
            raise UsageError(f"%hvd_c10d takes `on`, `off` or nothing, not `{choice}`")
        if choice:
            value = "1" if choice == "on" else "0"
            os.environ[_NAME] = value  # ranks that are started later have it from here
            pool = self._session.pool
            if pool is not None and pool.ranks:
                with as_usage_error():
                    pool.run(f"import os as _os; _os.environ[{_NAME!r}] = {value!r}; del _os")
        if os.environ.get(_NAME, "0") == "1":
            print(
                'torch.distributed: init_process_group() and init_process_group("gloo") make groups of hvdlab\'s in the ranks'
            )
        else:
            print(
                "torch.distributed: init_process_group(\"hvdlab\") makes groups of hvdlab's; others are torch's own"
            )
