"""What `--environment` names: how it is installed, and the settings that it is."""
