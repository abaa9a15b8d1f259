"""Constants of countoff (`countoff.core.constants`), as a test's rank wants them: no setting of countoff's is one."""

import json
import os
from collections.abc import Mapping
from typing import Any

from countoff.core import constants

_VARIABLE = "CONSTANTS_OF_A_TEST"
_defaults = {name: value for name, value in vars(constants).items() if name.isupper()}


def put(**values: float | str) -> None:
    """Sets constants of countoff in this process; to be called on a rank, before its guard is made."""
    assert values.keys() <= _defaults.keys(), values
    for name, value in values.items():
        setattr(constants, name, value)


def taken(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options among these. Those in capitals are constants: they are set, and all others reset."""
    put(**{**_defaults, **{name: value for name, value in options.items() if name.isupper()}})
    return {name: value for name, value in options.items() if not name.isupper()}


def environment(**values: float | str) -> dict[str, str]:
    """Returns the environment of ranks that begin with these constants, for `run_ranks` and `run_hosts`."""
    return {_VARIABLE: json.dumps(values)}


def put_those_of_the_environment() -> None:
    """Sets the constants that a test has given to this rank."""
    global _defaults
    put(**json.loads(os.environ.get(_VARIABLE, "{}")))
    _defaults = {name: getattr(constants, name) for name in _defaults}
