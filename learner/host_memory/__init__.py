"""Page-locked memory, copies to and from the device."""
