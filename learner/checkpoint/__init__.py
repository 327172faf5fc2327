"""The commit of a checkpoint, whatever backend trains, and the newest whole one."""
