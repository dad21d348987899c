"""The page: the report's viewer, live, for one model; and its JSON endpoints."""

from sufficit.web.app import make_app
from sufficit.web.limits import Limits
from sufficit.web.server import serve
from sufficit.web.studio import Studio, open_studio

__all__ = ["Limits", "Studio", "make_app", "open_studio", "serve"]
