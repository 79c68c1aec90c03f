"""Observer of a run that pauses for other prompts."""

from ...train.report.observer import PAUSE
from ..common.progress import ServerObserver
from .turns import Turn


class PausingObserver(ServerObserver):
    """Observer that asks for a pause when the node's turn in the queue is over."""

    def __init__(self, node_id: str, steps: int, turn: Turn, can_pause: bool):
        super().__init__(node_id, steps)
        self.turn, self.can_pause = turn, can_pause

    def take_requests(self) -> frozenset[str]:
        requests = super().take_requests()
        return requests | {PAUSE} if self.turn.is_due() else requests
