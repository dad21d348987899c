"""The endpoints keep to their own schema, whatever is sent to them."""

import io
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from PIL import Image

from sufficit import Classifier
from sufficit.web import Limits, make_app, open_studio

schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is not installed")
