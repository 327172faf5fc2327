"""The learner process: its loop, restoring, checkpoints, evaluation, turns at the device."""
