"""Shared by both planners: copies in device memory, free lists, the log of planned vertices, and assembly."""
