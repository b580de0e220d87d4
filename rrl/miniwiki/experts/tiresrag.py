"""Demonstrations of TIRESRAG-R1: some of them answer too early, reflect, and answer again."""

import zlib

from rrl.miniwiki.experts.demonstration import (
    DemonstrationBuilder,
    DemonstrationSegments,
    RetrieveFn,
    demonstrate,
    thoughts,
)
from rrl.miniwiki.questions import MiniQuestion
from rrl.recipes.tiresrag import TiresRag
from rrl.rollout.protocol import Append
from rrl.text.spans import in_tags


@demonstrate.register
def demonstrate_tiresrag(recipe: TiresRag, item: MiniQuestion, retrieve: RetrieveFn) -> DemonstrationSegments:
    """Think of the facts needed, search each hop, think about what was read, answer.

    Some demonstrations contain an early answer, wrong or "unknown", which carries no loss. The expert then states what
    is still missing, continues, and answers again.
    """
    environment = recipe.environment
    builder = DemonstrationBuilder(environment, item, retrieve)
    early, mistake = early_answer(item, recipe.shown_reflections)
    texts = [in_tags("think", thought) for thought in thoughts(item.plan)]
    texts[0] = texts[0].removeprefix("<think>")  # the prompt has opened it
    for index, hop in enumerate(item.plan.hops):
        if index == early:
            builder.segments += [texts[index], Append(f"\n{in_tags(environment.answer, mistake)}\n")]
            texts[index] = in_tags("think", f"Not yet. To find : {hop.query}")
        builder.search(f"{texts[index]}\n", hop)
    builder.segments.append(f"{texts[-1]}\n{in_tags(environment.answer, item.question.answers[0])}")
    return builder.segments


def early_answer(item: MiniQuestion, share: float) -> tuple[int, str]:
    """Return the index of the hop before which an early answer is written, and that answer; (-1, "") for no early answer.

    Both are a pure function of the question. A wrong answer is the value of the last fact read (Table 2 of the paper: the
    reasoning ends too early), or the negation of a yes or no.

    Args:
      item: the question and its hops.
      share: fraction of the questions with more than one hop that get an early answer.
    """
    draw = zlib.crc32(item.question.id.encode())
    hops = item.plan.hops
    if len(hops) < 2 or draw % 1000 >= 1000 * share:
        return -1, ""
    draw //= 1000
    early = 1 + draw % (len(hops) - 1)
    if draw // len(hops) % 2:
        return early, "unknown"
    answer = item.question.answers[0]
    wrong = {"yes": "no", "no": "yes"}.get(answer) or hops[early - 1].value
    return early, wrong if wrong != answer else "unknown"
