"""Doors to other formats and other places: export, import, copy, and the difference of two checkpoints.

Of its modules, those that build values (`plain_state`, `torch_export`, `tensor_difference` and the readers of foreign
files) know torch; they are imported when they are needed.
"""
