"""How much of the machine strangers may use."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """What a request may bring, and how many may wait."""

    megabytes: float = 10.0  # of a whole request
    megapixels: float = 25.0  # of a picture before it is brought to the model's size
    waiting: int = 16  # beside the one that is worked on
    seconds: float = 30.0  # for a request to arrive in

    @property
    def bytes(self) -> int:
        """Of a whole request."""
        return int(self.megabytes * 1e6)

    @property
    def pixels(self) -> int:
        """Of a picture."""
        return int(self.megapixels * 1e6)

    @property
    def places(self) -> int:
        """Requests that are worked on, wait or are still arriving."""
        return 1 + self.waiting
