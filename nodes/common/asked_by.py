"""By which name a request asked for this server: a foreign page can have a browser take its own name for ours."""

import ipaddress
from collections.abc import Mapping
from urllib.parse import urlsplit

from comfy.cli_args import args

from .folder_access import SETTINGS_FILE, read_settings


def is_loopback(host: str) -> bool:
    """Test for an address or name by which a machine reaches itself only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def listens_to_itself() -> bool:
    """Test for a server that no other machine reaches, but through a tunnel or a proxy."""
    return all(is_loopback(address.strip()) for address in str(args.listen).split(","))


def host_of(headers: Mapping[str, str]) -> str:
    """Return a request's Host without its port; empty where it is none."""
    try:
        return urlsplit(f"//{headers.get('Host', '')}").hostname or ""
    except ValueError:
        return ""


def why_foreign(headers: Mapping[str, str]) -> str:
    """Return why a request may ask nothing of a run; empty where it may.

    A server that only this machine reaches has this machine's names. Another one is that of a tunnel or a proxy, which
    the user's settings name, or of a foreign page whose name was led to this machine, so that it counts as our own.
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
