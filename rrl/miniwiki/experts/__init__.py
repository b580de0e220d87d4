"""The scripted expert of the built-in world: it demonstrates the protocol of a recipe, for a cold start before RL.

`demonstrate` has one implementation per recipe class. A recipe of your own registers its own with `@demonstrate.register`.
"""

from rrl.miniwiki.experts import r2ag, r3rag, single_context, tiresrag
from rrl.miniwiki.experts.demonstration import (
    DemonstrationBuilder,
    DemonstrationSegments,
    RetrieveFn,
    demonstrate,
    thoughts,
)

__all__ = [
    "DemonstrationBuilder",
    "DemonstrationSegments",
    "RetrieveFn",
    "demonstrate",
    "r2ag",
    "r3rag",
    "single_context",
    "thoughts",
    "tiresrag",
]
