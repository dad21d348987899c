"""Four photographs that ship with the package; assets/photos/SOURCES.md names their licences."""

from pathlib import Path

PHOTOS = Path(__file__).parents[1] / "assets" / "photos"
