"""Checks of the Host of a request: a foreign page can make a browser resolve its name to this server."""

import ipaddress
from collections.abc import Mapping
from urllib.parse import urlsplit

from comfy.cli_args import args

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
