"""Imports the pack for every test; torch and ComfyUI come with the conftest of the folders whose tests need them."""

import with_pack  # noqa: F401
