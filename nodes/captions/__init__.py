"""Routes of the editor of captions."""
