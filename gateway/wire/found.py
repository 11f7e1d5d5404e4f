"""What is found in the content of a body: facts that the policy judges, and how much of it is media."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Raw

from gateway.core.asked import Fact


class Found(list[Fact]):
    """Facts; and how many parts are no text, with their bytes."""

    __slots__ = ("media", "media_bytes")

    def __init__(self) -> None:
        super().__init__()
        self.media = self.media_bytes = 0

    def add_medium(self, part: Mapping[str, Raw]) -> None:
        """Count a part that is no text."""
        self.media += 1
        self.media_bytes += sum(map(len, part.values()))

    def add_media(self, count: int, size: int) -> None:
        """Count a list of media, of so many bytes."""
        self.media += count
        self.media_bytes += size

    def add(self, fact: Fact) -> None:
        """Add a fact to the one of the same row, if there is one."""
        for index, each in enumerate(self):
            if each.row == fact.row:
                self[index] = Fact(fact.row, each.value + fact.value, fact.path)
                return
        self.append(fact)

    def note(self, fact: Fact) -> None:
        """Note a fact unless one of the same row says as much: of a thousand images the worst address counts."""
        if not any(each.row == fact.row and each.value >= fact.value for each in self):
            self.append(fact)
