"""Two checks for Schemathesis, each with the one exception that no description can state.

Owns the exceptions. Refuses to judge anything else: the checks themselves are the library's.
"""

from typing import Any

import schemathesis
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import negative_data_rejection

MADE_UP = "x-schemathesis-unknown-property"
DEADLINE = "x-cartridge-deadline-ms"


@schemathesis.check  # type: ignore[untyped-decorator]
def wrong_data_rejection(context: Any, response: Any, case: Any) -> Any:
    """Wrong data is refused; in HTTP anybody may add a header, which makes nothing wrong."""
    if MADE_UP in (case.headers or {}):
        return None
    return negative_data_rejection(context, response, case)


@schemathesis.check  # type: ignore[untyped-decorator]
def no_server_error(context: Any, response: Any, case: Any) -> Any:
    """No 5xx, but where a client has set a deadline of its own that was over too soon."""
    if response.status_code == 504 and DEADLINE in (case.headers or {}):
        return None
    return not_a_server_error(context, response, case)
