"""Ranks agree on the arguments of a collective operation before anything is launched."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from iris import _env
from iris.errors import IrisError, RankMismatch
from iris.runtime.groups import Group

if TYPE_CHECKING:
    from iris.runtime.context import Iris


class Agreement:
    """What the ranks of a context have agreed on so far.

    ``IRIS_CHECK`` decides when ranks compare: at the first call of a combination of arguments (the default), at every
    call, or never. Combinations are forgotten oldest first, group by group: at the same call on every rank of a group,
    since all of them add the same ones.

    Attributes:
        forgotten: how often something has been forgotten; callers that remember calls drop theirs when it changes.
    """

    KEPT = 4096

    def __init__(self, ctx: Iris):
        self._ctx = ctx
        self._agreed: dict[tuple[int, ...], OrderedDict[tuple, None]] = {}
        self.forgotten = 0

    @staticmethod
    def mode() -> str:
        """``IRIS_CHECK``: first, always or off."""
        return _env.get("IRIS_CHECK")

    def known(self, operation: str, group: Group, facts: Mapping[str, Any]) -> bool:
        """Whether a call with these facts needs no comparison."""
        mode = self.mode()
        agreed = self._agreed.get(group.ranks, ())
        return group.size == 1 or mode == "off" or (mode == "first" and _key(operation, facts) in agreed)

    def reach(self, operation: str, group: Group, facts: Mapping[str, Any], error: IrisError | None = None) -> None:
        """Compare ``facts`` across the group. Collective over the group.

        Args:
            operation: its name.
            group: the ranks that take part.
            facts: what must be the same on every rank, by name.
            error: what this rank found wrong with its own arguments; raised here, after the others have learnt of it.

        Raises:
            IrisError: ``error``.
            RankMismatch: another rank found an error, or the ranks' facts differ; names the fields and values.
        """
        if self.known(operation, group, facts):
            if error is not None:
                self._ctx.exchange.post_fault(f"{type(error).__name__}: {error}")
                raise error
            return
        mine = ({name: str(value) for name, value in facts.items()}, error and f"{type(error).__name__}: {error}")
        posts = self._ctx.exchange.all_gather(f"{operation}(): comparing arguments", mine, group.ranks)
        if error is not None:
            raise error
        failed = {r: text for r, (_, text) in zip(group.ranks, posts, strict=True) if text is not None}
        if failed:
            shown = "; ".join(f"rank {r} raised {text}" for r, text in failed.items())
            raise RankMismatch(f"{operation}: nothing was launched, because {shown}")
        self._compare(operation, group, [theirs for theirs, _ in posts])
        agreed = self._agreed.setdefault(group.ranks, OrderedDict())
        agreed[_key(operation, facts)] = None
        while len(agreed) > self.KEPT:
            agreed.popitem(last=False)
            self.forgotten += 1

    def forget_calls(self) -> None:
        """Let callers that remember calls drop theirs, because what they would choose may have changed. Local."""
        self.forgotten += 1

    def _compare(self, operation: str, group: Group, posts: list[dict[str, str]]) -> None:
        differing = [name for name in posts[0] if len({post.get(name) for post in posts}) > 1]
        if differing:
            shown = "; ".join(
                f"{name} is " + ", ".join(f"{p.get(name)} on rank {r}" for r, p in zip(group.ranks, posts, strict=True))
                for name in differing
            )
            raise RankMismatch(f"{operation}: the ranks disagree, nothing was launched: {shown}")


def _key(operation: str, facts: Mapping[str, Any]) -> tuple:
    # With the types, because enumerations of different meaning may be equal to the same number.
    return (operation, tuple((type(fact), fact) for fact in facts.values()))
