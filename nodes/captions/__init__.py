"""Caption Folder, and the routes of the editor of captions."""
