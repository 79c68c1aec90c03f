"""JSON responses of the pack's routes, readable by every browser."""

import json
from collections.abc import Mapping
from typing import Any

from aiohttp import web

from ...common.untrusted.json_text import finite_json


def answer(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    """Answer with a value as JSON; non-finite numbers, which JSON lacks, become null."""
    return web.json_response(value, status=status, headers=headers, dumps=_dumps)


def refusal(sentence: str, status: int, headers: Mapping[str, str] | None = None, **fields: Any) -> web.Response:
    """Answer with `{"error": sentence}` and further fields."""
    return answer({"error": sentence.encode("utf-8", "replace").decode(), **fields}, status, headers)


def _dumps(value: Any) -> str:
    return json.dumps(finite_json(value), allow_nan=False)
