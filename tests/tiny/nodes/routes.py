"""Questions to a server's routes, those that are refused too."""

import json
import urllib.error
import urllib.request
from typing import Any

from comfy_server import DIRECT, PATIENCE


def ask(server: Any, path: str, method: str = "GET", body: Any = None, **headers: str) -> tuple[int, Any]:
    """Request a route. Return the status and the answer: JSON parsed, everything else as bytes.

    body: sent as JSON, None for no body.
    """
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(server.url + path, data, headers, method=method)
    try:
        with DIRECT.open(request, timeout=PATIENCE) as reply:
            return reply.status, _answer(reply)
    except urllib.error.HTTPError as error:
        return error.code, _answer(error)


def _answer(reply: Any) -> Any:
    data = reply.read()
    return json.loads(data) if reply.headers.get("Content-Type", "").startswith("application/json") else data
