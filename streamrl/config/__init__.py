"""Configuration: one frozen Struct per component, a strict loader, cross-section checks. Needs no torch."""

from streamrl.config.run import Config

__all__ = ["Config"]
