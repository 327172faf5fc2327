"""Imports of a benchmark that is being worked on."""

from actors.settings.engines import SglangEngineConfig as SglangEngineConfig
