"""Answers of the pack's routes: JSON that every browser reads."""

import json
from collections.abc import Mapping
from typing import Any

from aiohttp import web

from ...common.untrusted.json_text import finite_json


def answer(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    """Answer with a value as JSON; numbers that are not finite, which JSON has not, become null."""
    return web.json_response(value, status=status, headers=headers, dumps=_dumps)


def refusal(sentence: str, status: int, headers: Mapping[str, str] | None = None, **more: Any) -> web.Response:
    """Answer with `{"error": sentence}`."""
    return answer({"error": sentence.encode("utf-8", "replace").decode(), **more}, status, headers)


def _dumps(value: Any) -> str:
    return json.dumps(finite_json(value), allow_nan=False)
