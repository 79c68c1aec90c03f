"""Host memory: flat buffers, page-locked stages and mapped files."""
