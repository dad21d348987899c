"""The page of one model: the report's viewer, live, and its JSON endpoints."""

from sufficit.web.app import example_image, make_app
from sufficit.web.forms import Limits
from sufficit.web.server import serve
from sufficit.web.service import Service, open_service

__all__ = ["Limits", "Service", "example_image", "make_app", "open_service", "serve"]
