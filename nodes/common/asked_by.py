"""Checks of who asks for a change: a page of this server, at a name that is its own."""

import asyncio
import ipaddress
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from aiohttp import web
from comfy.cli_args import args

from ...common.untrusted.budgets import PAGE_REQUEST, Budget
from ...common.untrusted.json_text import parse_json
from .answers import refusal
from .folder_access import SETTINGS_FILE, read_settings


def is_loopback(host: str) -> bool:
    """Return whether an address or name is a loopback one."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def listens_to_itself() -> bool:
    """Return whether no other machine reaches this server, except through a tunnel or a proxy."""
    return all(is_loopback(address.strip()) for address in str(args.listen).split(","))


def host_of(headers: Mapping[str, str]) -> str:
    """Return a request's Host without its port; empty if missing or invalid."""
    try:
        return urlsplit(f"//{headers.get('Host', '')}").hostname or ""
    except ValueError:
        return ""


def why_foreign(headers: Mapping[str, str]) -> str:
    """Return why a request may not control a run; empty if it may.

    A server that only this machine reaches has this machine's names. Any other name belongs to a tunnel or a proxy,
    listed in the user's settings, or to a foreign page whose name resolves to this machine (DNS rebinding), so that
    the browser treats it as the same origin.
    """
    host = host_of(headers)
    if not listens_to_itself() or is_loopback(host):
        return ""
    try:
        if host and host in read_settings().hosts:
            return ""
    except ValueError as error:
        return str(error)
    return (
        f"This server doesn't know the name {host!r}, so a page at it may ask nothing of a run. If that name is yours, "
        f'write {{"hosts": ["{host}"]}} into {SETTINGS_FILE} in ComfyUI\'s user folder.'
    )


def refused_post(request: web.Request) -> web.Response | None:
    """Refuse a POST unless a page of this server sends it as JSON; None if accepted."""
    if not _is_own_page(request):
        return refusal("Only a page of this server may ask that.", 403)
    if request.content_type != "application/json":
        return refusal("Send application/json.", 415)
    return None


async def refused_change(request: web.Request) -> web.Response | None:
    """Refuse what `refused_post` refuses, and a page at a name that isn't this server's; None if accepted."""
    if (refused := refused_post(request)) is not None:
        return refused
    foreign = await asyncio.to_thread(why_foreign, request.headers)  # it may read the user's settings
    return refusal(foreign, 403) if foreign else None


async def posted_json(request: web.Request, budget: Budget, name: str) -> Any:
    """Read the JSON of a request, no more of it than its budget.

    name: of the request in messages. Raises OverBudget, and ValueError unless it is JSON in UTF-8.
    """
    data = bytearray()
    async for piece in request.content.iter_any():
        data += piece
        if len(data) > budget.bytes:
            break
    return await asyncio.to_thread(lambda: parse_json(data.decode("utf-8"), budget, name))


async def posted_object(request: web.Request, budget: Budget = PAGE_REQUEST) -> dict[str, Any]:
    """Read the JSON object of a request; empty for anything else, and for one that is too large."""
    try:
        body = await posted_json(request, budget, "The request")
    except ValueError:
        return {}
    return body if isinstance(body, dict) else {}


def _is_own_page(request: web.Request) -> bool:
    """Return whether a page of this server or no browser asks; --enable-cors-header turns ComfyUI's own check off."""
    if request.headers.get("Sec-Fetch-Site", "same-origin") != "same-origin":
        return False
    origin = request.headers.get("Origin")
    try:
        return origin is None or urlsplit(origin).netloc.lower() == request.host.lower()
    except ValueError:  # invalid URL, such as http://[::
        return False
