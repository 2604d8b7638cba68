"""Found as ``horovod`` where no other is: hands over to hvdlab. See ``hvdlab.horovod.import_hook``."""

import sys

try:
    from hvdlab.horovod.import_hook import stand_in
except ModuleNotFoundError as error:
    if error.name != "hvdlab":
        raise
    raise ModuleNotFoundError(
        f"This is {sys.executable}, which has no hvdlab: start the script with the Python that hvdlab is installed in.",
        name="hvdlab",
    ) from None

stand_in()
