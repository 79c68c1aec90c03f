"""These tests run in a process with torch and ComfyUI."""

from with_comfyui import pytest_configure as pytest_configure
